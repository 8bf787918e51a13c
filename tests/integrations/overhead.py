"""Measures the host time that the integration adds to decoding one token on the CPU. The time of the attention call
itself is left out."""

import inspect
import time
from unittest import mock

import torch
from families import tiny, tokens
from flashrope.integrations.transformers import applying, convert
from flashrope.integrations.transformers import attending as attention
from transformers import AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function

ROUNDS, CALLS = 2000, 5


def best(*functions) -> list[float]:
    """Returns how many microseconds of CPU time one call of each function takes. It is the minimum over interleaved
    rounds, because other load on the machine only adds time."""
    times = [float("inf")] * len(functions)
    for _ in range(ROUNDS):
        for at, function in enumerate(functions):
            start = time.thread_time()
            for _ in range(CALLS):
                function()
            times[at] = min(times[at], (time.thread_time() - start) / CALLS * 1e6)
    return times


@torch.no_grad()
def main() -> None:
    past = 32
    model = convert(tiny("llama"))
    layer = model.model.layers[0].self_attn
    q, k, v = torch.randn(1, 4, 1, 16), torch.randn(1, 2, past, 16), torch.randn(1, 2, past, 16)
    mask = torch.tensor([0, past, past - 1], dtype=torch.int32).view(3, 1, 1, 1)
    cos, sin = torch.randn(2, 1, 1, 16).unbind()
    position_ids = torch.tensor([[past - 1]])
    cache = DynamicCache(config=model.config)
    model(tokens(1, past - 1), past_key_values=cache)
    sizes = dict(batch_size=1, q_length=1, q_offset=past - 1, kv_length=past, device="cpu")
    if "cache_position" in inspect.signature(AttentionMaskInterface()["sdpa"]).parameters:
        sizes |= dict(cache_position=torch.tensor([past - 1]))
    inputs = dict(position_ids=position_ids, past_key_values=cache)

    # The attention calls return at once, so their time is left out.
    with (
        mock.patch("torch.nn.functional.scaled_dot_product_attention", lambda q, *_, **__: q),
        mock.patch.object(attention, "plan_and_attend", lambda q, *_, **__: q),
    ):
        theirs, ours, mask_time, positions, rotation = best(
            lambda: sdpa_attention_forward(layer, q, k, v, None, scaling=0.25),
            lambda: attention.attention_forward(layer, q, k, v, mask, scaling=0.25),
            lambda: attention.describe_mask(mask_function=causal_mask_function, **sizes),
            lambda: applying.check_forward(model.model, (), inputs),
            lambda: applying.no_rotation(None, (), (cos, sin)),
        )
    step = mask_time + positions + rotation
    print(
        f"in each layer, around the attention call: transformers' sdpa function {theirs:.1f} us, "
        f"the integration's {ours:.1f} us"
    )
    print(f"once a step: mask {mask_time:.1f} us, positions {positions:.1f} us, rotation {rotation:.1f} us")
    print(f"added to a layer and step: {ours - theirs + step / 16:.1f} us in a model of 16 layers")


if __name__ == "__main__":
    main()
