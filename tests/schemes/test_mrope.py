"""Tests positions of several coordinates in the sections of vision-language models (mrope)."""

import pytest
import torch
from flashrope import Rotary, attention
from packing import packing
from support import SCHEMES, check, problem


def grid(seqlen: int, batch: int = 2) -> torch.Tensor:
    """Returns the positions (batch, seqlen, 3) of text, then an image of 4 x 5 patches, then text, numbered as Qwen2-VL
    does."""
    before = 7
    text = torch.arange(before)[:, None].expand(-1, 3)
    patch = torch.arange(20)
    image = torch.stack((torch.zeros(20, dtype=torch.int64), patch // 5, patch % 5), -1) + before
    after = torch.arange(seqlen - 20 - before)[:, None].expand(-1, 3) + before + 5
    return torch.cat((text, image, after)).expand(batch, -1, -1)


# ---- the axis of every pair


def test_sections_one_after_the_other():
    assert Rotary.rope(128, 1e6).mrope([16, 24, 24]).axis == (0,) * 16 + (1,) * 24 + (2,) * 24
    assert Rotary.rope(32, rotary_dim=16).mrope((2, 3, 3)).axis == (0, 0, 1, 1, 1, 2, 2, 2)


def test_interleaved_sections():
    axis = Rotary.rope(128).mrope([24, 20, 20], interleaved=True).axis
    assert axis == (0, 1, 2) * 20 + (0,) * 4
    assert Rotary.rope(64).mrope([11, 11, 10], interleaved=True).axis == (0, 1, 2) * 10 + (0, 1)


# ---- attention

FORMS = {
    "sections": lambda d: Rotary.rope(d).mrope([d // 2 - 2 * (d // 6), d // 6, d // 6]),
    "interleaved": lambda d: Rotary.rope(d).mrope([d // 2 - 2 * (d // 6), d // 6, d // 6], interleaved=True),
    "pairs side by side": lambda d: Rotary.rope(d, rotary_dim=d - 8, interleaved=True).mrope([d // 2 - 6, 1, 1]),
    "yarn, local": lambda d: Rotary.rope(d).yarn(4.0, train_length=64).local(21).mrope([2, d // 2 - 3, 1]),
}
forms = pytest.mark.parametrize("form", FORMS)


@pytest.mark.interpreted(lambda target, form, **_: target.dtype == torch.float32 or form == "interleaved")
@forms
def test_accuracy(target, form):
    rotary = FORMS[form](24)
    positions = grid(41).to(target.device)
    check(target, problem(target, rotary, 41, batch=2, positions=positions, seed=1, head_dim_v=16))


@pytest.mark.interpreted(lambda exact, form: form == "interleaved")
@forms
def test_equal_coordinates_are_plain_rope(exact, form):
    rotary = FORMS[form](24)
    plain = Rotary(24, rotary.frequencies, rotary.interleaved, rotary.bands, rotary.temperature)
    p = problem(exact, rotary, 41, batch=2, seed=2)
    given = torch.arange(41, device=exact.device)
    results = [
        attention(p.q, p.k, p.v, scheme, positions=positions, impl=exact.impl)
        for scheme, positions in ((rotary, given[:, None].expand(-1, 3)), (plain, given), (plain, None))
    ]
    assert torch.equal(results[0], results[1])
    torch.testing.assert_close(results[0], results[2], rtol=1e-5, atol=1e-5)


@pytest.mark.interpreted(lambda exact, form, deterministic: deterministic or form == "sections")
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("form", ["sections", "local", "one coordinate"])
def test_packed(exact, form, deterministic):
    """Every packed sequence has its own positions and gets the results of a separate call. Rows outside all sequences
    get 0."""
    rotary = {"local": SCHEMES["local"](24), "one coordinate": Rotary.rope(24).log_n(20)}.get(form) or FORMS[form](24)
    lengths = (36, 0, 1, 29)
    positions = torch.cat((grid(36, 1)[0], grid(30, 1)[0], torch.zeros(4, 3)))
    positions = (positions if rotary.axis else positions[:, 1] * 1.5 - 2).to(exact.device)
    p = packing(exact, rotary, lengths, head_dim_v=24, spare=4, positions=positions)
    p.check(p.run(exact.impl, deterministic=deterministic), exact.dtype)
