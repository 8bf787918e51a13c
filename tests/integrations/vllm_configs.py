"""Replaces vLLM's VllmConfig in tests without vLLM. The replacement has the fields that the plugin reads."""

from types import SimpleNamespace


def config(options=None, hf=(), model=(), text=None, **engine):
    """Returns the configuration of a small Llama.

    Args:
        options: the value of the field "flashrope".
        hf, model, engine: fields to set in the configurations of the text model, the model and the engine.
        text: the whole configuration of the text model, which replaces the one with the fields hf.
    """
    fields = dict(
        model_type="llama",
        num_hidden_layers=2,
        hidden_size=128,
        num_attention_heads=4,
        head_dim=32,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    text = text or SimpleNamespace(**{**fields, "flashrope": options, **dict(hf)})
    fields = dict(architecture="LlamaForCausalLM", runner_type="generate", dtype="torch.float32", max_model_len=32768)
    fields = {**fields, "hf_overrides": {}, **dict(model)}
    parts = dict(
        **cache_config("auto"),
        **attention_backend(None),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        kv_transfer_config=None,
        speculative_config=None,
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=text, hf_config=text, **fields), **{**parts, **engine}
    )


def cache_config(dtype: str, block_size: int = 16) -> dict:
    return dict(cache_config=SimpleNamespace(cache_dtype=dtype, block_size=block_size))


def attention_backend(name, **by_kind) -> dict:
    return dict(attention_config=SimpleNamespace(backend=name, backend_per_kind=by_kind))


def rope_parameters(kind: str, **fields) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}
