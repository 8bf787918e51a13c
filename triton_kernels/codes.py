"""Codes of quantized caches, and their scales. ``flashrope.backends.quantized`` has the formula.

A cache of int8 holds a code a byte. A cache of uint8 holds two: channel 2 c in the low half of a byte, channel 2 c + 1
in the high half, each plus 8. All codes are exact in float16 and bfloat16. A key's scale multiplies its column of the
scores, whatever rotates the codes; a value's scale multiplies its weights.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .arguments import decode_int64

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it to a small float32 number rounds to an integer, ties to even


INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # the interpreter has no inline PTX

# ---- reading
# Four bytes at a time, without conversion instructions, which run at a quarter of the rate. A byte c below the exponent
# 0x43 is the bfloat16 number 128 + c, for c < 128. Below 0x64 it is the float16 number 1024 + c.

INT8_TO_BF16 = tl.constexpr("""
{
    .reg .b32 pair, low, high, minus;
    mov.b32 minus, 0xbf80bf80;
    prmt.b32 pair, $2, 0x43434343, 0x4140;
    and.b32 low, pair, 0xff7fff7f;
    and.b32 high, pair, 0xff80ff80;
    fma.rn.bf16x2 $0, high, minus, low;
    prmt.b32 pair, $2, 0x43434343, 0x4342;
    and.b32 low, pair, 0xff7fff7f;
    and.b32 high, pair, 0xff80ff80;
    fma.rn.bf16x2 $1, high, minus, low;
}
""")  # the lowest seven bits, less the sign bit
INT8_TO_FP16 = tl.constexpr("""
{
    .reg .b32 shifted, zero, pair;
    xor.b32 shifted, $2, 0x80808080;
    mov.b32 zero, 0x64806480;
    prmt.b32 pair, shifted, 0x64646464, 0x4140;
    sub.rn.f16x2 $0, pair, zero;
    prmt.b32 pair, shifted, 0x64646464, 0x4342;
    sub.rn.f16x2 $1, pair, zero;
}
""")
INT4_TO_BF16 = tl.constexpr("""
{
    .reg .b32 low, high, pair, one, zero;
    and.b32 low, $4, 0x0f0f0f0f;
    shr.u32 high, $4, 4;
    and.b32 high, high, 0x0f0f0f0f;
    mov.b32 one, 0x3f803f80;
    mov.b32 zero, 0xc308c308;
    prmt.b32 pair, low, 0x43434343, 0x4140;
    fma.rn.bf16x2 $0, pair, one, zero;
    prmt.b32 pair, low, 0x43434343, 0x4342;
    fma.rn.bf16x2 $1, pair, one, zero;
    prmt.b32 pair, high, 0x43434343, 0x4140;
    fma.rn.bf16x2 $2, pair, one, zero;
    prmt.b32 pair, high, 0x43434343, 0x4342;
    fma.rn.bf16x2 $3, pair, one, zero;
}
""")
INT4_TO_FP16 = tl.constexpr("""
{
    .reg .b32 low, high, pair, zero;
    and.b32 low, $4, 0x0f0f0f0f;
    shr.u32 high, $4, 4;
    and.b32 high, high, 0x0f0f0f0f;
    mov.b32 zero, 0x64086408;
    prmt.b32 pair, low, 0x64646464, 0x4140;
    sub.rn.f16x2 $0, pair, zero;
    prmt.b32 pair, low, 0x64646464, 0x4342;
    sub.rn.f16x2 $1, pair, zero;
    prmt.b32 pair, high, 0x64646464, 0x4140;
    sub.rn.f16x2 $2, pair, zero;
    prmt.b32 pair, high, 0x64646464, 0x4342;
    sub.rn.f16x2 $3, pair, zero;
}
""")
OF_INT4 = tl.constexpr("=r,=r,=r,=r,r")


@triton.jit
def as_type(x, dtype: tl.constexpr):
    """Codes of 8 bits as numbers of this type; other tiles as they are."""
    if x.dtype != tl.int8:
        return x
    elif INTERPRETED or dtype == tl.float32:
        return x.to(dtype)
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(INT8_TO_BF16, "=r,=r,r", [x], tl.bfloat16, True, 4)
    else:
        return tl.inline_asm_elementwise(INT8_TO_FP16, "=r,=r,r", [x], tl.float16, True, 4)


@triton.jit
def unpack(packed, dtype: tl.constexpr):
    """Bytes [M, N] to the codes in their low and in their high halves, two [M, N] of this type."""
    if INTERPRETED or dtype == tl.float32:
        return ((packed & 15).to(tl.int8) - 8).to(dtype), ((packed >> 4).to(tl.int8) - 8).to(dtype)
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(INT4_TO_BF16, OF_INT4, [packed], (tl.bfloat16, tl.bfloat16), True, 4)
    else:
        return tl.inline_asm_elementwise(INT4_TO_FP16, OF_INT4, [packed], (tl.float16, tl.float16), True, 4)


@triton.jit
def load_packed(ptr, offsets, at, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, dtype: tl.constexpr):
    """The codes of bytes `at` [N] of rows at offsets [M, 1]: two [M, N]. Beyond head_dim they
    are -8, where queries are 0 and results are not stored."""
    ptrs = ptr + offsets + at[None, :]
    if HEAD_DIM == BLOCK_D:
        return unpack(tl.load(ptrs), dtype)
    else:
        return unpack(tl.load(ptrs, mask=(at < HEAD_DIM // 2)[None, :], other=0), dtype)


@triton.jit
def load_packed_channels(ptr, offsets, channels, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, dtype: tl.constexpr):
    """The codes of any channels [N], [M, N]. Reads a byte for each."""
    low, high = load_packed(ptr, offsets, channels // 2, HEAD_DIM, BLOCK_D, dtype)
    return tl.where((channels % 2 == 0)[None, :], low, high)


@triton.jit
def interleave(low, high):
    """Two [M, N] to [M, 2 N], column by column."""
    return tl.reshape(tl.join(low, high), (low.shape[0], 2 * low.shape[1]))


class ScaleView(NamedTuple):
    """The scales of one head. ptr: of the first row; strides in elements."""

    ptr: object
    stride_row: object
    stride_batch: object


@triton.jit
def scale_view(ptr, stride_batch, stride_row, stride_head, head):
    """Strides are encoded."""
    head_ptr = ptr + head * decode_int64(stride_head)
    return ScaleView(head_ptr, decode_int64(stride_row), decode_int64(stride_batch))


@triton.jit
def load_scales(view, page, row):
    """The scales of rows, float32 [N]."""
    return tl.load(view.ptr + page * view.stride_batch + row * view.stride_row)


@triton.jit
def scale_values(weights, v, scales):
    """weights [M, N] and codes v [N, DV], in one part, so that their product has the scales [N].

    Scaled weights would leave the range of float16: there the values are scaled, and rounded once."""
    if v[0].dtype == tl.float16:
        return weights, ((v[0].to(tl.float32) * scales[:, None]).to(v[0].dtype),)
    else:
        return weights * scales[None, :], v


# ---- writing


@triton.jit
def quantize_rows(x, LARGEST: tl.constexpr):
    """x [M, D] to codes, whole float32 numbers [M, D], and scales float32 [M]."""
    HALF: tl.constexpr = 65504.0 if x.dtype == tl.float16 else 3.3895313892515355e38
    LIMIT: tl.constexpr = 3.4028234663852886e38 if x.dtype == tl.float32 else HALF  # the largest finite number
    x = x.to(tl.float32)
    has_nan = tl.max(tl.where(x != x, 1.0, 0.0), 1) > 0
    x = tl.minimum(tl.maximum(x, -LIMIT), LIMIT)
    scale = tl.div_rn(tl.max(tl.abs(x), 1), tl.full((x.shape[0],), LARGEST, tl.float32))
    steps = tl.where(scale > 0, scale, float("inf"))[:, None] + tl.zeros_like(x)
    codes = tl.div_rn(x, steps)
    codes = tl.minimum(tl.maximum(codes, -LARGEST), LARGEST) + ROUND - ROUND
    return tl.where(has_nan[:, None], 0.0, codes), tl.where(has_nan, float("nan"), scale)


@triton.jit
def store_codes(ptr, offsets, x, exists, HEAD_DIM: tl.constexpr):
    """Quantizes rows x [M, D] and stores them at offsets [M, 1] where they exist [M]. Returns their scales."""
    D: tl.constexpr = x.shape[1]
    if ptr.dtype.element_ty == tl.uint8:
        codes, scale = quantize_rows(x, 7.0)
        low, high = tl.split(tl.reshape((codes + 8.0).to(tl.int32), (x.shape[0], D // 2, 2)))
        at = tl.arange(0, D // 2)
        mask = exists[:, None] & (at < HEAD_DIM // 2)[None, :]
        tl.store(ptr + offsets + at[None, :], (low | (high << 4)).to(tl.uint8), mask=mask)
        return scale
    else:
        codes, scale = quantize_rows(x, 127.0)
        channels = tl.arange(0, D)
        mask = exists[:, None] & (channels < HEAD_DIM)[None, :]
        tl.store(ptr + offsets + channels[None, :], codes.to(tl.int32).to(tl.int8), mask=mask)
        return scale
