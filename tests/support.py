"""Defines the backends, inputs and schemes of the accuracy tests, and their error budget against float64.

The budget is per element. Let u be the type's unit roundoff and kappa = scale * max |q||k|. Rounding changes a score by
about u * kappa, and thereby every weight by a relative error of u * kappa. Let P be the attention weights and c a
constant of the type. Then

    |out - exact| <= c * u * (1 + kappa) * (P |V|)          |lse - exact| <= c * u * (1 + kappa)
    |dV - exact|  <= c * u * (P (1 + kappa))^T |dO|
    |dS|          <= M = P * (|dO| |V|^T + rowsum(P * |dO| |V|^T) + |dlse|)
    |dQ - exact|  <= c * u * (scale * (1 + kappa) * M) |K|  |dK - exact| <= c * u * (scale * (1 + kappa) * M)^T |Q|

With sinks of weight p, |dsink - exact| <= c * u * sum(p (1 + kappa) * (rowsum(P * |dO| |V|^T) + |dlse|)).

In these bounds, both channels of a rotating pair count with the length of the pair in |K| and |Q|, because rotation
mixes the two channels.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os

import torch
from flashrope import Rotary, attention
from flashrope.backends import reference
from flashrope.calls.int8 import dequantize, quantize
from flashrope.calls.records import AttentionCall
from flashrope.schemes.scales import UNSCALED

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
UNIT_ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# The constants c, which must not be changed. The largest values measured over all schemes, both maskings, several
# shapes and seeds were: float32 3.1 (CPU) and 1.5 (Triton), float64 5.7, bfloat16 0.65, float16 0.67 (CPU) and 0.45
# (Triton). In 16-bit types the last rounding alone may need 1.
COEFFICIENT = {torch.float64: 16.0, torch.float32: 16.0, torch.float16: 1.0, torch.bfloat16: 1.0}
NAMES = ("out", "lse", "grad_q", "grad_k", "grad_v")


@dataclasses.dataclass(frozen=True)
class Target:
    impl: str
    dtype: torch.dtype
    device: str

    def __str__(self) -> str:
        return f"{self.impl}-{str(self.dtype).removeprefix('torch.')}"

    @property
    def slow(self) -> bool:
        """Whether the target is Triton's interpreter, which takes seconds where a device takes microseconds."""
        return self.impl == "triton" and self.device == "cpu"

    def takes(self, number: int) -> bool:
        """Whether the default tests run the case with this number here: on a CPU, every case runs in float32 and in one
        of the backend's other types, in turn."""
        others = [t for t in TARGETS if t.impl == self.impl and t.dtype != torch.float32]
        return self.device != "cpu" or self not in others or others[number % len(others)] == self

    @property
    def of_any_positions(self) -> str | None:
        """Returns what to pass as impl if the tables of a cache may need other kernels than the compiled ones."""
        return None if self.impl == "cpu" else self.impl

    def size(self, small: int, large: int) -> int:
        return large if self.device == "cuda" else small


def _targets() -> list[Target]:
    """Returns the targets. Triton's interpreter emulates bfloat16 with bit patterns, so bfloat16 is tested on a GPU
    only."""
    types = (torch.float32, torch.bfloat16, torch.float16)
    targets = [Target("cpu", dtype, "cpu") for dtype in types]
    targets += [Target("sdpa", dtype, "cpu") for dtype in (*types, torch.float64)]
    gpu = torch.cuda.is_available()
    if gpu or INTERPRETED:
        types = (torch.float32, torch.float16, torch.bfloat16) if gpu else (torch.float32, torch.float16)
        targets += [Target("triton", dtype, "cuda" if gpu else "cpu") for dtype in types]
    return targets


TARGETS = _targets()


def device_of(impl: str) -> str:
    """Returns the device of the tensors that a backend takes here."""
    return next((target.device for target in TARGETS if target.impl == impl), "cpu")


SCHEMES = {
    "none": lambda d: Rotary.none(d),
    "rope": lambda d: Rotary.rope(d),
    "rope_interleaved": lambda d: Rotary.rope(d, interleaved=True),
    "rope_partial": lambda d: Rotary.rope(d, rotary_dim=d // 2),
    "hope_zeros": lambda d: Rotary.hope(d, 100),
    "hope_paper": lambda d: Rotary.hope(d, 100, interleaved=True),
    "hope_compact": lambda d: Rotary.hope(d, 100, compact=True),
    "interpolated": lambda d: Rotary.rope(d).interpolate(4.0),
    "ntk": lambda d: Rotary.rope(d).ntk(4.0),
    "hope_yarn": lambda d: Rotary.hope(d, 100).yarn(4.0, train_length=100),
    "rerope": lambda d: Rotary.rope(d).rectify(21),
    "leaky": lambda d: Rotary.rope(d).rectify(21, 4.0),
    "inverse_leaky": lambda d: Rotary.rope(d).rectify(21, 1 / 16),
    "local": lambda d: Rotary.rope(d).local(21),
    "log_n_clipped": lambda d: Rotary.rope(d).log_n(20),
    "log_n_trained": lambda d: Rotary.rope(d).log_n(50, clip=False),
    "hope_rerope_log_n": lambda d: Rotary.hope(d, 100, interleaved=True).rectify(21).log_n(20),
    "yarn_leaky_local_log_n": lambda d: (
        Rotary.rope(d).yarn(4.0, train_length=64).rectify(11, 8.0).local(45).log_n(20, clip=False)
    ),
}


def int32(values, device: str | None = None) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def random(shape, target: Target, seed: int, layout: str = "contiguous") -> torch.Tensor:
    """Returns normal numbers (batch, seqlen, heads, head_dim) that the target's type represents exactly, in the given
    memory layout."""
    batch, seqlen, heads, head_dim = shape
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(
        target.device, target.dtype
    )
    if layout == "transposed":  # (batch, heads, seqlen, head_dim) in memory
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "poisoned":  # a window of a larger buffer whose other elements are NaN
        room = x.new_full((batch, seqlen + 3, heads + 2, head_dim + 8), torch.nan)
        room[:, 1 : 1 + seqlen, 1 : 1 + heads, :head_dim] = x
        return room[:, 1 : 1 + seqlen, 1 : 1 + heads, :head_dim]
    assert layout == "contiguous"
    return x


@dataclasses.dataclass
class Problem:
    """The inputs of one call and of its backward."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rotary: Rotary
    causal: bool = True
    softmax_scale: float | None = None
    positions: torch.Tensor | None = None
    grad_out: torch.Tensor | None = None
    grad_lse: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    deterministic: bool = True
    places: tuple[torch.Tensor, torch.Tensor] | None = None  # positions of queries and keys

    def replace(self, **changes) -> Problem:
        return dataclasses.replace(self, **changes)


def problem(
    target: Target,
    rotary: Rotary,
    seqlen_q: int,
    seqlen_k: int | None = None,
    batch: int = 1,
    heads: int = 2,
    group: int = 2,
    seed: int = 0,
    layout: str = "contiguous",
    head_dim_v: int | None = None,
    **options,
) -> Problem:
    """Returns a problem of random inputs. head_dim_v: the width of v. None: the width of q and k."""
    seqlen_k, head_dim = seqlen_q if seqlen_k is None else seqlen_k, rotary.head_dim
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    q = random((batch, seqlen_q, heads, head_dim), target, seed, layout)
    k = random((batch, seqlen_k, heads // group, head_dim), target, seed + 1, layout)
    v = random((batch, seqlen_k, heads // group, head_dim_v), target, seed + 2, layout)
    grad_out = random((batch, seqlen_q, heads, head_dim_v), target, seed + 3, layout)
    grad_lse = random((batch, heads, seqlen_q, 1), target, seed + 4)[..., 0].to(lse_type(target))
    return Problem(q, k, v, rotary, grad_out=grad_out, grad_lse=grad_lse, **options)


def lse_type(target: Target) -> torch.dtype:
    return torch.float64 if target.dtype == torch.float64 else torch.float32


def run(p: Problem, impl: str) -> dict[str, torch.Tensor]:
    """Returns out, lse, and the gradients of (out * grad_out).sum() + (lse * grad_lse).sum() over the rows that see a
    key."""
    leaves = [x.detach().requires_grad_() for x in (p.q, p.k, p.v, p.sinks) if x is not None]
    out, lse = attention(
        *leaves[:3],
        p.rotary,
        causal=p.causal,
        softmax_scale=p.softmax_scale,
        positions=p.positions,
        sinks=None if p.sinks is None else leaves[3],
        return_lse=True,
        impl=impl,
        deterministic=p.deterministic,
    )
    grad_lse = torch.where(lse.isinf(), 0, p.grad_lse)
    if impl == "reference":
        grad_lse = grad_lse.to(lse)
    results, grads = (out, lse), (p.grad_out.to(out), grad_lse)
    if impl == "reference" and not lse.requires_grad:  # without keys lse does not depend on any input
        results, grads = (out,), (p.grad_out.to(out),)
    grads = torch.autograd.grad(results, leaves, grads, allow_unused=True)
    grads = (torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))
    names = NAMES if p.sinks is None else (*NAMES, "grad_sinks")
    return dict(zip(names, (out.detach(), lse.detach(), *grads), strict=True))


Results = dict[str, torch.Tensor]
_KNOWN: dict[tuple, tuple[Results, Results]] = {}  # the latest results of exact_and_bound


def exact_and_bound(p: Problem, gradients=True) -> tuple[Results, Results]:
    """Returns the float64 reference for the inputs converted to float64, and the budget without the factor c * u.

    Backends that get the same inputs share the results.
    """
    fields = [getattr(p, f.name) for f in dataclasses.fields(p) if f.name not in ("places", "deterministic")]
    key = (gradients, *map(_contents, (*fields, *(p.places or ()))))
    if key not in _KNOWN:
        if len(_KNOWN) == 100:
            del _KNOWN[next(iter(_KNOWN))]
        _KNOWN[key] = _exact_and_bound(p, gradients)
    return _KNOWN[key]


def _contents(x):
    if not isinstance(x, torch.Tensor):
        return x
    return x.device, x.shape, hashlib.sha256(x.detach().double().cpu().contiguous().numpy()).digest()


def _exact_and_bound(p: Problem, gradients: bool) -> tuple[Results, Results]:
    wide = p.replace(
        **{
            f.name: getattr(p, f.name).double()
            for f in dataclasses.fields(p)
            if f.name in ("q", "k", "v", "grad_out", "grad_lse", "sinks") and getattr(p, f.name) is not None
        }
    )
    q, k, v = wide.q, wide.k, wide.v
    group, seqlen_q, seqlen_k = q.shape[2] // k.shape[2], q.shape[1], k.shape[1]
    softmax_scale = p.rotary.head_dim**-0.5 if p.softmax_scale is None else p.softmax_scale
    call = AttentionCall(p.rotary, p.causal, softmax_scale, p.positions)
    identity = torch.eye(seqlen_k, dtype=q.dtype, device=q.device)[None, :, None].expand(k.shape[0], -1, k.shape[2], -1)
    out, lse = reference.dense_attention(q, k, torch.cat((v, identity), -1), call, places=p.places)
    exact, weights = {"out": out[..., : v.shape[-1]], "lse": lse}, out[..., v.shape[-1] :].transpose(1, 2)
    if p.sinks is not None or p.places is None and gradients:
        exact = run(wide, "reference")

    sink_weights = torch.zeros_like(exact["lse"])
    if p.sinks is not None:
        sink_weights = torch.exp(wide.sinks[:, None] - exact["lse"])
        weights = weights * (1 - sink_weights)[..., None]

    i = torch.arange(seqlen_q, device=q.device, dtype=torch.float64) + seqlen_k - seqlen_q
    j = torch.arange(seqlen_k, device=q.device)
    unseen = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device)
    where_q, where_k = (i, j) if p.places is None or p.rotary.axis else p.places
    seen = sum((band.holds(where_q[:, None], where_k[None, :]) for band in call.bands), unseen)
    if p.places is not None and p.causal:
        seen = seen & (j <= i[:, None])
    position = i if p.positions is None else p.positions.double()
    position = position if p.places is None else p.places[0]
    by_query = call.rotary.query_scale
    scale = abs(call.score_scale) * (by_query.of(position, seqlen_k) if by_query != UNSCALED else torch.ones_like(i))
    scale = scale[:, None] if scale.ndim == 2 else scale  # (batch, 1, seqlen_q) or (seqlen_q,)

    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    of_channels = q.new_ones(q.shape[-1])
    of_channels[: p.rotary.rotary_dim] = p.rotary.rotated_scale
    q, scaled_k = q * of_channels, k * of_channels
    lengths = q.norm(dim=-1).transpose(1, 2)[..., None] * k.norm(dim=-1).transpose(1, 2)[..., None, :]
    kappa = scale * (lengths * seen).amax(-1) if seqlen_k else torch.zeros_like(exact["lse"])
    spread = (1 + kappa)[..., None]
    bound = {"out": torch.einsum("bhij,bjhd->bihd", weights * spread, v.abs()), "lse": 1 + kappa}
    if not gradients:
        return exact, bound
    products = torch.einsum("bihd,bjhd->bhij", wide.grad_out.abs(), v.abs())
    delta = (weights * products).sum(-1) + wide.grad_lse.abs()
    of_scores = weights * (products + delta[..., None])
    of_scores = of_scores * spread * scale[..., None]

    def of_keys(x):  # summed over the query heads that share a key head
        return x.unflatten(2, (-1, group)).sum(3)

    bound |= {
        "grad_q": torch.einsum("bhij,bjhd->bihd", of_scores, pair_lengths(scaled_k, p.rotary)),
        "grad_k": of_keys(torch.einsum("bhij,bihd->bjhd", of_scores, pair_lengths(q, p.rotary))),
        "grad_v": of_keys(torch.einsum("bhij,bihd->bjhd", weights * spread, wide.grad_out.abs())),
    }
    if p.sinks is not None:
        bound["grad_sinks"] = (sink_weights * delta * (1 + kappa)).sum((0, 2))
    return exact, bound


def pair_lengths(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Returns |x|, with both channels of a rotated pair replaced by the length of the pair."""
    paired, rest = x[..., : rotary.rotary_dim], x[..., rotary.rotary_dim :].abs()
    shape = (-1, 2) if rotary.interleaved else (2, -1)
    pairs = paired.unflatten(-1, shape) if rotary.rotary_dim else paired[..., None]
    dim = -1 if rotary.interleaved else -2
    rotates = torch.tensor(rotary.frequencies, device=x.device) != 0
    rotates = rotates[:, None] if rotary.interleaved else rotates
    lengths = (
        torch.where(rotates, pairs.norm(dim=dim, keepdim=True), pairs.abs()).flatten(-2)
        if rotary.rotary_dim
        else paired
    )
    return torch.cat((lengths, rest), dim=-1)


def excess(
    got: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], bound: dict[str, torch.Tensor], dtype: torch.dtype
):
    """Returns the largest |error| / (u * bound) of each result. A result passes if c is at least this."""
    ratios = {}
    for name in got:
        assert got[name].shape == exact[name].shape, (
            f"{name}: shape {tuple(got[name].shape)}, expected {tuple(exact[name].shape)}"
        )
        error = torch.where(got[name].double() == exact[name], 0, (got[name].double() - exact[name]).abs())
        result_type = dtype if name != "lse" else torch.float64 if dtype == torch.float64 else torch.float32
        least = (
            torch.finfo(result_type).smallest_normal * torch.finfo(result_type).eps / 2
        )  # half the distance between the smallest numbers of the type
        ratio = (error - least).clamp(min=0) / (UNIT_ROUNDOFF[dtype] * bound[name])
        ratio = torch.where(error <= least, 0, ratio)  # 0 / 0 counts as 0, where nothing is visible; NaN stays
        ratios[name] = ratio.nan_to_num(nan=torch.inf).amax().item() if ratio.numel() else 0.0
    return ratios


def check(target: Target, p: Problem, roundings: int = 1) -> dict[str, float]:
    """Runs the target and checks out, lse and the three gradients against the budget. roundings: multiplies c."""
    got = run(p, target.impl)
    for name, like in zip(NAMES, (p.q, None, p.q, p.k, p.v), strict=True):
        assert got[name].dtype == (target.dtype if like is not None else lse_type(target)), name
        assert got[name].is_contiguous() or name.startswith("grad"), f"{name}: stride {got[name].stride()}"
    return check_budget(got, p, target.dtype, roundings=roundings)


def check_budget(
    got: dict[str, torch.Tensor], p: Problem, dtype: torch.dtype, where: str = "", roundings: int = 1
) -> dict[str, float]:
    """Checks any results that ``run`` returns for this problem against the budget. roundings: multiplies c."""
    gradients = any(name.startswith("grad") for name in got)
    ratios, allowed = excess(got, *exact_and_bound(p, gradients), dtype), roundings * COEFFICIENT[dtype]
    over = {name: ratio for name, ratio in ratios.items() if not ratio <= allowed}
    assert not over, f"{where}error over u * bound, allowed {allowed}: {over} in {p.rotary}"
    return ratios


def kept(x: torch.Tensor, cache_dtype: str | None) -> torch.Tensor:
    """Returns x as a cache of that type stores it: x itself, or in float64 the dequantized values."""
    return x if cache_dtype is None else dequantize(*quantize(x), torch.float64)
