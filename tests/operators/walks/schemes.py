"""Draws random schemes, as the Python expressions that create them."""

from __future__ import annotations

from flashrope import Rotary
from hypothesis import strategies as st

HEAD_DIMS = (8, 16, 24, 32, 40, 64)


def make(expression: str) -> Rotary:
    return eval(expression, {"Rotary": Rotary, "inf": float("inf")})


def _numbers(*choices: float):
    return st.sampled_from(choices)


@st.composite
def tables(draw, head_dim: int) -> str:
    base = draw(_numbers(2.0, 50.0, 10_000.0, 500_000.0))
    interleaved = draw(st.booleans())
    kind = draw(st.sampled_from(("rope", "rope", "partial", "hope", "none", "given")))
    if kind == "partial":
        rotary_dim = 2 * draw(st.integers(0, head_dim // 2))
        first_channel = 2 * draw(st.one_of(st.just(0), st.integers(0, (head_dim - rotary_dim) // 2)))
        return f"Rotary.rope({head_dim}, {base}, {rotary_dim}, {interleaved}, first_channel={first_channel})"
    if kind == "hope":
        compact = draw(st.booleans()) and not interleaved
        return f"Rotary.hope({head_dim}, {draw(st.integers(7, 300))}, {base}, {interleaved}, {compact})"
    if kind == "none":
        return f"Rotary.none({head_dim})"
    if kind == "given":
        table = draw(st.lists(_numbers(0.0, 1.0, 0.3, -0.7, 1e-3, 3.0), max_size=head_dim // 2))
        return f"Rotary.from_inv_freq({table}, {head_dim}, {interleaved})"
    return f"Rotary.rope({head_dim}, {base}, interleaved={interleaved})"


@st.composite
def changes(draw) -> str:
    factor, length = draw(_numbers(0.5, 1.0, 1.7, 4.0, 16.0)), draw(st.integers(8, 200))
    window = draw(st.integers(1, 90))
    kind = draw(
        st.sampled_from(
            ("interpolate", "ntk", "yarn", "cope", "rectify", "leaky", "local", "log_n", "self_extend", "dual_chunk")
            + ("log_steps", "scale_rotated")
        )
    )
    return {
        "interpolate": f".interpolate({factor})",
        "ntk": f".ntk({factor}, {draw(st.sampled_from(('old', 'aware', 'fixed', 'mixed')))!r})",
        "yarn": f".yarn({factor}, {length})",
        "cope": f".cope({length}, taper={draw(st.booleans())})",
        "rectify": f".rectify({window})",
        "leaky": f".rectify({window}, {draw(_numbers(1 / 16, 0.5, 2.0, 8.0, float('inf')))})",
        "local": f".local({window})",
        "log_n": f".log_n({length}, {draw(st.booleans())})",
        "log_steps": f".log_steps({length // 4}, {draw(_numbers(0.1, 0.5))}, {draw(st.integers(0, 1))})",
        "scale_rotated": f".scale_rotated({draw(_numbers(0.8, 1.5))})",
        "self_extend": f".self_extend({window // 4 * 4 + 4}, {draw(st.sampled_from((1, 2, 4)))})",
        "dual_chunk": f".dual_chunk({128 + draw(st.integers(1, 127))}, {draw(st.integers(1, 127))})",
    }[kind]


@st.composite
def axial_schemes(draw) -> str:
    """Returns the expression of a scheme whose positions have several coordinates: equal and unequal axes, in blocks or
    in random order, with tables of their own or sections of one table."""
    counts = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    pairs = sum(counts)
    head_dim = -(-pairs // 4) * 8  # a multiple of 8, which attention requires
    base, interleaved = draw(_numbers(2.0, 100.0, 10_000.0)), draw(st.booleans())
    kind = draw(st.sampled_from(("axial", "axial", "mrope", "equal")))
    if kind == "equal":
        return f"Rotary.axial({head_dim}, {draw(st.sampled_from((1, 2, 4)))}, {base}, {interleaved})"
    if kind == "mrope" and len(counts) > 1:
        return f"Rotary.rope({head_dim}, {base}, {2 * pairs}, {interleaved}).mrope({counts})"
    own = st.lists(_numbers(0.0, 1.0, 0.3, -0.7, 1e-3, 3.0), min_size=counts[0], max_size=counts[0])
    axes = [draw(own) if draw(st.booleans()) else counts[0], *counts[1:]]
    blocks = [a for a, count in enumerate(counts) for _ in range(count)]
    axis = draw(st.permutations(blocks)) if draw(st.booleans()) else None
    return f"Rotary.axial({head_dim}, {axes}, {base}, {interleaved}, axis={axis}, rotary_dim={2 * pairs})"


@st.composite
def schemes(draw, head_dim: int | None = None) -> str:
    """Returns the expression of a scheme. A step of the chain that the builders refuse is left out. head_dim: None
    draws one of HEAD_DIMS."""
    expression = draw(tables(head_dim or draw(st.sampled_from(HEAD_DIMS))))
    for change in draw(st.lists(changes(), max_size=4)):
        try:
            make(expression + change)
        except ValueError:
            continue
        expression += change
    return expression
