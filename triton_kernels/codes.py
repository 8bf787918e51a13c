"""Codes of quantized caches, and their scales. ``flashrope.backends.quantized`` has the formula.

A cache of int8 holds a code a byte. A cache of uint8 holds two: channel 2 c in the low half of a byte, channel 2 c + 1
in the high half, each plus 8. All codes are exact in float16 and bfloat16. A key's scale multiplies its column of the
scores, whatever rotates the codes; a value's scale multiplies its weights.
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
    """Whether kernels may use inline PTX: neither the interpreter nor an AMD GPU takes it. Elsewhere the same values
    come from operations of Triton's language."""
    return not INTERPRETED and is_cuda()


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
    """Converts 8-bit quantized values to this type. Returns other tiles as they are."""
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
    """Converts bytes [M, N] to the 4-bit values in their low and in their high halves, two [M, N] of this type."""
    if not has_ptx() or dtype == tl.float32:
        return ((packed & 15).to(tl.int8) - 8).to(dtype), ((packed >> 4).to(tl.int8) - 8).to(dtype)
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(INT4_TO_BF16, OF_INT4, [packed], (tl.bfloat16, tl.bfloat16), True, 4)
    else:
        return tl.inline_asm_elementwise(INT4_TO_FP16, OF_INT4, [packed], (tl.float16, tl.float16), True, 4)


# ---- words
# A word is 16 bits of a row: two codes of 8 bits, or four of 4. ldmatrix moves words, but not bytes, from shared memory
# to where a tensor core takes them, transposed or not. Code p of every word goes to part p of a tile.
# lop3 with 0xea is (a & b) | c, with 0x6a (a & b) ^ c. No output is written before the last read of the input.

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
    """In how many parts of at least `least` columns codes of this type are read as words; 1 if not as words, or if they
    are no codes."""
    parts = 2 if dtype == tl.int8 else 4 if dtype == tl.uint8 else 1
    return parts if code_vec >= 2 and block_d >= least * parts else 1


@triton.constexpr_function
def key_parts(dtype, code_vec, block_d, head_dim, rotary_dim, first_channel):
    """word_parts of keys that do not rotate. A tensor core takes at least 16 columns. First and second members of pairs
    are whole words, and so are the channels before them."""
    parts = word_parts(dtype, code_vec, block_d, 16)
    return parts if (head_dim | rotary_dim) % (2 * parts) == first_channel % parts == 0 else 1


@triton.constexpr_function
def value_parts(dtype, code_vec, block_d, head_dim):
    """word_parts of values. Below 32 columns, several of 4 warps would compute the same."""
    parts = word_parts(dtype, code_vec, block_d, 32)
    return parts if head_dim % parts == 0 else 1


@triton.jit
def unpack_words(words, PARTS: tl.constexpr, dtype: tl.constexpr):
    """Words [M, N] to their codes in this type: PARTS tiles [M, N]."""
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
    """Returns the codes of words `at` [N] of the rows [M] of a HeadView of codes: PARTS tiles [M, N]. Codes of 4 bits
    are -8 beyond head_dim, where queries are 0 and results are not stored."""
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
    """[M, N] to PARTS (1, 2 or 4) tiles [M, N / PARTS]: column c to tile c % PARTS."""
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
    """The inverse of split_columns."""
    if len(parts) == 1:
        return parts[0]
    elif len(parts) == 2:
        return interleave(parts[0], parts[1])
    else:
        return interleave(interleave(parts[0], parts[2]), interleave(parts[1], parts[3]))


@triton.jit
def load_packed(ptr, offsets, at, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, dtype: tl.constexpr):
    """Returns the codes of bytes `at` [N] of rows at offsets [M, 1]: two [M, N]. Beyond head_dim they
    are -8, where queries are 0 and results are not stored."""
    ptrs = ptr + offsets + at[None, :]
    if HEAD_DIM == BLOCK_D:
        return unpack(tl.load(ptrs), dtype)
    else:
        return unpack(tl.load(ptrs, mask=(at < HEAD_DIM // 2)[None, :], other=0), dtype)


@triton.jit
def load_packed_channels(ptr, offsets, channels, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, dtype: tl.constexpr):
    """Returns the quantized values [M, N] of any channels [N]. Reads a byte for each."""
    low, high = load_packed(ptr, offsets, channels // 2, HEAD_DIM, BLOCK_D, dtype)
    return tl.where((channels % 2 == 0)[None, :], low, high)


@triton.jit
def interleave(low, high):
    """Two [M, N] to [M, 2 N], column by column."""
    return tl.reshape(tl.join(low, high), (low.shape[0], 2 * low.shape[1]))


SHORT_PRODUCT = tl.constexpr(32)  # a reduction below it needs hide_codes


@triton.jit
def hide_codes(x):
    """Returns the tile x [M, N] in 16 bits. Hides from Triton that it was joined from loads of 8 bits.

    Wrap the operand of a tl.dot in it where codes were joined and fewer than SHORT_PRODUCT terms are added up. Symptom
    under Triton 3.6.0 without it: wrong products, while the interpreter is right. Triton chooses how many neighbours
    along the reduction a lane holds (kWidth in the TTGIR) by the narrowest load behind an operand, halved by a join: 8
    for joined codes. Four lanes share a row, so they need 32 neighbours. With 16, two of them hold copies, and the
    product adds the copies. docs/kernels.md has a small kernel that shows it. The branch is always taken: Triton does
    not look for loads behind the result of a branch, and the cast keeps the branch from becoming a select."""
    if not has_ptx() or x.dtype == tl.float32:
        return x
    else:
        bits = tl.zeros(x.shape, tl.int16)
        if tl.num_programs(0) > 0:
            bits = x.to(tl.int16, bitcast=True)
        return bits.to(x.dtype, bitcast=True)


@triton.jit
def join_codes(low, high, TERMS: tl.constexpr):
    """Joins codes, two [M, N], to an operand [M, 2 N] of a product that adds up TERMS terms."""
    if TERMS < SHORT_PRODUCT:
        return hide_codes(interleave(low, high))
    else:
        return interleave(low, high)


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
    """Returns the scales of rows, float32 [N]."""
    return tl.load(view.ptr + page * view.stride_batch + row * view.stride_row)


@triton.jit
def scale_values(weights, v, scales):
    """Applies the scales [N] to the weights [M, N] or to the quantized values v [N, DV], in parts.

    In float16 scaled weights would leave its range, so the values are scaled instead, and rounded once."""
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
    """Quantizes x [M, D]. Returns whole float32 numbers [M, D], and scales float32 [M]."""
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
