"""Measures ``flashrope loss --by-position``: the loss at every position of one pass over the longest length.

A window of n tokens gives n losses in one forward pass: at position i the model predicts token i + 1 from the i + 1
tokens before it. Means over bins of positions show where a scheme begins to fail, for the cost of measuring one length.
Two schemes are compared window by window, so that a hard passage affects both schemes alike.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ...console import files, report
from ...console.figure import COLOURS, new_figure, save
from ...console.options import BadInput
from ...console.progress import Bar, duration
from .checkpoint import Tokens, keep_logits, new_cache, rope_type_by_length
from .cost import seconds_by_length
from .journal import Journal
from .readings import Measured
from .statistics import half_interval
from .streaming import PIECE, KeptTokens

RESULTS = ("positions.png", "positions.svg", "positions.pdf", "positions.csv", "positions.json")
JOURNAL = "positions.jsonl"
PIECE_OF_LOGITS = 1 << 25  # number of logits that are computed at a time


class Losses(NamedTuple):
    """The losses of one scheme on one window.

    how: how the window was measured: "by position" (in one pass) or "by length" (in one pass for every bin).
    bins: the mean loss of every bin of positions, in nats per token.
    """

    scheme: str
    window: int
    how: str
    bins: tuple[float, ...]
    seconds: float


class PositionRun(NamedTuple):
    """The settings of a measurement.

    fingerprint: the fingerprint of the model as it was loaded.
    windows: int64 (windows, longest + 1), the tokens that the model reads, and the token after them.
    base: the scheme with which all other schemes are compared.
    bin: the number of positions in a bin.
    axis: the figure's axis of positions, "linear" or "log".
    """

    name: str
    model: Any
    fingerprint: str
    tokens: Tokens
    windows: torch.Tensor
    schemes: Sequence[Measured]
    base: str
    train_length: int
    bin: int
    cache_dtype: str | None
    axis: str


# ---- the measurement


@torch.no_grad()
def position_losses(
    model, row: torch.Tensor, cache_dtype: str | None = None, kept: KeptTokens | None = None
) -> torch.Tensor:
    """Returns the loss at every position, float64 (longest,) on the CPU.

    row: int64 (longest + 1,), the tokens that the model reads and the token after them. The hidden states are computed
    in one pass. The model's own head computes logits from them in pieces, so memory does not grow with vocabulary x
    length. kept: if given, the row is read in pieces, and after each piece the cache is cut to the kept tokens.
    """
    from ...integrations.transformers.versions import CACHE, cache_of

    hidden, found = HiddenStates(model), []
    cache = new_cache(model, cache_dtype)
    whole, targets = row[None, :-1].to(model.device), row[1:].to(model.device)
    for ids, expected in zip(*(x.split(PIECE if kept else len(row), dim=-1) for x in (whole, targets)), strict=True):
        uses_cache = kept is not None or cache is not None
        hidden.compute(ids, use_cache=uses_cache, **({} if cache is None else {CACHE: cache}))
        found.append(hidden.losses(ids, expected))
        if kept:
            kept.cut(cache := cache_of(hidden.output))
    return torch.cat(found)


def losses_by_length(model, row: torch.Tensor, cache_dtype: str | None, bin: int) -> torch.Tensor:
    """Returns what ``position_losses`` returns, for a scheme whose frequencies depend on the length. This takes one
    pass per bin, from the start of the text to the end of the bin, and keeps only the losses in the bin."""
    longest = len(row) - 1
    ends = range(bin, longest + bin, bin)
    parts = [position_losses(model, row[: min(end, longest) + 1], cache_dtype)[end - bin :] for end in ends]
    return torch.cat(parts)


def depends_on_length(model) -> bool:
    """Whether the frequencies of the model's current scheme depend on the length of the text."""
    layers = [module._flashrope for module in model.modules() if hasattr(module, "_flashrope")]
    if layers:
        return any(getattr(layer, "grows_from", math.inf) < math.inf for layer in layers)
    return rope_type_by_length(model) is not None


class HiddenStates:
    """Holds the hidden states of one pass, and computes logits of any part of them just as the model does."""

    def __init__(self, model):
        self.model, self.backbone = model, model.base_model
        if self.backbone is model:
            raise BadInput("--by-position: expected a language model with a head, got one without")
        self.output = None

    def compute(self, ids: torch.Tensor, **options) -> None:
        """Runs the model over ids, int64 (1, seqlen)."""

        def keep(module, args, output):
            self.output = output

        handle = self.backbone.register_forward_hook(keep)
        try:
            self.model(ids, **options, **keep_logits(self.model, 1))
        finally:
            handle.remove()

    def losses(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the losses of the tokens that ``compute`` has read, float64 (seqlen,) on the CPU."""
        size, found = max(PIECE_OF_LOGITS // self.model.get_output_embeddings().weight.shape[0], 1), []
        for begin, expected in zip(range(0, len(targets), size), targets.split(size), strict=True):
            logits = self.logits(ids, begin, begin + size).float()
            found.append(F.cross_entropy(logits, expected, reduction="none").double().cpu())
        return torch.cat(found)

    def logits(self, ids: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Returns the logits at the positions begin to end - 1, (end - begin, vocab_size)."""
        part = copy.copy(self.output)
        part.last_hidden_state = self.output.last_hidden_state[:, begin:end]
        own, self.backbone.forward = self.backbone.__dict__.get("forward"), lambda *args, **options: part
        try:
            return self.model(ids[:, begin:end], use_cache=False).logits[0]
        finally:
            if own is None:
                del self.backbone.forward
            else:
                self.backbone.forward = own


def bins_of(losses: torch.Tensor, size: int) -> tuple[float, ...]:
    """Returns the mean loss of every bin of positions. The last bin may be shorter."""
    return tuple(float(part.mean()) for part in losses.split(size))


def fingerprint(model) -> str:
    """Returns a hash of the model's configuration and dtype, and of some numbers of every parameter."""
    digest = hashlib.sha256(repr(sorted(model.config.to_diff_dict().items(), key=str)).encode())
    if model.dtype != torch.float32:
        digest.update(str(model.dtype).encode())
    for name, x in model.named_parameters():
        flat = x.detach().flatten()
        some = flat[:: max(flat.numel() // 16, 1)].float().cpu().numpy().tobytes()
        digest.update(f"{name} {tuple(x.shape)}".encode() + some)
    return digest.hexdigest()[:16]


# ---- the run


def measure(run: PositionRun, out: Path, facts: dict[str, str], overwrite: bool) -> list[Losses]:
    """Measures every scheme on every window. Writes the results after each window. Resumes an interrupted run where it
    stopped.

    Raises:
        BadInput: ``out`` holds a run with another model, text or scheme.
    """
    text = hashlib.sha256(run.windows.numpy().tobytes()).hexdigest()[:16]
    settings = {"model": run.fingerprint, "text": text, "bin": run.bin, "cache type": run.cache_dtype}
    journal = Journal(out / JOURNAL, settings, overwrite)
    journal.check_schemes(run.schemes)
    done = {(row["scheme"], row["window"]) for row in journal.rows}
    left = {n: [each for each in run.schemes if (each.label, n) not in done] for n in range(len(run.windows))}
    passes, longest = sum(map(len, left.values())), run.windows.shape[1] - 1
    if passes:
        each = seconds_by_length(lambda n: position_losses(run.model, run.windows[0, : n + 1]), longest)(longest)
        print(f"cost: about {duration(each)} a pass, {passes} passes, about {duration(passes * each)}\n", flush=True)
    bar = Bar(passes * longest)
    for n, schemes in left.items():
        for scheme in schemes:
            scheme.apply()
            bar.start(f"window {n + 1} of {len(run.windows)}, {scheme.label}")
            began, by_length = time.monotonic(), depends_on_length(run.model)
            if by_length:
                losses = losses_by_length(run.model, run.windows[n], run.cache_dtype, run.bin)
            else:
                losses = position_losses(run.model, run.windows[n], run.cache_dtype, scheme.kept)
            bins, seconds = bins_of(losses, run.bin), round(time.monotonic() - began, 3)
            journal.add(
                {
                    "scheme": scheme.label,
                    "words": scheme.words,
                    "window": n,
                    "how": "by length" if by_length else "by position",
                    "seconds": seconds,
                    "bins": bins,
                }
            )
            bar.step(longest)
        if schemes:
            write(run, found(journal, run), out, facts)
    bar.clear()
    write(run, rows := found(journal, run), out, facts)
    return rows


def found(journal: Journal, run: PositionRun) -> list[Losses]:
    """Returns the journal's rows for the schemes of this run, in the order of the schemes."""
    order = {scheme.label: n for n, scheme in enumerate(run.schemes)}
    rows = [row for row in journal.rows if row["scheme"] in order]
    rows.sort(key=lambda row: (order[row["scheme"]], row["window"]))
    return [Losses(row["scheme"], row["window"], row["how"], tuple(row["bins"]), row["seconds"]) for row in rows]


def write(run: PositionRun, rows: Sequence[Losses], out: Path, facts: dict[str, str]) -> None:
    """Writes the figure, the CSV and the JSON of the finished rows."""
    record = {"facts": facts, "train_length": run.train_length, "bin": run.bin, "axis": run.axis}
    files.write(out / "positions.json", json.dumps(record | {"rows": [row._asdict() for row in rows]}, indent=1))
    files.write(out / "positions.csv", csv_text(rows, run.bin, run.base))
    drawn = figure(rows, run.bin, run.train_length, run.name, run.tokens.unit, run.base, run.axis)
    for name in RESULTS[:3]:
        save(drawn, out / name)


# ---- output


class Paired(NamedTuple):
    """One scheme in one bin: the mean loss, and the mean over windows of its change against the base."""

    loss: float
    change: float
    interval: float  # half the width of the 95% interval of the change


def paired(rows: Sequence[Losses], scheme: str, base: str) -> list[Paired]:
    """Returns one entry for every bin, over the windows for which both schemes are finished."""
    of = {(row.scheme, row.window): row.bins for row in rows}
    windows = [n for name, n in of if name == scheme and (base, n) in of]
    result = []
    for at in range(len(of[scheme, windows[0]]) if windows else 0):
        own, other = ([of[name, n][at] for n in windows] for name in (scheme, base))
        changes = [a - b for a, b in zip(own, other, strict=True)]
        result.append(Paired(_mean(own), _mean(changes), half_interval(changes)))
    return result


def table(rows: Sequence[Losses], size: int, base: str, unit: str = "token") -> str:
    """Returns text columns: the loss in every bin, and below it the change against the base."""
    schemes = list(dict.fromkeys(row.scheme for row in rows))
    how = {row.scheme: row.how for row in rows}
    bins = max(len(row.bins) for row in rows)
    lines = [["positions", *(_range(at, size) for at in range(bins)), "s a pass"]]
    for scheme in schemes:
        cells = paired(rows, scheme, base)
        seconds = _mean([row.seconds for row in rows if row.scheme == scheme])
        note = ", by length" if how[scheme] == "by length" else ""
        lines.append([scheme + note, *(f"{cell.loss:.3f}" for cell in cells), f"{seconds:.1f}"])
        if scheme != base:
            lines.append(["  change", *map(_change, cells), ""])
    windows = len({row.window for row in rows})
    return report.aligned(
        f"loss, nats per {unit}, {windows} windows; change against {base} with its 95% interval", lines
    )


def _change(cell: Paired) -> str:
    return f"{cell.change:+.3f}" + ("" if math.isnan(cell.interval) else f" ± {cell.interval:.3f}")


def csv_text(rows: Sequence[Losses], size: int, base: str) -> str:
    """Returns CSV with a line for every scheme and bin."""
    lines = []
    for scheme in dict.fromkeys(row.scheme for row in rows):
        for at, cell in enumerate(paired(rows, scheme, base)):
            numbers = ("" if math.isnan(value) else f"{value:.6f}" for value in cell)
            lines.append([scheme, at * size, (at + 1) * size, *numbers])
    return files.csv_text(["scheme", "from", "to", "loss", "change", "change_interval_95"], lines)


def figure(
    rows: Sequence[Losses], size: int, train_length: int, model: str, unit: str, base: str, axis: str = "linear"
):
    """Draws the loss by position, and below it the change of every scheme against the base, with its 95% interval."""
    schemes = list(dict.fromkeys(row.scheme for row in rows))
    shown = schemes[: len(COLOURS)]
    picture = new_figure((7.2, 5.4))
    above, below = picture.subplots(2, 1, sharex=True, height_ratios=(1.2, 1))
    longest = size * max(len(row.bins) for row in rows)
    for at, scheme in enumerate(shown):
        cells = paired(rows, scheme, base)
        middle = [(n + 0.5) * size for n in range(len(cells))]
        look: dict[str, Any] = dict(color=COLOURS[at], linewidth=1.8)
        if at % 2:  # dashed, so that the line of the previous scheme stays visible
            look |= dict(linestyle=(0, (4, 2)))
        above.plot(middle, [cell.loss for cell in cells], label=scheme, **look)
        if scheme == base:
            below.axhline(0, **look)
            continue
        below.plot(middle, [cell.change for cell in cells], **look)
        widths = [0.0 if math.isnan(cell.interval) else cell.interval for cell in cells]
        ends = [[cell.change + sign * w for cell, w in zip(cells, widths, strict=True)] for sign in (-1, 1)]
        below.fill_between(middle, *ends, color=COLOURS[at], alpha=0.18, linewidth=0)
    for axes in (above, below):
        if train_length < longest:
            axes.axvline(train_length, color="0.4", linewidth=1, linestyle=":", zorder=0)
        axes.grid(axis="y", color="0.9", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    if axis == "log":
        below.set_xscale("log", base=2)
    else:
        below.set_xticks([longest * n / 4 for n in range(5)])
    below.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    above.set_ylabel(f"loss (nats per {unit})")
    below.set_ylabel(f"change against\n{base}, 95% interval", fontsize=9)
    marked = "; dotted: the training length" if train_length < longest else ""
    more = f"; {len(schemes) - len(shown)} more schemes in positions.csv" if len(schemes) > len(shown) else ""
    below.set_xlabel(f"position (tokens read before the predicted one){marked}{more}", fontsize=9)
    windows = len({row.window for row in rows})
    picture.suptitle(f"Loss by position: {model}, {windows} windows", fontsize=11, x=0.01, ha="left")
    picture.legend(*above.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=9)
    return picture


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _range(at: int, size: int) -> str:
    def short(n: int) -> str:
        return f"{n // 1024}k" if n % 1024 == 0 and n else str(n)

    return f"{short(at * size)}-{short((at + 1) * size)}"
