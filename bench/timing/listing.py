"""The tables of a session as text."""

from __future__ import annotations

from collections.abc import Sequence

from ..report.records import Record
from .options import Table


def text_of(table: Table, records: Sequence[Record]) -> str:
    """One table."""
    if not records:
        return f"{table.title}: nothing to time"
    ours = [record.contestant for record in records if record.ours]
    width = max(len(record.contestant) for record in records) + 2
    lines = [
        f"{table.title}, {records[0].rounds} rounds",
        f"{'':<{width}}{'median':>12}{'quartiles':>22}{'speed':>17}{'ceiling':>9}   "
        + "   ".join(f"time / {name}" for name in ours),
    ]
    for record in records:
        speed = f"{record.gbs:.4g} GB/s   " if record.tflops is None else f"{record.tflops:.3g} TFLOP/s"
        row = f"{record.contestant:<{width}}{record.milliseconds:>9.3f} ms{record.low:>11.3f} -{record.high:>9.3f}"
        row += f"{speed:>17}{record.share:>9.1%}   "
        row += "   ".join(
            f"{record.ratios[name]:.2f}".rjust(len(name) + 7) if name in record.ratios else " " * (len(name) + 7)
            for name in ours
        )
        lines.append(row.rstrip())
    return "\n".join(lines)


def memory_text(records: Sequence[Record]) -> str:
    """For every pass, one row per contestant and one column per length."""
    lines = []
    for backward in (False, True):
        peaks = {
            (record.contestant, record.seqlen): record.peak_bytes
            for record in records
            if record.backward == backward and record.peak_bytes is not None
        }
        if not peaks:
            continue
        names, seqlens = (list(dict.fromkeys(key[at] for key in peaks)) for at in (0, 1))
        width = max(map(len, names)) + 2
        lines.append(
            f"{'forward + backward' if backward else 'forward':<{width}}"
            + "".join(f"{seqlen:>10}" for seqlen in seqlens)
        )
        lines += [
            f"{name:<{width}}"
            + "".join(
                f"{peaks[name, seqlen] / 2**20:>10.1f}" if (name, seqlen) in peaks else f"{'-':>10}"
                for seqlen in seqlens
            )
            for name in names
        ]
    return "\n".join(lines)
