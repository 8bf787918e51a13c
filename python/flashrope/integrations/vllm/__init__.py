"""vLLM: serves a model with a scheme of this package. Keys stay in the engine's own paged cache.

They are rotated where the scheme has one rotation, else raw.

vLLM loads ``register`` through the entry point group ``vllm.general_plugins``. It changes nothing for a model whose
configuration has neither a field "flashrope" nor ``dual_chunk_attention_config``.

Where to look:

    plan      the scheme of every layer, what is refused, the plans of a process, vLLM's pages
    plugin    register: what is hooked into vLLM, the model's own rotary embedding among it
    backend   vLLM's attention backend, over attention_varlen_with_cache

Importing plan and plugin does not import vLLM.

docs/serving.md says how to use it.
"""

__all__ = ["register"]


def register() -> None:
    """Hooks this package into vLLM; vLLM calls it in every process. A second call does nothing."""
    from . import plugin

    plugin.register()
