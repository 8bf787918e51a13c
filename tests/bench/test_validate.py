"""Tests bench validate: how it reads the tutorial's kernel, and the rows that compare predictions with measurements."""

import pytest

pytest.importorskip("triton", reason="bench.validate compiles with it")

from bench import model, validate
from bench.report import predicted
from bench.report.output import RESULTS

KERNEL = """
import a_module_that_is_missing

@triton.jit
def _attn_fwd_inner(x, HEAD_DIM: tl.constexpr):
    return x * HEAD_DIM


@triton.autotune(configs, key=["N_CTX"])
@triton.jit
def _attn_fwd(Q, K, V, sm_scale, M, Out, *strides):
    tl.store(Out, _attn_fwd_inner(tl.load(Q), 2))
"""


def tile(head_dim, **changes):
    sizes = {"step": "forward", "D": head_dim, "block_m": 128, "block_n": 64, "blocks/SM": 2, "fixed": 0, "inner": 3000}
    return {name: str(value) for name, value in (sizes | changes).items()}


def test_only_the_forward_kernel_of_the_tutorial_is_read(tmp_path):
    path = tmp_path / "tutorial.py"
    path.write_text(KERNEL)
    kernel = validate.tutorial(path, tmp_path)
    assert kernel.fn.__name__ == "_attn_fwd"
    path.write_text(KERNEL.replace("def _attn_fwd_inner", "def _other"))
    with pytest.raises(SystemExit, match="--tutorial: .*tutorial.py has no _attn_fwd_inner"):
        validate.tutorial(path, tmp_path)


def test_rows_beside_what_was_measured():
    """The predicted time follows from the clocks. At 16,384 keys there are 16,384 blocks of 128 queries. 216 of them
    run at a time, and each takes 3,000 clocks per tile of 64 keys."""
    rows = list(validate.rows({validate.FLASH: [tile(128)], validate.TRITON: []}))
    assert [row["row"] for row in rows] == ["predicted", "published", "error of the model"]
    prediction, published, error = rows
    assert [published[n] for n in ("1024", "16384")] == ["142", "210"]
    tiles = sum(2 * (at + 1) for at in range(128))  # tiles of 64 keys that all blocks of one head visit
    seconds = 128 * tiles * 3000 / (108 * 2) / 1.41e9
    expected = 2 * 128 * 16384**2 * 128 / seconds / 1e12
    assert float(prediction["16384"]) == pytest.approx(expected, rel=0.01)
    assert error["16384"] == f"{expected / 210.4 - 1:+.0%}"


def test_masked_tiles_take_the_clocks_of_edges():
    problem = validate.problem(64, 1024)
    plain, slow = (validate.seconds(tile(64, edge=edge), problem) for edge in (3000, 30000))
    assert slow > 2 * plain


def test_the_page_prints_the_published_table():
    rows = model.read_csv(RESULTS / predicted.FOLDER / predicted.VALIDATION)
    tiles = {validate.FLASH: model.THEIRS, validate.TRITON: predicted.TUTORIAL}
    again = validate.rows({name: model.read_csv(RESULTS / predicted.FOLDER / file) for name, file in tiles.items()})
    assert [{name: row[name] for name in validate.COLUMNS} for row in rows] == list(again)
    page = (RESULTS / "README.md").read_text()
    for row in rows:
        assert f"| {row['kernel']} | {row['row']} | {row['D']} | {row['1024']} | " in page
