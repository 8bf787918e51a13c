"""Tests what impl="triton" refuses in Triton's interpreter."""

import pytest
import support
import torch
from flashrope import Rotary, attention, attention_varlen, attention_varlen_with_cache, attention_with_cache, rotate
from flashrope.backends.triton import launcher
from support import int32

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or not support.INTERPRETED, reason="needs Triton's interpreter"
)
ROPE = Rotary.rope(16)
BRAIN = torch.ones(2, 6, 1, 16, dtype=torch.bfloat16)
CALLS = {
    "attention": lambda x: attention(x, x, x, ROPE, impl="triton"),
    "attention_varlen": lambda x: attention_varlen(
        x[0], x[0], x[0], ROPE, int32([0, 6]), int32([0, 6]), 6, 6, impl="triton"
    ),
    "attention_with_cache": lambda x: attention_with_cache(x, x, x, ROPE, int32([6, 4]), impl="triton"),
    "attention_varlen_with_cache": lambda x: attention_varlen_with_cache(
        x[0], x, x, ROPE, int32([0, 3, 6]), int32([6, 4]), 3, impl="triton"
    ),
    "rotate": lambda x: rotate(x, ROPE, impl="triton"),
}


@pytest.mark.parametrize("name", CALLS)
def test_bfloat16_is_refused(name):
    """bfloat16 is refused, because the interpreter would compute with the bit patterns of the numbers instead of their
    values."""
    assert launcher.interpreted()
    with pytest.raises(ValueError, match=r"impl='triton' cannot serve .*interpreter.*bfloat16.*got torch\.bfloat16"):
        CALLS[name](BRAIN)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_types_are_served(name, dtype):
    CALLS[name](BRAIN.to(dtype))
