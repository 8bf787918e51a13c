"""The benchmark's own logic: what it refuses, counts, fits and writes. Speed is not tested here."""

import dataclasses
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # bench is no part of the installed package

import support
from bench import __main__ as command_line
from bench import check, contestants, machine, readme, results, suite, timing
from bench.contestants import OWN, Contestant, Unavailable, dense, flex, own, prefill_hope, prefill_rerope
from bench.problem import Problem, exponent
from flashrope.cos_sin import cos_sin

CPU = torch.device("cpu")
SMALL = Problem(1, 128, 2, 2, 32, torch.float32, CPU, window=32)


def session(tmp_path, *words) -> suite.Session:
    cuda = {"heads": 2, "heads_kv": 2, "head_dim": 32, "seqlens": [128], "tokens": 128, "window": 32}
    argv = ["--device", "cpu", "--seconds", "0", "--out", str(tmp_path), *words]
    return suite.Session("hope", argv, suite.parse(suite.parser("hope", "Test.", cuda, cuda), argv))


@pytest.fixture(autouse=True)
def quick_ceilings(monkeypatch):
    monkeypatch.setattr(
        machine, "ceilings", lambda device, dtype: {"product_tflops": 1.0, "copy_gbs": 10.0, "read_gbs": 10.0}
    )


# ---- counting
def test_operations_are_counted_as_the_literature_does():
    p = Problem(2, 1024, 16, 4, 128, torch.bfloat16, CPU)
    full = 4 * 2 * 16 * 1024**2 * 128
    assert p.flops(False) == full / 2 and p.flops(True) == full / 2 * 3.5
    assert p.replace(causal=False).flops(False) == full
    assert p.replace(decoding=True).flops(False) == 4 * 2 * 16 * 1024 * 128  # one query sees every key
    assert p.replace(window=64).flops(False) == p.flops(False)  # the same for every scheme


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
    with pytest.raises(ValueError, match="two points"):
        exponent({1: 1})


def test_ratio_is_the_median_over_rounds_not_the_ratio_of_medians():
    times = {"peer": [2.0, 30.0, 4.0], "ours": [1.0, 10.0, 8.0]}
    assert timing.ratio(times, "peer", "ours") == 2.0  # of 2, 3 and 0.5; the medians' would be 0.5
    assert timing.Spread.of([3.0]) == (3.0, 3.0, 3.0)


def test_rounds_take_turns():
    seen = []
    times = timing.rounds(
        {"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, timing.Timer(CPU), 0.0, least=4
    )
    assert "".join(seen) == "ab" + "ab" * 4  # a warm-up each, not counted
    assert {name: len(of) for name, of in times.items()} == {"a": 4, "b": 4}


def test_a_call_that_the_host_queues_late_is_timed_again(monkeypatch):
    """After a longer sleep, which stays; a call that waits for the device is not tried for ever."""
    late, slept, calls = [True, True, False, False], [], []

    class Event:
        def __init__(self, enable_timing):
            self.record = self.synchronize = lambda: None
            self.query = lambda: late.pop(0) if late else True
            self.elapsed_time = lambda other: 1.5 * len(calls)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    timer = timing.Timer(CPU)
    timer.flush = torch.zeros(4)  # as on a GPU
    assert timer(lambda: calls.append(1)) == 4.5 and timer(lambda: calls.append(1)) == 6.0
    assert slept == [timing.SLEEP_CYCLES * n for n in (1, 2, 4, 4)]
    timer(lambda: calls.append(1))
    assert slept[-1] == timing.MOST_SLEEP_CYCLES


def test_peak_memory_of_a_call():
    def call():
        first = torch.empty(1 << 18)
        del first
        second, third = torch.empty(1 << 18), torch.empty(1 << 18)
        return second, third

    assert timing.Timer(CPU).peak_bytes(call) == pytest.approx(2 * 4 * (1 << 18), abs=4096)


# ---- contestants
@pytest.mark.parametrize(
    "p", [SMALL, SMALL.replace(heads=4), SMALL.replace(causal=False)], ids=["causal", "grouped", "full"]
)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "both"])
def test_contestants_are_right(p, backward):
    """Those that run here without a compiler; others say why they do not."""
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
@pytest.mark.parametrize(("heads", "heads_kv"), [(5, 2), (4, 0)], ids=["q and k", "q alone"])
@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in place"])
def test_fused_rope_is_rope(heads, heads_kv, in_place):
    """Forward and backward against the same operator by operator; lengths that no tile divides."""
    from bench.fused_rope import rotate

    p = Problem(2, 37, heads, 1, 64, torch.float32, DEVICE)
    cos, sin = (x.float().contiguous() for x in cos_sin(p.rope(), contestants.positions(p)))
    q, k = (torch.randn(2, 37, count, 64, device=DEVICE) for count in (heads, heads_kv))
    grads = [torch.randn_like(x) for x in (q, k)]
    results_of = []
    for turn in (contestants.eager(p), lambda q, k: rotate(q.clone(), k.clone(), cos, sin, in_place)):
        leaves = [x.clone().requires_grad_() for x in (q, k)]
        out = turn(*leaves)
        results_of.append([*out, *torch.autograd.grad(out, leaves, [x.clone() for x in grads])])
    torch.testing.assert_close(*results_of, rtol=1e-5, atol=1e-5)


@triton_runs
def test_probe_reads_everything_once():
    from bench.probe import read

    x = torch.rand(100_003, device=DEVICE)
    assert read(x).double().sum().item() == pytest.approx(x.double().sum().item(), rel=1e-5)


@pytest.mark.slow
def test_compiled_contestants_are_right():
    pytest.importorskip("torch._inductor", reason="needs torch.compile")
    for contestant in prefill_hope(CPU):
        if contestant.name in ("compiled RoPE + SDPA flash", "compiled RoPE + FlexAttention"):
            assert check.error(contestant, SMALL, False) < 1e-5, contestant.name


# ---- a session
def test_no_ratio_for_a_wrong_contestant(tmp_path, capsys):
    wrong = Contestant("wrong one", Problem.none, partial(own, Problem.rope))
    missing = Contestant("missing one", Problem.none, partial(_raise, Unavailable("not installed")))
    broken = Contestant("broken one", Problem.none, partial(_raise, RuntimeError("no kernel\nmore")))
    s = session(tmp_path)
    s.plan([suite.Table("a table", [wrong, missing, broken, OWN["RoPE"], OWN["HoPE"]], SMALL)])
    assert s.finish() == 0
    assert [record.contestant for record in s.run.records] == ["flashrope RoPE", "flashrope HoPE"]
    assert s.run.absent == {"missing one": "not installed", "broken one": "failed: RuntimeError: no kernel"}
    assert s.run.wrong["wrong one"] > 0.1
    printed = capsys.readouterr().out
    assert "WRONG, so not timed: wrong one: error" in printed and "not run (not installed): missing one" in printed
    assert not any("wrong one" in record.ratios for record in s.run.records)


def test_ours_wrong_or_failing_ends_with_1(tmp_path):
    s = session(tmp_path)
    s.plan(
        [
            suite.Table(
                "a table",
                [dataclasses.replace(OWN["HoPE"], prepare=partial(own, Problem.rope)), OWN["RoPE"]],
                SMALL.replace(head_dim=64, train_length=256),
            )
        ]
    )
    assert s.run.wrong.keys() == {"flashrope HoPE"} and s.finish() == 1
    s = session(tmp_path)
    s.plan(
        [
            suite.Table(
                "a table",
                [dataclasses.replace(OWN["HoPE"], prepare=partial(_raise, RuntimeError("x"))), OWN["RoPE"]],
                SMALL,
            )
        ]
    )
    assert s.finish() == 1


def test_what_does_not_fit_is_skipped_with_a_line(tmp_path, capsys, monkeypatch):
    large = dataclasses.replace(OWN["RoPE"], name="large one", scratch=lambda problem: 1 << 60)
    s = session(tmp_path)
    s.plan([suite.Table("a table", [large, OWN["HoPE"]], SMALL)])
    assert [record.contestant for record in s.run.records] == ["flashrope HoPE"]
    assert "a table: large one: needs about 1073741824.0 GiB" in s.run.skipped[0]
    assert "skipped: a table: large one" in capsys.readouterr().out
    monkeypatch.setattr(s.timer, "free_bytes", lambda: 1000)
    s.plan([suite.Table("no room", [OWN["HoPE"]], SMALL)])
    assert "no room: nothing to time" in capsys.readouterr().out


def test_memory_is_noted_with_the_call_where_that_is_cheap(tmp_path, monkeypatch, capsys):
    s = session(tmp_path)
    s.timer.memory_is_cheap = True
    monkeypatch.setattr(s.timer, "peak_bytes", lambda call: 3 << 20)
    s.plan([suite.Table(title, [OWN["HoPE"]], SMALL) for title in ("one", "two")])
    assert [record.peak_bytes for record in s.run.records] == [None, None]
    s.memory(s.tables[:1])
    assert [record.peak_bytes for record in s.run.records] == [
        3 << 20,
        None,
    ] and "3.0" in capsys.readouterr().out.splitlines()[-1]


def test_memory_that_runs_out_is_skipped(tmp_path):
    def prepare(problem):
        if problem.seqlen == SMALL.seqlen:
            raise torch.OutOfMemoryError("tried to allocate too much")
        return own(Problem.none, problem)

    s = session(tmp_path)
    s.plan([suite.Table("a table", [Contestant("greedy", Problem.none, prepare), OWN["HoPE"]], SMALL)])
    assert s.run.skipped == ["a table: greedy: OutOfMemoryError: tried to allocate too much"]
    assert [record.contestant for record in s.run.records] == ["flashrope HoPE"]


def test_options(capsys):
    sizes = {"heads": 4, "heads_kv": 4, "head_dim": 64, "seqlens": [512], "tokens": 1024, "window": 64}
    p = suite.parser("hope", "Test.", sizes, sizes)
    options = suite.parse(p, ["--device", "cpu", "--seqlens", "256", "2048"])
    assert [suite.problem(options, n).batch for n in options.seqlens] == [4, 1] and options.dtype == torch.float32
    assert suite.stem("hope", options) == "hope-d64-h4x4-fp32"
    for words, message in (
        (["--device", "tpu"], "--device"),
        (["--heads", "3"], "multiple of --heads-kv 4"),
        (["--seqlens", "0"], "positive integer"),
    ):
        with pytest.raises(SystemExit):
            suite.parse(p, ["--device", "cpu", *words])
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["hope", "rerope", "decode", "rotation", "scaling"])
def test_every_subcommand_writes_its_files(tmp_path, monkeypatch, command):
    from bench import contestants, rotation, scaling

    monkeypatch.setitem(contestants.ENCODINGS, "compiled RoPE", contestants.eager)  # compiling takes half a minute
    monkeypatch.setattr(contestants, "flex", partial(_raise, Unavailable("left out")))
    monkeypatch.setattr(scaling, "AT", {"cpu": 64})
    monkeypatch.setattr(scaling, "CONTEXTS", {"cpu": (128, 256)})
    monkeypatch.setattr(scaling, "LINEAR", 2.0)  # at these lengths steps of the tables count
    monkeypatch.setattr(rotation, "best_rope", lambda device: "eager RoPE")
    words = [
        "--device",
        "cpu",
        "--seqlens",
        "128",
        "256",
        "--tokens",
        "256",
        "--head-dim",
        "32",
        "--window",
        "64",
        "--seconds",
        "0",
        "--heads",
        "2",
        "--heads-kv",
        "1",
        "--out",
        str(tmp_path),
    ]
    assert command_line.main([command, *words]) == 0
    [path] = tmp_path.glob("*/*.json")
    run = results.read(path)
    assert (
        run.command == command
        and run.argv.startswith(f"python -m bench {command} --device cpu")
        and len(run.records) > 3
    )
    assert not run.wrong and all(not reason.startswith("failed") for reason in run.absent.values())
    assert path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG" and path.with_suffix(".csv").exists()
    assert {goal["verdict"] for goal in run.goals} == {"not run"}
    if command == "scaling":
        path.with_suffix(".png").unlink()
        readme.draw([(path, run)])  # from the file
        assert path.with_suffix(".png").exists()
        assert any(name.startswith("peak memory") for name in run.exponents)


def test_all_runs_its_parts(monkeypatch, tmp_path, capsys):
    from bench import all as every

    ran = []

    def run(words, env):
        assert words[1:3] == ["-m", "bench"] and env["PYTHONPATH"].startswith(str(ROOT))
        ran.append(words[3:])
        return subprocess.CompletedProcess(words, len(ran) - 1)

    monkeypatch.setattr(subprocess, "run", run)
    common = ["--device", "cuda", "--out", str(tmp_path), "--seconds", "0.0"]
    assert every.main(["--only", "hope", "decode", *common]) == 4  # the worst of their exit codes
    assert ran == [
        [command, *words, *common] for command, words in every.MAIN + every.MORE if command in ("hope", "decode")
    ]
    ran.clear()
    every.main(["--only", "hope", "--device", "cpu"])
    assert [words[:3] for words in ran] == [["hope", "--device", "cpu"]]
    with pytest.raises(SystemExit):
        every.main(["--part", "more", "--only", "scaling"])
    assert "none of these is in --part more" in capsys.readouterr().err


def test_subcommands_are_listed_and_called(monkeypatch, capsys):
    assert command_line.main([]) == 2
    listed = capsys.readouterr().out
    assert all(name in listed for name in command_line.SUBCOMMANDS)
    seen = []
    module = type("Module", (), {"main": staticmethod(lambda words: seen.append(words) or 0)})
    monkeypatch.setattr(command_line, "import_module", lambda name, package: module)
    assert command_line.main(["hope", "--seqlens", "128"]) == 0 and seen == [["--seqlens", "128"]]


def _raise(error, *_):
    raise error
