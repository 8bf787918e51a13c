"""Tests the compile gate on small kernels of known size: whether it counts right, and whether it reports every kind of
limit that is exceeded."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

triton = pytest.importorskip("triton", reason="the gate compiles Triton kernels")
ROOT = Path(__file__).resolve().parents[2]
slow = pytest.mark.slow  # these tests compile kernels

from flashrope.triton_kernels.configs import Tile

from bench.machine_code import candidates as ranking
from bench.machine_code import cases, gate, limits, offline, sass
from bench.machine_code.offline import Measured

# The program has a tiled product with 64x64 tiles, K in steps of 32, and 4 warps. A step has 64*64*32 / (16*8*16) = 64
# HMMA. That is 16 per warp. On sm_90 the only warp group issues two HGMMA with K = 16 per step.
PROGRAM = """
import dataclasses, json, sys
import torch, triton, triton.language as tl
from bench import sanitize
from bench.machine_code import candidates as ranking
from bench.machine_code import cases, gate, offline, sass
from flashrope.backends.triton import launcher
from flashrope.backends.triton.chosen_tiles import forced
from flashrope.lab.tuning import candidates
from flashrope.lab.tuning.workloads import Workload

@triton.jit
def product(a, b, c, K, BLOCK: tl.constexpr, STEP: tl.constexpr):
    rows = tl.arange(0, BLOCK)
    steps = tl.arange(0, STEP)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, STEP):
        x = tl.load(a + rows[:, None] * K + k + steps[None, :])
        y = tl.load(b + (k + steps)[:, None] * BLOCK + rows[None, :])
        acc = tl.dot(x, y, acc)
    tl.store(c + rows[:, None] * BLOCK + rows[None, :], acc)

def launch(arch, step=32, K=4096, num_stages=2, **options):
    x = torch.empty(1 << 20, dtype=torch.float16, device="meta")
    return offline.catch(arch, product, x, x, x.float(), K, 64, step, num_warps=4, num_stages=num_stages, **options)

launches = {"sm_80": launch(80), "sm_90": launch(90), "spilling": launch(80, maxnreg=32),
            "large": launch(80, step=256, num_stages=4), "three stages": launch(80, num_stages=3),
            "other length": launch(80, K=8192), "odd length": launch(80, K=4097)}
found = {name: {"key": str(caught.key)} for name, caught in launches.items()}
for name in ("sm_80", "sm_90", "spilling", "large", "three stages"):
    compiled = launches[name].compile()
    found[name] |= dataclasses.asdict(offline.measure(compiled))
    tool, offline.tool = offline.tool, lambda name: None
    found[name]["without_tools"] = dataclasses.asdict(offline.measure(compiled))
    offline.tool = tool

wgmma = launches["sm_90"].compile()
found["sm_90"]["says"] = offline.ptxas_log(wgmma)
accumulator = wgmma.asm["ptx"].split("wgmma.mma_async", 1)[1].split("{", 1)[1].split(",", 1)[0]
commit = "wgmma.commit_group.sync.aligned;"
early = wgmma.asm["ptx"].replace(commit, f"{commit} add.f32 {accumulator}, {accumulator}, {accumulator};", 1)
wgmma.asm["ptx"] = early  # reads and writes a sum before the wait for it
found["early"] = {"says": offline.ptxas_log(wgmma), "serialised": offline.measure(wgmma).serialised}

found["compiled before"] = {"key": str(launch(80).key)}

rows = gate.plan(cases.cases(quick=True)[:2])
found["planned"] = [[row.kernel, len(row.cases)] for row in rows]
found["sanitized"] = sorted({caught.kernel.__name__ for caught in sanitize.launches(90, torch.bfloat16)})

found["first tiles"] = []
for arch in (80, 90):
    workload = Workload("forward", 1, 1000, 8, 2, 128, torch.bfloat16, 1, "")
    with offline.caught_launches(launcher, arch) as caught:
        workload.call(torch.device("meta"))()
    forward = next(launch for launch in caught if launch.kernel.__name__ == "attention_forward").compile()
    opcodes = sass.disassemble(forward.asm["cubin"], offline.tool("nvdisasm")).opcodes
    found["first tiles"].append([opcode for opcode in opcodes if opcode.startswith(("CCTL", "LDG.E.128", "LDGSTS"))])

found["tuned"] = []
for direction in candidates.KERNELS:
    tile = candidates.tiles(direction)[0]
    for cache in ("contiguous", "paged") if direction == "decode" else ("",):
        workload = Workload(direction, 1, 1000, 8, 2, 64, torch.bfloat16, 2, cache)
        with forced(direction, tile), offline.caught_launches(launcher, 90) as caught:
            workload.call(torch.device("meta"))()
        used = ranking.of_direction(direction, caught).kwargs
        shape, sizes = used["VARIANT"], (used["num_warps"], used["num_stages"])
        found["tuned"].append([[shape.block_m, shape.block_n, *sizes], list(tile)])
candidates.GRIDS["decode"] = ((16,), (64,), (4,), (3,))
found["judged"] = [[each.figures, each.rank] for each in ranking.ranked_by_machine_code("decode", 80, 64, 1, jobs=1)]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Returns the measured kernels. They are compiled in another process, because this process may interpret
    kernels."""
    program = tmp_path_factory.mktemp("gate") / "program.py"
    program.write_text(PROGRAM)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": os.pathsep.join(paths)}
    run = subprocess.run([sys.executable, program], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@slow
@pytest.mark.parametrize(("arch", "products"), [("sm_80", 16), ("sm_90", 2)])
def test_products_of_the_hot_loop(compiled, arch, products):
    loop = compiled[arch]["loop"]
    assert loop["mma"] == products
    assert loop["total"] > products and "local" not in loop


@slow
@pytest.mark.parametrize("name", ["sm_80", "sm_90", "spilling", "large"])
def test_registers_and_spills_are_what_ptxas_reports(compiled, name):
    kernel = compiled[name]
    reported = kernel["without_tools"]
    of_listing = {"loop", "loop_spills", "model"}
    assert kernel["serialised"] == ""
    assert {reported[field] for field in of_listing} == {None}
    assert all(kernel[field] == reported[field] for field in reported if field not in of_listing)
    assert (kernel["spill_stores"] > 0) == (kernel["spill_loads"] > 0) == (name == "spilling")


@slow
def test_spills_in_the_hot_loop(compiled):
    kernel = compiled["spilling"]
    assert kernel["loop"]["local"] > 0
    assert 0 < kernel["loop_spills"] < kernel["spill_stores"] + kernel["spill_loads"]
    assert compiled["sm_80"]["loop_spills"] == 0


@slow
def test_the_first_keys_and_values_are_requested_before_the_queries_are_read(compiled):
    for opcodes in compiled["first tiles"]:
        assert opcodes[:3] == ["CCTL.E.PF2", "CCTL.E.PF2", "LDG.E.128"]
        assert any(opcode.startswith("LDGSTS") for opcode in opcodes)


@slow
def test_the_gate_refuses_wgmma_that_waits(compiled):
    """The accumulator of a product is read before the wait for the product, so ptxas adds a wait and says so."""
    assert "(C75" in compiled["early"]["says"] and "(C75" not in compiled["sm_90"]["says"]
    says = compiled["early"]["serialised"]
    [found] = row(serialised=says).violations()
    assert ": ptxas lets wgmma wait: (C7517) " in found
    for kernel, scheme in limits.SERIALISED:
        assert scheme == cases.ONE_BAND.name
        assert not row(kernel, cases.Case(90, 128, "bf16", cases.ONE_BAND), serialised=says).violations()


@pytest.mark.parametrize(("number", "refused"), [(7509, False), (7510, True), (7518, True), (7519, False)])
def test_messages_of_ptxas_about_wgmma(number, refused):
    line = (
        f"(C{number}) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ... in 'product'"
    )
    log = f"ptxas info    : 0 bytes gmem\nptxas info    : {line}\nptxas info    : Used 62 registers\n"
    assert offline.serialised(log) == (line if refused else "")


@slow
def test_slots(compiled):
    """mma.sync reads tiles from registers, so shared memory holds only one of two stages. wgmma reads tiles from shared
    memory, so shared memory holds both stages."""
    assert [compiled[name]["slots"] for name in ("sm_80", "three stages", "large", "sm_90")] == [1, 2, 3, 2]


@slow
def test_launches_with_equal_specialisation_share_a_key(compiled):
    assert compiled["other length"]["key"] == compiled["compiled before"]["key"] == compiled["sm_80"]["key"]
    assert compiled["odd length"]["key"] != compiled["sm_80"]["key"]  # 16 does not divide 4097: no vector loads
    assert compiled["sm_90"]["key"] != compiled["sm_80"]["key"]


CASE = cases.Case(80, 128, "bf16", cases.ONE_BAND)


def row(kernel="attention_forward", case=CASE, measured=None, groups=1, **figures):
    if measured is None:
        defaults = {"registers": 128, "spill_stores": 0, "spill_loads": 0, "shared": 0, "warps": 4, "stages": 2}
        measured = Measured(**(defaults | {"loop": None} | figures))
    launch = SimpleNamespace(
        kernel=SimpleNamespace(__name__=kernel),
        arch=case.arch,
        kwargs={"VARIANT": SimpleNamespace(block_n=64, key_groups=groups)},
        stores_scores=False,
    )
    return gate.Row(launch, [case], measured)


@slow
def test_violations_name_the_kernel_and_the_limit(compiled):
    fields = [field.name for field in dataclasses.fields(Measured)]

    def found(name):
        # The figures of the loop are left out, because a bare product has a different instruction mix from attention.
        measured = {field: compiled[name][field] for field in fields} | {"loop": None}
        return row(measured=Measured(**measured)).violations()

    assert found("sm_80") == []
    spill, touched = found("spilling")
    expected = (
        f"touches {compiled['spilling']['loop_spills']} spilled bytes per thread in its tile loops, the limit is 0"
    )
    assert touched.endswith(expected)
    assert spill.startswith("attention_forward sm_80 128 bf16 1 rope: spills") and spill.endswith("the limit is 0")
    [shared] = found("large")
    assert f"needs {compiled['large']['shared']} bytes of shared memory, a block of sm_80 has 166912" in shared
    [failed] = row(measured="PTXASError: out of luck").violations()
    assert "does not compile: PTXASError: out of luck" in failed


NARROW = [(192, scheme, spill) for scheme, spill in zip(cases.VALUES, (0, 24), strict=True)]
NO_SPILL = [(arch, *row) for arch in (80, 86, 90) for row in NARROW]
NO_SPILL += [(80, 64, cases.UNALIGNED, 0), (80, 128, cases.UNALIGNED, 0), (90, 256, cases.ONE_BAND, 0)]


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="the tiles were chosen for Triton 3.6")
@pytest.mark.parametrize(
    ("arch", "head_dim", "scheme", "of_grad_kv"), NO_SPILL, ids=lambda x: getattr(x, "name", str(x))
)
def test_narrow_values_and_these_forwards_spill_nothing_in_the_tile_loops(arch, head_dim, scheme, of_grad_kv):
    case = cases.Case(arch, head_dim, "bf16", scheme)
    for kernel in sorted(case.kernels) if head_dim == 192 else ["attention_forward"]:
        limit = of_grad_kv if kernel == "attention_grad_kv" else 0
        assert not row(kernel, case, spill_stores=limit).violations()
        assert row(kernel, case, spill_stores=limit + 4).violations() and row(kernel, case, loop_spills=4).violations()


@pytest.mark.parametrize(
    "case",
    [
        cases.Case(80, 256, "bf16", cases.ONE_BAND),
        cases.Case(90, 96, "bf16", cases.ONE_BAND),
        cases.Case(86, 128, "bf16", cases.ONE_BAND),
        cases.Case(80, 64, "fp32", cases.ONE_BAND),
        *(cases.Case(80, 128, "bf16", scheme) for scheme in cases.VARIANTS if scheme.aligned),
    ],
    ids=lambda case: f"sm_{case.arch} {case.head_dim} {case.dtype} {case.scheme.name}",
)
def test_elsewhere_a_spill_is_listed_with_its_figure(case):
    spilling = row(case=case, spill_stores=512, loop_spills=64)
    assert not spilling.violations()
    assert (spilling.figures()["spill B"], spilling.figures()["in loops"]) == ("512", "64")


@pytest.mark.parametrize(("arch", "limit"), [(80, 163), (86, 99), (89, 99), (90, 227)])
def test_shared_memory_limit(arch, limit):
    case = cases.Case(arch, 128, "bf16", cases.ONE_BAND)
    assert not row(case=case, shared=limit * 1024).violations()
    assert row(case=case, shared=limit * 1024 + 16).violations()


@pytest.mark.parametrize(
    ("cache", "wide", "narrow", "passes"),
    [
        ("contiguous", 8, 0, True),
        ("contiguous", 8, 4, False),
        ("contiguous", 0, 16, False),
        ("contiguous", 9, 0, False),
        ("paged", 8, 4, True),  # page numbers
        ("paged", 4, 12, False),
    ],
)
def test_keys_and_values_are_read_once_in_vectors(cache, wide, narrow, passes):
    """Keys and values are read once, in 16-byte loads. 64 keys and 64 values of 128 two-byte channels take 8 such loads
    in each thread of 8 warps."""
    decode = next(scheme for scheme in cases.DECODE if scheme.name == f"rerope {cache}")
    loop = {"mma": 16, "total": 200, "global": wide + narrow, "global 16 B": wide}
    chunk = next(scheme for scheme in cases.CHUNKS if scheme.name == f"rope {cache} chunk")
    for kernel, scheme in (("attention_decode", decode), ("attention_chunks", chunk)):
        reading = row(kernel, cases.Case(80, 128, "bf16", scheme), warps=8, loop=loop, slots=2)
        assert reading.figures()["16 B loads"] == str(wide)
        assert (reading.violations() == []) == passes


@pytest.mark.parametrize(
    ("scheme", "most"), [("rerope contiguous", 2), ("rerope contiguous splits", 2), ("self-extend paged", 5)]
)
def test_groups_of_keys_do_not_wait_for_each_other(scheme, most):
    every = (*cases.DECODE, *cases.SPLITS, *cases.MAPS_DECODE)
    case = cases.Case(80, 128, "bf16", next(each for each in every if each.name == scheme))
    loop = {"mma": 16, "total": 200, "global": 16, "global 16 B": 16, "barrier": most}
    assert not row("attention_decode", case, warps=4, loop=loop, slots=2, groups=4).violations()
    loop["barrier"] += 1
    assert not row("attention_decode", case, warps=4, loop=loop, slots=2).violations()
    (found,) = row("attention_decode", case, warps=4, loop=loop, slots=2, groups=4).violations()
    assert found.endswith(f"{most + 1} barriers in the hot loop with groups of keys, the limit is {most}")


@pytest.mark.parametrize("kernel", ["attention_decode", "attention_chunks"])
@pytest.mark.parametrize(("cache", "needed"), [("contiguous", False), ("paged", True)])
def test_keys_and_values_of_a_paged_cache_have_two_slots(kernel, cache, needed):
    schemes = cases.DECODE if kernel == "attention_decode" else cases.CHUNKS
    case = cases.Case(80, 96, "bf16", next(scheme for scheme in schemes if scheme.cache == cache))

    def violations(slots, case=case, stages=3, **figures):
        return row(kernel, case, loop={"mma": 16, "total": 16}, slots=slots, stages=stages, **figures).violations()

    assert not violations(2) and not violations(None, dataclasses.replace(case, dtype="fp32"))
    for slots in (None, 1):
        assert bool(violations(slots)) == needed
    # One slot is enough for a two-stage tile if two blocks fit on a multiprocessor.
    assert not violations(1, stages=2, shared=80 * 1024)
    assert bool(violations(1, stages=2, shared=90 * 1024)) == bool(violations(None, stages=2)) == needed


LISTING = """
\t.section\t.text.kernel,"ax",@progbits
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_3) ;
.L_x_0:
        /*0020*/                   LDL.LU R5, [R1+0x4] ;
.L_x_1:
        /*0030*/                   HMMA.16816.F32.BF16 R88, R4, R8, R88 ;
        /*0040*/                   FSEL R2, R3, R4, P0 ;
        /*0050*/                   FFMA R2, R3, R4, R5 ;
        /*0060*/               @P1 BRA `(.L_x_1) ;
.L_x_2:
        /*0070*/                   LDSM.16.MT88.4 R4, [R2] ;
        /*0080*/                   HMMA.16816.F32.BF16 R88, R4, R8, R88 ;
        /*0090*/                   LDGDEPBAR ;
        /*00a0*/              @UP2 BRA.U `(.L_x_2) ;
        /*00b0*/                   STL.128 [R1], R4 ;
        /*00c0*/                   STL.64 [R1], R4 ;
        /*00d0*/              @!P2 BRA `(.L_x_0) ;
.L_x_3:
        /*00e0*/                   EXIT ;
.L_x_4:
        /*00f0*/                   BRA `(.L_x_4);
        /*0100*/                   NOP;
"""


def test_listing():
    listing = sass.parse(LISTING)
    assert len(listing.opcodes) == 17 and listing.opcodes[10] == "BRA.U"
    assert listing.loops == ((2, 13), (3, 6), (7, 10), (15, 15))
    assert sass.local_bytes(listing) == (24, 4)
    assert sass.local_bytes_in_loops(listing) == 0  # local memory is accessed only in the outer loop
    assert sass.mix(listing.opcodes)["total"] == 16  # the NOP does not count
    first, second = sass.tile_loops(listing)  # leaves out the outer loop and the endless loop
    assert first == {"mma": 1, "products": 1, "fp32": 1, "other": 2, "total": 4}
    assert second == {"ldsm": 1, "mma": 1, "products": 1, "other": 2, "total": 4}
    assert sass.hot_loop(sass.parse("")) is None


def test_local_memory_in_tile_loops():
    spilled = "LDL.64 R2, [R1] ;\n        /*0058*/                   STL [R1], R2 ;"
    listing = sass.parse(LISTING.replace("FFMA R2, R3, R4, R5 ;", spilled))
    assert sass.local_bytes(listing) == (28, 12) and sass.local_bytes_in_loops(listing) == 12


def test_hot_loop_is_the_one_without_masks():
    masked = LISTING.replace(
        "FSEL R2, R3, R4, P0 ;", "FSEL R2, R3, R4, P0 ;\n        /*0048*/                   FSEL R2, R3, R4, P0 ;"
    )
    assert sass.hot_loop(sass.parse(masked))["ldsm"] == 1


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        ("HGMMA.64x128x16.F32.BF16", "mma"),
        ("MUFU.EX2", "mufu"),
        ("FMUL.FTZ", "fp32"),
        ("FSETP.GT.AND", "other"),
        ("LDSM.16.M88.4", "ldsm"),
        ("LDS.128", "shared"),
        ("STSM.16.M88.4", "shared"),
        ("LDGSTS.E.BYPASS.128", "global"),
        ("LDGDEPBAR", "other"),
        ("LDL.LU", "local"),
        ("BAR.SYNC.DEFER_BLOCKING", "barrier"),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT", "barrier"),
        ("LDC.64", "other"),
    ],
)
def test_classes(opcode, expected):
    assert sass.classify(opcode) == expected


@slow
def test_every_pass_of_a_case_is_caught(compiled):
    """The plan has all launches of a case. Cases with one and with two bands share three kernels that do not depend on
    bands: the rotation of queries, the rotation of keys, and delta."""
    alone = [(kernel, 1) for kernel in ("attention_forward", "attention_grad_kv", "attention_grad_q")] * 2
    shared = [("attention_statistics", 2), ("rotate_rows", 2)]
    assert sorted(map(tuple, compiled["planned"])) == sorted(alone + shared)


@slow
def test_sanitize_launches_every_kernel(compiled):
    assert compiled["sanitized"] == sorted({*cases.KERNELS, *cases.DECODE_KERNELS, *cases.CHUNK_KERNELS})


@pytest.mark.parametrize(
    ("arch", "scheme", "most"),
    [
        (90, cases.ATOMIC[0], 3 if triton.__version__.startswith("3.6.") else 0),
        (90, cases.ONE_BAND, 0),
        (100, cases.ATOMIC[0], 0),
    ],
)
def test_candidates_may_touch_spilled_registers_as_often_as_the_gate_allows(arch, scheme, most):
    case = cases.Case(arch, 128, "bf16", scheme)
    allowed = limits.hot_loop_spills("attention_grad_kv", case)
    variant = SimpleNamespace(head_dim=128)
    launch = SimpleNamespace(arch=arch, kwargs={"VARIANT": variant}, stores_scores=False)
    for times in (0, most, most + 1):
        loop = {"mma": 32, "total": 520, "local": times}
        measured = Measured(255, 0, 0, 180 * 1024, 8, 3, loop)
        judged = ranking.judged("grad_qkv", Tile(64, 128, 8, 3), launch, measured, allowed)
        assert (judged.rank is None) == (times > most)
    assert (
        judged.figures["dropped"] == f"touches spilled registers {most + 1} times in the hot loop, the limit is {most}"
    )
