"""Makes the contestants: the ways to compute attention that the benchmarks compare.

A contestant names the scheme that it computes, so that its result can be checked against the float64 reference. It
prepares a call (q, k, v) -> out for one problem. The measured time includes the rotation. It does not include building
tables and masks, nor compilation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module

import torch
from flashrope import Rotary, attention
from flashrope.schemes.cos_sin import cos_sin
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .problem import Problem, Unavailable
from .two_calls import LIBRARIES, two_calls

DENSE_MASK = -1e9
SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def _no_scratch(problem: Problem) -> int:
    return 0


@dataclasses.dataclass(frozen=True)
class Contestant:
    """Describes a way to compute attention, or a rotation.

    All arguments that are functions take a problem. rotary: returns the scheme that the contestant must compute.
    prepare: returns a call (q, k, v) -> out. prepare and the call may raise Unavailable. scratch: returns the bytes of
    its score matrices or rotated caches. They decide whether the contestant fits into memory. moved: returns the bytes
    that it must move, if bandwidth is measured. ceiling: the entry of ``ceilings`` that its speed is a share of. exact:
    returns the float64 reference (q, k, v) -> result, if the result is not the output of attention. setting: returns a
    context in which all calls are made, for contestants with tiles or groups that are not in use.
    """

    name: str
    rotary: Callable[[Problem], Rotary]
    prepare: Callable[[Problem], Callable]
    ours: bool = False
    scratch: Callable[[Problem], int] = _no_scratch
    moved: Callable[[Problem], int] | None = None
    ceiling: str = "product_tflops"
    exact: Callable[[Problem], Callable] | None = None
    setting: Callable[[], AbstractContextManager] = nullcontext

    @property
    def runs_flashrope(self) -> bool:
        return self.ours or self.setting is not nullcontext


# ---- rotation
def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def full_table(rotary: Rotary, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cos and sin (seqlen, 1, head_dim) with their halves repeated, in the dtype of q and k, as models store
    them."""
    return tuple(torch.cat((x, x), -1).to(dtype)[:, None] for x in cos_sin(rotary, positions))


def apply(x, cos, sin):
    return x * cos + rotate_half(x) * sin


def positions(problem: Problem) -> torch.Tensor:
    return torch.arange(problem.seqlen, device=problem.device)


def eager(problem: Problem, at: torch.Tensor | None = None):
    """Returns a call that rotates tensors (batch, seqlen, heads, head_dim) to positions `at`, by default 0, 1, 2, ...,
    in eager mode."""
    return partial(_rotated, *full_table(problem.rope(), positions(problem) if at is None else at, problem.dtype))


def _rotated(cos, sin, *tensors):
    rotated = tuple(apply(x, cos, sin) for x in tensors)
    return rotated if len(rotated) > 1 else rotated[0]


def compiled(problem: Problem, at: torch.Tensor | None = None):
    """Returns the rotation of ``eager`` as one compiled function of all tensors."""
    torch.compiler.reset()  # torch refuses to compile a function for more than a few shapes
    cos, sin = full_table(problem.rope(), positions(problem) if at is None else at, problem.dtype)
    return partial(torch.compile(_rotated, dynamic=False, fullgraph=True), cos, sin)


def fused(problem: Problem, at: torch.Tensor | None = None, in_place: bool = False):
    """Returns the rotation of ``eager`` as one launch of ``fused_rope``."""
    if problem.device.type != "cuda":
        raise Unavailable("Triton kernels need a CUDA device")
    from .fused_rope import rotate

    cos, sin = (x.float().contiguous() for x in cos_sin(problem.rope(), positions(problem) if at is None else at))

    def rotated(x, y=None):
        both = rotate(x, x.new_empty(*x.shape[:2], 0, x.shape[3]) if y is None else y, cos, sin, in_place)
        return both[0] if y is None else both

    return rotated


ENCODINGS = {"fused RoPE": fused, "compiled RoPE": compiled, "eager RoPE": eager}


def best_rope(device: torch.device) -> str:
    """Returns the name of the fastest separate rotation on this device. This rotation precedes attention without
    position encoding, except where the benchmark compares rotations."""
    return "fused RoPE" if device.type == "cuda" else "compiled RoPE"


# ---- attention
def sdpa(which: str, problem: Problem):
    if problem.device.type == "cpu" and which != "flash":
        raise Unavailable("needs a CUDA device")
    repeat = problem.group if which == "efficient" else 1  # this kernel has no GQA, so models repeat keys and values

    def attend(q, k, v):
        if repeat > 1:
            k, v = (x.repeat_interleave(repeat, 2) for x in (k, v))
        with sdpa_kernel(SDPA[which]):
            out = scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)),
                is_causal=problem.causal and not problem.decoding,
                enable_gqa=problem.group > 1 and repeat == 1,
            )
        return out.transpose(1, 2)

    return attend


def upstream(module: str, problem: Problem):
    """Returns the call of flash-attn's own package. module: flash_attn for version 2, flash_attn_interface for version
    3, flash_attn.cute for version 4."""
    try:
        function = import_module(module).flash_attn_func
    except ImportError as error:
        raise Unavailable(f"not installed ({error})") from None

    def attend(q, k, v):
        out = function(q, k, v, causal=problem.causal and not problem.decoding)
        return out[0] if isinstance(out, tuple) else out

    return attend


def _block_mask(problem: Problem, mask):
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(mask, None, None, problem.seqlen, problem.seqlen, device=problem.device)


def _distance_mask(problem: Problem, inside: Callable):
    """Returns a mask of the pairs of query i and key j for which inside(i - j) holds. If the problem is causal, j <= i
    must hold as well."""

    def mask(b, h, i, j):
        return (i >= j) & inside(i - j) if problem.causal else inside(i - j)

    return mask


def flex(problem: Problem):
    from torch.nn.attention.flex_attention import flex_attention

    mask = _block_mask(problem, lambda b, h, i, j: i >= j) if problem.causal else None
    call = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def attend(q, k, v):
        if q.requires_grad and q.device.type == "cpu":
            raise Unavailable("torch compiles FlexAttention for the CPU without a backward")
        return call(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask, enable_gqa=problem.group > 1).transpose(
            1, 2
        )

    return attend


def flex_two_passes(problem: Problem):
    """Returns a call that computes ReRoPE as two masked passes and merges their outputs by the lse of each."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    if not problem.causal:
        raise Unavailable("two passes compute a causal mask; without it three are needed")
    if problem.device.type == "cpu":
        raise Unavailable("torch compiles FlexAttention for the CPU without lse")
    window, gqa = problem.window, problem.group > 1
    near_mask = _block_mask(problem, _distance_mask(problem, lambda d: d < window))
    far_mask = _block_mask(problem, _distance_mask(problem, lambda d: d >= window))
    near = ENCODINGS[best_rope(problem.device)](problem)
    far = ENCODINGS[best_rope(problem.device)](problem, torch.full((problem.seqlen,), window, device=problem.device))

    def passes(near_q, near_k, far_q, k, v):
        parts = [
            flex_attention(q, k, v, block_mask=mask, enable_gqa=gqa, return_aux=AuxRequest(lse=True))
            for q, k, mask in ((near_q, near_k, near_mask), (far_q, k, far_mask))
        ]
        lse = torch.logaddexp(*(aux.lse for _, aux in parts))
        return sum(out * torch.exp(aux.lse - lse)[..., None].to(out.dtype) for out, aux in parts)

    call = torch.compile(passes, dynamic=False, fullgraph=True)

    def attend(q, k, v):
        near_q, near_k = near(q, k)
        return call(*(x.transpose(1, 2) for x in (near_q, near_k, far(q), k, v))).transpose(1, 2)

    return attend


def dense(problem: Problem):
    """Returns a call that computes ReRoPE as its author's code does: it computes both score matrices in full and then
    chooses between them element by element."""
    window = problem.window
    near = eager(problem)
    ahead, behind = (eager(problem, torch.full((1,), float(at), device=problem.device)) for at in (window, -window))

    def attend(q, k, v):
        k, v = (x.repeat_interleave(problem.group, 2) for x in (k, v)) if problem.group > 1 else (k, v)
        distance = torch.arange(q.shape[1], device=q.device)[:, None] - torch.arange(k.shape[1], device=q.device)
        scores = torch.einsum("bihd,bjhd->bhij", near(q), near(k))
        scores = torch.where(distance < window, scores, torch.einsum("bihd,bjhd->bhij", ahead(q), k))
        if not problem.causal:
            scores = torch.where(distance > -window, scores, torch.einsum("bihd,bjhd->bhij", behind(q), k))
        scores = scores * problem.head_dim**-0.5
        if problem.causal:
            scores = scores.masked_fill(distance < 0, DENSE_MASK)
        return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)

    return attend


def own(
    scheme: Callable[[Problem], Rotary], problem: Problem, deterministic: bool | None = None, impl: str | None = None
):
    rotary, impl = scheme(problem), impl or own_impl(problem.device)
    return lambda q, k, v: attention(q, k, v, rotary, causal=problem.causal, impl=impl, deterministic=deterministic)


def own_impl(device: torch.device) -> str | None:
    """Returns the backend that is timed as flashrope. On the CPU it is the default, as in users' programs."""
    return None if device.type == "cpu" else "triton"


def with_rope(encoding: str, attend: Callable, problem: Problem):
    rotate, call = ENCODINGS[encoding](problem), attend(problem)
    return lambda q, k, v: call(*rotate(q, k), v)


def by_sdpa(name: str, scheme: Callable[[Problem], Rotary]) -> Contestant:
    """Returns flashrope's composition of PyTorch's kernels, impl="sdpa"."""
    return Contestant(f"flashrope {name}, sdpa", scheme, partial(own, scheme, impl="sdpa"), ours=True)


# ---- the contestants
KERNELS = {
    "SDPA flash": partial(sdpa, "flash"),
    "SDPA cuDNN": partial(sdpa, "cuDNN"),
    "SDPA efficient": partial(sdpa, "efficient"),
    "flash-attn 2": partial(upstream, "flash_attn"),
    "flash-attn 3": partial(upstream, "flash_attn_interface"),
    "flash-attn 4": partial(upstream, "flash_attn.cute"),
}


def prefill_hope(device: torch.device) -> list[Contestant]:
    """Returns the contestants: attention without position encoding, attention after a separate RoPE, and flashrope."""
    chosen = [Contestant(name, Problem.none, attend) for name, attend in KERNELS.items()]
    for encoding in (best_rope(device), "eager RoPE"):
        chosen += [
            Contestant(f"{encoding} + {name}", Problem.rope, partial(with_rope, encoding, attend))
            for name, attend in KERNELS.items()
            if encoding != "eager RoPE" or name.startswith("SDPA")
        ]
    if device.type == "cpu":
        chosen.append(
            Contestant("fused RoPE + SDPA flash", Problem.rope, partial(with_rope, "fused RoPE", KERNELS["SDPA flash"]))
        )
    rope = best_rope(device)
    chosen.append(Contestant(f"{rope} + FlexAttention", Problem.rope, partial(with_rope, rope, flex)))
    if device.type == "cuda":  # the CPU's backward is always reproducible
        chosen.append(REPRODUCIBLE)
    return chosen + [OWN["RoPE"], OWN["HoPE"], by_sdpa("HoPE", Problem.hope)]


def prefill_rerope(device: torch.device) -> list[Contestant]:
    """Returns the contestants: what computes ReRoPE, and what RoPE costs by the fastest kernels of others."""
    rope = best_rope(device)
    chosen = [Contestant("SDPA flash", Problem.none, KERNELS["SDPA flash"])]
    chosen += [
        Contestant(f"{rope} + {name}", Problem.rope, partial(with_rope, rope, KERNELS[name]))
        for name in ("SDPA cuDNN", "flash-attn 3", "flash-attn 4")
    ]
    chosen += [
        Contestant(f"{encoding} + two calls, {which}", Problem.rerope, partial(two_calls, ENCODINGS[encoding], which))
        for encoding in (rope, *(["eager RoPE"] if device.type == "cpu" else []))
        for which in LIBRARIES
    ]
    return chosen + [
        Contestant("two FlexAttention passes", Problem.rerope, flex_two_passes),
        Contestant("two dense matrices", Problem.rerope, dense, scratch=dense_bytes),
        OWN["HoPE"],
        OWN["ReRoPE"],
        by_sdpa("ReRoPE", Problem.rerope),
    ]


def dense_bytes(problem: Problem) -> int:
    """Returns the bytes of the five matrices that ``dense`` holds: two of scores, the choice between them, its softmax
    in float32, and one more for the backward."""
    return problem.batch * problem.heads * problem.seqlen**2 * (4 * problem.dtype.itemsize + 4)


OWN = {
    name: Contestant(f"flashrope {name}", scheme, partial(own, scheme), ours=True)
    for name, scheme in (
        ("RoPE", Problem.rope),
        ("HoPE", Problem.hope),
        ("ReRoPE", Problem.rerope),
        ("NoPE", Problem.none),
    )
}
REPRODUCIBLE = Contestant(
    "flashrope RoPE, deterministic=True", Problem.rope, partial(own, Problem.rope, deterministic=True), ours=True
)
