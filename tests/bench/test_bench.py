"""Tests the logic of the benchmarks: what they reject, count, fit, print and write. Speed is not tested."""

import dataclasses
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
from bench.speed.contestants import OWN, Contestant, Unavailable, dense, own, prefill_hope, prefill_rerope
from bench.speed.options import Table
from bench.speed.problem import Problem
from bench.speed.session import Session

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


# ---- the structure


def _raise(error, *_):
    raise error
