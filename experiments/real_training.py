"""``python -m experiments continue``: continues a pretrained model's training in three ways: under RoPE, under HoPE,
and under CoPE followed by HoPE.

All three ways start from the same weights and read the same batches. Batches are random windows of the first four
fifths of every text. Before, during and after the training, the loss by position is measured on windows of the last
fifth of every text. The row of RoPE at 0 tokens shows the pretrained model. Weights are float32. Under ``--dtype
bfloat16`` matrix products run in bfloat16 (autocast).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from flashrope.console import files
from flashrope.console.hardware import hardware
from flashrope.console.options import BadInput, positive
from flashrope.console.progress import Bar
from flashrope.lab.evaluation.by_position import bins_of, fingerprint, position_losses
from flashrope.lab.evaluation.checkpoint import describe, load, training_length
from flashrope.lab.evaluation.journal import Journal
from flashrope.lab.evaluation.readings import applicable
from flashrope.lab.small_models.data import unseen_windows

from .real_speed import DTYPES, as_it_came, command_line, parse

SUMMARY = "continue a pretrained model's training under HoPE: continue --model FILE --text PATH --out DIR"
RESULT, JOURNAL = "continued.json", "continued.jsonl"
BIN = 1024
TRAINED = 0.8  # share of every text that training reads
WARMUP = 0.1  # share of the steps in which the learning rate rises
MOMENTS = ("exp_avg", "exp_avg_sq")  # names of the moments in AdamW's state
BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 0.1, 1.0


class Stage(NamedTuple):
    """Describes a scheme to train under. apply: converts the model to this scheme."""

    scheme: str
    apply: Callable[[], object]


class Texts(NamedTuple):
    """Holds token ids. trained: one tensor per file, from which batches are drawn. unseen: the windows to measure,
    int64 (windows, longest + 1)."""

    trained: list[torch.Tensor]
    unseen: torch.Tensor


def run(argv: list[str], program: str) -> None:
    parser = argparse.ArgumentParser(prog=program, description=__doc__.partition(": ")[2], allow_abbrev=False)
    parser.add_argument("--model", required=True, help="folder or GGUF file")
    parser.add_argument("--text", metavar="PATH", nargs="+", required=True, help="text files")
    parser.add_argument("--tokens", type=positive, default=300_000, help="tokens to train on (default 300000)")
    parser.add_argument("--length", type=positive, default=2048, help="tokens per sequence (default 2048)")
    parser.add_argument("--batch", type=positive, default=2, help="sequences per step (default 2)")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="peak learning rate (default 3e-4)")
    parser.add_argument("--longest", type=positive, default=12_288, help="tokens per window that is measured")
    parser.add_argument("--windows", type=positive, default=4, help="windows to measure (default 4)")
    parser.add_argument(
        "--measurements", type=positive, default=4, help="number of measurements during training (default 4)"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="type of matrix products (default bfloat16)"
    )
    args = parse(parser, argv)
    args.out.mkdir(parents=True, exist_ok=True)
    train(args, command_line(program, argv))


def train(args: argparse.Namespace, command: str) -> None:
    """Trains all ways, or finishes an interrupted run. Writes continued.json and prints its table."""
    model, tokens = load(args.model, torch.device("cpu"))
    train_length = training_length(model, args.model, None)
    texts = read(args.text, tokens, args)
    steps = -(-args.tokens // (args.batch * args.length))
    measured = sorted({steps * n // args.measurements for n in range(args.measurements + 1)})
    settings = {
        "model": describe(model, args.model, train_length),
        "weights": fingerprint(model),
        "text": [Path(path).name for path in args.text],
        "steps": steps,
        "measured": measured,
        **{name: getattr(args, name) for name in ("length", "batch", "learning_rate", "longest", "dtype", "seed")},
        "windows": len(texts.unseen),
    }
    journal = Journal(args.out / JOURNAL, settings)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    ways = ways_of(model, train_length, args.longest)
    with Bar(len(ways) * steps) as bar:
        for way, stages in ways.items():
            bar.start(way)
            model.load_state_dict(start)
            continue_training(model, way, stages, texts, measured, journal, args, bar)
    facts = settings | {
        "train_length": train_length,
        "bin": BIN,
        "machine": f"{hardware('cpu')}, torch {torch.__version__}",
        "command": command,
    }
    record = {**facts, "rows": journal.rows}
    files.write(args.out / RESULT, json.dumps(record, indent=1) + "\n")
    print(table(record))


def read(paths: Sequence[str], tokens, args: argparse.Namespace) -> Texts:
    """Reads the texts and splits each into a part to train on and an unseen part. Raises BadInput if no text is long
    enough for a sequence, or for a window to measure."""
    trained, unseen = [], []
    for path in paths:
        ids = tokens.encode(Path(path).read_text(encoding="utf-8"))
        cut = int(TRAINED * len(ids))
        trained.append(torch.tensor(ids[:cut]))
        unseen.append(ids[cut:])
    windows = unseen_windows(unseen, args.longest + 1 - len(tokens.start), args.windows, args.seed)
    trained = [ids for ids in trained if len(ids) > args.length]
    if not windows or not trained:
        needed = max(int(args.length / TRAINED), int(args.longest / (1 - TRAINED))) + 2
        raise BadInput(f"--text: expected a file of at least {needed:,} {tokens.unit}s; shorten --longest or --length")
    return Texts(trained, torch.tensor([[*tokens.start, *window] for window in windows]))


def ways_of(model, train_length: int, longest: int) -> dict[str, list[Stage]]:
    """Returns {way: its stages}. A way trains under the schemes of its stages one after another, for equal numbers of
    steps."""
    from flashrope.integrations.transformers import convert

    found = {each.name: each for each in applicable(model, ["hope", "cope"], train_length, longest)[0]}
    if missing := {"hope", "cope"} - found.keys():
        raise BadInput(
            f"--model: expected a model to which HoPE and CoPE apply, got one to which {' and '.join(sorted(missing))} "
            f"{'do' if len(missing) > 1 else 'does'} not apply"
        )
    hope, cope = (Stage(found[name].label, found[name].apply) for name in ("hope", "cope"))
    return {
        "RoPE": [Stage("RoPE", lambda: convert(as_it_came(model)))],
        "HoPE": [hope],
        "CoPE, then HoPE": [cope, hope],
    }


def continue_training(
    model,
    way: str,
    stages: Sequence[Stage],
    texts: Texts,
    measured: Sequence[int],
    journal: Journal,
    args: argparse.Namespace,
    bar: Bar,
) -> None:
    """Trains one way, starting from the step that was saved last. Measures the model at the steps ``measured``."""
    steps, path = measured[-1], args.out / f"{way.replace(',', '').replace(' ', '-')}.safetensors"
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY)
    done = {row["step"] for row in journal.rows if row["way"] == way}
    first, losses = 0, []
    if path.exists():
        first, losses = restore(model, optimizer, path)
    bar.step(first)
    for step in range(first, steps + 1):
        if step in measured:
            stage = stages[min(max(step - 1, 0) * len(stages) // steps, len(stages) - 1)]
            stage.apply()
            if step > first:
                save(model, optimizer, step, losses, path)
            if step not in done:
                tokens = step * args.batch * args.length
                row = {"way": way, "scheme": stage.scheme, "step": step, "tokens": tokens}
                journal.add(row | {"training_loss": losses[-1:], "bins": measure(model, texts.unseen, args.dtype)})
        if step < steps:
            stages[step * len(stages) // steps].apply()
            for group in optimizer.param_groups:
                group["lr"] = args.learning_rate * rate(step, steps)
            losses.append(train_step(model, optimizer, batch(texts.trained, step, args), args.dtype))
            bar.step(1, f"loss {losses[-1]:.3f}")


def rate(step: int, steps: int) -> float:
    """Returns the learning rate of a step as a share of the highest one. It rises linearly, then falls linearly to
    0."""
    rise = max(int(WARMUP * steps), 1)
    return min((step + 1) / rise, (steps - step) / max(steps - rise, 1), 1.0)


def batch(texts: Sequence[torch.Tensor], step: int, args: argparse.Namespace) -> torch.Tensor:
    """Returns the sequences of a step, int64 (batch, length + 1). They are the same in every way. All positions of all
    texts are equally likely as their start."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    starts = torch.tensor([len(ids) - args.length for ids in texts])
    ends = starts.cumsum(0)
    rows = []
    for place in torch.randint(int(ends[-1]), (args.batch,), generator=generator).tolist():
        index = int(torch.searchsorted(ends, place, right=True))
        begin = place - int(ends[index] - starts[index])
        rows.append(texts[index][begin : begin + args.length + 1])
    return torch.stack(rows)


def train_step(model, optimizer, rows: torch.Tensor, dtype: str) -> float:
    """Makes a training step on rows, int64 (batch, length + 1), and returns the loss before the step."""
    model.train()
    total = 0.0
    for row in rows:  # one sequence at a time, because the logits of a batch are large
        with torch.autocast("cpu", DTYPES[dtype], enabled=dtype != "float32"):
            logits = model(row[None, :-1], use_cache=False).logits[0]
        loss = F.cross_entropy(logits.float(), row[1:]) / len(rows)
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def measure(model, windows: torch.Tensor, dtype: str) -> list[list[float]]:
    """Returns, for every window, the mean loss in each bin of BIN positions."""
    model.eval()
    with torch.autocast("cpu", DTYPES[dtype], enabled=dtype != "float32"):
        return [list(bins_of(position_losses(model, window), BIN)) for window in windows]


def save(model, optimizer, step: int, losses: Sequence[float], path: Path) -> None:
    """Writes the weights, the optimizer's state and the losses so far to ``path``. The file is written completely or
    not at all."""
    from safetensors.torch import save_file

    tensors = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        tensors |= {f"{kind}.{name}": x.contiguous() for kind, x in [("weight", parameter.data), *moments(state)]}
    with files.replacing(path) as partial:
        save_file(tensors, partial, {"step": str(step), "losses": json.dumps(losses)})


def restore(model, optimizer, path: Path) -> tuple[int, list[float]]:
    """Reads what ``save`` wrote into the model and the optimizer. Returns the step and the losses so far."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        step = int(metadata["step"])
        for name, parameter in model.named_parameters():
            parameter.data.copy_(file.get_tensor(f"weight.{name}"))
            state = {kind: file.get_tensor(f"{kind}.{name}") for kind in MOMENTS}
            optimizer.state[parameter] = {"step": torch.tensor(float(step)), **state}
    return step, json.loads(metadata["losses"])


def moments(state: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return [(kind, state[kind]) for kind in MOMENTS]


def curves(record: dict[str, Any]) -> Iterator[tuple[str, list[int], list[list[float]]]]:
    """Yields (name, token counts, losses) for every way. token counts: how many tokens it was trained on when it was
    measured. losses: for each count the loss in every bin, averaged over windows."""
    for way in dict.fromkeys(row["way"] for row in record["rows"]):
        rows = sorted((row for row in record["rows"] if row["way"] == way), key=lambda row: row["step"])
        yield way, [row["tokens"] for row in rows], [[fmean(x) for x in zip(*row["bins"], strict=True)] for row in rows]


def table(record: dict[str, Any]) -> str:
    """Returns a Markdown table of the loss in the second bin and in the last bin, by the number of tokens trained
    on."""
    found = list(curves(record))
    last = len(found[0][2][0]) - 1
    lines = [
        "| trained under | positions | " + " | ".join(f"{tokens:,} tokens" for tokens in found[0][1]) + " |",
        "|---|---|" + "---:|" * len(found[0][1]),
    ]
    for at in (1, last):
        for way, _, bins in found:
            cells = " | ".join(f"{each[at]:.3f}" for each in bins)
            lines.append(f"| {way} | {at}-{at + 1}k | {cells} |")
    return "\n".join(lines)
