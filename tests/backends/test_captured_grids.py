"""Tests that launches do not depend on the contents of the tables. A captured step can therefore be replayed for other
lengths.

Because of this, vLLM's backend declares ``AttentionCGSupport.UNIFORM_BATCH``.
"""

import json
import subprocess
import sys

from test_launches import ROOT, compiling_environment, without_gpu

PROGRAM = """
import json, sys
sys.path += ["tests/backends", "tests"]
import torch, triton
from flashrope import CacheLayer, CacheTables, Packed, PagedKVCache, Rotary, plan_cache
from flashrope.backends import triton as backend
from test_launches import Launcher, Uncompiled
from bench.machine_code import offline

HEADS, HEADS_KV, D, PAGE, PAGES, TABLE = 8, 2, 64, 16, 128, 64
DTYPE = torch.bfloat16
launches = []

class Recorded(Uncompiled):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._run = lambda x, y, z, stream, function, *args: launches.append((self.name, [x, y, z], described(args)))

def described(x):
    if isinstance(x, torch.Tensor):
        return "tensor", *x.shape
    return [described(each) for each in x] if isinstance(x, (tuple, list)) else repr(x)[:40]

def attend(tables, layers, rotary, q, k, v):
    queries = dict(seqlen_q=q.shape[-3], heads_q=HEADS, dtype=DTYPE, impl="triton")
    plan = plan_cache(tables, like=layers[0], rotary=rotary, **queries)
    for layer in layers:  # the first makes the launches, the second looks them up, the third repeats them
        plan.attend(q, layer, k, v)

def taken():
    found, launches[:] = list(launches), []
    return found

def packed(rotary, codes, new, lengths):
    "A step of vLLM: tables that are written in place, the same number of new tokens for every request."
    batch, shape = 3, (PAGES, PAGE, HEADS_KV, D)
    kind = torch.int8 if codes else DTYPE
    def scale():
        return torch.zeros(shape[:3]) if codes else None
    layers = [CacheLayer(*(torch.zeros(shape, dtype=kind) for _ in range(2)), scale(), scale()) for _ in range(3)]
    q, k, v = (torch.zeros(batch * new, heads, D, dtype=DTYPE) for heads in (HEADS, HEADS_KV, HEADS_KV))
    seqlens, block_table = torch.zeros(batch, dtype=torch.int32), torch.zeros(batch, TABLE, dtype=torch.int32)
    starts = torch.arange(batch + 1, dtype=torch.int32) * new
    slots = torch.zeros(batch * new, dtype=torch.int64)
    found = []
    for n, each in enumerate(lengths):
        seqlens.copy_(torch.tensor(each)), block_table.fill_(n), slots.fill_(n * PAGE)
        tables = CacheTables(seqlens, block_table, new=Packed(starts, new, slot_mapping=slots))
        attend(tables, layers, rotary, q, k, v)
        found.append(taken())
    return found

def captured(rotary, moved, new):
    "PagedKVCache.capture, from a few keys to many pages."
    cache = PagedKVCache(PAGES, PAGE, HEADS_KV, D, DTYPE, "cpu", layers=3)
    names = [cache.allocate(), cache.allocate()]
    def append(n):
        rows = torch.zeros(2, n, HEADS_KV, D, dtype=DTYPE)
        cache.append(names, *(rows.expand(3, *rows.shape) for _ in range(2)))
        launches.clear()
    append(30)
    if moved:
        cache.remove(names[0], 16, 20)
    step, found = cache.capture(names, new), []
    q, k, v = (torch.zeros(2, new, heads, D, dtype=DTYPE) for heads in (HEADS, HEADS_KV, HEADS_KV))
    for more in (0, 5, 300):
        if more:
            append(more)
        step.update()
        attend(step.tables, [cache.cache_layer(n) for n in range(3)], rotary, q, k, v)
        found.append(taken())
        step.advance()
    return found

triton.compiler.compile = Recorded
backend.unsupported_reason = lambda q, cached=False: ""
rope, lengths = Rotary.rope(D), ([1, 2, 3], [900, 16, 17], [4, 1000, 512])
schemes = {"rope": rope, "rerope": rope.rectify(100).log_n(64), "hope": Rotary.hope(D, 512)}
schemes["maps"] = rope.self_extend(96, 8)
found = {}
with offline.active(80, offline.AbsentDevice(80, Launcher)):
    for name, rotary in schemes.items():
        for new in (1, 5):
            for codes in (False, True):
                found[f"packed, {name}, {new} new, codes {codes}"] = packed(rotary, codes, new, lengths)
            for moved in (False,) if name == "maps" else (False, True):
                found[f"captured, {name}, {new} new, moved {moved}"] = captured(rotary, moved, new)
print(json.dumps(found))
"""


@without_gpu
def test_launches_do_not_depend_on_lengths():
    env = compiling_environment()
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert len(found) == 30
    for name, (first, *others) in found.items():
        kernels = [kernel for kernel, *_ in first]
        assert kernels.count("append_rows") == kernels.count("attention_decode") == 3, (name, kernels)
        assert all(other == first for other in others), name
