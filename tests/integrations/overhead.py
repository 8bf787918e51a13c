"""Host time of one decoding step on the CPU: what the integration adds to a layer, beside the attention call itself.

    OMP_NUM_THREADS=1 python tests/integrations/overhead.py
"""

import time

import torch
from families import tiny, tokens
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from flashrope import attention_with_cache
from flashrope.integrations import transformers as integration
from flashrope.integrations.transformers import convert

ROUNDS, CALLS = 500, 2  # short, so that some fall between the other work of the machine


def best(*functions) -> list[float]:
    """Microseconds of one call each, the least over rounds that take turns: other work on the machine only adds."""
    times = [float("inf")] * len(functions)
    for _ in range(ROUNDS):
        for at, function in enumerate(functions):
            start = time.perf_counter()
            for _ in range(CALLS):
                function()
            times[at] = min(times[at], (time.perf_counter() - start) / CALLS * 1e6)
    return times


@torch.no_grad()
def main() -> None:
    layers, past = 4, 32
    stock, mine = tiny("llama", num_hidden_layers=layers), convert(tiny("llama", num_hidden_layers=layers))
    layer = mine.model.layers[0].self_attn
    q, k, v = torch.randn(1, 4, 1, 16), torch.randn(1, 2, past, 16), torch.randn(1, 2, past, 16)
    mask = torch.tensor([0, past, past - 1], dtype=torch.int32).view(3, 1, 1, 1)
    first, end, _ = mask.view(3, -1).unbind()
    raw = [x.transpose(1, 2) for x in (q, k, v)]
    rotary = layer.rotary_bands.rotary
    sdpa_all, sdpa, mine_all, call = best(
        lambda: sdpa_attention_forward(layer, q, k, v, None, scaling=0.25),
        lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.25, enable_gqa=True),
        lambda: integration._attend(layer, q, k, v, mask, scaling=0.25),
        lambda: attention_with_cache(*raw, rotary, end, cache_leftpad=first, softmax_scale=0.25))
    for name, whole, inner in (("transformers' sdpa function", sdpa_all, sdpa), ("the integration's function", mine_all, call)):
        print(f"{name}: {whole:.0f} us, of which the attention call {inner:.0f}: its own {whole - inner:.0f} us")
    print(f"added by the integration to a layer and step: {mine_all - call - (sdpa_all - sdpa):.0f} us")

    def step(model):
        cache = DynamicCache(config=model.config)
        model(tokens(1, past), past_key_values=cache)

        def one():
            model(tokens(1, 1), past_key_values=cache)
            cache.crop(-1)
        return one

    plain, converted = best(step(stock), step(mine))
    print(f"a whole step of {layers} layers: stock {plain:.0f} us, converted {converted:.0f} us: "
          f"{(converted - plain) / layers:.0f} us per layer with the attention call, the mask and the positions")


if __name__ == "__main__":
    main()
