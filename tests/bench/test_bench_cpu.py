"""Tests bench cpu: its goals, its expected time, and whether the timed calls are correct. Speed is not tested."""

import argparse
import dataclasses
from functools import partial

import pytest

from bench.report import records
from bench.speed import check


def test_goals_of_the_cpu_depend_on_the_instruction_set():
    from bench.speed.cpu import BFLOAT16_TARGETS, GOALS, Goal

    goal = Goal("a / b", 1.0, 1.2)
    assert [goal.limit_of(target) for target in ("x86-64-v4", "x86-64-v3", "armv8-a", "")] == [1.0, 1.2, 1.2, 1.2]
    assert Goal("a / b", 0.7).limit_of("x86-64-v3") == 0.7
    for target in BFLOAT16_TARGETS:
        assert Goal("a / b", 1.0, 1.2).limit_of(target) == 1.0
    goal = Goal("a / b", 1.0, 1.2, checked=False, multiplied=0.6)
    assert [goal.limit_of(f"x86-64-{name}") for name in ("v4-amx", "v4-bf16", "v4", "v3")] == [0.6, 0.6, 1.0, 1.2]
    assert goal.is_checked("x86-64-v4-bf16", frozenset()) and not goal.is_checked("x86-64-v4", frozenset())
    assert not goal.is_checked("x86-64-v4-bf16", frozenset({"amx_bf16"}))  # here SDPA multiplies with AMX
    assert len({goal.figure for goal in GOALS}) == len(GOALS)


def test_wide_heads_are_checked_and_timed(capsys, monkeypatch):
    """Every goal for wide heads gets a figure. The result over one cache for keys and values matches the reference over
    this cache, and not the reference over two separate caches."""
    from bench.speed import cpu, cpu_cases, cpu_wide

    if (kernels := cpu_cases.compiled_kernels()) is None:
        pytest.skip("no compiled kernels")
    for name, value in (("HEAD_DIM", 48), ("SEQLEN", 96), ("KEYS", 320)):
        monkeypatch.setattr(cpu_wide, name, value)
    options = argparse.Namespace(heads=2, head_dim=16, window=64, seconds=0.0)
    measured = cpu.Bench(options, records.Run("cpu", "", {}, {}, {}), kernels)
    cpu_wide.measure(measured)
    assert len(cpu_wide.GOALS) == 6 and {figure for figure, _ in cpu_wide.GOALS} <= measured.figures.keys()
    one, two = (cpu_wide.shared_entries(kernels)[n].contestant for n in (1, 0))
    p = measured.problem(320, 64, decoding=True, heads=4, heads_kv=2)
    assert check.error(one, p, False) < check.TOLERANCE[p.dtype]
    assert check.error(dataclasses.replace(one, exact=two.exact), p, False) > check.TOLERANCE[p.dtype]


def test_quantized_caches_are_checked_and_timed(capsys):
    """Every goal for quantized caches gets a figure. The result of one int8 contestant matches the reference over int8
    values, and not the reference over values that are not quantized."""
    from bench.speed import cpu, cpu_cases

    if (kernels := cpu_cases.compiled_kernels()) is None:
        pytest.skip("no compiled kernels")
    options = argparse.Namespace(heads=2, head_dim=16, window=64, seconds=0.0)
    measured = cpu.Bench(options, records.Run("cpu", "", {}, {}, {}), kernels)
    measured.cache_types(512, 512, 0.1)
    goals = {goal.figure.replace("32768", "512").replace("8192", "512") for goal in cpu.GOALS if "types" in goal.figure}
    assert len(goals) == 15 and goals <= measured.figures.keys()
    each = next(each for each in cpu_cases.quantized_entries(kernels) if each.name == "HoPE, paged, int8")
    p = measured.problem(512, 64, decoding=True, dtype=each.dtype)
    other = cpu_cases.Stored(cpu.Problem.hope)
    wrong = dataclasses.replace(each.contestant, exact=partial(cpu_cases.over_stored_rows, other))
    assert check.error(each.contestant, p, False) < check.error(wrong, p, False) / 2


def test_training_steps_compute_what_their_names_say():
    from bench.speed import cpu_cases, training

    p = training.training_problem(2, 64)
    chosen = cpu_cases.training_entries(cpu_cases.compiled_kernels())
    steps = training.training_steps(chosen, p)
    losses = {name: [step(), step(), step()] for name, step in steps.items()}
    assert list(losses) == ["eager RoPE + SDPA", "RoPE", "HoPE", "ReRoPE"]
    assert losses["eager RoPE + SDPA"] == pytest.approx(losses["RoPE"], rel=1e-5)
    assert all(len({*each}) == 3 for each in losses.values())  # every step changes the weights
    assert all(check.error(each.contestant, p, True) < check.TOLERANCE[p.dtype] for each in chosen)
    assert training.tokens_per_second({"a": [2.0, 1.0, 4.0]}, p) == "a 64,000"
