"""Reads and writes quantized keys and values. Every element is stored as a small integer, its code. Every row has a
scale.

``flashrope.backends.quantized`` has the formula. An int8 cache holds one code per byte. A uint8 cache holds two codes
of 4 bits per byte, each plus 8: channel 2 c in the low half, channel 2 c + 1 in the high half. All codes are exact in
float16 and bfloat16. Rotation does not change a key's scale, so kernels rotate codes and multiply the key's column of
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


@triton.jit
def unpack(packed, dtype: tl.constexpr):
    """Returns the codes in the low halves and in the high halves of bytes [M, N]: two tiles [M, N] of `dtype`."""
    if not has_ptx() or dtype == tl.float32:
        return ((packed & 15).to(tl.int8) - 8).to(dtype), ((packed >> 4).to(tl.int8) - 8).to(dtype)
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(INT4_TO_BF16, OF_INT4, [packed], (tl.bfloat16, tl.bfloat16), True, 4)
    else:
        return tl.inline_asm_elementwise(INT4_TO_FP16, OF_INT4, [packed], (tl.float16, tl.float16), True, 4)


# ---- words
# A word is 16 bits of a row: two codes of 8 bits or four codes of 4 bits. ldmatrix loads words from shared memory into
# the registers of a tensor-core operand, and can transpose them. It cannot transpose single bytes. Code p of every word
# goes to part p of a tile.
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
WORDS4_TO_BF16 = tl.constexpr("""
{
    .reg .b32 first, second, third, fourth, one, zero, base;
    mov.b32 one, 0x3f803f80;
    mov.b32 zero, 0xc308c308;
    mov.b32 base, 0x43004300;
    shr.u32 second, $4, 4;
    shr.u32 third, $4, 8;
    shr.u32 fourth, $4, 12;
    lop3.b32 first, $4, 0x000f000f, base, 0xea;
    lop3.b32 second, second, 0x000f000f, base, 0xea;
    lop3.b32 third, third, 0x000f000f, base, 0xea;
    lop3.b32 fourth, fourth, 0x000f000f, base, 0xea;
    fma.rn.bf16x2 $0, first, one, zero;
    fma.rn.bf16x2 $1, second, one, zero;
    fma.rn.bf16x2 $2, third, one, zero;
    fma.rn.bf16x2 $3, fourth, one, zero;
}
""")
WORDS4_TO_FP16 = tl.constexpr("""
{
    .reg .b32 first, second, third, fourth, base, zero, sixteenth, zero_high;
    mov.b32 base, 0x64006400;
    mov.b32 zero, 0x64086408;
    mov.b32 sixteenth, 0x2c002c00;
    mov.b32 zero_high, 0xd480d480;
    shr.u32 third, $4, 8;
    lop3.b32 first, $4, 0x000f000f, base, 0xea;
    lop3.b32 second, $4, 0x00f000f0, base, 0xea;
    lop3.b32 fourth, third, 0x00f000f0, base, 0xea;
    lop3.b32 third, third, 0x000f000f, base, 0xea;
    sub.rn.f16x2 $0, first, zero;
    fma.rn.f16x2 $1, second, sixteenth, zero_high;
    sub.rn.f16x2 $2, third, zero;
    fma.rn.f16x2 $3, fourth, sixteenth, zero_high;
}
""")


@triton.constexpr_function
def word_parts(dtype, code_vec, block_d, least):
    """Returns the number of parts in which a tile is loaded as words: the number of codes in a word. Returns 1 if the
    tile is not quantized, if its rows are not aligned to words, or if a part would have fewer than `least` columns."""
    parts = 2 if dtype == tl.int8 else 4 if dtype == tl.uint8 else 1
    return parts if code_vec >= 2 and block_d >= least * parts else 1


@triton.constexpr_function
def key_parts(dtype, rotates, code_vec, block_d, head_dim, rotary_dim, first_channel):
    """Returns word_parts for keys, or 1 if they rotate. A part has at least the 16 columns that a tensor core takes.
    The first members of the pairs must fill whole words, and so must the second members and the channels before the
    pairs. Otherwise the result is 1."""
    parts = word_parts(dtype, code_vec, block_d, 16)
    whole = (head_dim | rotary_dim) % (2 * parts) == first_channel % parts == 0
    return parts if whole and not rotates else 1


@triton.constexpr_function
def value_parts(dtype, code_vec, block_d, head_dim):
    """Returns word_parts for values. A part has at least 32 columns. With fewer, some of 4 warps would compute the same
    products."""
    parts = word_parts(dtype, code_vec, block_d, 32)
    return parts if head_dim % parts == 0 else 1


@triton.jit
def unpack_words(words, PARTS: tl.constexpr, dtype: tl.constexpr):
    """Returns the codes of words [M, N]: PARTS tiles [M, N] of `dtype`. Tile p holds code p of every word."""
    if not has_ptx() or dtype == tl.float32:
        if PARTS == 2:
            return ((words << 8) >> 8).to(dtype), (words >> 8).to(dtype)
        else:
            codes = ()
            for part in tl.static_range(PARTS):
                codes += ((((words >> (4 * part)) & 15) - 8).to(dtype),)
            return codes
    elif dtype == tl.bfloat16:
        if PARTS == 2:
            return tl.inline_asm_elementwise(WORDS8_TO_BF16, "=r,=r,r", [words], (tl.bfloat16,) * 2, True, 2)
        else:
            return tl.inline_asm_elementwise(WORDS4_TO_BF16, OF_INT4, [words], (tl.bfloat16,) * 4, True, 2)
    else:
        if PARTS == 2:
            return tl.inline_asm_elementwise(WORDS8_TO_FP16, "=r,=r,r", [words], (tl.float16,) * 2, True, 2)
        else:
            return tl.inline_asm_elementwise(WORDS4_TO_FP16, OF_INT4, [words], (tl.float16,) * 4, True, 2)


@triton.jit
def load_words(
    view, page, row, at, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr, VARIANT: tl.constexpr, dtype: tl.constexpr
):
    """Loads words from rows of a quantized HeadView. Returns their codes: PARTS tiles [M, N] of `dtype`. page, row [M]:
    the rows. at [N]: the indices of the words in a row. Beyond head_dim, 4-bit codes are -8. They have no effect there,
    because queries are 0 and results are not stored."""
    BYTES: tl.constexpr = VARIANT.code_vec
    VEC: tl.constexpr = VARIANT.code_vec // 2
    ptr = tl.multiple_of(view.ptr.to(tl.pointer_type(tl.int16)), BYTES)
    stride_row, stride_batch = tl.multiple_of(view.stride_row // 2, VEC), tl.multiple_of(view.stride_batch // 2, VEC)
    ptrs = ptr + (page * stride_batch + row * stride_row)[:, None] + at[None, :]
    if HEAD_DIM == at.shape[0] * PARTS:
        return unpack_words(tl.load(ptrs), PARTS, dtype)
    else:
        return unpack_words(tl.load(ptrs, mask=(at < HEAD_DIM // PARTS)[None, :], other=0), PARTS, dtype)


@triton.jit
def split_columns(x, PARTS: tl.constexpr):
    """Splits x [M, N] into PARTS (1, 2 or 4) tiles [M, N / PARTS]. Column c goes to tile c % PARTS."""
    if PARTS == 1:
        return (x,)
    else:
        even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
        if PARTS == 2:
            return even, odd
        else:
            first, third = split_columns(even, 2)
            second, fourth = split_columns(odd, 2)
            return first, second, third, fourth


@triton.jit
def join_columns(parts):
    """Joins the tiles that split_columns returns."""
    if len(parts) == 1:
        return parts[0]
    elif len(parts) == 2:
        return interleave(parts[0], parts[1])
    else:
        return interleave(interleave(parts[0], parts[2]), interleave(parts[1], parts[3]))


@triton.jit
def load_packed(ptr, offsets, at, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, dtype: tl.constexpr):
    """Loads bytes `at` [N] of the rows at offsets [M, 1]. Returns the codes in their low and in their high halves: two
    tiles [M, N] of `dtype`. Beyond head_dim the codes are -8. They have no effect there, because queries are 0 and
    results are not stored."""
    ptrs = ptr + offsets + at[None, :]
    if HEAD_DIM == BLOCK_D:
        return unpack(tl.load(ptrs), dtype)
    else:
        return unpack(tl.load(ptrs, mask=(at < HEAD_DIM // 2)[None, :], other=0), dtype)


@triton.jit
def load_packed_channels(ptr, offsets, channels, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, dtype: tl.constexpr):
    """Returns the 4-bit codes [M, N] of any channels [N]. Loads one byte per code."""
    low, high = load_packed(ptr, offsets, channels // 2, HEAD_DIM, BLOCK_D, dtype)
    return tl.where((channels % 2 == 0)[None, :], low, high)


@triton.jit
def interleave(low, high):
    """Joins two tiles [M, N] to one tile [M, 2 N] that alternates their columns."""
    return tl.reshape(tl.join(low, high), (low.shape[0], 2 * low.shape[1]))


SHORT_PRODUCT = tl.constexpr(32)  # a tl.dot that adds up fewer terms needs hide_codes


@triton.jit
def hide_codes(x):
    """Returns the tile x [M, N] unchanged. Hides from Triton that x was joined from 8-bit loads.

    Use it on an operand of a tl.dot that was joined from codes, if the tl.dot adds up fewer than SHORT_PRODUCT terms.
    Symptom under Triton 3.6.0 without it: compiled products are wrong, while interpreted ones are right.
    docs/kernels.md has a small kernel that shows this.

    Triton chooses how many adjacent elements along the reduction a lane holds (kWidth in the TTGIR). It derives kWidth
    from the narrowest load of the operand, and a join halves that width. For joined codes kWidth is 8. Four lanes share
    a row, so a row needs 32 elements. If a row has 16, two of the lanes hold copies, and the product adds these, too.

    The branch is always taken. It hides the loads, because Triton does not search for loads beyond the result of a
    branch. The cast keeps the compiler from replacing the branch by a select."""
    if not has_ptx() or x.dtype == tl.float32:
        return x
    else:
        bits = tl.zeros(x.shape, tl.int16)
        if tl.num_programs(0) > 0:
            bits = x.to(tl.int16, bitcast=True)
        return bits.to(x.dtype, bitcast=True)


@triton.jit
def join_codes(low, high, TERMS: tl.constexpr):
    """Joins two tiles of codes [M, N] to an operand [M, 2 N] of a tl.dot that adds up TERMS terms."""
    if TERMS < SHORT_PRODUCT:
        return hide_codes(interleave(low, high))
    else:
        return interleave(low, high)


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


@triton.jit
def quantize_rows(x, LARGEST: tl.constexpr):
    """Quantizes each row of x [M, D]. Returns (codes, scales): integers in float32 [M, D], and float32 [M]. LARGEST:
    the largest code."""
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
