"""Trains a small byte-level Llama to find hidden numbers, for the figure of ``flashrope passkey`` in
docs/measuring.md.

    python tools/passkey_model.py runs/passkey/model
    flashrope passkey --model runs/passkey/model --lengths 256 384 768 1536 --trials 8 --batch 8 --device cpu

The model is first trained on random bytes that end with a repeated run, from which it learns copying quickly. Then it
is trained on passkey prompts up to the training length, with a loss only on the answer.
"""

import argparse
import random

import torch
from flashrope.cli.options import cores
from flashrope.evaluation.model import Tokens
from flashrope.evaluation.prompts import Haystack
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

TRAIN_LENGTH, SHORTEST = 384, 256
CONFIG = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=TRAIN_LENGTH,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
BYTES = Haystack(Tokens(lambda text: list(text.encode()), unit="byte"))


def copies(generator: torch.Generator, batch: int = 32, length: int = 80, run: int = 32) -> torch.Tensor:
    """Returns random bytes (batch, length) whose last ``run`` bytes occur earlier too."""
    texts = torch.randint(32, 127, (batch, length), generator=generator)
    starts = torch.randint(0, length - 2 * run, (batch, 1), generator=generator)
    texts[:, -run:] = texts.gather(1, starts + torch.arange(run))
    return texts


def prompts(draw: random.Random, batch: int = 8) -> torch.Tensor:
    """Returns prompts (batch, length) of one random length, with random depths and numbers."""
    length = draw.randint(SHORTEST, TRAIN_LENGTH)
    some = [BYTES.prompt(length, draw.random(), draw) for _ in range(batch)]
    return torch.tensor([[*prompt.ids, *prompt.candidates[0]] for prompt in some])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", help="directory for the model")
    parser.add_argument("--steps", type=int, nargs=2, default=[900, 400], help="steps on copies and on prompts")
    parser.add_argument("--threads", type=int, default=cores(), help="CPU threads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    draw, generator = random.Random(0), torch.Generator().manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    for name, steps, texts, kept, rate in (
        ("copies", args.steps[0], lambda: copies(generator), 31, 3e-3),
        ("prompts", args.steps[1], lambda: prompts(draw), 6, 1e-3),
    ):
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.1)
        for step in range(1, steps + 1):
            ids = texts()
            logits = model(ids, use_cache=False, logits_to_keep=kept + 1).logits[:, :-1]
            loss = cross_entropy(logits.flatten(0, 1), ids[:, -kept:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if step % 50 == 0:
                print(f"{name}, step {step}: {loss:.3f} nats per byte", flush=True)
    model.save_pretrained(args.out)


if __name__ == "__main__":
    main()
