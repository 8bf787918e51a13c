"""``convert`` and ``revert``: run Hugging Face transformers models on this package's attention.

``from_pretrained`` and ``register_auto_classes`` load models that were saved after ``convert`` with options, and
convert them with the same options.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from ...schemes.rotary import Rotary
from ..scheme_options import FIELD
from .adapters import collecting_options, follow_adapters
from .applying import apply, choose_stock_attention, undo
from .caches import check_cache
from .configurations import delete_options, separate_configuration
from .conversion_plan import FAMILIES, NAME, SAVED, find_decoder, plan_conversion
from .untested import accept
from .versions import arguments_of, check_version

REVERTED = "_flashrope_reverted"  # the decoder's attribute with the handle of the hook that ``revert`` adds


def convert(model, rotary: Rotary | dict[str, Rotary] | None = None, *, untested: bool = False, **options: Any):
    """Makes a transformers causal language model run on this package's attention, in place. ``revert`` undoes it.

    Use it to give a model another rotary scheme, or to run its own scheme on these kernels and caches of raw keys.
    Models that were saved after ``convert`` are loaded by ``from_pretrained``.

    Example:
        from transformers import AutoModelForCausalLM
        from flashrope.integrations.transformers import convert

        model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
        convert(model, rerope=True, log_n=True)  # ReRoPE; convert(model) keeps the model's own scheme

    Without options the model keeps its own scheme, and its logits do not change. Its caches then hold raw keys. A cache
    that was filled before ``convert`` or ``revert`` raises an error.

    Every call describes the whole scheme: its options replace the options of an earlier call. A warning names the
    earlier options that no option of the same kind replaces. Without options, the options in the configuration are
    used. They come from the folder from which the model was loaded, or from an earlier ``convert``. If the model is
    still converted, the call warns that it keeps them. To get the model's own scheme, call ``revert(model)`` first.

    Args:
        model: a transformers model of a type in ``FAMILIES``, or a module that holds one (PEFT, DDP).
        rotary: a scheme to use instead of the model's own in all layers that rotate. A dict {layer type: Rotary} if the
            layers differ.
        untested: also accept a model type that is not in ``FAMILIES``, if the converted model has the outputs of the
            stock model. The outputs are compared on random tokens, with and without a cache and padding on the left.
            The tests of types in ``FAMILIES`` cover more.
        ntk: the factor of ``Rotary.ntk``.
        yarn: (factor, train_length) of ``Rotary.yarn``. Cannot be combined with ntk.
        hope: HoPE: pairs that make less than one turn over this number of tokens do not rotate. True: the model's
            training length.
        cope: CoPE with this training length (``Rotary.cope``): pairs that make less than one turn over this length
            rotate more slowly. True: the model's training length. A dict gives the arguments of ``Rotary.cope``, for
            example {"pairs": 10, "taper": False}. Cannot be combined with hope.
        rerope: ReRoPE with this window, in positions. True: half the model's training length, as in ``suggest``. A
            quarter to a half of the training length was best in the ablation of ReRoPE's author. A window of 0, or of
            the training length or more, gives a warning.
        leaky_rerope: (window, factor) of Leaky ReRoPE: distances grow by 1 / factor beyond the window. Cannot be
            combined with rerope.
        p_rope: the fraction of the pairs that rotates, counted from the fastest pair (``Rotary.p_rope``). Cannot be
            combined with hope or cope.
        string: (start, window) of ``Rotary.string``: a distance d >= start becomes d - start + window. Cannot be
            combined with rerope.
        self_extend: (window, group) of ``Rotary.self_extend``: grouped positions beyond the window. Cannot be combined
            with rerope.
        dual_chunk: (chunk_size, local_size) of ``Rotary.dual_chunk``, or (chunk_size, local_size, length_scale). Cannot
            be combined with rerope or self_extend. True: computed from the model's training length. Without this
            option, a configuration's dual_chunk_attention_config (Qwen2.5-1M) is used, with its length_scale and
            without its sparse attention. The option replaces dual_chunk_attention_config. False switches
            dual_chunk_attention_config off.
        log_n: scales queries by max(1, ln(i + 1) / ln(log_n)). True: the model's training length.
        log_n_clip: False: the factor of log_n may be below 1, as in models that were trained with log n. Needs log_n.

    Layers with a sliding window see a fixed number of keys: rerope, leaky_rerope, string, self_extend, dual_chunk and
    log_n leave them as they are, and need a layer that sees all keys. All but log_n need one that also rotates, which
    cohere2, exaone4 and afmoe do not have.

    ``print(model)`` shows the scheme of every layer. The configuration keeps the options, save_pretrained writes them,
    and ``revert`` deletes them. If another living model has the same configuration object, this model gets a copy. To
    load a model that was saved with options, use ``from_pretrained`` of this package. Without this package transformers
    does not load it.

    Returns:
        model.

    Raises:
        TypeError, ValueError: an argument is invalid. The message names the argument and says what was expected. The
            model does not change.
    """
    check_version()
    given, decoder = {"rotary": rotary, **options}, find_decoder(model)
    plan = plan_conversion(model, decoder, given, untested)
    if separate_configuration(model, decoder):
        plan = plan_conversion(model, decoder, given, untested)  # the schemes keep the configuration
    if plan.own is not None:
        accept(model, decoder, plan.own)
    for message in plan.warnings:
        warnings.warn(message, stacklevel=2)
    apply(model, decoder, plan)
    follow_adapters()
    hook = vars(decoder).pop(REVERTED, None)
    if hook is not None:
        hook.remove()
    return model


def revert(model):
    """Restores the stock model, which runs the same functions on the same weights as before ``convert``. Returns model.

    Example:
        from transformers import AutoModelForCausalLM
        from flashrope.integrations.transformers import convert, revert

        model = convert(AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B"))
        revert(model)

    One hook is added, which raises an error for caches that hold the converted model's raw keys. A model that was saved
    with options and loaded without ``convert`` becomes the stock model, too.
    """
    decoder = find_decoder(model)
    separate_configuration(model, decoder)
    if undo(model, decoder):
        setattr(decoder, REVERTED, decoder.register_forward_pre_hook(_check_reverted, with_kwargs=True))
    else:
        choose_stock_attention(model, names=(SAVED, NAME))
    delete_options(model, decoder.config)
    return model


def _check_reverted(module, args, kwargs) -> None:
    """Raises an error for caches of the converted model. It is the decoder's hook after ``revert``."""
    check_cache(module, arguments_of(module, args, kwargs))


# ---- loading

AUTO_CLASSES = (
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
)


def from_pretrained(
    pretrained_model_name_or_path, *args, auto_class=AutoModelForCausalLM, untested: bool = False, **kwargs
):
    """Loads a model with transformers and converts it with the options with which it was saved. A model that was saved
    without options keeps its own scheme.

    Use it for models that were saved after ``convert`` with options, which transformers does not load, and for the
    folders of their PEFT adapters.
    ``register_auto_classes`` lets ``AutoModel`` classes and ``pipeline`` load them.

    Example:
        from flashrope.integrations.transformers import from_pretrained

        model = from_pretrained("Qwen/Qwen3-0.6B")

    Args:
        pretrained_model_name_or_path, args, kwargs: passed to transformers' from_pretrained. attn_implementation is the
            attention that the model has after ``revert``.
        auto_class: the class whose from_pretrained is called, such as AutoModel or LlamaForCausalLM.
        untested: as in ``convert``.

    Returns:
        The model, or with output_loading_info=True the model and a dict, as transformers returns them.

    Raises:
        TypeError, ValueError: as in ``convert``.
    """
    loaded, model = _load(auto_class, pretrained_model_name_or_path, *args, **kwargs)
    choose_stock_attention(model, kwargs.get("attn_implementation"))
    convert(model, untested=untested)
    return loaded


def _load(stock, *args, **kwargs) -> tuple[Any, torch.nn.Module]:
    """Returns what stock.from_pretrained returns, and the model in it. The options of an adapter, with which its folder
    was saved, replace those of its base model."""
    with collecting_options() as found:
        loaded = stock.from_pretrained(*args, **kwargs)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    if found:
        setattr(find_decoder(model).config, FIELD, found[-1])
    return loaded, model


def register_auto_classes(*model_types: str) -> None:
    """Makes transformers' AutoModel classes, and with them ``pipeline``, convert models that were saved with options.

    Use it if other code loads the model. ``from_pretrained`` needs no registration.

    Example:
        from flashrope.integrations.transformers import register_auto_classes

        register_auto_classes("llama", "qwen3")  # before AutoModelForCausalLM.from_pretrained(...)

    Models without options stay stock models, and other classes (``LlamaForCausalLM.from_pretrained``) are not affected.
    The registration uses ``register`` of the auto classes and lasts for this process. ``revert`` gives a model that was
    loaded in this way the attention that transformers prefers, and ignores the attn_implementation with which it was
    loaded.

    Args:
        model_types: names from ``FAMILIES``. Without names, all families are registered, which imports their modules.

    Raises:
        ValueError: a model type is not in ``FAMILIES``, or the installed version of transformers ignores the
            registration of its own model types, as 5.17 does.
    """
    unknown = sorted(set(model_types) - FAMILIES)
    if unknown:
        raise ValueError(f"model_types: expected names among {', '.join(sorted(FAMILIES))}; got {unknown[0]!r}")
    for model_type in model_types or sorted(FAMILIES):
        if model_type not in CONFIG_MAPPING:  # this version of transformers does not have the model type yet
            continue
        config_class = CONFIG_MAPPING[model_type]
        for auto_class in (getattr(transformers, name) for name in AUTO_CLASSES):
            if config_class in auto_class._model_mapping:
                stock = auto_class._model_mapping[config_class]
                if isinstance(stock, type) and not hasattr(stock, LOADS):
                    auto_class.register(config_class, _loader(stock), exist_ok=True)
                    _check_registered(auto_class, config_class)


def _check_registered(auto_class, config_class) -> None:
    if not hasattr(auto_class._model_mapping[config_class], LOADS):
        raise ValueError(
            f"transformers: expected a version whose {auto_class.__name__}.register accepts {config_class.__name__}, "
            f"got {transformers.__version__}, which ignores it; use flashrope.integrations.transformers.from_pretrained"
        )


LOADS = "_converts_saved_models"


def _loader(stock: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Returns a subclass of ``stock`` for the auto classes. The subclass builds and loads models of the class
    ``stock``, and converts a loaded model that has options."""

    def load(cls, *args, **kwargs):
        loaded, model = _load(stock, *args, **kwargs)
        choose_stock_attention(model)
        if getattr(model.config, FIELD, None):
            convert(model)
        return loaded

    def build(cls, *args, **kwargs):
        return stock._from_config(*args, **kwargs)

    methods = {"from_pretrained": classmethod(load), "_from_config": classmethod(build), LOADS: True}
    return type(stock.__name__, (stock,), {"__module__": stock.__module__, "__qualname__": stock.__name__, **methods})
