"""Tests the logic of the benchmarks: what they reject, count, fit, print and write. Speed is not tested."""

import ast
import dataclasses
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

import support
from flashrope.lab.tuning.timer import MAX_SLEEP_CYCLES, SLEEP_CYCLES
from flashrope.schemes.cos_sin import cos_sin

from bench import __main__ as command_line
from bench import results_page as page
from bench.report import records
from bench.speed import ceilings, check, contestants, options, timer
from bench.speed.contestants import OWN, Contestant, Unavailable, dense, flex, own, prefill_hope, prefill_rerope
from bench.speed.options import Table
from bench.speed.problem import Problem, exponent
from bench.speed.session import Session, expected_time

CPU = torch.device("cpu")
SMALL = Problem(1, 128, 2, 2, 32, torch.float32, CPU, window=32)


def session(*words) -> Session:
    sizes = {"heads": 2, "heads_kv": 2, "head_dim": 32, "seqlens": [128], "tokens": 128, "window": 32}
    argv = ["--device", "cpu", "--seconds", "0", *words]
    return Session("hope", argv, options.parse(options.parser("hope", "Test.", sizes, sizes), argv))


@pytest.fixture(autouse=True)
def quick_ceilings(monkeypatch):
    monkeypatch.setattr(
        ceilings, "ceilings", lambda device, dtype: {"product_tflops": 1.0, "copy_gbs": 10.0, "read_gbs": 10.0}
    )


# ---- counting
def test_operations_are_counted_as_the_literature_does():
    p = Problem(2, 1024, 16, 4, 128, torch.bfloat16, CPU)
    full = 4 * 2 * 16 * 1024**2 * 128
    assert p.flops(False) == full / 2 and p.flops(True) == full / 2 * 3.5
    assert p.replace(causal=False).flops(False) == full
    assert p.replace(decoding=True).flops(False) == 4 * 2 * 16 * 1024 * 128  # one query sees every key
    assert p.replace(window=64).flops(False) == p.flops(False)  # the count is the same for every scheme


def test_bytes_of_a_cache_are_keys_and_values_of_the_key_heads():
    assert Problem(1, 131072, 32, 8, 128, torch.bfloat16, CPU, decoding=True).bytes_of_cache() == 4 * 8 * 131072 * 128
    assert Problem(1, 131072, 32, 8, 128, torch.bfloat16, CPU, decoding=True).bytes_of_q() == 2 * 32 * 128


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="heads: expected a multiple of heads_kv = 3, got 4"):
        Problem(1, 8, 4, 3, 32, torch.float32, CPU)


def test_exponent():
    assert exponent({x: 3 * x**2 for x in (128, 256, 1024)}) == pytest.approx(2)
    assert exponent({1: 5, 10: 5, 100: 5}) == pytest.approx(0)
    noisy = {512: 1.1, 1024: 1.9, 2048: 4.2, 4096: 7.7}
    assert 0.9 < exponent(noisy) < 1.05
    with pytest.raises(ValueError, match="at least two points"):
        exponent({1: 1})


def test_ratio_is_the_median_over_rounds_not_the_ratio_of_medians():
    times = {"peer": [2.0, 30.0, 4.0], "ours": [1.0, 10.0, 8.0]}
    assert timer.ratio(times, "peer", "ours") == 2.0  # the median of 2, 3, 0.5; the ratio of medians would be 0.5
    assert timer.Spread.of([3.0]) == (3.0, 3.0, 3.0)


def test_rounds_alternate_between_calls():
    seen = []
    times = timer.rounds(
        {"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, timer.Timer(CPU), 0.0, min_rounds=4
    )
    assert "".join(seen) == "ab" + "ab" * 4  # one warm-up of each, not counted
    assert {name: len(of) for name, of in times.items()} == {"a": 4, "b": 4}


def test_a_call_that_the_host_queues_late_is_timed_again(monkeypatch):
    """If the host queues a call too late, the call is timed again after a longer sleep of the device, and later calls
    keep this sleep. A call that waits for the device is not repeated forever."""
    late, slept, calls = [True, True, False, False], [], []

    class Event:
        def __init__(self, enable_timing):
            self.record = self.synchronize = lambda: None
            self.query = lambda: late.pop(0) if late else True
            self.elapsed_time = lambda other: 1.5 * len(calls)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    measure = timer.Timer(CPU)
    measure.flush = torch.zeros(4)  # as on a GPU
    assert measure(lambda: calls.append(1)) == 4.5 and measure(lambda: calls.append(1)) == 6.0
    assert slept == [SLEEP_CYCLES * n for n in (1, 2, 4, 4)]
    measure(lambda: calls.append(1))
    assert slept[-1] == MAX_SLEEP_CYCLES


def test_peak_memory_of_a_call():
    def call():
        first = torch.empty(1 << 18)
        del first
        second, third = torch.empty(1 << 18), torch.empty(1 << 18)
        return second, third

    assert timer.Timer(CPU).peak_bytes(call) == pytest.approx(2 * 4 * (1 << 18), abs=4096)


# ---- contestants
@pytest.mark.parametrize(
    "p", [SMALL, SMALL.replace(heads=4), SMALL.replace(causal=False)], ids=["causal", "grouped", "full"]
)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "both"])
def test_contestants_are_correct(p, backward):
    """All contestants that need no compiler are correct or say why they cannot run."""
    reasons = {}
    for contestant in {c.name: c for c in prefill_hope(CPU) + prefill_rerope(CPU)}.values():
        if "compiled" in contestant.name:
            continue
        try:
            assert check.error(contestant, p, backward) < check.TOLERANCE[p.dtype] / 50, contestant.name
        except Unavailable as reason:
            reasons[contestant.name] = str(reason)
    assert reasons["SDPA cuDNN"] == "needs a CUDA device" and "not installed" in reasons["flash-attn 2"]
    assert "fused RoPE + SDPA flash" in reasons and "two FlexAttention passes" in reasons
    assert "not installed" in reasons["flash-attn 3"] and "not installed" in reasons["flash-attn 4"]
    assert reasons["eager RoPE + two calls, SDPA cuDNN"] == "needs a CUDA device" or not p.causal
    assert ("eager RoPE + two calls, SDPA flash" in reasons) == (not p.causal)
    assert not any(name.startswith("flashrope") for name in reasons)


@pytest.mark.parametrize(
    "wrong",
    [
        Contestant("other window", Problem.rerope, lambda p: dense(p.replace(window=p.window + 16))),
        Contestant("RoPE for HoPE", Problem.hope, partial(own, Problem.rope)),
        Contestant("not a number", Problem.none, lambda p: lambda q, k, v: q * torch.nan),
        Contestant(
            "last row unwritten",
            Problem.none,
            lambda p: lambda q, k, v: own(Problem.none, p)(q, k, v) * (torch.arange(q.shape[1]) < 319)[:, None, None],
        ),
    ],
    ids=lambda contestant: contestant.name,
)
def test_wrong_contestant_is_found(wrong):
    assert check.error(wrong, SMALL.replace(head_dim=64, train_length=256), False) > check.TOLERANCE[torch.bfloat16]


def test_wrong_gradient_is_found():
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad / 2

    halved = Contestant(
        "half the gradient", Problem.none, lambda p: lambda q, k, v: own(Problem.none, p)(Half.apply(q), k, v)
    )
    assert check.error(halved, SMALL, False) < 1e-5 < 0.1 < check.error(halved, SMALL, True)


def test_flex_attention_says_that_it_has_no_backward_here():
    q, k, v = SMALL.tensors(grad=True)
    with pytest.raises(Unavailable, match="without a backward"):
        flex(SMALL)(q, k, v)


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
triton_runs = pytest.mark.skipif(
    not (torch.cuda.is_available() or support.INTERPRETED), reason="needs a GPU or Triton's interpreter"
)


@triton_runs
@pytest.mark.parametrize(("heads", "heads_kv"), [(5, 2), (4, 0)], ids=["q and k", "only q"])
@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in place"])
def test_fused_rope_is_rope(heads, heads_kv, in_place):
    """Forward and backward of the fused kernel equal eager RoPE, for lengths that are not multiples of a tile."""
    from bench.speed.fused_rope import rotate

    p = Problem(2, 37, heads, 1, 64, torch.float32, DEVICE)
    cos, sin = (x.float().contiguous() for x in cos_sin(p.rope(), contestants.positions(p)))
    q, k = (torch.randn(2, 37, count, 64, device=DEVICE) for count in (heads, heads_kv))
    grads = [torch.randn_like(x) for x in (q, k)]
    results_of = []
    for rotation in (contestants.eager(p), lambda q, k: rotate(q.clone(), k.clone(), cos, sin, in_place)):
        leaves = [x.clone().requires_grad_() for x in (q, k)]
        out = rotation(*leaves)
        results_of.append([*out, *torch.autograd.grad(out, leaves, [x.clone() for x in grads])])
    torch.testing.assert_close(*results_of, rtol=1e-5, atol=1e-5)


@triton_runs
@pytest.mark.parametrize("way", ["keys_on_cpu", "keys_by_triton"])
def test_rotation_of_the_keys_is_what_hope_does(way):
    from bench.speed import rotation

    device = CPU if way == "keys_on_cpu" else DEVICE
    p = SMALL.replace(seqlen=37, train_length=64, device=device)
    tensors = p.tensors()
    rotated = getattr(rotation, way)(p)(*tensors)
    torch.testing.assert_close(rotated, rotation.exact_keys(Problem.hope, p)(*tensors), rtol=1e-5, atol=1e-5)


@triton_runs
def test_sanitize_says_what_it_runs(monkeypatch, capsys):
    from bench import sanitize

    every = sanitize.cases()
    assert len({case.name for case in every}) == len(every)
    chosen = [case for case in every if "1 tokens, paged" in case.name or case.name == "baselines"][-3:]
    monkeypatch.setattr(sanitize, "cases", lambda: chosen)
    assert sanitize.main(["--device", str(DEVICE), "--dtype", "fp32"]) == 0
    printed = capsys.readouterr().out
    assert "not run: 1 cases with impl='cuda': " in printed
    assert "sanitize: 1 of 2: two bands, head_dim 128, 1 tokens, paged cache, triton" in printed
    assert printed.endswith("sanitize: 2 of 2 done\n")


@triton_runs
def test_probe_reads_everything_once():
    from bench.speed.probe import read

    x = torch.rand(100_003, device=DEVICE)
    assert read(x).double().sum().item() == pytest.approx(x.double().sum().item(), rel=1e-5)


@pytest.mark.slow
def test_compiled_contestants_are_correct():
    pytest.importorskip("torch._inductor", reason="needs torch.compile")
    for contestant in prefill_hope(CPU):
        if contestant.name in ("compiled RoPE + SDPA flash", "compiled RoPE + FlexAttention"):
            assert check.error(contestant, SMALL, False) < 1e-5, contestant.name


# ---- a session
def test_no_ratio_for_a_wrong_contestant(capsys):
    wrong = Contestant("wrong one", Problem.none, partial(own, Problem.rope))
    missing = Contestant("missing one", Problem.none, partial(_raise, Unavailable("not installed")))
    broken = Contestant("broken one", Problem.none, partial(_raise, RuntimeError("no kernel\nmore")))
    s = session()
    s.measure([Table("a table", [wrong, missing, broken, OWN["RoPE"], OWN["HoPE"]], SMALL)])
    assert s.finish() == 0
    assert [record.contestant for record in s.run.records] == ["flashrope RoPE", "flashrope HoPE"]
    assert s.run.absent == {"missing one": "not installed", "broken one": "failed: RuntimeError: no kernel"}
    assert s.run.wrong["wrong one"] > 0.1
    printed = capsys.readouterr().out
    assert "WRONG, not timed: wrong one: error" in printed and "not run (not installed): missing one" in printed
    assert not any("wrong one" in record.ratios for record in s.run.records)


def test_flashrope_wrong_or_failing_exits_with_1():
    for prepare, wrong in (
        (partial(own, Problem.rope), {"flashrope HoPE"}),
        (partial(_raise, RuntimeError("x")), set()),
    ):
        s = session()
        contestants = [dataclasses.replace(OWN["HoPE"], prepare=prepare), OWN["RoPE"]]
        s.measure([Table("a table", contestants, SMALL.replace(head_dim=64, train_length=256))])
        assert s.run.wrong.keys() == wrong and s.finish() == 1


def test_what_does_not_fit_is_skipped_with_a_line(capsys, monkeypatch):
    large = dataclasses.replace(OWN["RoPE"], name="large one", scratch=lambda problem: 1 << 60)
    s = session()
    s.measure([Table("a table", [large, OWN["HoPE"]], SMALL)])
    assert [record.contestant for record in s.run.records] == ["flashrope HoPE"]
    assert "a table: large one: needs about 1073741824.0 GiB" in s.run.skipped[0]
    assert "skipped: a table: large one" in capsys.readouterr().out
    monkeypatch.setattr(s.timer, "free_bytes", lambda: 1000)
    s.measure([Table("no room", [OWN["HoPE"]], SMALL)])
    assert "no room: nothing to time" in capsys.readouterr().out


def test_memory_is_noted_with_the_call_where_that_is_cheap(monkeypatch, capsys):
    s = session()
    s.timer.memory_is_cheap = True
    monkeypatch.setattr(s.timer, "peak_bytes", lambda call: 3 << 20)
    s.measure([Table(title, [OWN["HoPE"]], SMALL) for title in ("one", "two")])
    assert [record.peak_bytes for record in s.run.records] == [None, None]
    s.memory(s.tables[:1])
    assert [record.peak_bytes for record in s.run.records] == [3 << 20, None]
    assert "3.0" in capsys.readouterr().out.splitlines()[-1]


def test_memory_that_runs_out_is_skipped():
    def prepare(problem):
        if problem.seqlen == SMALL.seqlen:
            raise torch.OutOfMemoryError("tried to allocate too much")
        return own(Problem.none, problem)

    s = session()
    s.measure([Table("a table", [Contestant("greedy", Problem.none, prepare), OWN["HoPE"]], SMALL)])
    assert s.run.skipped == ["a table: greedy: OutOfMemoryError: tried to allocate too much"]
    assert [record.contestant for record in s.run.records] == ["flashrope HoPE"]


def test_options(capsys):
    sizes = {"heads": 4, "heads_kv": 4, "head_dim": 64, "seqlens": [512], "tokens": 1024, "window": 64}
    p = options.parser("hope", "Test.", sizes, sizes)
    parsed = options.parse(p, ["--device", "cpu", "--seqlens", "256", "2048"])
    assert [options.problem(parsed, n).batch for n in parsed.seqlens] == [4, 1] and parsed.dtype == torch.float32
    assert options.stem("hope", parsed) == "hope-d64-h4x4-fp32"
    for words, message in (
        (["--device", "tpu"], "--device"),
        (["--heads", "3"], "multiple of --heads-kv 4"),
        (["--seqlens", "0"], "positive integer"),
        (["--out", "a", "--publish"], "not allowed with"),
    ):
        with pytest.raises(SystemExit):
            options.parse(p, ["--device", "cpu", *words])
        assert message in capsys.readouterr().err


def test_the_expected_time_comes_first():
    assert expected_time(8, 5.0).startswith("expected time: 40 s for 8 tables of 5 s each (--seconds)")
    assert expected_time(30, 20.0).startswith("expected time: 10 min 00 s for 30 tables of 20 s each")


@pytest.mark.slow
def test_measuring_memory_prints_nothing(tmp_path):
    code = "import bench, torch; from bench.speed.timer import Timer; "
    code += "Timer(torch.device('cpu')).peak_bytes(lambda: torch.randn(100, 100))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not ran.stdout and "USDT" not in ran.stderr


COMMANDS = ("hope", "rerope", "decode", "rotation", "scaling")


@pytest.fixture
def small_sizes(monkeypatch):
    """Returns options for small problems, with contestants that need no compiling. Compiling would take half a
    minute."""
    from bench.speed import rotation, scaling

    monkeypatch.setitem(contestants.ENCODINGS, "compiled RoPE", contestants.eager)
    monkeypatch.setattr(contestants, "flex", partial(_raise, Unavailable("left out")))
    monkeypatch.setattr(scaling, "AT", {"cpu": 64})
    monkeypatch.setattr(scaling, "CONTEXTS", {"cpu": (128, 256)})
    monkeypatch.setattr(scaling, "MAX_MEMORY_EXPONENT", 2.0)  # at such short lengths the tables grow in visible steps
    monkeypatch.setattr(rotation, "best_rope", lambda device: "eager RoPE")
    words = "--device cpu --seqlens 128 256 --tokens 256 --head-dim 32 --window 64 --seconds 0 --heads 2 --heads-kv 1"
    return words.split()


@pytest.mark.parametrize("command", COMMANDS)
def test_out_writes_the_files(tmp_path, small_sizes, command):
    assert command_line.main([command, *small_sizes, "--out", str(tmp_path)]) == 0
    [path] = tmp_path.glob("*/*.json")
    run = records.read(path)
    assert run.command == command and len(run.records) > 3
    assert run.argv == f"python -m bench {command} {' '.join(small_sizes)}"
    assert not run.wrong and all(not reason.startswith("failed") for reason in run.absent.values())
    assert path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG" and path.with_suffix(".csv").exists()
    assert {goal["verdict"] for goal in run.goals} == {"not run"}
    if command == "scaling":
        path.with_suffix(".png").unlink()
        page.draw([(path, run)])  # draws the figure from the file
        assert path.with_suffix(".png").exists()
        assert any(name.startswith("peak memory") for name in run.exponents)


def snapshot(folder: Path) -> dict[Path, tuple[int, int]]:
    """Returns {file: (size, time of the last change)} for all files in a folder."""
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


@triton_runs
@pytest.mark.parametrize("command", command_line.SUBCOMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        command_line.main([command, "-h"])
    assert stopped.value.code == 0 and f"python -m bench {command}" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["decode", "scaling", "cpu", "ceilings", "tune"])
def test_without_options_nothing_is_written(tmp_path, monkeypatch, capsys, small_sizes, command):
    from bench.speed import cpu, tune

    words = {
        "cpu": ["--seqlen", "64", "--seconds", "0", "--heads", "1", "--threads", "1"],
        "ceilings": ["--device", "cpu"],
        "tune": ["--direction", "forward", "--bands", "1"],
    }
    monkeypatch.setattr(cpu, "CACHE_SEQLENS", (128, 64))
    monkeypatch.setattr(cpu, "compiled_kernels", lambda target: None)
    monkeypatch.setattr(cpu, "host_times", lambda heads, head_dim: (1.0, 1.0))
    monkeypatch.setattr(tune, "ranked_by_machine_code", lambda *_: [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    before = snapshot(ROOT / "bench")
    assert command_line.main([command, *words.get(command, small_sizes)]) == 0
    printed = capsys.readouterr().out
    assert "expected time: " in printed if command == "cpu" else printed
    assert not list(tmp_path.iterdir()) and snapshot(ROOT / "bench") == before


def test_all_runs_its_parts(monkeypatch, tmp_path, capsys):
    from bench.speed import all as every

    ran = []

    def run(words, env):
        assert words[1:3] == ["-m", "bench"] and env["PYTHONPATH"].startswith(str(ROOT))
        ran.append(words[3:])
        return subprocess.CompletedProcess(words, len(ran) - 1)

    monkeypatch.setattr(subprocess, "run", run)
    common = ["--device", "cuda", "--out", str(tmp_path), "--seconds", "0.0"]
    assert every.main(["--only", "hope", "decode", *common]) == 4  # the exit code is the worst one of the subcommands
    assert ran == [
        [command, *words, *common] for command, words in every.MAIN + every.MORE if command in ("hope", "decode")
    ]
    assert "all: 5 of 5: decode --head-dim 64" in capsys.readouterr().out
    ran.clear()
    every.main(["--only", "hope", "--device", "cpu"])
    assert ran == [["hope", "--device", "cpu"]]
    with pytest.raises(SystemExit):
        every.main(["--part", "more", "--only", "scaling"])
    assert "expected subcommands of --part more" in capsys.readouterr().err


def test_every_subcommand_is_listed(capsys):
    assert command_line.main([]) == 2 and command_line.main(["--help"]) == 0
    listed = capsys.readouterr().out
    for name in command_line.SUBCOMMANDS:
        assert f"  {name} " in listed and callable(command_line._main_of(name))


def test_a_subcommand_gets_its_options(monkeypatch):
    seen = []
    module = type("Module", (), {"main": staticmethod(lambda words: seen.append(words) or 0)})
    monkeypatch.setattr(command_line, "import_module", lambda name, package: module)
    assert command_line.main(["decode", "--seqlens", "128"]) == 0 and seen == [["--seqlens", "128"]]


# ---- the structure
def private_uses(path: Path) -> list[str]:
    """Returns where the source uses private names of flashrope: it imports them, or takes them as attributes of what it
    imported from flashrope."""
    tree, known, found = ast.parse(path.read_text()), set(), []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "flashrope":
            known |= {alias.asname or alias.name for alias in node.names}
            names = (*node.module.split("."), *(alias.name for alias in node.names))
            found += [f"import of {name}" for name in names if name.startswith("_")]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "flashrope":
                    known.add(alias.asname or "flashrope")
                    found += [f"import of {name}" for name in alias.name.split(".") if name.startswith("_")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in known:
                found.append(f"{root.id}...{node.attr}")
    return found


def test_bench_uses_only_public_names_of_flashrope(tmp_path):
    example = tmp_path / "example.py"
    example.write_text(
        "from flashrope.backends import triton as b\nfrom flashrope._ops import x\nb.a._Plan, x.__name__"
    )
    assert private_uses(example) == ["import of _ops", "b..._Plan"]
    for path in (ROOT / "bench").rglob("*.py"):
        assert not private_uses(path), path


def _raise(error, *_):
    raise error
