"""Code that all figures share: an off-screen matplotlib figure, colours and markers."""

from __future__ import annotations

from pathlib import Path

from .files import replacing

# Okabe and Ito's palette, whose colours people with colour blindness can distinguish.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def new_figure(size: tuple[float, float], dpi: int = 200):
    """Returns a figure of this size in inches that needs no display. matplotlib is imported here, not with the
    module."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure, path: Path) -> None:
    """Writes the figure in the format that the path's suffix names. The write is atomic."""
    kind = path.suffix[1:]
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}  # so that the same figure gives the same file
    with replacing(path) as partial:
        figure.savefig(partial, format=kind, metadata=undated.get(kind))
