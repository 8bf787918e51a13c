"""The recipe for CUDA graphs in ``PagedKVCache``'s docstring, as it is written there.

Without a GPU a replay is the captured call again, over the same tensors: like a graph it sees nothing but what they
hold. ``tests/kernels/test_cuda_graphs.py`` captures it on a GPU.
"""

import re

import pytest
import support
import torch
from flashrope import PagedKVCache, Rotary, attention_with_cache
from paged_oracle import Tokens, look

PAGE, HEADS_KV, HEADS, D, LAYERS = 16, 2, 4, 16, 2
SCHEME = Rotary.rope(D).rectify(21).log_n(40)
CODE = [re.sub(r"\s+", " ", code) for code in re.findall(r"``(.+?)``", PagedKVCache.__doc__, re.DOTALL)]


def written(start: str) -> str:
    """The only piece of code in the docstring that starts so."""
    (code,) = {code for code in CODE if code.startswith(start) and "(" in code}
    return code


OPTIONS = {  # of the cache; of the call, as in the docstring
    "raw": ({}, {}),
    "padded": ({}, {"cache_leftpad"}),
    "quantized": ({"cache_dtype": "int8"}, {"k_scale", "v_scale"}),
    "rotated": ({"rotated_keys": Rotary.rope(D)}, {"rotated_keys"}),
}


class Recipe:
    """Three sequences, two of which share a page, and the tensors of a captured step of all layers."""

    def __init__(self, target: support.Target, kind: str, steps: int):
        of_cache, named = OPTIONS[kind]
        self.target, self.rotary = target, of_cache.get("rotated_keys", SCHEME)
        cache = PagedKVCache(12, PAGE, HEADS_KV, D, target.dtype, target.device, layers=LAYERS, **of_cache)
        a, b = cache.allocate(), cache.allocate()
        self.leftpad = [3, 5] if kind == "padded" else [0, 0]

        def random(*shape):
            return torch.randn(LAYERS, *shape, D, generator=generator).to(target.device, target.dtype)

        generator = torch.Generator().manual_seed(1)
        k, v = random(2, 29, HEADS_KV), random(2, 29, HEADS_KV)
        cache.append([a, b], k, v, impl=target.impl, leftpad=self.leftpad if kind == "padded" else None)
        self.names, self.leftpad = [a, b, cache.fork(a)], [*self.leftpad, self.leftpad[0]]
        self.keys, self.values = ([x[:, n] for n in (0, 1, 0)] for x in (k, v))
        self.q, self.k, self.v = (random(steps, 3, 2, heads) for heads in (HEADS, HEADS_KV, HEADS_KV))
        self.static = {
            "q": self.q[:, 0].clone(),
            "k": self.k[:, 0].clone(),
            "v": self.v[:, 0].clone(),
            "seqlens": torch.zeros(3, dtype=torch.int32, device=target.device),
            "block_table": torch.zeros(3, cache.max_pages, dtype=torch.int32, device=target.device),
            "leftpad": torch.zeros(3, dtype=torch.int32, device=target.device),
        }
        self.cache, self.named = cache, named

    def evaluate(self, start: str, **names):
        names |= {"cache": self.cache, "sequences": self.names, "rotary": self.rotary}
        names["attention_with_cache"] = self.call
        return eval(written(start), names)

    def call(self, *arguments, **new):
        i, static = self.layer, self.static
        options = dict(zip(("k_scale", "v_scale"), self.cache.scales(i), strict=True))
        options |= {"cache_leftpad": static["leftpad"], "rotated_keys": True}
        options = {name: x for name, x in options.items() if name in self.named}
        return attention_with_cache(*arguments, **new, impl=self.target.impl, return_lse=True, **options)

    def step(self):
        """What a graph holds: the call of every layer."""
        results, static = [], self.static
        for self.layer in range(LAYERS):
            q, k, v = (static[name][self.layer] for name in "qkv")
            tables = {name: static[name] for name in ("seqlens", "block_table")}
            results.append(self.evaluate("attention_with_cache", i=self.layer, q=q, k=k, v=v, **tables))
        return results

    def run(self, replay, n: int) -> None:
        """Step n by the recipe, and what it should have done. replay: returns out and lse of every layer."""
        static, k = self.static, self.k[0, n]
        for name in "qkv":
            static[name].copy_(getattr(self, name)[:, n])
        self.evaluate("cache.reserve", k=k)
        static["seqlens"].copy_(self.evaluate("cache.seqlens"))
        static["block_table"].copy_(self.evaluate("cache.block_table"))
        static["leftpad"].copy_(self.evaluate("cache.leftpad"))
        got = replay()
        self.evaluate("cache.advance", k=k)
        for b, pad in enumerate(self.leftpad):
            self.keys[b], self.values[b] = (
                torch.cat((old[b], new[:, n, b]), 1) for old, new in ((self.keys, self.k), (self.values, self.v))
            )
            for layer, (out, lse) in enumerate(got):
                kept = [support.kept(x[b][layer, pad:], self.cache.cache_dtype) for x in (self.keys, self.values)]
                zeros = torch.zeros_like(out[b : b + 1]), torch.zeros_like(lse[b : b + 1])
                q = static["q"][layer, b : b + 1]
                p = support.Problem(q, *(x[None] for x in kept), self.rotary, grad_out=zeros[0], grad_lse=zeros[1])
                support.check_budget({"out": out[b : b + 1], "lse": lse[b : b + 1]}, p, self.target.dtype)

    def look(self) -> None:
        held = {}
        for name, pad, *rows in zip(self.names, self.leftpad, self.keys, self.values, strict=True):
            kept = (support.kept(x[:, pad:], self.cache.cache_dtype) for x in rows)
            held[name] = Tokens(list(range(rows[0].shape[1] - pad)), *kept)
        look(self.cache, held)


@pytest.mark.interpreted(lambda kind, **_: False)
@pytest.mark.parametrize("kind", OPTIONS)
def test_as_written(exact, kind):
    """Steps of two tokens, through a shared page and over the end of one."""
    steps = 2 if exact.slow else 8
    recipe = Recipe(exact, kind, steps)
    for n in range(steps):
        recipe.run(recipe.step, n)
    if kind != "rotated":
        recipe.look()


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
    cache.truncate(a, 0)  # nothing is left that was moved
    cache.append([a, b], *torch.randn(2, 2, 3, HEADS_KV, D))
    assert cache.seqlens([a, b]).tolist() == [3, 23]
    getattr(cache, call)([a, b])
