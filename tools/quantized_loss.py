"""What quantized caches cost in loss: the table and the figure of docs/decoding.md.

    flashrope demo
    python tools/quantized_loss.py runs/demo/rope.safetensors runs/demo/hope.safetensors --out docs/quantized

First the change of the loss that int8 and int4 caches make, as ``flashrope loss --cache-dtype`` measures it, by model,
scheme and length: every window of unseen text is read through the cache. Then keys alone are rounded to 8, 4 and 3 bits
with a scale for each token and key head, before and after their rotation, at the training length. Both are taken
window by window; intervals are Student's 95% intervals of the mean over the windows.
"""

import argparse
from pathlib import Path

import torch
from flashrope import Rotary, attention, rotate
from flashrope.backends.names import CACHE_DTYPES
from flashrope.cli import files
from flashrope.cli.figure import COLOURS, MARKERS, new_figure, save
from flashrope.cli.options import cores
from flashrope.evaluation import llama
from flashrope.evaluation.loss import half_interval, measure, of_length
from flashrope.evaluation.schemes import applicable
from flashrope.small_models import data
from flashrope.small_models.model import load_checkpoint, trained_length
from torch.nn.functional import cross_entropy

BITS = (8, 4, 3)


def change(values: list[float], base: list[float]) -> tuple[float, float]:
    """The mean of the differences and half of its interval."""
    differences = [a - b for a, b in zip(values, base, strict=True)]
    return sum(differences) / len(differences), half_interval(differences)


def by_length(path: Path, windows: list[bytes], lengths: list[int], names: list[str], targets: int, batch: int):
    """Yields (scheme, length, mean loss, half of its interval, {cache_dtype: change})."""
    model = llama.read(path).eval()
    schemes, _ = applicable(model, names, trained_length(path), lengths[-1], all_converted=True)
    for scheme in schemes:
        scheme.apply()
        for length in lengths:
            inputs = of_length(windows, (), length)
            plain, *quantized = (
                list(measure(model, inputs, targets, batch, 512, cache_dtype)) for cache_dtype in (None, *CACHE_DTYPES)
            )
            changes = {name: change(x, plain) for name, x in zip(CACHE_DTYPES, quantized, strict=True)}
            yield scheme.label, length, sum(plain) / len(plain), half_interval(plain), changes


def rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x (..., head_dim) as multiples of a scale for each row."""
    largest = 2 ** (bits - 1) - 1
    scale = x.abs().amax(-1, keepdim=True) / largest
    return (x / scale).round() * scale


@torch.no_grad()
def by_bits(path: Path, windows: list[bytes], targets: int):
    """Yields (bits, {"raw" or "rotated": losses of the windows}); bits None: nothing is rounded."""
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


def draw(rows: list[list], models: list[str], out: Path) -> None:
    figure = new_figure((3.4 * len(models), 2.8))
    grid = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, model in zip(grid, models, strict=True):
        for n, keys in enumerate(("raw", "rotated")):
            points = [row for row in rows if row[0] == model and row[2] == keys]
            axes.errorbar(
                [BITS.index(row[1]) + 0.16 * n - 0.08 for row in points],
                [float(row[3]) for row in points],
                [float(row[4]) for row in points],
                fmt=MARKERS[n],
                color=COLOURS[n],
                capsize=3,
                label=f"{keys} keys",
            )
        axes.axhline(0, color="black", linewidth=0.6)
        axes.set_xticks(range(len(BITS)), [f"{bits} bits" for bits in BITS])
        axes.set_title(model, fontsize=10, loc="left")
        axes.set_yscale("symlog", linthresh=1e-3)
    grid[0].set_ylabel("change of the loss, nats per byte")
    grid[-1].legend(frameon=False, fontsize=8)
    save(figure, out / "bits.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="checkpoints of flashrope demo or of the experiments")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--schemes", nargs="+", default=["stock", "rerope", "yarn"])
    parser.add_argument("--windows", type=int, default=32, help="of the first table; the second has four times as many")
    parser.add_argument("--targets", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(cores())
    corpus = data.standard_library(max(args.lengths) + 1)
    args.out.mkdir(parents=True, exist_ok=True)

    windows = data.unseen_windows(corpus.unseen, max(args.lengths) + 1, args.windows, args.seed)
    header = ["model", "scheme", "length", "loss", "interval"]
    header += [f"{name}{what}" for name in CACHE_DTYPES for what in ("", " interval")]
    rows = []
    for path in args.models:
        for scheme, length, *loss, changes in by_length(
            path, windows, args.lengths, args.schemes, args.targets, args.batch
        ):
            numbers = [*loss, *(number for pair in changes.values() for number in pair)]
            rows.append([path.stem, scheme, length, *(f"{number:.6f}" for number in numbers)])
            print(*rows[-1], flush=True)
    files.write(args.out / "lengths.csv", files.csv_text(header, rows))

    rows = []
    for path in args.models:
        size = trained_length(path) + 1
        windows = data.unseen_windows(corpus.unseen, size, 4 * args.windows, args.seed)
        plain: list[float] = []
        for bits, losses in by_bits(path, windows, args.targets):
            plain = plain or losses["raw"]
            if bits is None:
                continue
            for keys, values in losses.items():
                rows.append([path.stem, bits, keys, *(f"{number:.6f}" for number in change(values, plain))])
            rows.append(
                [path.stem, bits, "rotated - raw", *(f"{x:.6f}" for x in change(losses["rotated"], losses["raw"]))]
            )
            print(*rows[-3:], sep="\n", flush=True)
    files.write(args.out / "bits.csv", files.csv_text(["model", "bits", "keys", "change", "interval"], rows))
    draw(rows, [path.stem for path in args.models], args.out)


if __name__ == "__main__":
    main()
