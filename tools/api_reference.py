"""Makes the page of the API from the signatures and docstrings of the public names, for the documentation site. The
page is not in the repository.

python tools/api_reference.py    prints it
"""

from __future__ import annotations

import argparse
import ast
import re
from importlib import import_module
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = {  # section: {file below python/flashrope: public names}
    "Schemes": {"schemes/rotary.py": ("Rotary",), "schemes/bands.py": ("Band",)},
    "Attention": {
        "operators/functional.py": (
            "attention",
            "attention_varlen",
            "attention_with_cache",
            "attention_varlen_with_cache",
            "rotate",
        ),
        "operators/documents.py": ("cu_seqlens_of",),
    },
    "Caches": {
        "operators/cache_plan.py": ("plan_cache", "CachePlan"),
        "calls/cache_tables.py": ("CacheTables", "CacheLayer", "Packed", "CachePositions"),
        "cache/contiguous.py": ("KVCache",),
        "cache/paged.py": ("PagedKVCache",),
        "cache/pool.py": ("OutOfPages",),
        "cache/step.py": ("Step",),
        "cache/capture.py": ("CapturedStep",),
    },
    "Hugging Face: `flashrope.integrations.transformers`": {
        "integrations/transformers/conversion.py": ("convert", "revert", "from_pretrained", "register_auto_classes"),
        "integrations/transformers/caches.py": ("accept_cache", "CodesCache"),
        "integrations/transformers/one_tensor.py": ("SharedKeysCache", "LatentCache"),
        "integrations/transformers/reuse.py": ("Passage", "prefill_passage", "join_passages"),
        "integrations/transformers/layer_schemes.py": ("suggest", "Suggestion"),
        "integrations/transformers/conversion_plan.py": ("FAMILIES",),
    },
    "Distributed training: `flashrope.integrations.distributed`": {
        "integrations/distributed.py": (
            "context_parallel_attention",
            "shard_sequence",
            "unshard_sequence",
            "sequence_positions",
        ),
    },
}
INHERITED = ("layer", "scales", "cache_layer", "nbytes", "discard_step")  # methods that caches have from ``Cache``
HEAD = """# API reference

Generated from the docstrings by `python tools/api_reference.py`. A test runs the examples.
Everything in the first three sections is imported from `flashrope`:

```python
import torch
from flashrope import Band, CacheLayer, CacheTables, KVCache, PagedKVCache, Rotary, cu_seqlens_of, plan_cache, rotate
from flashrope import attention, attention_varlen, attention_varlen_with_cache, attention_with_cache
```
"""


def render() -> str:
    """Returns the page."""
    parts = [HEAD]
    for section, files in SECTIONS.items():
        parts.append(f"## {section}\n")
        for file, names in files.items():
            body = {name: node for node in _parse(file).body for name in _names(node)}
            parts += [part for name in names for part in _entry(name, body[name])]
    parts.append("## Commands\n\n`flashrope <command> [options]`, also `python -m flashrope <command>`.\n")
    for name, (module, summary) in import_module("flashrope.cli.main").COMMANDS.items():
        parts.append(f"### flashrope {name}\n\n{summary[0].upper()}{summary[1:]}.\n{_options(module)}")
    return "\n".join(parts)


def _parse(file: str) -> ast.Module:
    return ast.parse((ROOT / "python" / "flashrope" / file).read_text())


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [node.name] if isinstance(node, (ast.ClassDef, ast.FunctionDef)) else []


def _entry(name: str, node: ast.stmt) -> list[str]:
    """Returns the Markdown of a function, a class with its public methods, or a constant."""
    if isinstance(node, ast.FunctionDef):
        return [f"### {name}\n\n{_signature(name, node)}\n\n{_markdown(ast.get_docstring(node))}\n"]
    if isinstance(node, ast.Assign):
        values = import_module("flashrope.schemes.families").families_with("tested")  # FAMILIES is the only constant
        return [f"### {name}\n\n{', '.join(f'`{value}`' for value in values)}.\n"]
    methods = [x for x in node.body if isinstance(x, ast.FunctionDef)]
    if "Cache" in map(ast.unparse, node.bases):
        base = next(x for x in _parse("cache/storage.py").body if isinstance(x, ast.ClassDef) and x.name == "Cache")
        methods += [x for x in base.body if isinstance(x, ast.FunctionDef) and x.name in INHERITED]
    fields = [ast.unparse(x) for x in node.body if isinstance(x, ast.AnnAssign)]
    init = [_signature(name, x) for x in methods if x.name == "__init__"]
    if fields and any(ast.unparse(base) == "NamedTuple" for base in node.bases):
        init = [f"```text\n{name}({', '.join(fields)})\n```"]
    parts = ["\n\n".join([f"### {name}", *init, _markdown(ast.get_docstring(node))]) + "\n"]
    instance = "cache" if name.endswith("Cache") else name.lower()
    for method in methods:
        if method.name.startswith("_"):
            continue
        decorators = {ast.unparse(x) for x in method.decorator_list}
        owner = name if decorators & {"classmethod", "staticmethod"} else instance
        if decorators & {"property", "cached_property"}:
            heading = f"```text\n{owner}.{method.name} -> {ast.unparse(method.returns)}\n```"
        else:
            heading = _signature(f"{owner}.{method.name}", method)
        parts.append(f"#### {name}.{method.name}\n\n{heading}\n\n{_markdown(ast.get_docstring(method))}\n")
    return parts


def _signature(name: str, node: ast.FunctionDef) -> str:
    arguments = [x for x in node.args.args if x.arg not in ("self", "cls")]
    defaults = [""] * (len(arguments) - len(node.args.defaults)) + [f" = {ast.unparse(x)}" for x in node.args.defaults]
    each = [ast.unparse(x) + default for x, default in zip(arguments, defaults, strict=True)]
    if node.args.vararg or node.args.kwonlyargs:
        each.append("*" + (ast.unparse(node.args.vararg) if node.args.vararg else ""))
    for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        each.append(ast.unparse(argument) + (f" = {ast.unparse(default)}" if default else ""))
    if node.args.kwarg and ast.unparse(node.args.kwarg.annotation or ast.Constant(None)) != "Never":  # omits **unknown
        each.append(f"**{node.args.kwarg.arg}")
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    line = f"{name}({', '.join(each)}){returns}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {argument},\n" for argument in each) + f"){returns}"
    return f"```text\n{line}\n```"


def _markdown(doc: str | None) -> str:
    """Returns a docstring with Args, Attributes and Raises as lists, and Example as code."""
    lines, heading = [], ""
    source = [*(doc or "").replace("``", "`").splitlines(), ""]
    for line, behind in pairwise([*source, ""]):
        if heading == "Example":
            if line or behind.startswith("    "):
                lines.append(line.removeprefix("    "))
                continue
            lines, heading = [*lines, "```"], ""
        if line == "Example:":
            heading = "Example"
            lines += ["**Example**", "", "```python"]
            continue
        section = re.fullmatch(r"(Args|Attributes|Returns|Raises):", line)
        item = re.fullmatch(r"    (\w+(?:, \w+)*): (.+)", line)
        if section:
            heading = section[1]
            lines += [f"**{heading}**", ""]
        elif item and heading != "Returns":  # prose
            lines.append("- " + ", ".join(f"`{x}`" for x in item[1].split(", ")) + f": {item[2]}")
        else:
            lines.append("  " * line.startswith("        ") + line.strip())
    return "\n".join(lines).rstrip()


def _options(module: str) -> str:
    """Returns the options of a command. A default is added if the option's help does not describe it."""
    parser = argparse.ArgumentParser(add_help=False)
    import_module(module).add_arguments(parser)
    rows = []
    for action in parser._actions:
        value = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else "")
        text = action.help % vars(action)
        default = action.default
        if default not in (None, argparse.SUPPRESS) and default is not False and "default" not in text:
            text += f" (default: {' '.join(default) if isinstance(default, list) else default})"
        rows.append(f"- `{' '.join(filter(None, (*action.option_strings, value)))}`: {text}\n")
    return "\n" + "".join(rows) if rows else ""


if __name__ == "__main__":
    print(render())
