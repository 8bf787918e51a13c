"""Says what replaces keyword arguments of flash-attn, scaled_dot_product_attention and Hugging Face.

``refuse_unknown(call, given)`` raises an error that names the argument to use instead. No error is raised for a keyword
whose value is the other library's default and has no effect, such as ``dropout_p=0.0``. The public calls collect
unknown keywords in ``**unknown``. That costs nothing if there are none. A type checker reports unknown keywords,
because the type of ``**unknown`` is Never.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from .cache_tables import CacheLayer, CachePositions

_NONE = "no such argument, because these kernels have no {}"
_NOT_THE_SAME = "no such argument, because these kernels have no {}, and the model is not the same without it; see {}"
_OTHER_SCORES = "docs/extending.md, 'A scheme outside the formula', for another way to compute it"
_VARLEN = "attention_varlen for packed sequences"
_CACHE = "attention_with_cache or attention_varlen_with_cache"
_SCALES = (
    "{} of a CacheLayer for plan_cache, a scale per token and key head of an int8 cache; these kernels have no float8"
)
_ROTARY = "rotary, a Rotary; pass raw q and k, which the call itself rotates"

INSTEAD = {  # keyword: what is expected instead
    "window_size": "rotary.local(w + 1) for flash-attn's (w, 0) or, with causal=False, (w, w); no window for (-1, -1)",
    "sliding_window": "rotary.local(window)",
    "attention_chunk": _NOT_THE_SAME.format("chunked attention", "rotary.local for windows"),
    "dropout_p": "0.0, because these kernels have no dropout",
    "dropout": "0.0, because these kernels have no dropout",
    "softcap": _NOT_THE_SAME.format("soft cap", _OTHER_SCORES),
    "alibi_slopes": _NOT_THE_SAME.format("ALiBi", _OTHER_SCORES),
    "is_causal": "causal, which is True by default",
    "attn_mask": f"causal, rotary.local for windows, {_VARLEN} or cache_leftpad in a cache; there are no other masks",
    "attn_bias": _NOT_THE_SAME.format("bias", _OTHER_SCORES),
    "return_attn_probs": "return_lse, for (out, lse); probabilities are never formed",
    "return_softmax_lse": "return_lse",
    "scale": "softmax_scale",
    "scaling": "softmax_scale",
    "enable_gqa": "no such argument, because the shapes say how many key heads there are",
    "deterministic": "no such argument, because decoding with a KV cache has no backward",
    "s_aux": "sinks",
    "learnable_sink": "sinks",
    "position_ids": "positions",
    "query": "q",
    "key": "k",
    "value": "v",
    "cu_seqlens": "cu_seqlens_q and cu_seqlens_k",
    "cu_seqlens_k_new": "cu_seqlens_q, which also divides the new k and v",
    "max_seqlen": "max_seqlen_q and max_seqlen_k",
    "cu_seq_lens_q": "cu_seqlens_q",
    "cu_seq_lens_k": "cu_seqlens_k",
    "max_length_q": "max_seqlen_q",
    "max_length_k": "max_seqlen_k",
    "seqused_k": "cache_seqlens of " + _CACHE,
    "block_tables": "block_table",
    "page_table": "block_table",
    "block_size": "no such argument, because the shape of the cache gives the page size",
    "context_lens": "cache_seqlens",
    "seq_lens": "cache_seqlens",
    "cache_lens": "cache_seqlens",
    "cache_batch_idx": "the sequences' own rows of the cache, or pages with block_table",
    "rotary_cos": _ROTARY,
    "rotary_sin": _ROTARY,
    "rotary_interleaved": "the argument interleaved of the Rotary's class method",
    "rotary_seqlens": "cache_seqlens; positions follow from it",
    "q_descale": _NONE.format("float8"),
    "k_descale": _SCALES.format("k_scale"),
    "v_descale": _SCALES.format("v_scale"),
    "qv": _NONE.format("second query"),
    "pack_gqa": "no such argument, because the kernels make this choice themselves",
    "sm_margin": "no such argument, because the kernels make this choice themselves",
}
_DOCUMENTS = f"{_VARLEN}, with cu_seqlens = flashrope.cu_seqlens_of(document_ids)"
INSTEAD |= {
    "document_ids": _DOCUMENTS,
    "block_mask": f"{_DOCUMENTS} for documents, rotary.local for windows; there are no other masks",
    "attention_mask": INSTEAD["attn_mask"],
    "mask": INSTEAD["attn_mask"],
    "cos": _ROTARY,
    "sin": _ROTARY,
    "logits_soft_cap": INSTEAD["softcap"],
    "return_softmax": INSTEAD["return_attn_probs"],
    "query_states": "q",
    "key_states": "k",
    "value_states": "v",
}
ELSEWHERE = {  # arguments that only some of the public calls have
    "num_splits": f"an argument of {_CACHE}; without a cache keys are not split",
    "max_seqlen_q": _VARLEN,
    "max_seqlen_k": f"{_VARLEN}; with a cache, cache_seqlens gives the lengths of the keys",
    "cu_seqlens_q": _VARLEN + ", or attention_varlen_with_cache",
    "cu_seqlens_k": f"{_VARLEN}; with a cache, cache_seqlens gives the lengths of the keys",
    "slot_mapping": "plan_cache with CacheTables(new=Packed(cu_seqlens_q, max_seqlen_q, slot_mapping))",
    "rotated_keys": "plan_cache(..., rotated_keys=True)",
    "positions": "plan_cache with CacheTables(positions=CachePositions(queries=...))",
}
ELSEWHERE |= dict.fromkeys(
    ("k_cache", "v_cache", "cache_seqlens", "block_table", "cache_leftpad", "validate"),
    f"an argument of {_CACHE}",
)
ELSEWHERE |= {name: f"plan_cache and its attend with CacheLayer({name}=...)" for name in CacheLayer._fields[2:]}
ELSEWHERE |= {
    name: f"plan_cache with CacheTables(positions=CachePositions({name}=...))" for name in CachePositions._fields[:-1]
}
NO_OPS: dict[str, tuple[Any, ...]] = {  # keyword: default values of other libraries that have no effect
    "window_size": ((-1, -1), [-1, -1], None),
    "attention_chunk": (0, None),
    "dropout_p": (0.0, 0),
    "dropout": (0.0, 0),
    "softcap": (0.0, 0, None),
    "logits_soft_cap": (0.0, 0, None),
    "enable_gqa": (False,),
    "return_attn_probs": (False,),
    "return_softmax_lse": (False,),
    "return_softmax": (False,),
    "sm_margin": (0,),
}
NO_OPS |= dict.fromkeys(  # keywords that have no effect if they are None
    (
        *("sliding_window", "alibi_slopes", "attn_mask", "attention_mask", "mask", "attn_bias", "scale", "scaling"),
        *("s_aux", "learnable_sink", "position_ids", "cu_seqlens_k_new", "seqused_k", "block_tables", "page_table"),
        *("cache_batch_idx", "rotary_cos", "rotary_sin", "rotary_seqlens", "q_descale", "k_descale", "v_descale"),
        *("qv", "pack_gqa", "block_table", "cache_leftpad"),
    ),
    (None,),
)


def refuse_unknown(call: Callable, given: dict[str, Any]) -> None:
    """Raises an error for the first unknown keyword whose value has an effect (is not in ``NO_OPS``).

    Args:
        call: one of the public calls.
        given: the keywords that call does not have, and their values.

    Raises:
        TypeError: an unknown keyword has an effect. The message gives its name, its value, and what is expected
            instead.
    """
    for name, value in given.items():
        if not any(type(value) is type(default) and value == default for default in NO_OPS.get(name, ())):
            _refuse(call, name, value)


def _refuse(call: Callable, name: str, value: Any) -> NoReturn:
    own = [parameter for parameter in inspect.signature(call).parameters if parameter != "unknown"]
    expected = INSTEAD.get(name) or ELSEWHERE.get(name)
    if expected is None:
        close = [] if torch.compiler.is_compiling() else difflib.get_close_matches(name, own, n=1)
        expected = close[0] if close else f"one of {', '.join(own)}"
    shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    raise TypeError(
        f"{name}: expected {expected}, got {name}={shown}, an unexpected keyword argument of {call.__name__}"
    )
