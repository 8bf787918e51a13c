"""Tests the reproducible backward that stores gradients of scores: its results, and the layout of its workspace."""

import itertools

import pytest
import support
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from flashrope import Rotary
from flashrope.backends.triton import attention, launcher
from flashrope.backends.triton import chosen_tiles as tiles
from flashrope.backends.triton import deterministic as score_grads
from flashrope.triton_kernels import configs
from flashrope.triton_kernels.arguments import ScoreGrads
from packing import packing
from support import SCHEMES

# Rows after the last query are read from the workspace although nothing was written to them. Their sums may overflow,
# but are not used.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
PANEL = configs.PANEL_ROWS * configs.PANEL_KEYS  # elements


# ---- numbers


@pytest.fixture
def target(monkeypatch):
    """Returns Triton's target in float32, changed to store gradients of scores."""
    found = [target for target in support.TARGETS if target.impl == "triton" and target.dtype == torch.float32]
    if not found:
        pytest.skip("Triton neither compiles nor interprets here")
    monkeypatch.setattr(configs, "storing_is_faster", lambda *args: True)
    monkeypatch.setattr(configs, "SCORE_BLOCKS", 0)  # small problems have few blocks
    return found[0]


@pytest.fixture
def stored(monkeypatch) -> list[str]:
    """Records the names of the kernels that are launched with stored gradients of scores."""
    names, launch = [], launcher.launch

    def watched(kernel, grid, *args, **options):
        if any(isinstance(x, ScoreGrads) for x in args):
            names.append(kernel.__name__)
        launch(kernel, grid, *args, **options)

    monkeypatch.setattr(launcher, "launch", watched)
    return names


PAIR = ["attention_grad_kv", "attention_grad_q"]
CAUSAL = ("rope_interleaved", "rerope", "local", "yarn_leaky_local_log_n")  # in the default tests
CASES = [(name, True, name in CAUSAL) for name in SCHEMES]
CASES += [(name, False, name == "hope_rerope_log_n") for name in ("rope", "rerope", "leaky", "hope_rerope_log_n")]


def rows(cases):
    slow = () if torch.cuda.is_available() else pytest.mark.slow
    return [pytest.param(*arguments, marks=() if quick else slow) for *arguments, quick in cases]


@pytest.mark.parametrize(("scheme", "causal"), rows(CASES))
def test_stored_scores(target, stored, scheme, causal):
    support.check(target, support.problem(target, SCHEMES[scheme](16), 41, 55, causal=causal, seed=4))
    assert stored == PAIR


@pytest.mark.parametrize("scheme", ["self_extend", "dual_chunk"])
def test_position_maps(target, stored, scheme):
    rotary = Rotary.rope(16)
    rotary = rotary.self_extend(20, 4) if scheme == "self_extend" else rotary.dual_chunk(136, 8)
    support.check(target, support.problem(target, rotary, 140, 150, heads=1, group=1, seed=5))
    assert stored == PAIR


@pytest.mark.parametrize(
    "lengths", rows((lengths, sum(lengths) > 400) for lengths in [(140, 300), (300, 140), (1, 200), (200, 1)])
)
def test_several_rows_of_panels(target, stored, lengths):
    support.check(target, support.problem(target, SCHEMES["rerope"](16), *lengths, heads=1, group=1, seed=6))
    assert stored == PAIR


@pytest.mark.parametrize("tile", [(16, 64, 1, 1), (64, 128, 4, 1)], ids=["64 keys", "128 keys"])
def test_tiles_within_and_across_panels(target, stored, tile):
    """A tile may lie within a panel, or in two panels if it has 128 keys. In the first case, the rows of a
    score tile are queries if ``configs.query_rows`` allows it for the architecture."""
    with tiles.forced("grad_kv", configs.Tile(*tile)), tiles.forced("grad_q", configs.Tile(32, 32, 1, 1)):
        support.check(target, support.problem(target, SCHEMES["rerope"](128), 140, 150, heads=1, group=1, seed=7))
    assert stored == PAIR


@pytest.mark.parametrize(
    ("batch", "heads", "group", "matrices", "pairs"),
    [(2, 6, 2, 2 * 2, 3), (3, 1, 1, 2, 2), (2, 3, 1, 100, 1), (2, 2, 1, 1, 4)],
)
def test_a_workspace_for_some_heads_at_a_time(target, stored, monkeypatch, batch, heads, group, matrices, pairs):
    """If the workspace holds only some matrices, the heads are computed in several pairs of launches. matrices: how
    many fit into the workspace. pairs: the number of pairs of launches."""
    panels = 2  # panels of one matrix, for 40 queries and 40 keys
    monkeypatch.setattr(configs, "SCORE_BYTES", 4 * PANEL * panels * matrices)
    p = support.problem(target, Rotary.rope(16), 40, batch=batch, heads=heads, group=group, seed=8)
    support.check(target, p)
    assert stored == PAIR * pairs


def test_a_workspace_without_room_for_one_key_head(target, stored, monkeypatch):
    p = support.problem(target, Rotary.rope(16), 40, group=2, seed=8)
    monkeypatch.setattr(configs, "SCORE_BYTES", 4 * PANEL * 2 * 2)
    support.check(target, p)
    assert stored == PAIR
    monkeypatch.setattr(configs, "SCORE_BYTES", 4 * PANEL * 2 * 2 - 1)
    support.check(target, p)
    assert stored == PAIR


@pytest.mark.parametrize(("scheme", "causal"), [("rope", False), ("hope_rerope_log_n", True)])
def test_packed_sequences(target, stored, scheme, causal):
    """Packed sequences are right. Rows outside every sequence get 0."""
    options = dict(heads=2, heads_kv=1, spare=5, causal=causal)
    p = packing(target, SCHEMES[scheme](16), (13, 0, 137, 5), (13, 4, 150, 0), **options)
    p.check(p.run("triton"), target.dtype)
    assert stored == PAIR


def test_packed_sequences_in_several_launches(target, stored, monkeypatch):
    p = packing(target, Rotary.rope(16), (13, 137), (13, 150), heads=4, heads_kv=2)
    total, columns = 150, 4
    monkeypatch.setattr(configs, "SCORE_BYTES", 4 * PANEL * 2 * (total // configs.PANEL_ROWS + 2) * columns)
    p.check(p.run("triton"), target.dtype)
    assert stored == PAIR * 2


@pytest.mark.parametrize(("blocks", "stores"), [(4 / 108, True), (5 / 108, False)])
def test_few_blocks_in_a_launch(target, stored, monkeypatch, blocks, stores):
    """If the workspace holds two of four heads, a launch has four blocks. If five blocks are required, the launch is
    too small and gradients of scores are not stored."""
    monkeypatch.setattr(attention, "multiprocessors", lambda device: 108)
    monkeypatch.setattr(configs, "SCORE_BYTES", 4 * PANEL * 2 * 2)
    monkeypatch.setattr(configs, "SCORE_BLOCKS", blocks)
    assert score_grads.layout_of(40, 40, 1, 4, 4, 4, True, False).is_busy(2, 108) is stores
    with score_grads.forced(True):
        assert score_grads.layout_of(40, 40, 1, 4, 4, 4, True, False).is_busy(2, 108)
    with tiles.forced("grad_kv", configs.Tile(32, 32, 1, 1)):
        support.check(target, support.problem(target, Rotary.rope(16), 40, batch=1, heads=4, group=1, seed=8))
    assert stored == PAIR * 2 * stores


def test_few_blocks_of_packed_sequences(target, stored, monkeypatch):
    """Four sequences of 5 tokens and one of 137 have 9 blocks of 32 keys. The estimate is at most 10 blocks, and not
    five times the blocks of the longest sequence."""
    monkeypatch.setattr(attention, "multiprocessors", lambda device: 108)
    p = packing(target, Rotary.rope(16), (5, 5, 5, 5, 137), (5, 5, 5, 5, 137), heads=2, heads_kv=2)
    monkeypatch.setattr(configs, "SCORE_BYTES", 4 * PANEL * (157 // configs.PANEL_ROWS + 5) * 4)
    with tiles.forced("grad_kv", configs.Tile(32, 32, 1, 1)):
        for blocks, stores in ((10, True), (11, False)):
            stored.clear()
            monkeypatch.setattr(configs, "SCORE_BLOCKS", blocks / 108)
            p.check(p.run("triton"), target.dtype)
            assert bool(stored) is stores


# ---- where the workspace holds them


def layout(rows, keys, batch=2, heads=6, heads_kv=3, causal=True, packed=False):
    return score_grads.layout_of(rows, keys, batch, heads, heads_kv, 2, causal, packed)


SIZES = [(1, 1), (128, 128), (129, 129), (300, 100), (100, 300), (1, 1000), (1000, 1), (700, 700)]


@pytest.mark.parametrize(("causal", "size"), list(itertools.product((True, False), SIZES)))
def test_panels_of_a_matrix(causal, size):
    """Every row of panels has the columns that its queries see, and the matrix has room for all of them."""
    rows, keys = size
    found = layout(rows, keys, causal=causal)
    used = 0
    for first in range(0, rows, configs.PANEL_ROWS):
        width = found.width + first // configs.PANEL_ROWS * found.growth
        last = min(first + configs.PANEL_ROWS, rows) - 1 + keys - rows if causal else keys - 1
        # a tile of 128 keys is stored as a whole
        assert width * configs.PANEL_KEYS >= min(keys, (last // 128 + 1) * 128)
        used += width
    assert used == found.panels


@pytest.mark.parametrize("room", [1, 2, 3, 4, 6, 100])
@pytest.mark.parametrize(("batch", "heads_kv", "group"), [(1, 1, 1), (5, 3, 2), (2, 8, 4), (7, 1, 1)])
def test_launches_serve_every_head_once(monkeypatch, room, batch, heads_kv, group):
    """The launches serve every head exactly once. room: the number of key heads of a sequence whose matrices fit into
    the workspace."""
    monkeypatch.setattr(configs, "SCORE_BYTES", room * group * 2 * PANEL * 2)
    found = layout(100, 100, batch, heads_kv * group, heads_kv)
    served = []
    for argument, count in found.launches(torch.empty(0)):
        first, head, heads = ((number - 2**40) >> 4 for number in argument[1:4])
        assert count % heads == 0 and count <= room
        served += itertools.product(range(first, first + count // heads), range(head, head + heads))
    assert sorted(served) == list(itertools.product(range(batch), range(heads_kv)))
    assert 2 * found.elements <= configs.SCORE_BYTES


def test_a_causal_matrix_takes_half_of_the_memory():
    whole, half = (layout(8192, 8192, 1, 1, 1, causal=causal).panels for causal in (False, True))
    assert whole == 64 * 128 and half == 64 * 65


def test_no_room():
    assert layout(2**17, 2**17, 1, 1, 1) is None and layout(2**15, 2**15, 1, 1, 1)
    with score_grads.forced(False):
        assert layout(128, 128) is None
    assert layout(128, 128)


@pytest.mark.parametrize(
    ("arguments", "stores"),
    [
        ((80, 2, 128, 128), True),
        ((80, 2, 64, 64), True),
        ((90, 2, 128, 128), True),
        ((80, 4, 128, 128), False),
        ((80, 2, 256, 256), False),
        ((80, 2, 256, 128), False),
        ((80, 2, 32, 32), False),
        (("gfx942", 2, 128, 128), False),
    ],
)
def test_where_it_is_faster(arguments, stores):
    assert configs.storing_is_faster(*arguments) is stores
