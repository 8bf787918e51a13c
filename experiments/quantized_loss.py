"""Measures how much quantized caches raise the loss, for the table and the figure of docs/quantized/README.md.

    python -m experiments loss --preset loss --device cpu --threads 1
    python -m experiments.quantized_loss runs/experiments-loss/models/rope-*.safetensors --out docs/quantized

The first measurement is the change of the loss with int8 and int4 caches by scheme and length, as in ``flashrope loss
--cache-dtype``. Every model reads every window of unseen text in chunks through the cache. The second measurement
rounds only keys, at the training length, to 8, 4 and 3 bits with a scale for each token and key head. It rounds them
before or after their rotation. Every change is the difference of two losses of one model on one window. Intervals are
Student's 95% intervals of the mean over the models. The tables also have intervals over the windows.
"""

import argparse
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from flashrope import Rotary, attention, rotate
from flashrope.backends.names import CACHE_DTYPES
from flashrope.cli import files
from flashrope.cli.figure import COLOURS, MARKERS, new_figure, save
from flashrope.cli.options import cores
from flashrope.evaluation import llama
from flashrope.evaluation.loss import half_interval, measure, of_length
from flashrope.evaluation.schemes import applicable
from flashrope.rotary.catalogue import SCHEMES
from flashrope.small_models import data
from flashrope.small_models.model import load_checkpoint, trained_length
from torch.nn.functional import cross_entropy

BITS = (8, 4, 3)
CHUNK = 512  # tokens that the model reads at once

Table = list[list[float]]  # losses, indexed by [model][window]


class Change(NamedTuple):
    """Holds the change of the loss in nats per byte: its mean, the half widths of its intervals over models and over
    windows, and the largest mean of a single model."""

    mean: float
    over_models: float
    over_windows: float
    largest: float


def change(values: Table, base: Table) -> Change:
    """Returns the mean change of the loss from base to values, both [model][window], with its intervals."""
    differences = [[a - b for a, b in zip(*rows, strict=True)] for rows in zip(values, base, strict=True)]
    of_models, of_windows = (
        [fmean(row) for row in differences],
        [fmean(column) for column in zip(*differences, strict=True)],
    )
    return Change(fmean(of_models), half_interval(of_models), half_interval(of_windows), max(of_models, key=abs))


def by_length(path: Path, windows: list[bytes], lengths: list[int], names: list[str], targets: int, batch: int):
    """Yields (scheme, length, cache_dtype or None, losses of the windows)."""
    model = llama.read(path).eval()
    schemes, _ = applicable(model, names, trained_length(path), lengths[-1], all_converted=True)
    for scheme in schemes:
        scheme.apply()
        for length in lengths:
            inputs = of_length(windows, (), length)
            for cache_dtype in (None, *CACHE_DTYPES):
                losses = list(measure(model, inputs, targets, batch, CHUNK, cache_dtype))
                yield scheme.label, length, cache_dtype, losses


def rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns x (..., head_dim) after rounding to multiples of a scale. Each row has its own scale."""
    largest = 2 ** (bits - 1) - 1
    scale = x.abs().amax(-1, keepdim=True) / largest
    return (x / scale).round() * scale


@torch.no_grad()
def by_bits(path: Path, windows: list[bytes], targets: int):
    """Yields (bits, {"raw" or "rotated": losses of the windows}). "raw" rounds keys before their rotation, "rotated"
    after it. bits None means that nothing is rounded."""
    model, rotary = load_checkpoint(path)
    tokens = data.as_tokens([window[-trained_length(path) - 1 :] for window in windows])

    def losses(attend) -> list[float]:
        logits = model(tokens[:, :-1], rotary, attend)[:, -targets:]
        return cross_entropy(logits.transpose(1, 2), tokens[:, -targets:], reduction="none").double().mean(1).tolist()

    yield None, {"raw": losses(attention)}
    still = Rotary.none(model.config.head_dim)
    for bits in BITS:
        raw = losses(lambda q, k, v, rotary, bits=bits: attention(q, rounded(k, bits), v, rotary))
        rotated = losses(
            lambda q, k, v, rotary, bits=bits: attention(rotate(q, rotary), rounded(rotate(k, rotary), bits), v, still)
        )
        yield bits, {"raw": raw, "rotated": rotated}


def draw(rows: list[list], out: Path) -> None:
    figure = new_figure((6.6, 2.5))
    for axes, bits in zip(figure.subplots(1, len(BITS)), BITS, strict=True):
        found = [row for row in rows if row[0] == bits]
        for n, row in enumerate(found):
            mean, half = (1000 * float(number) for number in row[2:4])
            axes.errorbar(n, mean, half, fmt=MARKERS[n], color=COLOURS[n], capsize=3)
        axes.axhline(0, color="black", linewidth=0.6)
        axes.set_xticks(range(len(found)), [row[1].replace(" - ", "\n− ") for row in found], fontsize=8)
        axes.set_xlim(-0.5, len(found) - 0.5)
        axes.set_title(f"keys of {bits} bits", fontsize=10, loc="left")
        axes.tick_params(axis="y", labelsize=8)
    figure.axes[0].set_ylabel("change of the loss,\n0.001 nats per byte", fontsize=9)
    save(figure, out / "bits.png")


def texts(change: Change) -> list[str]:
    return [f"{number:.6f}" for number in change]


def measure_lengths(args: argparse.Namespace, unseen: tuple[bytes, ...]) -> None:
    """Writes lengths.csv."""
    windows = data.unseen_windows(unseen, max(args.lengths) + 1, args.windows, args.seed)
    losses: dict[tuple, Table] = {}
    for path in args.models:
        for *key, found in by_length(path, windows, args.lengths, args.schemes, args.targets, args.batch):
            losses.setdefault(tuple(key), []).append(found)
            print(path.stem, *key, f"{fmean(found):.6f}", flush=True)
    header = ["scheme", "length", "loss", "over models"]
    header += [f"{name}{what}" for name in CACHE_DTYPES for what in ("", " over models", " over windows", " largest")]
    rows = []
    for (scheme, length, cache_dtype), plain in losses.items():
        if cache_dtype is None:
            means = [fmean(row) for row in plain]
            changes = (texts(change(losses[scheme, length, name], plain)) for name in CACHE_DTYPES)
            rows.append([scheme, length, f"{fmean(means):.6f}", f"{half_interval(means):.6f}", *sum(changes, [])])
    files.write(args.out / "lengths.csv", files.csv_text(header, rows))


def measure_bits(args: argparse.Namespace, unseen: tuple[bytes, ...]) -> None:
    """Writes bits.csv and draws it."""
    losses: dict[tuple, Table] = {}
    for path in args.models:
        windows = data.unseen_windows(unseen, trained_length(path) + 1, 8 * args.windows, args.seed)
        for bits, of_keys in by_bits(path, windows, args.targets):
            for keys, found in of_keys.items():
                losses.setdefault((bits, keys), []).append(found)
    plain, rows = losses[None, "raw"], []
    for bits in BITS:
        raw, rotated = losses[bits, "raw"], losses[bits, "rotated"]
        pairs = {"raw": (raw, plain), "rotated": (rotated, plain), "rotated - raw": (rotated, raw)}
        rows += [[bits, keys, *texts(change(*pair))] for keys, pair in pairs.items()]
    header = ["bits", "keys", "change", "over models", "over windows", "largest"]
    files.write(args.out / "bits.csv", files.csv_text(header, rows))
    draw(rows, args.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="checkpoints of the experiments or of flashrope demo")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--schemes", nargs="+", default=[name for name in SCHEMES if name != "hope"])
    parser.add_argument(
        "--windows", type=int, default=16, help="windows of the first table; the second has eight times as many"
    )
    parser.add_argument("--targets", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(cores())
    unseen = data.standard_library(max(args.lengths) + 1).unseen
    args.out.mkdir(parents=True, exist_ok=True)
    measure_bits(args, unseen)
    measure_lengths(args, unseen)


if __name__ == "__main__":
    main()
