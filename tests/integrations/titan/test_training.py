"""Tests the override in torchtitan's llama3 and qwen3. It changes nothing under their own RoPE, and under HoPE the loss
falls."""

import pytest
import torch
import trainings

OWN = {"scheme": "stock"}


def policy(name: str):
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    return {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}[name]


def yarn(config):
    for layer in config.model_spec.model.layers:
        rope = layer.attention.rope
        rope.scaling, rope.rope_factor, rope.original_seq_len, rope.beta_fast = "yarn", 4.0, 32, 4.0
    return config


def check_first_step(got, stock, exact) -> None:
    """Checks errors against float64: the largest error may exceed twice the largest error of stock torchtitan by at
    most a few roundings."""
    eps = torch.finfo(torch.float32).eps
    assert abs(got[0] - exact[0]) <= 2 * abs(stock[0] - exact[0]) + 4 * eps * abs(exact[0])
    assert got[1].keys() == exact[1].keys()
    for name, want in exact[1].items():
        largest = want.abs().max()
        error, allowed = (got[1][name] - want).abs().max(), (stock[1][name] - want).abs().max()
        assert error <= 2 * allowed + 8 * eps * largest, f"{name}: {error / largest:.2g}, stock {allowed / largest:.2g}"


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
@pytest.mark.parametrize("scaling", ["own", "yarn"])
def test_the_first_step_is_torchtitans(family, scaling):
    change = yarn if scaling == "yarn" else lambda config: config
    stock = trainings.first_step(change(trainings.settings(family)))
    exact = trainings.first_step(change(trainings.settings(family, training=trainings.FLOAT64)))
    check_first_step(trainings.first_step(change(trainings.settings(family, OWN))), stock, exact)


@pytest.mark.parametrize("name", ["selective", "full"])
def test_activation_checkpointing_changes_no_gradient(name):
    exact = trainings.first_step(trainings.settings("llama3", {}, training=trainings.FLOAT64))
    got = trainings.first_step(
        trainings.settings("llama3", {}, training=trainings.FLOAT64, activation_checkpoint=policy(name))
    )
    assert got[0] == exact[0]
    for key, want in exact[1].items():
        torch.testing.assert_close(got[1][key], want, rtol=1e-12, atol=1e-14, msg=key)


@pytest.mark.parametrize("imports, forwards", [([], 2), ([trainings.SAVE], 1)])
def test_selective_checkpointing_keeps_the_output_where_asked(imports, forwards, monkeypatch):
    from flashrope.backends.registry import load_backend

    backend, calls = load_backend("cpu"), []
    forward = backend.forward
    monkeypatch.setattr(backend, "forward", lambda *args: calls.append(1) or forward(*args))
    config = trainings.settings("llama3", {}, 1, activation_checkpoint=policy("selective"))
    config.override.imports += imports
    trainings.first_step(config)
    assert len(calls) == forwards


@pytest.mark.parametrize(
    "family, backend",
    [("llama3", "aot_eager"), ("qwen3", "aot_eager"), pytest.param("llama3", "inductor", marks=pytest.mark.slow)],
)
def test_compiled_blocks(family, backend):
    exact = trainings.first_step(trainings.settings(family, {}, 1, training=trainings.FLOAT64))
    compiled = {"enable": True, "components": ["model"], "backend": backend}
    got = trainings.first_step(trainings.settings(family, {}, 1, training=trainings.FLOAT64, compile=compiled))
    assert got[0] == pytest.approx(exact[0], rel=1e-12)
    for key, want in exact[1].items():
        torch.testing.assert_close(got[1][key], want, rtol=1e-9, atol=1e-12, msg=key)


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_twenty_steps_in_float64_are_torchtitans(family):
    stock = trainings.losses(trainings.settings(family, None, 1, training=trainings.FLOAT64), 20)
    ours = trainings.losses(trainings.settings(family, OWN, 1, training=trainings.FLOAT64), 20)
    assert ours == pytest.approx(stock, rel=1e-9)
    assert stock[-1] < stock[0] - 1


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_with_hope_the_loss_falls(family):
    own, hope = (trainings.losses(trainings.settings(family, given, 1), 20) for given in (OWN, {}))
    assert hope[-1] < hope[0] - 1
    assert hope[0] != own[0]
