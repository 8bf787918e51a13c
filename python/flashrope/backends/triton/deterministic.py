"""Decides how a reproducible backward stores the gradients of scores (``triton_kernels/attention/score_grads.py``).

The kernel of dK and dV computes four matrix products and stores dS, from which the kernel of dQ computes the fifth.
Every element is written once, and each kernel sums in a fixed order, so the bits do not depend on the order of blocks.
The matrices of all heads would take memory that grows with the square of the length. So both kernels run for some heads
at a time, and share a workspace of at most ``configs.SCORE_BYTES``. Every launch ends with a few long blocks that leave
the rest of the GPU idle. Launches with few blocks lose more by this than stored gradients save. So calls with such
launches store nothing, and the kernel of dQ computes the gradients of scores again.

An alternative that was not taken is a float32 buffer of dQ for every resident block, to which the block adds its part
of dQ. The buffers do not fit in the L2 cache. So a block would read and write four bytes per channel for every query
row and key tile. With 128 channels and 64 keys per tile, this moves 16 bytes per score. Storing dS moves four bytes per
score.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ...triton_kernels import configs
from ...triton_kernels.arguments import ScoreGrads, encode_int
from .launcher import cdiv


class ScoreLayout(NamedTuple):
    """Where a call stores gradients of scores.

    width, growth: the fields of ``score_grads.Matrix``. panels: the number of panels of a matrix. Packed sequences
    share one matrix. sequences: the number of matrices per head, 1 if sequences are packed. batch: the number of
    sequences in a matrix. heads_kv: the key heads of the call. group: query heads per key head. most_sequences,
    most_heads: the largest numbers of sequences and key heads of one launch.
    """

    width: int
    growth: int
    panels: int
    sequences: int
    batch: int
    heads_kv: int
    group: int
    most_sequences: int
    most_heads: int

    def is_busy(self, key_tiles: int, multiprocessors: int) -> bool:
        """Whether the blocks of each launch keep a GPU busy. A layout with one pair of launches always counts as busy:
        it has as many blocks per launch as a backward that does not store gradients of scores.

        key_tiles: the number of blocks of dK and dV for one key head of one matrix."""
        if _forced or (self.most_sequences, self.most_heads) == (self.sequences, self.heads_kv):
            return True
        blocks = key_tiles * self.most_sequences * self.most_heads
        return blocks >= configs.SCORE_BLOCKS * multiprocessors

    @property
    def elements(self) -> int:
        """Returns the size of the workspace."""
        matrices = self.most_sequences * self.most_heads * self.group
        return matrices * self.panels * configs.PANEL_ROWS * configs.PANEL_KEYS

    def launches(self, workspace: torch.Tensor) -> Iterator[tuple[ScoreGrads, int]]:
        """Yields (ScoreGrads, count) for each pair of launches: the kernel of dK and dV, then the kernel of dQ. count:
        the number of combinations of a sequence and a key head that both launches compute.

        workspace: a tensor of ``elements`` elements, in q's type."""
        strides = self.width, self.growth, self.panels, self.most_sequences * self.panels
        for first in range(0, self.sequences, self.most_sequences):
            for head in range(0, self.heads_kv, self.most_heads):
                heads = min(self.most_heads, self.heads_kv - head)
                sequences = min(self.most_sequences, self.sequences - first)
                numbers = map(encode_int, (first, head, heads, *strides))
                yield ScoreGrads(workspace, *numbers), sequences * self.batch * heads


def layout_of(
    seqlen_q: int, max_seqlen_k: int, batch: int, heads_q: int, heads_kv: int, itemsize: int, causal: bool, packed: bool
) -> ScoreLayout | None:
    """Returns the layout of a call, or None if the matrices of one key head need more than ``configs.SCORE_BYTES``.

    seqlen_q: the query rows of one sequence, or of all sequences if they are packed.
    """
    if _forced is False:
        return None
    rows, group = cdiv(seqlen_q, configs.PANEL_ROWS), heads_q // heads_kv
    panels_in_row = configs.PANEL_ROWS // configs.PANEL_KEYS  # panels that hold PANEL_ROWS keys
    width, growth, sequences = cdiv(max_seqlen_k, configs.PANEL_ROWS) * panels_in_row, 0, batch
    panels = rows * width
    if packed:  # sequence n begins in row (its first query row) // PANEL_ROWS + n of the panels
        panels, sequences = (seqlen_q // configs.PANEL_ROWS + batch) * width, 1
    elif causal:
        ahead = cdiv(max(max_seqlen_k - seqlen_q, 0), configs.PANEL_ROWS)
        first = panels_in_row * (1 + ahead)
        triangle = rows * first + rows * (rows - 1) // 2 * panels_in_row
        if triangle < panels:
            width, growth, panels = first, panels_in_row, triangle
    room = configs.SCORE_BYTES // (group * panels * configs.PANEL_ROWS * configs.PANEL_KEYS * itemsize)
    if not room:
        return None
    # Makes as few launches as the memory allows, and gives all launches about the same amount of work.
    heads = cdiv(heads_kv, cdiv(heads_kv, max(1, min(heads_kv, room // sequences))))
    most = cdiv(sequences, cdiv(sequences, min(sequences, room // heads)))
    return ScoreLayout(width, growth, panels, sequences, batch // sequences, heads_kv, group, most, heads)


_forced: bool | None = None


@contextlib.contextmanager
def forced(stores: bool) -> Iterator[None]:
    """Overrides within the context whether a backward stores the gradients of scores. Used to compile and test both
    variants.

    stores: True: calls with few blocks store them, too. False: no call stores them.
    """
    global _forced
    before, _forced = _forced, stores
    try:
        yield
    finally:
        _forced = before
