"""Tests gradient checkpointing when a model is converted or reverted between a forward and its backward: the backward
computes the layers again, under another scheme."""

import functools
import threading

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

from families import close, tiny, tokens
from flashrope.integrations.transformers import convert, revert
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils.checkpoint import checkpoint

HEARD = "model: expected the backward of a forward under the model's present scheme, got one of a forward before"
WINDOW = functools.partial(convert, rerope=6)


def forward(model) -> torch.Tensor:
    return model(tokens(), labels=tokens(), use_cache=False).loss


def gradients(model) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def checkpointed(kind: str):
    model = tiny("llama").train()
    if kind == "wrapper":
        apply_activation_checkpointing(model, check_fn=lambda module: type(module).__name__ == "LlamaDecoderLayer")
    elif kind != "none":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": kind == "reentrant"})
        if kind == "reentrant":
            model.enable_input_require_grads()
    return model


KINDS = ["not reentrant", "reentrant", "wrapper"]
CHANGES = {
    "stock to scheme": [WINDOW],
    "stock to the same scheme": [convert],
    "scheme to scheme": [WINDOW, functools.partial(convert, rerope=7)],
    "scheme to stock": [WINDOW, revert],
    "reverted to scheme": [lambda model: revert(convert(model)), WINDOW],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES)
def test_another_scheme_before_the_backward(kind, change):
    model, (*before, last) = checkpointed(kind), CHANGES[change]
    for each in before:
        each(model)
    loss = forward(model)
    last(model)
    with pytest.raises(ValueError, match=HEARD):
        loss.backward()
    model.zero_grad()
    forward(model).backward()
    found, expected = gradients(model), last(checkpointed("none"))
    forward(expected).backward()
    assert all(
        close(a, b, 1e-5 * max(1, float(b.abs().max()))) for a, b in zip(found, gradients(expected), strict=True)
    )


def test_another_scheme_and_a_forward_before_the_backward():
    model = convert(checkpointed("not reentrant"), rerope=6)
    loss = forward(model)
    forward(convert(model, rerope=7))
    with pytest.raises(ValueError, match=HEARD):
        loss.backward()


@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_the_same_scheme_before_the_backward(kind):
    """A convert to the same scheme is harmless. Without checkpoints, so is a convert to another scheme."""
    model = convert(checkpointed(kind), rerope=6)
    forward(model).backward()
    expected = [grad.clone() for grad in gradients(model)]
    model.zero_grad()
    loss = forward(model)
    convert(model, **({"rerope": 7} if kind == "none" else {"rerope": 6}))
    loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), expected, strict=True))


def test_a_checkpoint_around_the_model_and_backward_in_another_thread():
    model = convert(tiny("llama").train(), rerope=6)
    forward(model).backward()
    expected = [grad.clone() for grad in gradients(model)]
    for _ in range(2):
        model.zero_grad()
        thread = threading.Thread(target=checkpoint(lambda: forward(model), use_reentrant=False).backward)
        thread.start()
        thread.join()
        assert all(torch.equal(a, b) for a, b in zip(gradients(model), expected, strict=True))
