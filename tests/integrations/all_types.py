"""Sorts all causal language model types of the installed transformers by outcome: the type is tested, it passes the
comparison of ``convert(model, untested=True)``, or it is refused for a reason.

python tests/integrations/all_types.py [TYPE ...]
"""

import sys
import textwrap
import warnings

import torch
import transformers
from flashrope.integrations.transformers import convert
from flashrope.integrations.transformers.conversion_plan import attention_modules, check_decoder, find_decoder
from flashrope.integrations.transformers.layer_schemes import layer_type_of
from flashrope.schemes.hugging_face import model_steps
from flashrope.schemes.rotary import build as build_scheme
from small_models import CAUSAL_LM, HERE, REFUSED_BY_VERSION, causal_lm, small_config, tiny
from transformers import CONFIG_MAPPING

TESTED, PASSED = "tested", "passes the comparison"
COMPOSITE = "several models in one: converted if the type of its text decoder is"
NOT_BUILT = "no small model of it was built"
REASONS = {  # {part of an error message: the reason in the table}
    "found 0 in": "no rotary embedding, or one per layer",
    "decoder with a rotary embedding, found": "several decoders",
    "AttentionMaskInterface": "makes its masks itself",
    "AttentionInterface": "computes its attention itself",
    "later keys": "its attention is not causal, or its configuration says so",
    "attention modules, found": "layers of other kinds",
    "only be called on Attention layers": "layers of other kinds",
    "depend on its rotary embedding": "a small model shows no rotation",
    "keys that its indexer selects": "attends to the keys that an indexer selects (sparse attention)",
    "multi-head latent attention": "multi-head latent attention",
    "after their rotation": "scales channels after the rotation",
    "table for short texts": "keeps longrope's short table at every length",
    "cap, got": "caps its scores",
    "kernels cannot express": "masks that the kernels cannot express",
    "same outputs": "gives other outputs when converted",
    "rotates nothing": "rotates nothing",
    "its own base": "a base per layer",
    "the kernels take a head_dim up to": "a head_dim that the kernels do not take",
    "even integer": "rotates an odd number of channels",
}


def outcome(name: str) -> str:
    """Returns TESTED, PASSED, or the reason why a model of this type is refused."""
    if name in HERE:
        return TESTED
    try:
        default = CONFIG_MAPPING[name]()
        if default.get_text_config() is not default:
            return COMPOSITE
    except Exception:
        return NOT_BUILT
    problem = _refusal(lambda: _small(name))
    if problem == NOT_BUILT:
        with torch.device("meta"):
            problem = _refusal(lambda: causal_lm(default)) or NOT_BUILT
    return problem or PASSED


def _small(name: str):
    try:
        return _smaller(name)
    except Exception:
        return _smaller(name, head_dim=16)  # in a few configurations head_dim is None


def _smaller(name: str, **changes):
    with torch.device("meta"):
        model = causal_lm(small_config(name, **changes))
        parameters = sum(p.numel() for p in model.parameters())
    if parameters > 10e6:
        raise ValueError(f"{name} has {parameters} parameters")
    return tiny(name, **changes)


def _refusal(build) -> str:
    try:
        model = build()
    except Exception:
        return NOT_BUILT
    try:
        decoder = find_decoder(model)
        check_decoder(decoder)
        for module in attention_modules(decoder):
            build_scheme(model_steps(decoder.config, layer_type_of(decoder.config, module.layer_idx)))
        if next(model.parameters()).is_meta:
            return ""
        convert(model, untested=True)
    except (ValueError, TypeError) as error:
        return next((reason for part, reason in REASONS.items() if part in str(error)), str(error)[:100])
    except Exception as error:
        return f"its own forward fails in a small model ({type(error).__name__})"
    return ""


def outcomes(names=None) -> dict[str, list[str]]:
    """Returns {outcome: the model types that have it}."""
    found: dict[str, list[str]] = {}
    for name in names or sorted(CAUSAL_LM):
        found.setdefault(outcome(name), []).append(name)
    return found


def summary() -> str:
    """Returns a Markdown list with one line per outcome."""
    found = outcomes()
    tested = found.pop(TESTED)
    first = f"transformers {transformers.__version__} has {len(CAUSAL_LM)} causal language model types, of which "
    first += (
        f"{len(tested)} are tested. The others, by what `convert(model, untested=True)` says of a small random model:"
    )
    lines = [textwrap.fill(first, 120), ""]
    for reason, names in sorted(found.items(), key=lambda item: (item[0] != PASSED, -len(item[1]))):
        older = [name for name in names if name in REFUSED_BY_VERSION]
        line = f"- {reason} ({len(names)}): {', '.join(names)}" + (" (tested in newer versions)" if older else "")
        lines.append(textwrap.fill(line, 120, subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(lines)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    if sys.argv[1:]:
        for reason, names in outcomes(sys.argv[1:]).items():
            print(f"{reason}: {', '.join(names)}")
    else:
        print(summary())
