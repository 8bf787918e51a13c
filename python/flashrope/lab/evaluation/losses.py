"""``flashrope loss``: measures the loss of a Hugging Face model on the user's text by length of the context, under its
own scheme and other schemes.

The text is cut into windows that do not overlap, each within one file. At length c the model reads c tokens, including
the start token of the tokenizer, and predicts the token after each of them. The loss is the mean over the last N
predictions. Every length and scheme predicts the same N tokens of a window: a longer length only adds text before them.
With repeated context, the added text is copies of the tokens that the shortest length reads.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ...console import files, options, report
from ...console.figure import COLOURS, MARKERS, new_figure, save
from ...console.options import BadInput
from ...console.progress import Bar
from ..small_models import data
from . import by_position
from .checkpoint import (
    Tokens,
    check_positions,
    last_logits,
    load,
    measured_lengths,
    new_cache,
    rope_type_by_length,
    run_command,
    training_length,
)
from .readings import applicable, settings
from .statistics import half_interval
from .streaming import PIECE, KeptTokens

MAX_TARGETS = 512
CONTEXTS = {"text": "text", "repeated": "repeated context", "copy": "second copy of a passage"}  # {name: title}
RESULTS = ("loss.png", "loss.svg", "loss.pdf", "loss.csv", "loss.json")


class LossRow(NamedTuple):
    """One scheme at one length. ``windows`` holds the loss of every window. It is empty if memory ran out."""

    scheme: str
    context: str  # a name in CONTEXTS
    length: int  # tokens that the model reads
    windows: tuple[float, ...]  # nats per token

    @property
    def loss(self) -> float:
        return sum(self.windows) / len(self.windows) if self.windows else math.nan

    @property
    def interval(self) -> float:
        """Returns half the width of the 95% interval of the mean loss over windows."""
        return half_interval(self.windows)

    def change_from(self, shortest: LossRow) -> tuple[float, ...]:
        """Returns, for every window, the loss minus the loss at the shortest context."""
        return tuple(a - b for a, b in zip(self.windows, shortest.windows, strict=False))


def run(args: argparse.Namespace) -> int:
    return run_command("loss", _measure, args)


def _measure(args: argparse.Namespace) -> int:
    if args.by_position:
        return _measure_by_position(args)
    files.check_folder(args.out, RESULTS, args.overwrite)
    device = options.device(args.device)
    texts = data.read_texts(args.text)
    model, tokens = load(args.model, device, args.dtype)
    train_length = training_length(model, args.model, args.train_length)
    lengths = measured_lengths(args.lengths, train_length)
    check_lengths(model, lengths, tokens)
    targets = args.targets or max(min(lengths[0] // 2, MAX_TARGETS), 1)
    if targets > lengths[0]:
        raise BadInput(f"--targets: expected at most {lengths[0]}, the shortest length, got {targets}")
    if args.copy and not 2 <= args.copy <= (most := (lengths[0] + 1 - len(tokens.start)) // 2):
        raise BadInput(f"--copy: expected 2 to {most} tokens, half the shortest length, got {args.copy}")
    if args.chunk and args.chunk < lengths[-1]:
        check_chunks(model)
    new_cache(model, args.cache_dtype)
    windows = text_windows(texts, tokens, lengths[-1], args.windows, args.seed)
    schemes, skipped = applicable(
        model, args.schemes, train_length, lengths[-1], args.window, args.rotary, bool(args.cache_dtype), args.sinks
    )
    out = files.folder(args.out)
    facts = settings(
        args,
        model,
        train_length,
        schemes,
        skipped,
        text=f"{', '.join(args.text)}, {len(texts)} files",
        measured=f"the loss of the last {targets} tokens of {len(windows)} windows, the same at every length, in "
        f"nats per {tokens.unit}; ± is the 95% interval over the windows"
        + (f"; of a copied passage of {args.copy} tokens, of all but the first of the second copy" if args.copy else "")
        + (f"; {args.windows} windows were asked for, but the text has no more" if len(windows) < args.windows else ""),
    )

    contexts = ["text", *["repeated"] * args.repeat, *["copy"] * bool(args.copy)]
    work = {"text": lengths, "repeated": lengths[1:], "copy": lengths}  # at the shortest length nothing is repeated
    bar = Bar(len(schemes) * len(windows) * sum(sum(work[context]) for context in contexts))
    rows: list[LossRow] = []
    for scheme in schemes:
        scheme.apply()
        for context in contexts:
            for length in work[context]:
                bar.start(f"{scheme.label}, {context}, {length:,} tokens")
                if context == "copy":
                    inputs, counted = copied(windows, tokens.start, length, args.copy), args.copy - 1
                else:
                    inputs = of_length(windows, tokens.start, length, lengths[0] if context == "repeated" else None)
                    counted = targets
                chunk = PIECE if scheme.kept else args.chunk
                losses = measure(model, inputs, counted, args.batch, chunk, args.cache_dtype, scheme.kept)
                rows.append(LossRow(scheme.label, context, length, tuple(_counted(losses, bar, length))))
            if context == "repeated":
                rows.append(next(row for row in rows if row.scheme == scheme.label)._replace(context=context))
    bar.clear()
    order = _labels(rows)
    rows.sort(key=lambda row: (order.index((row.scheme, row.context)), row.length))
    files.write(out / "loss.csv", csv_text(rows))
    record = {"facts": facts, "left_out": skipped, "train_length": train_length, "targets": targets}
    record["rows"] = [row._asdict() for row in rows]
    files.write(out / "loss.json", json.dumps(record, indent=1))
    base = next((scheme.label for scheme in schemes if scheme.name == "stock"), None)
    figure = loss_figure(rows, train_length, Path(args.model).name, tokens.unit, base)
    for name in RESULTS[:3]:
        save(figure, out / name)
    print(f"\n{table(rows, targets, tokens.unit)}\n")
    if len(lengths) > 1:
        print(f"{changes_table(rows)}\n")
    if missing := [row for row in rows if not row.windows]:
        print(f"-: out of memory, in {len(missing)} of {len(rows)} cells; use --chunk or a smaller --batch\n")
    print(f"written to {out}/: {', '.join(RESULTS)}")
    return 0


def _measure_by_position(args: argparse.Namespace) -> int:
    for name in ("targets", "repeat", "copy", "chunk"):
        if getattr(args, name):
            raise BadInput(
                f"--{name}: not supported with --by-position, which measures every token of a window at once"
            )
    if args.batch > 1:
        raise BadInput(f"--batch: expected 1 with --by-position, which reads one window per pass, got {args.batch}")
    device = options.device(args.device)
    texts = data.read_texts(args.text)
    model, tokens = load(args.model, device, args.dtype)
    own = by_position.fingerprint(model)
    train_length = training_length(model, args.model, args.train_length)
    longest = max(args.lengths or [2 * train_length])
    check_lengths(model, [longest], tokens)
    new_cache(model, args.cache_dtype)
    windows = text_windows(texts, tokens, longest, args.windows, args.seed)
    schemes, skipped = applicable(
        model, args.schemes, train_length, longest, args.window, args.rotary, bool(args.cache_dtype), args.sinks
    )
    base = next((scheme.label for scheme in schemes if scheme.name == "stock"), schemes[0].label)
    facts = settings(
        args,
        model,
        train_length,
        schemes,
        skipped,
        text=f"{', '.join(args.text)}, {len(texts)} files",
        measured=f"every token of {len(windows)} windows of {longest:,} tokens, one pass each; means over "
        f"{args.by_position:,} positions, in nats per {tokens.unit}; changes are against {base}, ± is the 95% interval "
        "over the windows",
    )
    rows = of_length(windows, tokens.start, longest)
    name, sizes = Path(args.model).name, (train_length, args.by_position, args.cache_dtype, args.axis)
    run = by_position.PositionRun(name, model, own, tokens, rows, schemes, base, *sizes)
    out = files.folder(args.out)
    found = by_position.measure(run, out, facts, args.overwrite)
    print(f"\n{by_position.table(found, args.by_position, base, tokens.unit)}\n")
    print(f"written to {out}/: {', '.join((*by_position.RESULTS, by_position.JOURNAL))}")
    return 0


def _counted(losses: Iterable[float], bar: Bar, length: int) -> Iterator[float]:
    """Yields the losses and counts them on the bar. Yields nothing if memory runs out."""
    found = []
    try:
        for loss in losses:
            found.append(loss)
            bar.step(length)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return
    yield from found


# ---- the text


def text_windows(texts: dict[str, str], tokens: Tokens, longest: int, count: int, seed: int) -> list[list[int]]:
    """Returns up to ``count`` random windows of tokens that do not overlap, each within one file. A window has the text
    that the longest length reads, and the token after it. Raises BadInput if no file is long enough."""
    size = longest - len(tokens.start) + 1
    pieces = [tokens.encode(text) for text in texts.values()]
    windows = data.unseen_windows(pieces, size, count, seed)
    if not windows:
        raise BadInput(
            f"--text: expected a file of at least {size:,} {tokens.unit}s for a length of {longest:,}, the longest "
            f"file has {max(map(len, pieces)):,}; give other files or shorter --lengths"
        )
    return windows


def of_length(
    windows: Sequence[Sequence[int]], start: Sequence[int], length: int, repeated: int | None = None
) -> torch.Tensor:
    """Returns int64 (windows, length + 1): the tokens that the model reads, and the token after them.

    A row is the start tokens and the end of a window. ``repeated``: None, or a shorter length. With a shorter length,
    the row is filled with copies of the text that the model reads at that length.
    """
    size = length - len(start) + 1
    rows = []
    for window in windows:
        text = list(window[-size:])
        if repeated:
            unit = list(window[-(repeated - len(start) + 1) :])
            text = (unit * -(-size // len(unit)))[-size:]
        rows.append([*start, *text])
    return torch.tensor(rows)


def copied(windows: Sequence[Sequence[int]], start: Sequence[int], length: int, size: int) -> torch.Tensor:
    """Returns int64 (windows, length + 1): the start tokens, a passage of ``size`` tokens, text, and the passage again.

    The passage is the beginning of the window, which is the same at every length. The text is the end of the window.
    """
    between = length + 1 - len(start) - 2 * size
    rows = [[*start, *window[:size], *window[len(window) - between :], *window[:size]] for window in windows]
    return torch.tensor(rows)


# ---- the measurement


@torch.no_grad()
def measure(
    model,
    inputs: torch.Tensor,
    targets: int,
    batch: int = 1,
    chunk: int | None = None,
    cache_dtype: str | None = None,
    kept: KeptTokens | None = None,
) -> Iterator[float]:
    """Yields the mean loss of the last ``targets`` tokens of every row of inputs, int64 (windows, length + 1), in nats
    per token."""
    for ids in inputs.to(model.device).split(batch):
        logits = last_logits(model, ids[:, :-1], targets, chunk, cache_dtype, kept)
        losses = F.cross_entropy(logits.transpose(1, 2), ids[:, -targets:], reduction="none")
        yield from losses.double().mean(1).tolist()


# ---- checks of what can be measured


def check_lengths(model, lengths: Sequence[int], tokens: Tokens) -> None:
    """Raises BadInput for lengths that are too short for a prediction, or beyond a learned table of positions."""
    if lengths[0] < 2 + len(tokens.start):
        raise BadInput(f"--lengths: expected at least {2 + len(tokens.start)}, got {lengths[0]}")
    check_positions(model, lengths[-1], "--lengths")


def check_chunks(model) -> None:
    """Raises BadInput if the model's rotary table depends on the length, so that reading in pieces would change it."""
    if (kind := rope_type_by_length(model)) is not None:
        raise BadInput(
            f"--chunk: expected a model whose rotary table does not depend on the length, got rope type {kind}"
        )


# ---- output


def _labels(rows: Sequence[LossRow]) -> list[tuple[str, str]]:
    """Returns (scheme, context) of the table's rows: for each scheme its contexts in the order of CONTEXTS."""
    schemes = list(dict.fromkeys(row.scheme for row in rows))
    contexts = [context for context in CONTEXTS if any(row.context == context for row in rows)]
    return [(scheme, context) for scheme in schemes for context in contexts]


def _label(scheme: str, context: str) -> str:
    return scheme if context == "text" else f"{scheme}, {context}"


def table(rows: Sequence[LossRow], targets: int, unit: str = "token") -> str:
    """Returns text columns: the loss and its interval, by scheme and length."""
    return _aligned(rows, f"loss of the last {targets} tokens, nats per {unit}", lambda row: row.windows)


def changes_table(rows: Sequence[LossRow]) -> str:
    """Returns text columns: the change from the shortest length, with its interval."""
    title = f"change from {min(row.length for row in rows):,} tokens, window by window"
    return _aligned(rows, title, lambda row: row.change_from(_shortest(rows, row)))


def _shortest(rows: Sequence[LossRow], row: LossRow) -> LossRow:
    return next(each for each in rows if each[:2] == row[:2])


def _aligned(rows: Sequence[LossRow], title: str, values: Callable[[LossRow], Sequence[float]]) -> str:
    lengths = sorted({row.length for row in rows})
    lines = [["length, tokens", *(f"{length:,}" for length in lengths)]]
    for label in _labels(rows):
        found = {row.length: row for row in rows if (row.scheme, row.context) == label}
        lines.append([_label(*label), *(_cell(values(found[length])) for length in lengths)])
    return report.aligned(title, lines)


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "-"
    mean = sum(values) / len(values)
    return f"{mean:.4f}" + (f" ± {half_interval(values):.4f}" if len(values) > 1 else "")


def csv_text(rows: Sequence[LossRow]) -> str:
    """Returns CSV with a line per scheme, context and length. The column ``change`` is the mean over windows of the
    difference from the shortest length. The interval of this mean is not widened by windows that are hard at both
    lengths."""
    columns = ["scheme", "context", "length", "loss", "interval_95", "change", "change_interval_95", "windows"]
    lines = []
    for row in rows:
        change = row.change_from(_shortest(rows, row))
        mean = sum(change) / len(change) if change else math.nan
        values = [row.loss, row.interval, mean, half_interval(change)]
        lines.append([*row[:3], *("" if math.isnan(value) else f"{value:.6f}" for value in values), len(row.windows)])
    return files.csv_text(columns, lines)


def loss_figure(rows: Sequence[LossRow], train_length: int, model: str, unit: str = "token", base: str | None = None):
    """Draws the loss by length, and the mean over windows of its change against the scheme ``base``, by default the
    first scheme.

    There is a column for each measured context. The upper panel of a column shows the losses, and the lower panel shows
    the changes. The error bars of both panels are the 95% intervals of the changes, which are narrower than the
    intervals of the losses, because a hard window raises the losses of both schemes. At most as many schemes are drawn
    as there are colours.
    """
    schemes = list(dict.fromkeys(row.scheme for row in rows))
    shown, first = schemes[: len(COLOURS)], base or schemes[0]
    contexts = [context for context in CONTEXTS if any(row.context == context for row in rows)]
    lengths = sorted({row.length for row in rows})
    figure = new_figure((3.4 + 3.3 * len(contexts), 5.6))
    grid = figure.subplots(2, len(contexts), squeeze=False, sharex=True, sharey="row", height_ratios=(1, 1))
    of = {(row.scheme, row.context, row.length): row for row in rows if row.windows}
    for column, context in enumerate(contexts):
        above, below = grid[0, column], grid[1, column]
        for at, scheme in enumerate(shown):
            look = dict(color=COLOURS[at], marker=MARKERS[at], markersize=5.5, linewidth=1.8)
            if at % 2:  # dashed and hollow, so that the previous scheme stays visible
                look |= dict(linestyle=(0, (3, 2)), markerfacecolor="none")
            found = [of[scheme, context, n] for n in lengths if (scheme, context, n) in of]
            above.plot([row.length for row in found], [row.loss for row in found], label=scheme, **look)
            pairs = [(row, of[first, context, row.length]) for row in found if (first, context, row.length) in of]
            if scheme == first or not pairs:
                continue
            apart = 1.022 ** (at - len(shown) / 2)  # moves neighbours apart, so that their error bars do not overlap
            changes = [row.change_from(other) for row, other in pairs]
            widths = [0.0 if math.isnan(width) else width for width in map(half_interval, changes)]
            where = [row.length * apart for row, _ in pairs]
            bars: dict[str, Any] = dict(yerr=widths, elinewidth=1)
            above.errorbar(where, [row.loss for row, _ in pairs], color=COLOURS[at], fmt="none", **bars)
            below.errorbar(where, [sum(change) / len(change) for change in changes], capsize=2.5, **bars, **look)
        below.axhline(0, color=COLOURS[schemes.index(first) % len(COLOURS)], linewidth=1.5)
        for axes in (above, below):
            _length_axis(axes, lengths, train_length)
        above.set_title(CONTEXTS[context], loc="left", fontsize=9)
    grid[0, 0].set_ylabel(f"loss (nats per {unit})")
    grid[1, 0].set_ylabel(f"change against {first}\n(nats per {unit}, 95% interval)", fontsize=9)
    marked = "; dotted: the training length" if lengths[0] <= train_length <= lengths[-1] else ""
    more = f"; {len(schemes) - len(shown)} more schemes in loss.csv" if len(schemes) > len(shown) else ""
    figure.supxlabel(f"length (tokens, log scale){marked}{more}", fontsize=9)
    figure.suptitle(f"Loss by length of the context: {model}", fontsize=11, x=0.01, ha="left")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=9)
    return figure


def _length_axis(axes, lengths: Sequence[int], train_length: int) -> None:
    from matplotlib.ticker import NullLocator

    if lengths[0] <= train_length <= lengths[-1]:
        axes.axvline(train_length, color="0.6", linewidth=1, linestyle=":", zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
