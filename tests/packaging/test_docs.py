"""Tests that the pages match the source. The Python blocks of a page run unchanged, one after another in one namespace,
and print what their comments show. Links and paths exist. The API reference has every public name."""

import ast
import builtins
import contextlib
import functools
import inspect
import io
import re
import runpy
import tomllib
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import flashrope
import pytest
import torch
from flashrope import Rotary
from flashrope.schemes.catalogue import known_options

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (ROOT / "docs", ROOT / "bench" / "results")
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for path in FOLDERS for page in sorted(path.rglob("*.md"))),
]
TRANSFORMERS = "flashrope.integrations.transformers"
API_MODULES = ("flashrope", TRANSFORMERS, "flashrope.integrations.distributed")
OPTIONAL = ("transformers", "peft")
HOW_TO = [
    "long_context",
    "training",
    "trainers",
    "integration",
    "decoding",
    "caches",
    "serving",
    "distribution",
    "extending",
    "migration",
]


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def needs(block: str) -> list[str]:
    """Returns the optional packages that a block imports, either directly or by importing the integration of the same
    name."""
    return [
        name
        for name in OPTIONAL
        if re.search(rf"^(import|from) (flashrope\.integrations\.)?{name}\b", block, re.MULTILINE)
    ]


WITH_SHAPES = {  # start of a checkpoint's name: (model type, what its configuration needs)
    "gemma-4": ("gemma4_unified_text", {"global_head_dim": 16, "attention_k_eq_v": True}),
    "deepseek-v2": (
        "deepseek_v2",
        {"kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
        | {"num_key_value_heads": 4, "head_dim": 8, "first_k_dense_replace": 2},
    ),
}


def stand_in_for_checkpoints(block: str) -> None:
    """Saves a small random model as the folder "owner/name", where transformers looks first. The name decides which
    kind of model it is."""
    for name in re.findall(r'from_pretrained\("([\w.-]+/[\w.-]+)"', block):
        from transformers import AutoConfig, AutoModelForCausalLM

        short = name.split("/")[1].lower()
        shapes = [shape for start, shape in WITH_SHAPES.items() if short.startswith(start)]
        kind, changes = shapes[0] if shapes else (re.match(r"[a-z]+\d?", short)[0], {})
        sizes = {
            "vocab_size": 64,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "head_dim": 16,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "eos_token_id": 2,
        }
        config = AutoConfig.for_model(kind, **sizes | changes)
        AutoModelForCausalLM.from_config(config).save_pretrained(name)


def shown_outputs(block: str) -> list[tuple[ast.stmt, str | None]]:
    """Returns the statements of a block, each with the output that its comments show, or None.

    A comment "# -> text" shows a line of output. The comment is on the line of its statement, below the statement, or
    inside it.
    """
    statements = ast.parse(block).body
    lines = block.splitlines()
    ends = [statement.lineno - 1 for statement in statements[1:]] + [len(lines)]
    found = []
    for statement, end in zip(statements, ends, strict=True):
        arrows = (re.search(r"# -> ?(.*)", line) for line in lines[statement.lineno - 1 : end])
        shown = [arrow[1].rstrip() for arrow in arrows if arrow]
        found.append((statement, "\n".join(shown) if shown else None))
    return found


def run_block(block: str, page: str, namespace: dict) -> None:
    """Runs a block and compares what each statement prints, or the value of an expression, with the comments.

    "..." in a comment stands for any text. All printed output has to be shown.
    """
    for statement, shown in shown_outputs(block):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            if isinstance(statement, ast.Expr):
                value = eval(compile(ast.Expression(statement.value), page, "eval"), namespace)  # noqa: S307
            else:
                value = exec(compile(ast.Module([statement], []), page, "exec"), namespace)  # noqa: S102
        output = printed.getvalue().strip()
        if shown is not None and not output and value is not None:
            output = repr(value)
        pattern = ".*".join(re.escape(part) for part in (shown or "").split("..."))
        where = f"{page}, line {statement.lineno} of the block: {ast.unparse(statement)[:80]}"
        assert re.fullmatch(pattern, output, re.DOTALL), f"{where}\nshows   {shown!r}\nprints  {output!r}"


FAILS = "try:\n    int('x')\nexcept ValueError as error:\n    print(error)  # -> invalid literal for {}..."
RIGHT = ["print(1 + 1)  # -> 2", "1 + 1  # -> 2", "print('a b c')\n# -> a ... c", FAILS.format("int"), "x = 1  # one"]
RIGHT += ["print(1, 2, sep='\\n')\n# -> 1\n# -> 2"]
WRONG = ["print(1 + 1)  # -> 3", "1 + 1  # -> 3", "print('a b')\n# -> a ... c", FAILS.format("float"), "x = 2  # -> 2"]
WRONG += ["print(1, 2, sep='\\n')\n# -> 1", "print(2)"]


def test_an_output_that_a_page_shows_wrongly_is_noticed():
    for block in RIGHT:
        run_block(block, "a page", {})
    for block in WRONG:
        with pytest.raises(AssertionError, match="line 1 of the block"):
            run_block(block, "a page", {})


def run_page(name: str, text: str, tmp_path, monkeypatch) -> None:
    """Runs the code of a page. Blocks that need a missing package are left out, and a page without other blocks is
    skipped."""
    missing = {name for name in OPTIONAL if find_spec(name) is None}
    served = [block for block in blocks(text) if not missing & set(needs(block))]
    if not served:
        pytest.skip(f"the page's code needs {', '.join(sorted(missing))}")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace = {}
    for block in served:
        if "LatentCache" in block and version("transformers") < "5":
            continue  # convert refuses latent attention under transformers 4
        stand_in_for_checkpoints(block)
        run_block(block, name, namespace)


WITH_CODE = [page for page in PAGES if blocks(page.read_text())]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    run_page(str(page), page.read_text(), tmp_path, monkeypatch)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_links_to_is_there(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if any(
            f"{folder}/" in target and not (ROOT / "docs" / folder).exists() for folder in ("experiments", "schemes")
        ):
            continue  # the source distribution leaves them out
        assert target.startswith(("https://", "http://")) or (page.parent / target).exists(), target


@functools.cache
def api_reference() -> dict:
    return runpy.run_path(str(ROOT / "tools" / "api_reference.py"))


def reference_page() -> str:
    return api_reference()["render"]()


def test_the_examples_of_the_api_reference_run(tmp_path, monkeypatch):
    run_page("docs/api.md", reference_page(), tmp_path, monkeypatch)


def test_every_argument_of_the_api_reference_is_one():
    """Every name that the API reference lists as an argument is an argument, and not just a word before a colon in a
    docstring."""
    options = known_options().values()
    of_convert = {option.name for option in options} | {option.beside.name for option in options if option.beside}
    page = reference_page().split("\n## Commands")[0]
    entries = re.split(r"^#{3,4} ", page, flags=re.MULTILINE)[1:]
    checked = 0
    for entry in entries:
        name = entry.split()[0]
        signature = re.search(r"```text\n(.*?)```", entry, re.DOTALL)
        known = set(re.findall(r"\w+", signature[1] if signature else ""))
        known |= of_convert if name == "convert" else set()
        if isinstance(described := getattr(flashrope, name, None), type):
            sources = (inspect.getsource(each) for each in described.__mro__ if each.__module__.startswith("flashrope"))
            known |= set(re.findall(r"(?:self\.|def |^    )(\w+)", "".join(sources), re.MULTILINE))
        for section, text in re.findall(r"\*\*(\w+)\*\*\n\n(.*?)(?=\n\n|\Z)", entry, re.DOTALL):
            names = {
                word for item in re.findall(r"^- (`.+?`):", text, re.MULTILINE) for word in re.findall(r"\w+", item)
            }
            if section == "Raises":
                known = {*vars(builtins), *flashrope.__all__}
            assert names <= known and not (names and section == "Returns"), (name, section, names - known)
            checked += len(names)
    assert checked > 150


def test_the_api_reference_has_every_public_name():
    described = {name for files in api_reference()["SECTIONS"].values() for names in files.values() for name in names}
    assert described == {name for module in API_MODULES for name in import_module(module).__all__} - {"__version__"}


def test_a_page_that_says_how_to_opens_with_code():
    for name in HOW_TO:
        assert "```" in "\n".join((ROOT / "docs" / f"{name}.md").read_text().splitlines()[:20]), name


def test_every_public_call_and_builder_has_an_example():
    """Every public call and builder has an example. The test of the page's code runs the examples."""
    page = reference_page().split("\n## Commands")[0]
    entries = {entry.split()[0]: entry for entry in re.split(r"^#{3,4} ", page, flags=re.MULTILINE)[1:]}
    installed = [name for name in API_MODULES if name != TRANSFORMERS or find_spec("transformers")]
    public = {name: getattr(module, name) for module in map(import_module, installed) for name in module.__all__}
    wanted = {name for name, value in public.items() if inspect.isfunction(value)}
    wanted |= {f"Rotary.{name}" for name, value in vars(Rotary).items() if returns_a_rotary(name, value)}
    wanted |= {"Rotary", "KVCache", "PagedKVCache", "Step", "CodesCache"}
    wanted -= {"unshard_sequence", "sequence_positions"}  # in the example of shard_sequence
    assert len(wanted) > 30
    assert not [name for name in sorted(wanted) if "**Example**\n\n```python\n" not in entries[name]]


def test_the_reading_order_of_the_kernels_follows_their_imports():
    page = (ROOT / "docs" / "kernels.md").read_text().split("## Reading order")[1].split("\n## ")[0]
    order = re.findall(r"^\| `([\w/]+)\.py`", page, re.MULTILINE)
    kernels = ROOT / "triton_kernels"
    paths = {path.relative_to(kernels).with_suffix("").as_posix() for path in kernels.rglob("*.py")}
    assert set(order) == {path for path in paths if not path.endswith("__init__")}
    for n, name in enumerate(order):
        imported = re.findall(r"^from \.+(?:\w+\.)?(\w+) import", (kernels / f"{name}.py").read_text(), re.MULTILINE)
        used = {path for path in order if path.rpartition("/")[2] in imported}
        assert used <= set(order[:n]), name


def test_the_readme_is_short_and_keeps_the_commands_that_ci_runs():
    readme = (ROOT / "README.md").read_text()
    prose = re.sub(r"```.*?```|<!--.*?-->", "", readme, flags=re.DOTALL)
    assert len([word for word in prose.split() if re.search(r"\w", word)]) <= 850  # borders of tables are not words
    assert not [line for line in prose.splitlines() if len(line) > 100 and not line.startswith(("|", "!["))]
    for marker in ("demo", "test"):
        assert re.search(rf"<!-- ci:{marker} -->\n```bash\n.+\n```", readme)


def test_the_pages_for_users_are_few_enough_to_read():
    """Pages about development, experiments and results do not count."""
    counted = [page for page in (ROOT / "docs").rglob("*.md") if not {"dev", "experiments"} & set(page.parts)]
    assert sum(len(page.read_text().splitlines()) for page in counted) <= 3500


def test_no_page_has_an_address_of_the_project():
    """The project has no public address. Once it has one, only [project.urls] of pyproject.toml has to be changed."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    searched = [*PAGES, ROOT / "SECURITY.md", *(ROOT / "bench").rglob("*.sh"), *(ROOT / "python").rglob("*.py")]
    for address in [*urls.values(), "repository.invalid"]:
        assert not [path for path in searched if address in path.read_text()]
    for name in ("CONTRIBUTING.md", "SECURITY.md", "docs/speed.md"):
        assert "[project.urls]" in (ROOT / name).read_text(), name


def test_the_citation_has_the_version():
    for name, line in (("CITATION.cff", "version: {}"), ("README.md", "version = {{{}}}")):
        assert line.format(flashrope.__version__) in (ROOT / name).read_text(), name


def returns_a_rotary(name: str, value) -> bool:
    return (
        not name.startswith("_")
        and getattr(getattr(value, "__func__", value), "__annotations__", {}).get("return") == "Rotary"
    )


def test_the_table_of_schemes_has_every_builder():
    table = (ROOT / "docs" / "schemes.md").read_text().split("## When to use which")[1].split("\n## ")[0]
    rows = {name for row in table.splitlines() for name in re.findall(r"`(?:Rotary)?\.(\w+)", row.split(" | ")[0])}
    builders = {name for name, value in vars(Rotary).items() if returns_a_rotary(name, value)} - {"from_text"}
    assert len(builders) > 15 and rows == builders


@pytest.mark.parametrize("name", ["fast.txt", "slower.txt"])
def test_the_tests_of_a_list_exist(name):
    assert f"@tests/{name}" in (ROOT / "CONTRIBUTING.md").read_text()
    for line in (ROOT / "tests" / name).read_text().splitlines():
        file, _, name = line.partition("::")
        assert f"def {name}" in (ROOT / file).read_text(), line


def test_modules_that_are_run_by_name_exist():
    """Pages may quote a command of an earlier revision, so they are not searched."""
    for path in (ROOT / ".ci" / "run", ROOT / "CONTRIBUTING.md", *(ROOT / "tests").rglob("*.py")):
        for name in re.findall(r"python -m ((?:tests|bench|experiments)[a-z_.]*[a-z])", path.read_text()):
            module = ROOT / name.replace(".", "/")
            assert module.is_dir() or module.with_suffix(".py").exists(), (path, name)


def test_the_paths_that_contributing_names_exist():
    rooms = re.findall(r"^\| (`.+?) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    paths = [path for room in rooms for path in re.findall(r"`([\w./]+/[\w./]*)`", room)]
    assert len(paths) > 12
    for path in paths:
        assert (ROOT / path).exists(), path
