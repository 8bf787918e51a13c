"""Tests that the command line starts without torch, and that every command ends cleanly at Ctrl-C."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import flashrope
import pytest
from flashrope.cli.main import COMMANDS
from flashrope.console.program import guarded
from flashrope.console.progress import Bar, duration, seconds_left
from flashrope.lab.commands.demo import TIMES
from flashrope.lab.small_models.presets import PRESETS
from flashrope.lab.small_models.workers import steps_of_jobs
from flashrope.lab.tuning.measure import _cancelled_by_errors
from flashrope.schemes.catalogue import SCHEMES
from processes import Terminal, interrupted_at

HEAVY = {"torch", "numpy", "triton", "transformers", "matplotlib", "safetensors", "multiprocessing"}


def python(*arguments, **options):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, **options)


def loaded(code: str) -> set[str]:
    """Returns the top-level modules that a new process has loaded after running the code."""
    ran = python("-c", f"{code}\nimport sys; print('\\n' + ' '.join({{name.split('.')[0] for name in sys.modules}}))")
    assert ran.returncode == 0, ran.stderr
    return set(ran.stdout.splitlines()[-1].split())


# ---- start


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS), ["demo", "--step", "3"], ["nonsense"]],
    ids=" ".join,
)
def test_help_and_wrong_options_load_no_library(arguments):
    found = loaded(f"from flashrope.cli.main import main\ntry:\n    main({arguments})\nexcept SystemExit:\n    pass")
    assert "flashrope" in found and not found & HEAVY


def test_help_takes_less_than_a_second():
    def seconds(*arguments):
        began = time.perf_counter()
        ran = python("-m", "flashrope", *arguments)
        assert ran.returncode == 0 and ran.stdout
        return time.perf_counter() - began

    for arguments in (["--help"], ["--version"], ["loss", "--help"]):
        assert min(seconds(*arguments) for _ in range(3)) < 1.0


def test_the_package_is_imported_on_first_use():
    assert not loaded("import flashrope; flashrope.__version__; dir(flashrope)") & HEAVY
    uses = "from flashrope import attention", "flashrope.Rotary.rope(64)", "from flashrope import *; KVCache"
    assert "torch" in loaded("; ".join(("import flashrope, sys", "assert 'torch' not in sys.modules", *uses)))
    assert set(flashrope.__all__) <= set(dir(flashrope))
    for name in flashrope.__all__:
        assert getattr(flashrope, name).__class__.__name__ != "module"
    with pytest.raises(AttributeError, match="module 'flashrope' has no attribute 'atention'"):
        flashrope.atention  # noqa: B018


def test_where_torch_is_loaded_the_operators_are_there_after_the_import():
    """In a process that has already imported torch, importing flashrope registers its operators. torch.export.load
    needs them for a saved program."""
    ran = python("-c", "import torch, flashrope; print(torch.ops.flashrope.attention.default)")
    assert ran.returncode == 0, ran.stderr


def test_the_light_modules_hold_the_same_names():
    assert list(TIMES) == list(PRESETS)
    shown = python("-m", "flashrope", "demo", "--help").stdout
    assert "Time of a run" in shown and " ".join(TIMES["cpu"].split()) in " ".join(shown.split())
    shown = python("-m", "flashrope", "loss", "--help").stdout
    assert all(name in shown for name in SCHEMES)


# ---- time left


def test_durations():
    shown = [duration(seconds) for seconds in (0.2, 45, 59.5, 130, 3600, 11_100)]
    assert shown == ["1 s", "45 s", "1 min 00 s", "2 min 10 s", "1 h 00 min", "3 h 05 min"]
    assert seconds_left(10.0, 1, 4) == 30.0 and seconds_left(10.0, 4, 4) == 0.0
    assert seconds_left(10.0, 0, 4) is None and seconds_left(0.5, 1, 4) is None


def test_the_steps_of_several_jobs_are_counted_together():
    lines = Terminal()
    bar = Bar(20, lines)
    count = steps_of_jobs(bar)
    for job, step in ((0, 1), (1, 4), (0, 3), (1, 10)):
        count(job, (step, 1.5))
    assert bar.done == 13
    assert "65%" in "".join(lines) and "loss 1.500" in "".join(lines)


# ---- Ctrl-C


def test_what_a_library_makes_of_an_interrupt_is_one(capsys):
    def failing(error, cause):
        def command():
            try:
                raise cause
            except BaseException:
                raise error  # noqa: B904  its context is the cause

        return command

    assert guarded("flashrope", failing(ImportError("initialization failed"), KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "\nflashrope: interrupted\n"
    with pytest.raises(ImportError):
        guarded("flashrope", failing(ImportError("initialization failed"), OSError()))
    with pytest.raises(SystemExit):
        guarded("flashrope", failing(SystemExit(2), OSError()))


@pytest.mark.parametrize(
    "module",
    ["torch._utils\n", *(pytest.param(f"{name}\n", marks=pytest.mark.slow) for name in ("torch.nn", "numpy"))]
    + ["flashrope.backends\n"],
)
def test_an_interrupt_while_torch_is_loaded(module):
    """Ctrl-C ends the command cleanly even while it loads torch. The test waits for a module that Python names on
    stderr as soon as it is loaded (-X importtime)."""
    command = [sys.executable, "-X", "importtime", "-m", "flashrope", "info"]
    code, lines = interrupted_at(command, module)
    said = [line for line in lines if not line.startswith("import time:") and line.strip()]
    assert code == 130 and said == ["flashrope: interrupted\n"]


def test_tuning_cancels_what_is_not_compiled_yet():
    """At Ctrl-C, tuning cancels the kernels that are not compiled yet. Otherwise the thread pool would wait for minutes
    until all are compiled."""
    running, go = threading.Event(), threading.Event()

    def compile_one():
        running.set()
        go.wait(30)

    futures = {}
    with pytest.raises(KeyboardInterrupt), ThreadPoolExecutor(1) as threads, _cancelled_by_errors(futures):
        for choice in range(20):
            futures[threads.submit(compile_one)] = choice
        running.wait(30)
        threading.Timer(0.2, go.set).start()
        raise KeyboardInterrupt
    assert sum(future.cancelled() for future in futures) == 19


def test_the_benchmarks_end_cleanly_too(monkeypatch, capsys):
    from bench import __main__ as bench

    def interrupt(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "import_module", lambda *name: SimpleNamespace(main=interrupt))
    assert bench.main(["model"]) == 130 and capsys.readouterr().err == "\npython -m bench: interrupted\n"
