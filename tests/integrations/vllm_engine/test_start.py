"""Tests that vLLM's engine refuses bad configurations when it starts, with the plugin's message. test_vllm_plan.py
tests the checks themselves."""

import logging
import pickle
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; .ci/run tests it in an environment of its own")

from flashrope.integrations.transformers import convert
from models import save_model
from transformers import AutoModelForCausalLM
from vllm.engine.arg_utils import EngineArgs

COMMON = dict(skip_tokenizer_init=True, dtype="float32", max_model_len=1024)
HYBRID = dict(sliding_window=48, layer_types=["sliding_attention", "sliding_attention", "full_attention"])
REFUSED = {  # model, its changes, options, settings, message
    "key": ("llama", {}, {"windw": 64}, {}, "flashrope of --hf-overrides: options: .* got 'windw'"),
    "window": ("llama", {}, {"rerope": 1024}, {}, "rerope: expected a window of less than max_model_len = 1024"),
    "block_size": ("llama", {}, {}, {"block_size": 48}, "block_size: expected 16, 32, 64, 128, ..., got 48"),
    "cache dtype": ("llama", {}, {}, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype: .* got fp8, .* convert in software"),
    "4 bits": (
        "llama",
        {},
        {},
        {"kv_cache_dtype": "int4_per_token_head"},
        "kv_cache_dtype: .* got int4_per_token_head",
    ),
    "scaled fp8": (
        "llama",
        {},
        {},
        {"kv_cache_dtype": "fp8_per_token_head"},
        "kv_cache_dtype: expected auto or float32",
    ),
    "backend": ("llama", {}, {}, {"attention_backend": "CPU_ATTN"}, "attention_backend: expected None or CUSTOM"),
    "soft cap": ("gemma2", HYBRID, {}, {}, "attn_logit_softcapping: not supported by flashrope, got 50.0"),
    "alibi": ("bloom", {}, {}, {}, "architecture: expected a tested .* got BloomForCausalLM"),
    "sliding": ("mistral", {"sliding_window": 48}, {"rerope": 8}, {}, "rerope: expected a layer that sees all keys"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, tmp_path):
    model, changes, options, settings, message = REFUSED[name]
    folder = save_model(tmp_path, model, **changes)
    with pytest.raises(Exception, match=message):
        EngineArgs(folder, hf_overrides={"flashrope": options}, **{**COMMON, **settings}).create_engine_config()


def test_the_plugin_is_an_entry_point():
    from importlib.metadata import entry_points

    (plugin,) = entry_points(group="vllm.general_plugins", name="flashrope")
    assert plugin.value == "flashrope.integrations.vllm:register"


def test_a_table_that_vllm_reads_differently(tmp_path, monkeypatch):
    """If vLLM reads the rotary table differently from the plugin, an error is raised. The plugin compares vLLM's table
    with the table of the configuration before it turns vLLM's rotation off."""
    from engine import engine
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    stock = RotaryEmbedding._compute_inv_freq
    monkeypatch.setattr(RotaryEmbedding, "_compute_inv_freq", lambda self, base: stock(self, 1.01 * base))
    with pytest.raises(ValueError, match="rope: expected the cos and sin of the model's configuration"):
        with engine(save_model(tmp_path, "llama"), {}):
            pass


@pytest.mark.parametrize(
    "window, head_size, message",
    [
        (64, 32, "sliding_window: expected 48 in layer 1, as the model's configuration says, got 64 from vLLM"),
        (None, 32, "sliding_window: expected 48 in layer 1, .* got None"),
        (48, 64, "head_size: expected 32 in layer 1, got 64 from vLLM"),
    ],
)
def test_a_layer_that_vllm_builds_differently(window, head_size, message):
    from flashrope import Rotary
    from flashrope.integrations.vllm.backend import FlashropeImpl
    from flashrope.integrations.vllm.engine_plan import Layer

    plan = SimpleNamespace(layers=[Layer(Rotary.rope(32), None, False), Layer(Rotary.rope(32).local(48), 48, True)])
    layer = FlashropeImpl.__new__(FlashropeImpl)  # without an engine's configuration
    layer.plan, layer.sliding_window, layer.head_size = plan, window, head_size
    with pytest.raises(ValueError, match=message):
        layer._find_scheme("model.layers.1.self_attn.attn")


def test_rotation_outside_get_rope(tmp_path, monkeypatch):
    """A model that rotates outside get_rope raises an error, because its rotation was not turned off."""
    import vllm.model_executor.models.llama as llama
    from engine import engine

    class OwnRotation:
        def __call__(self, positions, q, k):
            return q, k

    monkeypatch.setattr(llama, "get_rope", lambda *args, **kwargs: OwnRotation())
    with pytest.raises(RuntimeError, match="expected a model that gets its rotation from vLLM's get_rope"):
        with engine(save_model(tmp_path, "llama"), {"rerope": 33}):
            pass


def test_another_plugins_backend(tmp_path, monkeypatch):
    """With another plugin's attention backend, models with a scheme raise an error, because that backend expects
    rotated keys and would get raw keys. Stock models run."""
    from engine import engine
    from vllm.v1.attention.backends import registry

    folder, custom = save_model(tmp_path, "llama"), registry.AttentionBackendEnum.CUSTOM
    monkeypatch.setitem(registry._ATTN_OVERRIDES, custom, "another.Backend")
    with pytest.raises(RuntimeError, match="attention_backend: expected CUSTOM to be flashrope.* got another.Backend"):
        with engine(folder, {}):
            pass
    with engine(folder, None):
        pass


def test_another_plugins_backend_in_a_worker(tmp_path, monkeypatch):
    """Another plugin's backend in a worker raises an error too. The worker registers plugins again, possibly in another
    order than the process that checked the configuration."""
    from engine import engine
    from vllm.v1.attention.backends import registry
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    stock = CPUModelRunner.load_model

    def load_model(self, *args, **kwargs):
        monkeypatch.setitem(registry._ATTN_OVERRIDES, registry.AttentionBackendEnum.CUSTOM, "another.Backend")
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(CPUModelRunner, "load_model", load_model)
    with pytest.raises(RuntimeError, match="attention_backend: expected CUSTOM to be flashrope.* got another.Backend"):
        with engine(save_model(tmp_path, "llama"), {}):
            pass


def test_what_a_gpu_would_be_asked():
    """CudaPlatform validates the CUSTOM backend with these arguments. None of this has run on a GPU."""
    import torch
    from flashrope.integrations.vllm.backend import FlashropeBackend
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.selector import AttentionSelectorConfig

    def reasons(capability, **changes):
        layer = dict(head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=16)
        asked = AttentionSelectorConfig(**{**layer, **changes})._asdict()
        return FlashropeBackend.validate_configuration(device_capability=capability, **asked)

    ampere = DeviceCapability(8, 0)
    assert reasons(ampere) == [] == reasons(ampere, has_sliding_window=True, has_sink=True)
    assert reasons(ampere, kv_cache_dtype="int8_per_token_head") == []
    assert reasons(DeviceCapability(7, 5)) == ["compute capability not supported"]
    for cache_dtype in ("fp8", "int4_per_token_head"):
        assert reasons(ampere, kv_cache_dtype=cache_dtype) == ["kv_cache_dtype not supported"]
    assert reasons(ampere, head_size=100) == ["head_size not supported"]
    assert reasons(ampere, attn_type="encoder_only") == ["attention type encoder_only not supported"]


@pytest.mark.parametrize("head_size", [32, 256])
def test_pages_are_those_of_vllms_own_kernels(head_size):
    """Pages have the layout of vLLM's own kernels: as many bytes as TRITON_ATTN needs, with keys, values and scales in
    the same places. The quantized values differ."""
    import torch
    from flashrope.integrations.vllm.backend import FlashropeBackend
    from flashrope.integrations.vllm.engine_plan import split_pages
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

    cache_dtype, rows = "int8_per_token_head", head_size + 4
    dtype, mode = STR_DTYPE_TO_TORCH_DTYPE[cache_dtype], get_kv_quant_mode(cache_dtype)
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=head_size, dtype=dtype, kv_quant_mode=mode)
    ours, theirs = (backend.customize_spec(spec) for backend in (FlashropeBackend, TritonAttentionBackend))
    assert ours == theirs and ours.page_size_bytes == 16 * 2 * 2 * rows
    cache = torch.zeros(3, 16, 2, 2 * rows, dtype=dtype).transpose(1, 2)
    impl = TritonAttentionImpl.__new__(TritonAttentionImpl)  # without an engine's configuration
    impl._kv_quant_mode, impl._k_scale_cache, impl._v_scale_cache = mode, None, None
    expected = (*impl._pth_key_value_caches(cache), impl._k_scale_cache, impl._v_scale_cache)
    for view, place in zip(split_pages(cache, head_size)[1:], expected, strict=True):
        assert (view.data_ptr(), view.stride(), view.dtype) == (place.data_ptr(), place.stride(), place.dtype)
        assert view.shape[:3] == place.shape[:3]  # rows of TRITON_ATTN include the scale


def test_the_builder_declares_what_the_grids_allow():
    """The builder declares the CUDA graph support that the grids allow. tests/backends/test_captured_grids.py shows
    that launches do not depend on lengths."""
    from flashrope.integrations.vllm.backend import FlashropeMetadataBuilder
    from vllm.v1.attention.backend import AttentionCGSupport

    assert FlashropeMetadataBuilder._cudagraph_support is AttentionCGSupport.UNIFORM_BATCH


@pytest.fixture
def log(monkeypatch):
    """Returns the list of the plugin's log messages. vLLM removes handlers of its loggers when an engine starts."""
    messages = []
    logger = logging.getLogger("vllm.plugins.flashrope")
    monkeypatch.setattr(logger, "handle", lambda record: messages.append(record.getMessage()))
    return messages


def start(folder: str, overrides: dict, **settings):
    return EngineArgs(folder, hf_overrides=overrides, **{**COMMON, **settings}).create_engine_config()


def test_an_engine_logs_one_line(tmp_path, log):
    """The line has the scheme and the cache form of every kind of layer, and where they were configured. The engine's
    process checks the configuration again and does not log the line again."""
    folder = save_model(tmp_path, "gemma3_text", **HYBRID)
    config = start(folder, {"flashrope": {"rerope": 24, "log_n": 256}})
    pickle.loads(pickle.dumps(config)).__post_init__()
    (line,) = log
    assert "Gemma3ForCausalLM, configured by --hf-overrides, context 1024" in line
    local, whole = line.split("; layers ")
    assert ": layers 0-1 (window 48): Rotary(" in local and local.endswith("rotated keys in the cache")
    assert whole.startswith("2 (all keys): Rotary(") and whole.endswith("raw keys in the cache")
    assert "24 for d >= 24" in whole and "max(1, ln(i + 1) / ln(256))" in whole


def test_a_misspelt_field_is_logged(tmp_path, log):
    """A misspelt field gives a warning. The engine serves the stock model."""
    config = start(save_model(tmp_path, "llama"), {"flashrop": {"rerope": 24}})
    assert log == [
        'flashrope: flashrop of --hf-overrides: expected the name "flashrope", got "flashrop", which has no effect'
    ]
    assert config.attention_config.backend is None


def test_lost_options_are_logged(tmp_path, log):
    """hf_overrides replaces the saved field. The log names the options that are lost."""
    convert(AutoModelForCausalLM.from_pretrained(save_model(tmp_path, "llama")), log_n=256).save_pretrained(tmp_path)
    start(str(tmp_path), {})
    start(str(tmp_path), {"flashrope": {"rerope": 24}})
    saved, line, warning = log
    assert "configured by config.json" in saved and "ln(256)" in saved
    assert "configured by --hf-overrides" in line and "ln(256)" not in line
    assert warning == (
        'flashrope of --hf-overrides: replaces the whole field of config.json and drops {"log_n": 256}; to keep these '
        'options, pass {"flashrope": {"log_n": 256, "rerope": 24}}'
    )


@pytest.mark.parametrize("options, bands", [({"rerope": 64}, 2), (None, 0)], ids=["rerope", "stock"])
def test_memory_is_kept_free_for_workspaces(options, bands, tmp_path, monkeypatch):
    """If vLLM chooses the size of its cache, the worker keeps memory free for the workspaces of a long prompt. A stock
    model gets all memory."""
    from engine import engine

    def sizes(worker) -> tuple[int, int]:
        worker = worker.worker
        return type(worker).determine_available_memory._flashrope(worker), worker.determine_available_memory()

    with engine(save_model(tmp_path, "llama"), {}):
        pass  # hooks the worker
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    with engine(str(tmp_path), options, gpu_memory_utilization=0.15, num_gpu_blocks_override=64) as llm:
        ((stock, given),) = llm.collective_rpc(sizes)
    per_token = 4 * 2 * 32 * (2 + 3 + bands) + 2 * 4 * (bands + 1) * 32  # as in kept_free
    expected = 1024 * per_token if bands else 0
    assert abs(stock - given - expected) < 2**18, (stock, given, expected)
