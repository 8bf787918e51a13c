"""A vLLM plugin that serves a model with a scheme of this package. Keys stay in the engine's own paged cache.

The cache holds rotated keys if the scheme has one rotation, otherwise raw keys.

vLLM loads ``register`` through the entry point group ``vllm.general_plugins``. The plugin changes nothing for a model
whose configuration has neither a field "flashrope" nor ``dual_chunk_attention_config``.

Where to look:

    configured     the field "flashrope": its origin, misspelt and lost options, and dual_chunk_attention_config
    engine_plan    the scheme of every layer, checks of the configuration, the plans of a process, vLLM's pages
    engine_memory  the memory that vLLM's cache leaves free for the workspaces of a step
    plugin         register: the hooks into vLLM, which also turn off the model's own rotary embedding
    backend        vLLM's attention backend, over plan_cache

Only backend needs vLLM when it is imported.

docs/serving.md says how to use the plugin.
"""

__all__ = ["register"]


def register() -> None:
    """Hooks this package into vLLM. vLLM calls it in every process. A second call does nothing."""
    from . import plugin

    plugin.register()
