"""Continues the pretraining of a Llama in Hugging Face's Trainer, under its own scheme, HoPE, CoPE, or CoPE and then
HoPE: packed documents, bfloat16, gradient checkpointing, checkpoints to resume from, and at the end a folder to push.
This file is self-contained: copy it and change it.

    python train_hf.py --model meta-llama/Llama-3.2-1B --text my_texts/ --length 8192
    accelerate launch --config_file train_hf_fsdp2.yaml train_hf.py --model MODEL --text my_texts/ --length 8192
    python train_hf.py --device cpu --steps 20  # a random byte-level model of two layers, to try the script

The script works for Llama and for every other family with a number in the column "packed" of docs/families.md.
Running the same command again resumes from the last checkpoint. With --out DIR, the folder DIR/model has the weights,
the tokenizer and the scheme: ``from_pretrained`` of ``flashrope.integrations.transformers`` and ``flashrope loss
--model DIR/model`` read this folder, and ``hf upload NAME DIR/model`` uploads it. The script needs flashrope,
transformers and accelerate.
"""

from __future__ import annotations

import argparse
import copy
import functools
import hashlib
import json
import os
import sys
import sysconfig
from pathlib import Path

import torch
from flashrope.integrations.transformers import convert
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorWithFlattening,
    LlamaConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

BYTES = 256
TINY = LlamaConfig(
    vocab_size=BYTES,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=None,
    eos_token_id=None,
)


class BadInput(ValueError):
    """Raised for an option with a value that cannot be used. The message names the option."""


class Schemes(TrainerCallback, ExportableState):
    """Gives the model the scheme of the step that begins, so that a resumed run has the right scheme, too.

    Checkpoints hold the settings in trainer_state.json, among the states of callbacks.
    """

    def __init__(self, model, settings: dict):
        self.model, self.settings, self.current = model, settings, None
        self.give(0)

    def give(self, step: int) -> None:
        length, cope_steps = self.settings["train_length"], self.settings["cope_steps"]
        wanted = {"cope": length} if step < cope_steps else {"hope": length}
        if self.settings["scheme"] == "own":
            wanted = {}
        if wanted != self.current:
            convert(self.model, **wanted)
            self.current = wanted

    def on_train_begin(self, args, state, control, **_):
        self.give(min(state.global_step, state.max_steps - 1))

    def on_step_begin(self, args, state, control, **_):
        self.give(state.global_step)

    def state(self) -> dict:
        return {"args": self.settings, "attributes": {}}


def last_checkpoint(out: Path, settings: dict) -> Path | None:
    """Returns the newest complete checkpoint, or None. A checkpoint with trainer_state.json is complete, because this
    file is written last. Raises BadInput if the checkpoint was made with other settings."""
    found = sorted(out.glob("checkpoint-*/trainer_state.json"), key=lambda path: int(path.parent.name.split("-")[1]))
    if not found:
        return None
    saved = json.loads(found[-1].read_text())["stateful_callbacks"]["Schemes"]["args"]
    differences = [
        f"{name} {saved.get(name)!r} (now {now!r})" for name, now in settings.items() if saved.get(name) != now
    ]
    if differences:
        made = f"{found[-1].parent} was made with {', '.join(differences)}"
        raise BadInput(f"--out: {made}; choose another folder or the same settings")
    return found[-1].parent


def load(name: str | None) -> tuple[torch.nn.Module, AutoTokenizer | None]:
    """Returns (model, tokenizer). The model is in float32. A model over bytes has None as its tokenizer. Raises
    BadInput."""
    if name is None:
        return AutoModelForCausalLM.from_config(copy.deepcopy(TINY)), None
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)  # bf16 is only the type of the computation
    try:
        return model, AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        if model.config.vocab_size != BYTES:
            raise BadInput(
                f"--model: {name}: expected a tokenizer, or a vocabulary of {BYTES} bytes, got no tokenizer "
                f"and a vocabulary of {model.config.vocab_size}"
            ) from None
        return model, None


def read_documents(path: str | None) -> list[bytes]:
    """Returns the files of a folder, one file, or Python's standard library. Raises BadInput."""
    root = Path(path or sysconfig.get_paths()["stdlib"])
    if not root.exists():
        raise BadInput(f"--text: {root}: no such file or folder")
    found = [root] if root.is_file() else sorted(p for p in root.rglob("*" if path else "*.py") if p.is_file())
    if not path:
        found = [p for p in found if "site-packages" not in p.parts]
    texts = [content for content in (p.read_bytes() for p in found) if content.strip() and b"\0" not in content]
    if not texts:
        raise BadInput(f"--text: {root}: expected text, got none")
    return texts


def cut(documents: list[bytes], tokenizer, length: int) -> list[dict]:
    """Returns samples of at most ``length`` tokens, each from one document. All samples are in memory. For a larger
    corpus, write a streaming data set with samples of this form."""
    samples = []
    for document in documents:
        if tokenizer is None:
            tokens = list(document)
        else:
            tokens = tokenizer(document.decode(errors="replace")).input_ids
            if tokenizer.eos_token_id is not None and tokens[-1:] != [tokenizer.eos_token_id]:
                tokens.append(tokenizer.eos_token_id)
        samples += [{"input_ids": tokens[at : at + length]} for at in range(0, len(tokens), length)]
    return [sample for sample in samples if len(sample["input_ids"]) > 1]  # a sample of one token has no target


def choose_lengths(args: argparse.Namespace, trained: int) -> None:
    """Fills in each of the three lengths that is not given. trained: the model's max_position_embeddings. Raises
    BadInput."""
    if args.model is not None and args.length is None:
        raise BadInput(
            f"--length: expected the longest sample in tokens, got none; the model's max_position_embeddings, "
            f"{trained}, may be more than fits into memory"
        )
    args.length = args.length or trained
    args.train_length = args.train_length or max(trained, args.length)
    args.max_positions = args.max_positions or max(trained, args.length)
    print(
        f"samples of at most {args.length} tokens, scheme for a train length of {args.train_length}, "
        f"max_position_embeddings {args.max_positions}",
        flush=True,
    )


def make_trainer(args: argparse.Namespace) -> tuple[Trainer, Path | None]:
    """Returns (trainer, checkpoint to resume from or None). Raises BadInput."""
    torch.manual_seed(args.seed)  # for the weights of the tiny model
    model, tokenizer = load(args.model)
    documents = read_documents(args.text)
    choose_lengths(args, model.config.max_position_embeddings)
    model.config.max_position_embeddings = args.max_positions
    cope_steps = {"own": 0, "hope": 0, "cope-hope": args.steps // 2, "cope": args.steps}[args.scheme]
    if args.cope_steps is not None:
        cope_steps = args.cope_steps
    names = (
        "model",
        "scheme",
        "length",
        "train_length",
        "max_positions",
        "steps",
        "batch",
        "accumulate",
        "learning_rate",
        "warmup",
        "seed",
        "dtype",
    )
    settings = {name: getattr(args, name) for name in names} | {"cope_steps": cope_steps}
    settings["text"] = hashlib.sha256(b"\0".join(documents)).hexdigest()
    checkpoint = last_checkpoint(Path(args.out), settings)
    model.config.use_cache = False  # transformers recognizes packed sequences only without a cache
    arguments = TrainingArguments(
        args.out,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=args.accumulate,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        bf16=args.dtype == "bfloat16",
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=args.warmup,
        weight_decay=0.1,
        save_steps=args.save_every,
        save_total_limit=2,
        logging_steps=args.log_every,
        seed=args.seed,
        use_cpu=args.device == "cpu",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        arguments,
        data_collator=DataCollatorWithFlattening(),  # one row per batch; position_ids restart in every sample
        train_dataset=cut(documents, tokenizer, args.length),
        processing_class=tokenizer,
        callbacks=[Schemes(model, settings)],
    )
    return trainer, checkpoint


def export(trainer: Trainer, folder: Path) -> None:
    """Writes the whole model on rank 0, even if the model is sharded."""
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.is_world_process_zero():
        model = trainer.accelerator.unwrap_model(trainer.model)
        model.config.use_cache = True
        model.save_pretrained(folder, state_dict=weights)
        if trainer.processing_class is not None:
            trainer.processing_class.save_pretrained(folder)


def check(args: argparse.Namespace) -> None:
    """Raises BadInput for options that do not fit together."""
    if args.cope_steps is not None and args.scheme != "cope-hope":
        raise BadInput(f"--cope-steps: supported only with --scheme cope-hope, got --scheme {args.scheme}")
    if args.cope_steps is not None and args.cope_steps >= args.steps:
        raise BadInput(f"--cope-steps: expected less than --steps = {args.steps}, got {args.cope_steps}")
    if args.device == "cpu" and os.environ.get("ACCELERATE_USE_FSDP") == "true":
        raise BadInput("--device: expected a GPU for FSDP; accelerate shards nothing on CPUs, and does not say so")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    positive = functools.partial(_at_least, 1)
    parser.add_argument("--model", help="a checkpoint, by folder or name; default: a tiny random model over bytes")
    parser.add_argument("--text", metavar="PATH", help="a file, or a folder with one document per file")
    parser.add_argument("--out", metavar="DIR", default="runs/hf", help="checkpoints, and the model in DIR/model")
    parser.add_argument(
        "--scheme", choices=("hope", "cope-hope", "cope", "own"), default="own", help="default: own, the model's"
    )
    parser.add_argument("--cope-steps", type=positive, help="steps under CoPE before HoPE; default: half of --steps")
    of_model = "default: the model's max_position_embeddings"
    parser.add_argument("--length", type=positive, help="longest sample, in tokens; required with --model")
    parser.add_argument(
        "--train-length", type=positive, help=f"train length of HoPE and CoPE, in tokens; {of_model}, at least --length"
    )
    parser.add_argument(
        "--max-positions", type=positive, help=f"max_position_embeddings to save; {of_model}, at least --length"
    )
    parser.add_argument("--steps", type=positive, default=1000)
    parser.add_argument("--batch", type=positive, default=4, help="samples in one packed row, per device")
    parser.add_argument("--accumulate", type=positive, default=1, help="packed rows per step and device")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--warmup", type=positive, default=10, help="steps")
    parser.add_argument(
        "--save-every", type=positive, default=500, help="steps between checkpoints; the newest two are kept"
    )
    parser.add_argument("--log-every", type=positive, default=10)
    parser.add_argument("--seed", type=functools.partial(_at_least, 0), default=0)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the computation")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    return parser.parse_args(arguments)


def _at_least(minimum: int, text: str) -> int:
    if int(text) < minimum:
        raise ValueError
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    try:
        check(args)
        trainer, checkpoint = make_trainer(args)
    except BadInput as error:
        print(f"train_hf: error: {error}", file=sys.stderr)
        return 2
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    export(trainer, Path(args.out) / "model")
    return 0


if __name__ == "__main__":
    sys.exit(main())
