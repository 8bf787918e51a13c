"""What the tests of products in bfloat16 on the CPU share (csrc/cpu/bf16)."""

import support
import torch
from caching import cached_call
from flashrope.backends.cpu import loader
from support import Target

BRAIN = Target("cpu", torch.bfloat16, "cpu")
PAGE = 32


def hide_instructions(monkeypatch) -> None:
    """Hides the processor's instructions for bfloat16. Calls then use the library for AVX-512."""
    monkeypatch.setattr(loader, "instructions", lambda: loader.INSTRUCTIONS["x86-64-v4"])
    found = loader.find.__wrapped__()
    assert found.target == "x86-64-v4" and not found.library.multiplies(torch.bfloat16, 100)
    monkeypatch.setattr(loader, "load", lambda: found.library)


def check_runs_of_keys(p: support.Problem) -> None:
    """Checks attention of a problem's queries to a cache whose positions have a gap, so that the sequence has several
    runs. The keys are in pages of PAGE keys."""
    keys, queries = p.k.shape[1], p.q.shape[1]
    pages = keys // PAGE
    first_positions = torch.arange(pages) * PAGE + (torch.arange(pages) > 3) * 40
    rows = (first_positions[:, None] + torch.arange(PAGE)).flatten()
    k, v = (x.view(pages, PAGE, *x.shape[2:]) for x in (p.k, p.v))
    tables = {"block_table": torch.arange(pages, dtype=torch.int32)[None]}
    tables["page_positions"] = first_positions.to(torch.int32)[None]
    arguments = (p.q, k, v, p.rotary, support.int32([keys]))
    out, lse = cached_call(*arguments, **tables, return_lse=True, impl="cpu")
    places = (rows[-queries:].double(), rows.double())
    support.check_budget({"out": out, "lse": lse}, p.replace(places=places), torch.bfloat16)


def results_of_pytorch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns results of PyTorch's own kernels, which may use the tiles of AMX too. q, k, v: (batch, heads, seqlen,
    head_dim)."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), q @ k.mT
