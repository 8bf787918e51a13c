"""Trains a small byte-level Llama on Python's standard library, for the figure of ``flashrope loss`` in
docs/long_context.md. The files that the model has not seen are written to its folder.

    python tools/loss_model.py runs/loss/model
    flashrope loss --model runs/loss/model --text runs/loss/model/unseen --lengths 128 256 512 1024 2048 \\
        --targets 64 --windows 32 --batch 8 --repeat --device cpu
"""

import argparse
from pathlib import Path

import torch
from flashrope.console.options import cores
from flashrope.console.progress import Bar
from flashrope.lab.small_models import data
from flashrope.lab.small_models.train import TrainConfig, learning_rate_fraction
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

TRAIN_LENGTH, WINDOW = 256, 2049
CONFIG = dict(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=344,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=TRAIN_LENGTH,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="folder for the model and the unseen text")
    parser.add_argument("--steps", type=int, default=800)
    args = parser.parse_args()
    torch.set_num_threads(cores())
    torch.manual_seed(0)
    corpus = data.standard_library(WINDOW)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    config = TrainConfig(args.steps, batch_size=8, train_length=TRAIN_LENGTH, learning_rate=3e-3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=config.betas, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_fraction(step, config))
    batches = data.random_batches(corpus.train, config.batch_size, TRAIN_LENGTH, 0)
    bar = Bar(args.steps)
    for step, batch in zip(range(args.steps), batches, strict=False):
        loss = cross_entropy(model(batch[:, :-1]).logits.transpose(1, 2), batch[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        bar.step()
        if step % 100 == 0:
            bar.start(f"step {step}, loss {loss.item():.3f}")
    bar.clear()
    model.save_pretrained(args.path)
    for name, text in zip(corpus.unseen_files, corpus.unseen, strict=True):
        path = args.path / "unseen" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    print(f"loss {loss.item():.3f} at the last step; model and unseen text in {args.path}")


if __name__ == "__main__":
    main()
