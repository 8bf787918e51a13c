"""Measures how much reused chunks and forgotten tokens raise the loss, for the table and the figure of
bench/results/reused/README.md.

    python -m experiments loss --preset loss --device cpu --threads 1
    python -m experiments.reused_loss runs/experiments-loss/models/rope-L256-s[0-4].safetensors --threads 1 \\
        --out bench/results/reused

In the first measurement a text is read in chunks that do not attend to each other. ``PagedKVCache.extend`` joins the
chunks, and the model predicts the bytes after them. Optionally the first bytes of every chunk are computed again with
attention to all preceding text. The loss is compared with the loss after one prefill of the whole text.

The second measurement is the loss by position over 32 training lengths, in four ways. The cache of ``flashrope generate
--keep`` keeps the first and the last bytes. Truncation reads the last bytes again for every byte. ReRoPE with log n
keeps all bytes, and so does RoPE. The window of ReRoPE is half the training length.

Every change is the difference of two losses of one model on one window. Intervals are Student's 95% intervals of the
mean over the models.
"""

import argparse
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import torch
from flashrope import PagedKVCache, Rotary
from flashrope.console import files
from flashrope.console.figure import COLOURS, MARKERS, new_figure, save
from flashrope.console.options import cores
from flashrope.lab.evaluation.losses import half_interval
from flashrope.lab.small_models import data
from flashrope.lab.small_models.model import (
    LanguageModel,
    load_checkpoint,
    read_in_step,
    trained_length,
)
from torch.nn.functional import cross_entropy

PAGE_SIZE = 16
FULL, NOTHING, LAST = "full prefill", "nothing before", "only the last chunk"
EVERY = 16  # every EVERY-th position is measured
CHUNKS = (16, 64)  # bytes per chunk
MULTIPLE = 32  # length of the figure in training lengths, a power of two
FIRST = 4  # number of first bytes that --keep keeps
TRUNCATED, REROPE, ROPE = "truncation", "ReRoPE, log n", "RoPE"

Losses = dict[tuple, list[float]]  # {what was measured: one loss per model}


def in_bytes(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the loss of every byte, in float64 and with the shape (windows, seqlen)."""
    return cross_entropy(logits.transpose(1, 2), tokens, reduction="none").double()


def text(number: float) -> str:
    return f"{round(number, 6) + 0.0:.6f}"  # + 0.0 avoids the text -0.000000


# ---- chunks


def reused(
    model: LanguageModel, rotary: Rotary, tokens: torch.Tensor, chunk: int, targets: int, again: int | None
) -> float:
    """Returns the loss of the last ``targets`` bytes after the text before them was read in chunks.

    again: how many of the first bytes of every chunk are recomputed with attention to all preceding text. In the
    first chunk nothing is recomputed. None: the whole text is read by one prefill.
    """
    count, before, sizes = len(tokens), tokens.shape[1] - 1 - targets, model.config
    if again is None:
        return in_bytes(model(tokens[:, :-1], rotary)[:, -targets:], tokens[:, -targets:]).mean().item()
    pages = count * 3 * (-(-before // chunk) * (-(-chunk // PAGE_SIZE) + 1) + -(-targets // PAGE_SIZE))
    cache = PagedKVCache(pages, PAGE_SIZE, sizes.heads, sizes.head_dim, torch.float32, "cpu", layers=sizes.layers)
    prompts = [cache.allocate() for _ in range(count)]

    def read(sequences: list[int], part: torch.Tensor) -> torch.Tensor:
        with cache.step(sequences, part.shape[1]) as step:
            return read_in_step(model, rotary, step, part)

    for start, stop in pairwise([*range(0, before, chunk), before]):
        alone, anew = [cache.allocate() for _ in range(count)], min(again, stop - start) if start else 0
        read(alone, tokens[:, start:stop])
        if anew:
            read(prompts, tokens[:, start : start + anew])
        for prompt, passage in zip(prompts, alone, strict=True):
            cache.remove(passage, 0, anew)
            cache.extend(prompt, passage)
            cache.free(passage)
    return in_bytes(read(prompts, tokens[:, before:-1]), tokens[:, -targets:]).mean().item()


def measure_chunks(args: argparse.Namespace, unseen: tuple[bytes, ...]) -> None:
    """Writes chunks.csv."""
    losses: Losses = {}
    for path in args.models:
        model, rotary, length = *load_checkpoint(path), trained_length(path)
        rotary = rotary.rectify(length // 2).log_n(length)
        windows = data.as_tokens(data.unseen_windows(unseen, max(args.lengths) + 1, 4 * args.windows, args.seed))
        for total in args.lengths:
            tokens = windows[:, -total - 1 :]

            def keep(chunk: int | str, way: int | str, loss: float, total: int = total) -> None:
                losses.setdefault((total, chunk, way), []).append(loss)

            keep("", FULL, reused(model, rotary, tokens, 0, args.targets, None))
            keep("", NOTHING, reused(model, rotary, tokens[:, -args.targets - 1 :], 0, args.targets, None))
            for chunk in CHUNKS:
                last = tokens[:, -args.targets - chunk - 1 :]
                keep(chunk, LAST, reused(model, rotary, last, chunk, args.targets, None))
                for again in args.again:
                    keep(chunk, again, reused(model, rotary, tokens, chunk, args.targets, again))
        print(path.stem, flush=True)
    header = ["length", "chunk", "computed again", "loss", "change", "over models"]
    rows = []
    for (total, chunk, way), found in losses.items():
        changes = [a - b for a, b in zip(found, losses[total, "", FULL], strict=True)]
        numbers = fmean(found), fmean(changes), half_interval(changes)
        rows.append([total, chunk, way, *map(text, numbers)])
    files.write(args.out / "chunks.csv", files.csv_text(header, rows))


# ---- positions


def rolling(model: LanguageModel, rotary: Rotary, tokens: torch.Tensor, keep: tuple[int, int]) -> torch.Tensor:
    """Returns the losses (windows, measured) of every EVERY-th byte when bytes are read one by one through a cache of
    fixed size. keep: how many of the first and of the last bytes the cache keeps."""
    count, sizes, found = len(tokens), model.config, []
    pages = -(-(sum(keep) + 1) // PAGE_SIZE) + 3  # + 3, because pages around the gap are not full
    shape = count * pages, PAGE_SIZE, sizes.heads, sizes.head_dim
    cache = PagedKVCache(*shape, torch.float32, "cpu", pages * PAGE_SIZE, layers=sizes.layers)
    sequences = [cache.allocate() for _ in range(count)]
    for at in range(tokens.shape[1] - 1):
        with cache.step(sequences, 1) as step:
            logits = read_in_step(model, rotary, step, tokens[:, at : at + 1])
        for sequence in sequences:
            cache.keep(sequence, *keep)
        if at % EVERY == EVERY - 1:
            found.append(in_bytes(logits, tokens[:, at + 1 : at + 2]))
    return torch.cat(found, 1)


def truncated(model: LanguageModel, rotary: Rotary, tokens: torch.Tensor, length: int) -> torch.Tensor:
    """Returns the losses of every EVERY-th byte when the model reads only the last ``length`` bytes before it."""
    found = []
    for at in range(EVERY - 1, tokens.shape[1] - 1, EVERY):
        logits = model(tokens[:, max(at + 1 - length, 0) : at + 1], rotary)[:, -1:]
        found.append(in_bytes(logits, tokens[:, at + 1 : at + 2]))
    return torch.cat(found, 1)


def whole(model: LanguageModel, rotary: Rotary, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the losses of every EVERY-th byte when the cache keeps all bytes."""
    rows = (in_bytes(model(row[:, :-1], rotary), row[:, 1:]) for row in tokens.split(1))
    return torch.cat([row[:, EVERY - 1 :: EVERY] for row in rows])


def ways(args: argparse.Namespace, path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Measures one model in every way. Yields (name of the way, losses (windows, measured))."""
    model, rotary, length = *load_checkpoint(path), trained_length(path)
    model.eval()
    longest = MULTIPLE * length
    unseen = data.standard_library(longest + 1).unseen
    tokens = data.as_tokens(data.unseen_windows(unseen, longest + 1, args.windows, args.seed))
    kept = FIRST, length - 1 - FIRST
    yield f"--keep {kept[0]},{kept[1]}", rolling(model, rotary, tokens, kept)
    yield TRUNCATED, truncated(model, rotary, tokens, length)
    yield REROPE, whole(model, rotary.rectify(length // 2).log_n(length), tokens)
    yield ROPE, whole(model, rotary, tokens)


def measure_positions(args: argparse.Namespace) -> None:
    """Measures the loss by position, writes positions.csv and draws it."""
    losses: Losses = {}
    length = trained_length(args.models[0])
    edges = [0, *(length * 2**n // 2 for n in range(MULTIPLE.bit_length() + 1))]
    for path in args.models:
        for name, found in ways(args, path):
            for start, stop in pairwise(edges):
                part = found[:, start // EVERY : stop // EVERY].mean().item()
                losses.setdefault((name, start, stop), []).append(part)
            print(path.stem, name, f"{found.mean().item():.4f}", flush=True)
        write_positions(losses, length, args.out)


def write_positions(losses: Losses, length: int, out: Path) -> None:
    rows = []
    for (name, start, stop), found in losses.items():
        changes = [a - b for a, b in zip(found, losses[TRUNCATED, start, stop], strict=True)]
        numbers = fmean(found), half_interval(found), fmean(changes), half_interval(changes)
        rows.append([name, start, stop, len(found), *map(text, numbers)])
    header = ["cache", "from position", "to position", "models", "loss", "over models", "change", "change over models"]
    files.write(out / "positions.csv", files.csv_text(header, rows))
    draw(rows, length, out)


def draw(rows: list[list], length: int, out: Path) -> None:
    """Draws the loss by position, and the difference from truncation."""
    figure = new_figure((7.2, 3.0))
    for axes, column, title in zip(
        figure.subplots(1, 2), (4, 6), ("loss, nats per byte", f"change against {TRUNCATED}"), strict=True
    ):
        for n, name in enumerate(dict.fromkeys(row[0] for row in rows)):
            found = [row for row in rows if row[0] == name and (column == 4 or name not in (TRUNCATED, ROPE))]
            if not found:
                continue
            x = [(row[1] + row[2]) / 2 / length * 1.02**n for row in found]
            y, half = ([float(row[at]) for row in found] for at in (column, column + 1))
            line = dict(color=COLOURS[n], marker=MARKERS[n], markersize=4, linewidth=1.2, label=name)
            if column == 4:
                axes.plot(x, y, **line)
            else:
                axes.errorbar(x, y, half, capsize=2, **line)
        axes.set_xscale("log", base=2)
        axes.set_xticks([0.25, 1, 4, 16], ["1/4", "1", "4", "16"])
        axes.set_xlabel("position / training length", fontsize=9)
        axes.set_title(title, fontsize=10, loc="left")
        axes.tick_params(labelsize=8)
        axes.axvline(1, color="black", linewidth=0.6, linestyle=":")
    figure.axes[1].axhline(0, color="black", linewidth=0.6)
    figure.axes[0].legend(fontsize=8)
    save(figure, out / "positions.png")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="RoPE models of the experiments or of flashrope demo")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[256, 1024], help="lengths of the text in the first table"
    )
    parser.add_argument(
        "--again",
        type=int,
        nargs="+",
        default=[0, 1, 4, 8],
        help="number of first bytes of a chunk that are computed again",
    )
    parser.add_argument("--targets", type=int, default=128)
    parser.add_argument(
        "--windows", type=int, default=16, help="windows of the figure; the first table has four times as many"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    measure_chunks(args, data.standard_library(max(args.lengths) + 1).unseen)
    measure_positions(args)


if __name__ == "__main__":
    main()
