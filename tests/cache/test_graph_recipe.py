"""Runs the recipe for CUDA graphs exactly as the docstring of ``PagedKVCache`` has it.

Without a GPU, a replay runs the captured call again over the same tensors. Like the replay of a
graph, such a call sees only what these tensors hold. ``tests/backends/test_cuda_graphs.py`` captures the recipe on a
GPU.
"""

import re

import pytest
import support
import torch
from caching import cached_call
from flashrope import PagedKVCache, Rotary
from paged_oracle import Held

PAGE, HEADS_KV, HEADS, D, LAYERS = 16, 2, 4, 16, 2
SCHEME = Rotary.rope(D).rectify(21).log_n(40)
CODE = [re.sub(r"\s+", " ", code) for code in re.findall(r"``(.+?)``", PagedKVCache.__doc__, re.DOTALL)]


def written(start: str) -> str:
    """Returns the only piece of code in the docstring that begins with `start`."""
    (code,) = {code for code in CODE if code.startswith(start) and "(" in code}
    return code


OPTIONS = {  # options of the cache; options of the call or the plan
    "raw": ({}, {}),
    "padded": ({}, {"cache_leftpad"}),
    "quantized": ({"cache_dtype": "int8"}, {"k_scale", "v_scale"}),
    "rotated": ({"rotated_keys": Rotary.rope(D)}, {"rotated_keys"}),
}


class Recipe:
    """Three sequences, two of which share a page, and the tensors of a captured step of all layers."""

    def __init__(self, target: support.Target, kind: str):
        of_cache, self.named = OPTIONS[kind]
        self.rotary = of_cache.get("rotated_keys", SCHEME)
        self.held = Held(target, 12, PAGE, (HEADS, HEADS_KV), [self.rotary] * LAYERS, **of_cache)
        self.cache, device = self.held.cache, target.device
        self.names = [self.held.allocate(), self.held.allocate()]
        self.held.write(self.names, 29, leftpad=[3, 5] if kind == "padded" else None)
        self.names.append(self.held.fork(self.names[0]))
        self.static = dict(zip("qkv", self.new(), strict=True))
        self.static |= {name: torch.zeros(3, dtype=torch.int32, device=device) for name in ("seqlens", "leftpad")}
        self.static["block_table"] = torch.zeros(3, self.cache.max_pages, dtype=torch.int32, device=device)

    def new(self) -> list[torch.Tensor]:
        """Returns q, k and v of two tokens."""
        return [self.held.new(3, 2, heads) for heads in (HEADS, HEADS_KV, HEADS_KV)]

    def evaluate(self, start: str, **names):
        names |= {"cache": self.cache, "sequences": self.names, "rotary": self.rotary}
        names["attention_with_cache"] = self.call
        return eval(written(start), names)

    def call(self, *arguments, **new):
        i, static = self.layer, self.static
        options = dict(zip(("k_scale", "v_scale"), self.cache.scales(i), strict=True))
        options |= {"cache_leftpad": static["leftpad"], "rotated_keys": True}
        options = {name: x for name, x in options.items() if name in self.named}
        return cached_call(*arguments, **new, impl=self.held.target.impl, return_lse=True, **options)

    def step(self):
        """Runs what a graph holds: the call of every layer."""
        results, static = [], self.static
        for self.layer in range(LAYERS):
            q, k, v = (static[name][self.layer] for name in "qkv")
            tables = {name: static[name] for name in ("seqlens", "block_table")}
            results.append(self.evaluate("attention_with_cache", i=self.layer, q=q, k=k, v=v, **tables))
        return results

    def run(self, replay) -> None:
        """Runs one step by the recipe and compares its results with the expected ones. replay: returns out and lse of
        every layer."""
        static, (q, k, v) = self.static, self.new()
        for name, x in zip("qkv", (q, k, v), strict=True):
            static[name].copy_(x)
        self.evaluate("cache.reserve", k=k[0])
        static["seqlens"].copy_(self.evaluate("cache.seqlens"))
        static["block_table"].copy_(self.evaluate("cache.block_table"))
        static["leftpad"].copy_(self.evaluate("cache.leftpad"))
        got = replay()
        self.evaluate("cache.advance", k=k[0])
        self.held.written(self.names, k, v)
        self.held.compare(self.names, q, got)


@pytest.mark.interpreted(lambda kind, **_: False)
@pytest.mark.parametrize("kind", OPTIONS)
def test_as_written(exact, kind):
    """Steps of two tokens give the right results, also where they write to a shared page or cross the end of a page."""
    recipe = Recipe(exact, kind)
    for _ in range(2 if exact.slow else 8):
        recipe.run(recipe.step)
    if kind != "rotated":
        recipe.held.look()


MOVED = {
    "extend": lambda c, a, b: c.extend(a, b),
    "remove": lambda c, a, b: c.remove(a, 3, 4),
    "remove, open": lambda c, a, b: c.remove(a, 3, 4, close=False),
    "keep": lambda c, a, b: c.keep(a, 1, 4),
}


@pytest.mark.parametrize("call", ["seqlens", "block_table"])
@pytest.mark.parametrize("kind", MOVED)
def test_moved_sequences_are_refused(kind, call):
    cache = PagedKVCache(8, PAGE, HEADS_KV, D, torch.float32, "cpu")
    a, b = cache.allocate(), cache.allocate()
    cache.append([a, b], *torch.randn(2, 2, 20, HEADS_KV, D))
    MOVED[kind](cache, a, b)
    child = cache.fork(a)
    for name in (a, child):
        with pytest.raises(ValueError, match=rf"^{call}: not supported for sequences that .* got sequence {name};"):
            getattr(cache, call)([b, name])
    getattr(cache, call)([b])
    cache.truncate(a, 0)  # no moved token is left
    cache.append([a, b], *torch.randn(2, 2, 3, HEADS_KV, D))
    assert cache.seqlens([a, b]).tolist() == [3, 23]
    getattr(cache, call)([a, b])
