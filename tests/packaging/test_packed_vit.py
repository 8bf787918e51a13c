"""Tests examples/packed_vit.py: its pictures, its packing and a short training. With -m slow the whole example runs."""

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "packed_vit.py"
vit = runpy.run_path(str(EXAMPLE))
SIZES = ((4, 7), (1, 3), (8, 5))


@pytest.fixture
def pictures():
    generator = torch.Generator().manual_seed(0)
    return [vit["picture"](*size, generator) for size in SIZES]


def test_the_label_is_where_the_ring_is():
    generator = torch.Generator().manual_seed(1)
    for _ in range(40):
        pixels, side = vit["picture"](6, 5, generator)
        patches = pixels.unfold(0, 4, 4).unfold(1, 4, 4).flatten(2)  # (6, 5, 16)
        cross, ring = (
            divmod(int((patches @ (mark - mark.mean()).flatten()).argmax()), 5) for mark in (vit["CROSS"], vit["RING"])
        )
        down, right = ring[0] - cross[0], ring[1] - cross[1]
        expected = ("below" if down > 0 else "above") if abs(down) > abs(right) else "right" if right > 0 else "left"
        assert vit["SIDES"][side] == expected


def test_packed_as_alone(pictures):
    """Packed pictures have the logits of each picture by itself. A class token is at (0, 0), and a patch is at its row
    and column."""
    torch.manual_seed(0)
    model = vit["VisionTransformer"](vit["scheme"]("axial")).double()
    batch = vit["pack"](pictures)
    batch = batch._replace(patches=batch.patches.double())
    assert batch.cu_seqlens.tolist() == [0, 29, 33, 74] and batch.longest == 41
    assert batch.positions[[0, 1, 28, 29, 32, 73]].tolist() == [[0, 0], [0, 0], [3, 6], [0, 0], [0, 2], [7, 4]]
    alone = [vit["pack"]([one]) for one in pictures]
    alone = torch.cat([model(one._replace(patches=one.patches.double())) for one in alone])
    torch.testing.assert_close(model(batch), alone, rtol=1e-10, atol=1e-10)
    moved = model(batch._replace(positions=batch.positions * 2))
    assert (moved - alone).abs().max() > 1e-3


def test_a_short_training():
    torch.manual_seed(0)
    model = vit["VisionTransformer"](vit["scheme"]("axial"))
    before = [x.clone() for x in model.parameters()]
    losses = vit["train"](model, 5, 8, 1e-3, 0, torch.device("cpu"))
    assert len(losses) == 5 and all(0 < loss < 10 for loss in losses)
    assert all((x != old).any() for x, old in zip(model.parameters(), before, strict=True))
    assert 0 <= vit["measure"](model, 3, 9, 8, 0, torch.device("cpu")) <= 1


@pytest.mark.slow
def test_positions_are_what_it_learns_from():
    right = vit["main"]([])
    assert right[6, 6] > 0.9 and right[8, 8] > 0.9 and min(right.values()) > 0.5
    assert max(vit["main"](["--positions", "none", "--steps", "150"]).values()) < 0.5
