"""Reads and writes quantized keys and values. Every element is stored as a small integer, its code. Every row has a
scale.

``flashrope.calls.int8`` has the formula. A code is an int8, which is exact in float16 and bfloat16. Rotation
does not change a key's scale, so kernels rotate codes and multiply the key's column of
the scores by the key's scale. A value's scale multiplies the value's column of the weights.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from .arguments import decode_int64

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it to a small float32 number rounds to an integer, ties to even


INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.constexpr_function
def has_ptx():
    """Whether kernels may use inline PTX, which neither the interpreter nor AMD GPUs can run. Without PTX, kernels
    compute the same values with Triton's own operations."""
    return not INTERPRETED and is_cuda()


# ---- reading
# The PTX below converts four bytes at a time. It avoids conversion instructions, which run at a quarter of the rate.
# The byte 0x43 followed by a byte c < 128 is the bfloat16 number 128 + c. The byte 0x64 followed by any byte c is the
# float16 number 1024 + c. The bytes 0x4b0000 followed by any byte c are the float32 number 2^23 + c.

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
""")  # for each byte: the number in its lowest seven bits, minus 128 if its sign bit is set
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
INT8_TO_FP32 = tl.constexpr("""
{
    .reg .b32 shifted, n0, n1, n2, n3;
    xor.b32 shifted, $4, 0x80808080;
    prmt.b32 n0, shifted, 0x4b000000, 0x7440;
    prmt.b32 n1, shifted, 0x4b000000, 0x7441;
    prmt.b32 n2, shifted, 0x4b000000, 0x7442;
    prmt.b32 n3, shifted, 0x4b000000, 0x7443;
    add.rn.f32 $0, n0, 0fcb000080;
    add.rn.f32 $1, n1, 0fcb000080;
    add.rn.f32 $2, n2, 0fcb000080;
    add.rn.f32 $3, n3, 0fcb000080;
}
""")


@triton.jit
def as_type(x, dtype: tl.constexpr):
    """Converts a tile of 8-bit codes to `dtype`. Returns a tile of any other type unchanged."""
    if x.dtype != tl.int8:
        return x
    elif not has_ptx():
        return x.to(dtype)
    elif dtype == tl.float32:
        return tl.inline_asm_elementwise(INT8_TO_FP32, "=f,=f,=f,=f,r", [x], tl.float32, True, 4)
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(INT8_TO_BF16, "=r,=r,r", [x], tl.bfloat16, True, 4)
    else:
        return tl.inline_asm_elementwise(INT8_TO_FP16, "=r,=r,r", [x], tl.float16, True, 4)


# ---- words
# A word is 16 bits of a row: two codes. ldmatrix loads words from shared memory into the registers of a tensor-core
# operand, and can transpose them. It cannot transpose single bytes. Code p of every word goes to part p of a tile.
# lop3 with 0xea is (a & b) | c. With 0x6a it is (a & b) ^ c. The PTX below reads its input for the last time before it
# writes an output.

WORDS8_TO_BF16 = tl.constexpr("""
{
    .reg .b32 odd, low, high, minus, base;
    mov.b32 minus, 0xbf80bf80;
    mov.b32 base, 0x43004300;
    shr.u32 odd, $2, 8;
    lop3.b32 low, $2, 0x007f007f, base, 0xea;
    lop3.b32 high, $2, 0x00800080, base, 0xea;
    fma.rn.bf16x2 $0, high, minus, low;
    lop3.b32 low, odd, 0x007f007f, base, 0xea;
    lop3.b32 high, odd, 0x00800080, base, 0xea;
    fma.rn.bf16x2 $1, high, minus, low;
}
""")
WORDS8_TO_FP16 = tl.constexpr("""
{
    .reg .b32 even, odd, zero;
    mov.b32 zero, 0x64806480;
    shr.u32 odd, $2, 8;
    lop3.b32 even, $2, 0x00ff00ff, zero, 0x6a;
    lop3.b32 odd, odd, 0x00ff00ff, zero, 0x6a;
    sub.rn.f16x2 $0, even, zero;
    sub.rn.f16x2 $1, odd, zero;
}
""")


@triton.constexpr_function
def word_parts(dtype, code_vec, block_d, least):
    """Returns the number of parts in which a tile is loaded as words: 2, the number of codes in a word. Returns 1 if
    the tile is not quantized, if its rows are not aligned to words, or if a part would have fewer than `least`
    columns."""
    return 2 if dtype == tl.int8 and code_vec >= 2 and block_d >= 2 * least else 1


@triton.constexpr_function
def key_parts(dtype, rotates, code_vec, block_d, head_dim, rotary_dim, first_channel):
    """Returns word_parts for keys, or 1 if they rotate. A part has at least the 16 columns that a tensor core takes.
    The first members of the pairs must fill whole words, and so must the second members and the channels before the
    pairs. Otherwise the result is 1."""
    whole = (head_dim | rotary_dim) % 4 == first_channel % 2 == 0
    return word_parts(dtype, code_vec, block_d, 16) if whole and not rotates else 1


@triton.constexpr_function
def value_parts(dtype, code_vec, block_d):
    """Returns word_parts for values. A part has at least 32 columns. With fewer, some of 4 warps would compute the same
    products."""
    return word_parts(dtype, code_vec, block_d, 32)


@triton.jit
def unpack_words(words, dtype: tl.constexpr):
    """Returns the codes of words [M, N]: two tiles [M, N] of `dtype`. Tile p holds code p of every word."""
    if not has_ptx() or dtype == tl.float32:
        return ((words << 8) >> 8).to(dtype), (words >> 8).to(dtype)
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(WORDS8_TO_BF16, "=r,=r,r", [words], (tl.bfloat16,) * 2, True, 2)
    else:
        return tl.inline_asm_elementwise(WORDS8_TO_FP16, "=r,=r,r", [words], (tl.float16,) * 2, True, 2)


@triton.jit
def load_words(view, page, row, at, HEAD_DIM: tl.constexpr, VARIANT: tl.constexpr, dtype: tl.constexpr):
    """Loads words from rows of a quantized HeadView. Returns their codes: two tiles [M, N] of `dtype`. page, row [M]:
    the rows. at [N]: the indices of the words in a row."""
    BYTES: tl.constexpr = VARIANT.code_vec
    VEC: tl.constexpr = VARIANT.code_vec // 2
    ptr = tl.multiple_of(view.ptr.to(tl.pointer_type(tl.int16)), BYTES)
    stride_row, stride_batch = tl.multiple_of(view.stride_row // 2, VEC), tl.multiple_of(view.stride_batch // 2, VEC)
    ptrs = ptr + (page * stride_batch + row * stride_row)[:, None] + at[None, :]
    if HEAD_DIM == at.shape[0] * 2:
        return unpack_words(tl.load(ptrs), dtype)
    else:
        return unpack_words(tl.load(ptrs, mask=(at < HEAD_DIM // 2)[None, :], other=0), dtype)


@triton.jit
def split_columns(x):
    """Splits x [M, N] into two tiles [M, N / 2]. Column c goes to tile c % 2."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def join_columns(even, odd):
    """Joins the tiles that split_columns returns."""
    return tl.reshape(tl.join(even, odd), (even.shape[0], 2 * even.shape[1]))


class ScaleView(NamedTuple):
    """The scales of one head. ptr: pointer to the first row's scale. Strides are in elements."""

    ptr: object
    stride_row: object
    stride_batch: object


@triton.jit
def scale_view(ptr, stride_batch, stride_row, stride_head, head):
    """Returns the ScaleView of a head. Strides are encoded, as ``arguments.py`` explains."""
    head_ptr = ptr + head * decode_int64(stride_head)
    return ScaleView(head_ptr, decode_int64(stride_row), decode_int64(stride_batch))


@triton.jit
def load_scales(view, page, row):
    """Returns the scales of rows, float32 [N]."""
    return tl.load(view.ptr + page * view.stride_batch + row * view.stride_row)


@triton.jit
def scale_values(weights, v, scales):
    """Returns (weights [M, N], v) after multiplying one of them by the scales [N]. v: a tuple of tiles of quantized
    values, each [N, DV / parts].

    Scaled weights could leave the range of float16, so in float16 the values are scaled instead, and rounded once."""
    if v[0].dtype == tl.float16:
        scaled = ()
        for part in tl.static_range(len(v)):
            scaled += ((v[part].to(tl.float32) * scales[:, None]).to(v[part].dtype),)
        return weights, scaled
    else:
        return weights * scales[None, :], v


# ---- writing


LARGEST = tl.constexpr(127.0)  # the largest code


@triton.jit
def quantize_rows(x):
    """Quantizes each row of x [M, D]. Returns (codes, scales): integers in float32 [M, D], and float32 [M]."""
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
    """Quantizes rows x [M, D] and stores their codes at offsets [M, 1], except for rows where `exists` [M] is false.
    Returns the scales of all rows."""
    codes, scale = quantize_rows(x)
    channels = tl.arange(0, x.shape[1])
    mask = exists[:, None] & (channels < HEAD_DIM)[None, :]
    tl.store(ptr + offsets + channels[None, :], codes.to(tl.int32).to(tl.int8), mask=mask)
    return scale
