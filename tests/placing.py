"""Calls over caches at tables of positions, held against the formula on the keys that they show."""

import support
import torch
from flashrope import attention_with_cache
from flashrope.backends import addresses
from flashrope.backends.cache_tables import CachePositions, CacheTables
from flashrope.backends.quantized import dequantize, quantize
from flashrope.backends.shown import of_queries, shown
from support import int32


class Case:
    """q over caches at tables of positions. Rows that no sequence shows are NaN, and so is all around the caches."""

    def __init__(self, target, shape, seqlen_q, heads=(4, 2), lengths=None, table=None, codes=None, leftpad=None):
        generator = torch.Generator().manual_seed(len(shape) + seqlen_q)
        batch, entries, self.page, head_dim = shape
        self.target, self.codes = target, codes
        pages = batch * entries
        if table is None:
            table = torch.randperm(pages, generator=generator).view(batch, entries)
        self.block_table = table.int().to(target.device)
        self.q = support.random((batch, seqlen_q, heads[0], head_dim), target, 3)
        self.k, self.v = (
            support.random((pages, self.page, heads[1], head_dim), target, seed, "poisoned") for seed in (1, 2)
        )
        self.whole = self.k.clone(), self.v.clone()
        self.seqlens = int32([entries * self.page] * batch if lengths is None else lengths, target.device)
        self.leftpad = leftpad if leftpad is None else int32(leftpad, target.device)

    def contiguous(self):
        self.k, self.v = (x[self.block_table.long()].flatten(1, 2) for x in (self.k, self.v))
        self.block_table, self.whole = None, (self.k.clone(), self.v.clone())
        return self

    def check(self, rotary, causal=True, queries=None, num_splits=None, **tables) -> None:
        device = self.target.device
        tables = {name: x.to(device) for name, x in tables.items()}
        queries = queries if queries is None else queries.to(device)
        given = CachePositions(**tables, queries=queries)
        own = CacheTables(self.seqlens, self.block_table, self.leftpad, positions=given)
        bounds = enumerate(addresses.bounds(own, self.k))
        found = [shown(given, b, first, end, self.block_table, self.k) for b, (first, end) in bounds]
        hidden = torch.ones(self.k.shape[:2], dtype=torch.bool, device=device)
        for keys in found:
            hidden[keys.page, keys.row] = False
        k, v = (x.copy_(whole) for x, whole in zip((self.k, self.v), self.whole, strict=True))
        options = {}
        if self.codes is not None:
            (k, options["k_scale"]), (v, options["v_scale"]) = (quantize(x, self.codes) for x in (k, v))
            for name in ("k_scale", "v_scale"):
                options[name] = options[name].masked_fill(hidden[..., None], torch.nan)
            exact_k, exact_v = (
                dequantize(x, options[name], torch.float64) for x, name in ((k, "k_scale"), (v, "v_scale"))
            )
        else:
            for x in (k, v):
                x[hidden] = torch.nan
            exact_k, exact_v = k, v
        out, lse = attention_with_cache(
            self.q, k, v, rotary, self.seqlens, block_table=self.block_table, cache_leftpad=self.leftpad,
            causal=causal, positions=queries, return_lse=True, impl=self.target.impl,
            num_splits=num_splits, **tables, **options,
        )  # fmt: skip
        for b, keys in enumerate(found):
            one = slice(b, b + 1)
            if not keys.row.numel():
                assert not out[b].any() and (lse[b] == -torch.inf).all()
                continue
            p = support.Problem(
                self.q[one], exact_k[keys.page, keys.row][None], exact_v[keys.page, keys.row][None], rotary, causal,
                places=(of_queries(given, b, self.q.shape[1], keys.position), keys.position),
                grad_out=torch.zeros_like(self.q[one]), grad_lse=torch.zeros_like(lse[one]),
            )  # fmt: skip
            support.check_budget({"out": out[one], "lse": lse[one]}, p, self.target.dtype, f"sequence {b}: ")
