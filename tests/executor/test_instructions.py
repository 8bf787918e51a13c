"""Compares the results of single instructions with the PTX ISA."""

import pytest
import torch

from .machine.driver import Machine
from .machine.kernel import Kernel
from .machine.launches import ExecutionError

FP16, BF16 = torch.float16, torch.bfloat16
LANE = torch.arange(32)[:, None]
GROUP, MEMBER = LANE // 4, LANE % 4  # PTX ISA: groupID and threadID_in_group

PTX = """
.version 8.7
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 dynamic_bytes[];
.entry probe(
	.param .u64 probe_in,
	.param .u64 probe_out
)
.maxntid 32, 1, 1
{{
	.shared .align 4 .b8 static_bytes[128];
	.reg .pred %p<9>;
	.reg .b16 %rs<9>;
	.reg .b32 %x<{inputs}>;
	.reg .b32 %y<{outputs}>;
	.reg .b32 %r<9>;
	.reg .b64 %rd<9>;
	ld.param.u64 %rd1, [probe_in];
	ld.param.u64 %rd2, [probe_out];
	mov.u32 %r1, %tid.x;
	mov.u32 %r2, %ctaid.x;
	mad.lo.s32 %r2, %r2, 32, %r1;
	mad.wide.u32 %rd1, %r2, {in_bytes}, %rd1;
	mad.wide.u32 %rd2, %r2, {out_bytes}, %rd2;
{loads}
{body}
{stores}
	ret;
}}
"""


def run(body: str, x: torch.Tensor, outputs: int, shared_bytes: int = 0) -> torch.Tensor:
    """Returns int32 (rows, outputs) that the body computes from x (rows, inputs), with 32 rows per block. The body
    reads %x0, %x1, ... and writes %y0, %y1, ..."""
    inputs, out = x.shape[1], torch.zeros(len(x), outputs, dtype=torch.int32)
    text = PTX.format(
        inputs=inputs,
        outputs=outputs,
        in_bytes=4 * inputs,
        out_bytes=4 * outputs,
        loads="\n".join(f"ld.global.u32 %x{n}, [%rd1+{4 * n}];" for n in range(inputs)),
        stores="\n".join(f"st.global.u32 [%rd2+{4 * n}], %y{n};" for n in range(outputs)),
        body=body,
    )
    kernel = Kernel(Machine.current, text)
    kernel((len(x) // 32,), x.contiguous(), out, shared_bytes=shared_bytes)
    return out


def random(*shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_mma_holds_its_fragments_as_the_ptx_isa_says(dtype):
    a, b, c = random(16, 16, dtype=dtype, seed=0), random(16, 8, dtype=dtype, seed=1), torch.randn(16, 8)
    i = torch.arange(8)[None]  # a0 to a7
    fragment_a = a[
        torch.where((i < 2) | ((i >= 4) & (i < 6)), GROUP, GROUP + 8), MEMBER * 2 + i % 2 + torch.where(i >= 4, 8, 0)
    ]
    i = i[:, :4]  # b0 to b3, c0 to c3
    fragment_b = b[MEMBER * 2 + i % 2 + torch.where(i >= 2, 8, 0), GROUP.expand(32, 4)]
    at = torch.where(i < 2, GROUP, GROUP + 8), MEMBER * 2 + i % 2
    x = torch.cat([fragment.contiguous().view(torch.int32) for fragment in (fragment_a, fragment_b, c[at])], 1)
    name = "f16" if dtype == FP16 else "bf16"
    body = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 "
        "{%y0,%y1,%y2,%y3}, {%x0,%x1,%x2,%x3}, {%x4,%x5}, {%x6,%x7,%x8,%x9};"
    )
    expected = c.double() + a.double() @ b.double()
    torch.testing.assert_close(run(body, x, 4).view(torch.float32).double(), expected[at], rtol=0, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_deals_rows_as_the_ptx_isa_says(transposed):
    numbers = torch.arange(256, dtype=torch.int16).view(4, 8, 8)
    body = f"""
        mov.u32 %r3, dynamic_bytes;
        shl.b32 %r4, %r1, 4;
        add.s32 %r3, %r3, %r4;
        st.shared.v4.u32 [%r3], {{%x0,%x1,%x2,%x3}};
        bar.warp.sync -1;
        ldmatrix.sync.aligned.m8n8.x4{".trans" * transposed}.shared.b16 {{%y0,%y1,%y2,%y3}}, [%r3];
    """
    registers = run(body, numbers.view(32, 8).view(torch.int32), 4, 512).view(torch.int16).view(32, 4, 2)
    for matrix in range(4):
        x = numbers[matrix].T if transposed else numbers[matrix]
        assert torch.equal(registers[:, matrix], x[GROUP, MEMBER * 2 + torch.arange(2)])


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_two_byte_types_round_as_torch_does(dtype):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200_000,), dtype=torch.int64, generator=generator).to(torch.int32)
    near = torch.randn(100_000, generator=generator) * torch.logspace(-9, 5, 100_000)
    x = torch.cat([bits.view(torch.float32), near, torch.tensor([0.0, -0.0, 65519.0, 65520.0, 2.0**-25, 3 * 2.0**-25])])
    x = x[x.isfinite()]
    x = torch.cat([x, x[: -len(x) % 32]])
    name = "f16" if dtype == FP16 else "bf16"
    body = f"""
        cvt.rn.{name}.f32 %rs1, %x0;
        cvt.u32.u16 %y0, %rs1;
        {{.reg .{name} low, high;
        mov.b32 {{low,high}}, %y0;
        cvt.f32.{name} %y1, low;}}
    """
    narrow, wide = run(body, x.view(torch.int32)[:, None], 2).unbind(1)
    assert torch.equal(narrow.to(torch.int16), x.to(dtype).view(torch.int16))
    finite = x.to(dtype).isfinite()
    assert torch.equal(wide.view(torch.float32)[finite], x.to(dtype).float()[finite])


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        ("add.f32x2 %rd6, %rd3, %rd4;", lambda a, b, c: a + b),
        ("sub.rn.f32x2 %rd6, %rd3, %rd4;", lambda a, b, c: a - b),
        ("mul.f32x2 %rd6, %rd3, %rd4;", lambda a, b, c: a * b),
        ("fma.rn.f32x2 %rd6, %rd3, %rd4, %rd5;", lambda a, b, c: (a.double() * b.double() + c.double()).float()),
    ],
)
def test_pairs_of_float32(opcode, expected):
    a, b, c = (random(64, 2, dtype=torch.float32, seed=seed) for seed in range(3))
    pack = "".join(f"mov.b64 %rd{3 + n}, {{%x{2 * n}, %x{2 * n + 1}}};\n" for n in range(3))
    body = f"{pack}{opcode}\nmov.b64 {{%y0, %y1}}, %rd6;"
    out = run(body, torch.cat((a, b, c), 1).view(torch.int32), 2).view(torch.float32)
    torch.testing.assert_close(out, expected(a, b, c), rtol=1e-7, atol=0)


def test_the_low_half_of_a_pair_is_its_own():
    x = torch.arange(32, dtype=torch.int32)[:, None]
    pair = "mov.b64 %rd3, {%x0, %r8};\n"  # %r8 has no value
    assert torch.equal(run(pair + "cvt.u32.u64 %y0, %rd3;", x, 1), x)
    with pytest.raises(ExecutionError, match="register used before it was written"):
        run(pair + "mov.b64 {%r3, %y0}, %rd3;", x, 1)
    with pytest.raises(ExecutionError, match="register used before it was written"):
        run(pair + "mov.b64 %rd3, {%r8, %x0};\ncvt.u32.u64 %y0, %rd3;", x, 1)


@pytest.mark.parametrize(
    ("opcode", "b", "c", "source", "inside"),
    [
        ("bfly", 5, 31, lambda lane: lane ^ 5, lambda lane: lane >= 0),
        ("idx", 9, 31, lambda lane: lane * 0 + 9, lambda lane: lane >= 0),
        ("up", 3, 0, lambda lane: torch.where(lane >= 3, lane - 3, lane), lambda lane: lane >= 3),
        ("down", 3, 31, lambda lane: torch.where(lane < 29, lane + 3, lane), lambda lane: lane < 29),
        # segments of 8 lanes
        ("idx", 2, 0x181F, lambda lane: lane // 8 * 8 + 2, lambda lane: lane >= 0),
        ("down", 3, 0x181F, lambda lane: torch.where(lane % 8 < 5, lane + 3, lane), lambda lane: lane % 8 < 5),
    ],
)
def test_shuffles(opcode, b, c, source, inside):
    body = f"""
        mov.u32 %r5, {b}; mov.u32 %r6, {c}; mov.u32 %r7, -1;
        shfl.sync.{opcode}.b32 %y0|%p1, %x0, %r5, %r6, %r7;
        selp.u32 %y1, 1, 0, %p1;
    """
    x, lane = torch.arange(100, 132, dtype=torch.int32)[:, None], LANE[:, 0]
    values, predicates = run(body, x, 2).unbind(1)
    assert torch.equal(values, x[source(lane), 0]) and torch.equal(predicates, inside(lane).int())


def test_reductions():
    x = torch.randint(-(1 << 26), 1 << 26, (64, 1), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    body = "mov.u32 %r7, -1;" + "".join(
        f"redux.sync.{name}.s32 %y{n}, %x0, %r7;" for n, name in enumerate(("add", "min", "max"))
    )
    got, blocks = run(body, x, 3).view(2, 32, 3), x.view(2, 32)
    for n, want in enumerate((blocks.sum(1), blocks.amin(1), blocks.amax(1))):
        assert torch.equal(got[..., n], want.int()[:, None].expand(2, 32))
    unsigned = run(body.replace(".s32", ".u32"), x, 3).view(2, 32, 3).long() % 2**32
    blocks = blocks.long() % 2**32  # a negative number is large
    for n, want in enumerate((blocks.sum(1) % 2**32, blocks.amin(1), blocks.amax(1))):
        assert torch.equal(unsigned[..., n], want[:, None].expand(2, 32))


def test_integers():
    x = torch.tensor([[0x12345678, -1]] * 32, dtype=torch.int32)
    body = """
        bfi.b32 %y0, %x0, %x1, 8, 4;
        bfi.b32 %y1, %x0, %x1, 28, 8;
        bfi.b32 %y2, %x0, %x1, 40, 8;
        ld.global.s32 %rd3, [%rd1+4];
        shr.s64 %rd3, %rd3, 32;
        cvt.u32.u64 %y3, %rd3;
    """
    row = run(body, x, 4)[0].tolist()
    assert [n & 0xFFFFFFFF for n in row] == [0xFFFFF8FF, 0x8FFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF]


def test_lop3():
    """Tests every bit of the table, and the two tables that the kernels use."""
    a, b, c = 0xF0F0CC12, 0xCCCC3455, 0xAAAAF00F
    x = torch.tensor([[a, b, c]] * 32).to(torch.int32)
    body = "".join(f"lop3.b32 %y{n}, %x0, %x1, %x2, {1 << n};\n" for n in range(8))
    body += "lop3.b32 %y8, %x0, %x1, %x2, 0xea; lop3.b32 %y9, %x0, %x1, %x2, 0x6a;"
    row = [n & 0xFFFFFFFF for n in run(body, x, 10)[0].tolist()]
    for n, got in enumerate(row[:8]):
        terms = [x if n & bit else ~x for x, bit in ((a, 4), (b, 2), (c, 1))]
        assert got == terms[0] & terms[1] & terms[2] & 0xFFFFFFFF
    assert row[8:] == [(a & b) | c, (a & b) ^ c]


@pytest.mark.parametrize(("at", "length"), [(0, 64), (20, 30), (40, 40), (63, 1), (64, 8), (5, 0)])
def test_bit_field_of_64_bits(at, length):
    number = 0x9ABCDEF012345678
    words = [number & 0xFFFFFFFF, number >> 32]
    body = f"mov.b64 %rd5, {{%x0, %x1}}; bfe.u64 %rd5, %rd5, {at}, {length}; mov.b64 {{%y0, %y1}}, %rd5;"
    low, high = (n & 0xFFFFFFFF for n in run(body, torch.tensor([words] * 32).to(torch.int32), 2)[0].tolist())
    assert high << 32 | low == number >> at & ((1 << length) - 1)


def test_fma_of_two_halves():
    x = torch.tensor([[1024 + 16 * 5, 1024 + 16 * 15, 0.0625, 0.0625, -72, -72]] * 32).half().view(torch.int32)
    got = run("fma.rn.f16x2 %y0, %x0, %x1, %x2;", x, 1).view(torch.float16)
    assert torch.equal(got, torch.tensor([[-3.0, 7.0]] * 32).half())


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_extremes_of_halves(dtype):
    """The maximum and the minimum of a number and a NaN are the number."""
    x = random(32, 4, dtype=dtype, seed=3)
    x[0], x[1, :2], x[2, 2:] = torch.tensor([torch.inf, -0.0, -torch.inf, 3.0]), torch.nan, torch.nan
    name = "f16x2" if dtype == FP16 else "bf16x2"
    got = run(f"max.{name} %y0, %x0, %x1;\nmin.{name} %y1, %x0, %x1;", x.view(torch.int32), 2).view(dtype)
    a, b = x[:, :2], x[:, 2:]
    assert torch.equal(got[:, :2], torch.fmax(a, b)) and torch.equal(got[:, 2:], torch.fmin(a, b))


def test_static_and_dynamic_shared_memory():
    body = """
        mov.u32 %r3, static_bytes; mov.u32 %r4, dynamic_bytes;
        sub.u32 %y0, %r4, %r3;
        shl.b32 %r5, %r1, 2;
        add.s32 %r3, %r3, %r5; add.s32 %r4, %r4, %r5;
        st.shared.u32 [%r3], %x0; st.shared.u32 [%r4], %r1;
        ld.shared.u32 %y1, [%r3]; ld.shared.u32 %y2, [%r4];
    """
    x = torch.arange(100, 132, dtype=torch.int32)[:, None]
    assert torch.equal(run(body, x, 3, 128), torch.cat([torch.full((32, 1), 128), x, LANE], 1).int())
    with pytest.raises(ExecutionError, match="outside shared memory: probe line"):
        run(body, x, 3, 64)


def test_parameters_have_an_end():
    x = torch.zeros(32, 1, dtype=torch.int32)
    body = "mov.b64 %rd5, probe_out; ld.param.u32 %y0, [%rd5+{}];"
    run(body.format(4), x, 1)
    with pytest.raises(ExecutionError, match="read outside the parameters: probe line"):
        run(body.format(8), x, 1)


@pytest.mark.parametrize(
    ("grid", "shared_bytes", "message"),
    [((0,), 0, "grid of"), ((1, 65536), 0, "grid of"), ((1,), 1 << 20, "bytes of shared memory, the device has")],
)
def test_launches_that_a_driver_refuses(machine, grid, shared_bytes, message):
    text = PTX.format(inputs=1, outputs=1, in_bytes=4, out_bytes=4, loads="", stores="", body="")
    x = torch.zeros(32, 1, dtype=torch.int32)
    Kernel(machine, text)((1,), x, x)
    with pytest.raises(RuntimeError, match=message):
        Kernel(machine, text)(grid, x, x, shared_bytes=shared_bytes)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("opcode", ["atom.global.gpu.relaxed.add", "red.global.add"])
def test_atomic_additions(opcode, width):
    """Lanes of a block with equal numbers modulo 8 add to the same floats. atom returns the previous value."""
    values, results = ([f"%{name}{n}" for n in range(width)] for name in "xy")
    returned = opcode.startswith("atom")
    operands = [f"{{{', '.join(group)}}}" if width > 1 else group[0] for group in (results, values)]
    addition = f"{opcode}{f'.v{width}' if width > 1 else ''}.f32 {operands[0] + ', ' if returned else ''}[%rd3]"
    text = PTX.format(
        inputs=width,
        outputs=width,
        in_bytes=4 * width,
        out_bytes=4 * width,
        loads="\n".join(f"ld.global.u32 {x}, [%rd1+{4 * n}];\nmov.b32 %y{n}, 0;" for n, x in enumerate(values)),
        body=f"""
            mov.u32 %r3, %tid.x;
            setp.lt.u32 %p1, %r3, 8;
            and.b32 %r4, %r3, 24;
            mul.wide.u32 %rd3, %r4, {4 * width};
            sub.s64 %rd3, %rd2, %rd3;
            {addition}, {operands[1]};
        """,
        stores="\n".join(f"@!%p1 st.global.u32 [%rd2+{4 * n}], {y};" for n, y in enumerate(results)),
    )
    x, out = torch.arange(96 * width).view(96, width).float(), torch.zeros(96, width)
    Kernel(Machine.current, text)((3,), x, out)
    x, out = x.view(3, 4, 8, width), out.view(3, 4, 8, width)
    assert torch.equal(out[:, 0], x.sum(1))
    assert torch.equal(out[:, 1:], x.cumsum(1)[:, :-1] if returned else torch.zeros_like(out[:, 1:]))
