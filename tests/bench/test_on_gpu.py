"""Runs bench/on_gpu.sh with a replacement for python3 that pretends to have a GPU. Also tests the progress lines that
the script reads from logs."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

from bench import progress

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "on_gpu.sh"
needs_bash = pytest.mark.skipif(
    not all(map(shutil.which, ("bash", "timeout", "tar", "awk"))), reason="needs bash and coreutils"
)
# A replacement for python3. It answers all questions of the script about the device, and prints what real steps print.
# The step "tests" never ends.
STUB = """#!/usr/bin/env bash
case "$*" in
  "-m bench.progress"*) exec {python} "$@" ;;
  "-c "*) echo "NVIDIA Test(R) GPU" ;;
  "-m pytest"*) echo "....... [  7/40]"; exec sleep 60 ;;
  "-m bench hope --seqlens 8192"*) echo "failing" >&2; exit 3 ;;
  "-m bench all"*"--out "*) mkdir -p "${{@: -1}}/device"; echo "{{}}" > "${{@: -1}}/device/decode.json" ;;
  *) echo "ran $*" ;;
esac
"""


def run(folder: Path, *words: str, stub: str = STUB) -> subprocess.CompletedProcess:
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    (programs / "python3").write_text(stub.format(python=sys.executable))
    (programs / "python3").chmod(0o755)
    env = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    return subprocess.run(["bash", SCRIPT, *words], capture_output=True, text=True, env=env, cwd=folder, timeout=60)


def packed(folder: Path) -> dict[str, str]:
    """Returns {path: text} of all files in the packed results."""
    [path] = folder.glob("*.tgz")
    assert re.fullmatch(r"flashrope-gpu-nvidia-test-r-gpu-\d{4}-\d\d-\d\d\.tgz", path.name)
    with tarfile.open(path) as archive:
        members = [member for member in archive.getmembers() if member.isfile()]
        assert all(member.name.startswith(path.stem + "/") for member in members)
        return {member.name.split("/", 1)[1]: archive.extractfile(member).read().decode() for member in members}


@needs_bash
def test_one_file_with_logs_results_and_what_was_not_reached(tmp_path):
    done = run(tmp_path, "-t", "0.05", "-o", "out", "smoke", "decode", "hope", "tests", "rotation")
    files = packed(tmp_path / "out")
    assert done.returncode == 1 and done.stdout.rstrip().endswith(".tgz"), done.stderr
    issues = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Issues"]
    assert f"Attach this file to an issue at {issues}: " in done.stdout.splitlines()[-1]
    summary = re.sub(r" +", " ", files["summary.txt"]).splitlines()
    assert [re.sub(r"\d+ s ", "", line) for line in summary] == [
        "smoke passed",
        "tests out of time",
        " tests: 7 of 40 run, not reached: 33",
        "hope FAILED (exit code 1)",
        "decode passed",
        "rotation - not run: the time of -t is over",
    ]
    assert files["smoke.log"].startswith("ran -m flashrope info\nran -m bench hope")
    assert "failing" in files["hope.log"] and files["results/device/decode.json"] == "{}\n"
    assert "Test(R) GPU" in files["versions.txt"]


@needs_bash
def test_steps_of_one_day_are_packed_together(tmp_path):
    for step in ("host", "smoke"):
        done = run(tmp_path, "-o", "out", step)
        assert done.returncode == 0, done.stderr
    files = packed(tmp_path / "out")
    assert [line.split()[0] for line in files["summary.txt"].splitlines()] == ["smoke", "host"]
    assert {"smoke.log", "host.log", "versions.txt"} < files.keys()


@needs_bash
def test_a_step_that_cannot_run_says_why(tmp_path):
    if shutil.which("compute-sanitizer"):
        pytest.skip("compute-sanitizer is installed")
    done = run(tmp_path, "-o", "out", "memcheck")
    assert done.returncode == 1
    assert "not run: compute-sanitizer is not on PATH" in packed(tmp_path / "out")["summary.txt"]


@needs_bash
@pytest.mark.parametrize(
    ("words", "stub", "message"),
    [
        ((), "#!/bin/sh\necho 'no GPU: none here' >&2; exit 1\n", "on_gpu.sh: no GPU: none here"),
        (("sleep",), STUB, "on_gpu.sh: unknown step sleep; see bench/on_gpu.sh -h"),
        (("-t", "soon"), STUB, "on_gpu.sh: -t: expected a number of minutes, got soon"),
    ],
    ids=["no GPU", "step", "time"],
)
def test_refuses_in_one_line(tmp_path, words, stub, message):
    done = run(tmp_path, "-o", "out", *words, stub=stub)
    assert (done.returncode, done.stderr, done.stdout) == (2, message + "\n", "")
    assert not (tmp_path / "out").exists()


@needs_bash
def test_experiments_run_only_where_they_are_named(tmp_path):
    stub = STUB.replace(
        "  *) echo",
        '  "-m experiments"*) mkdir -p "${{@: -1}}/perplexity"; : > "${{@: -1}}/settings.json" ;;\n  *) echo',
    )
    assert run(tmp_path, "-o", "out", "smoke", "experiments", stub=stub).returncode == 0
    files = packed(tmp_path / "out")
    assert re.search(r"^experiments +\d+ s +passed", files["summary.txt"], re.MULTILINE)
    assert "experiments-small/settings.json" in files
    assert "experiments" not in re.search(r"^order=\(([^)]*)\)", SCRIPT.read_text(), re.MULTILINE)[1]


@needs_bash
def test_help_explains_every_step():
    done = subprocess.run(["bash", SCRIPT, "-h"], capture_output=True, text=True, check=True)
    source = SCRIPT.read_text()
    steps = re.search(r"^order=\(([^)]*)\)", source, re.MULTILINE)[1].split()
    limits = re.search(r"^declare -A limits=\(([^)]*)\)", source, re.MULTILINE)[1]
    assert steps == re.findall(r"^  ([a-z-]+) {2,}", done.stdout.split("Options:")[0].split("Steps:")[1], re.MULTILINE)
    assert sorted(steps) == sorted(re.findall(r"\[([a-z-]+)\]=", limits))
    assert sum(map(int, re.findall(r"=(\d+)", limits))) <= 70 * 60


def test_the_kernel_tests_are_there():
    listed = re.search(r"^kernel_tests=\([^)]*\)", SCRIPT.read_text(), re.MULTILINE)[0]
    names = subprocess.run(
        ["bash", "-c", listed + "; echo ${kernel_tests[@]}"], capture_output=True, text=True, check=True
    )
    assert names.stdout and all((ROOT / "tests" / f"{name}.py").exists() for name in names.stdout.split())


# ---- progress
def test_steps_say_what_comes_and_what_is_done():
    said = []
    assert list(progress.steps("hope", [1, 2], lambda x: f"item {x}", said.append)) == [1, 2]
    assert said == ["hope: to do: item 1 | item 2", "hope: 1 of 2: item 1", "hope: 2 of 2: item 2", "hope: 2 of 2 done"]
    assert progress.unfinished(said) == []
    assert progress.unfinished(said[:3]) == ["hope: 1 of 2 done, not reached: item 2"]
    assert progress.unfinished(said[:1]) == ["hope: 0 of 2 done, not reached: item 1, item 2"]


def test_what_several_commands_did_not_reach():
    log = [
        "all: to do: hope | rerope --window 8",
        "all: 1 of 2: hope",
        "hope: to do: a | b",
        "hope: 1 of 2: a",
        "hope: 2 of 2: b",
        "hope: 2 of 2 done",
        "all: 2 of 2: rerope --window 8",
        "rerope: to do: c | d",
        "rerope: 1 of 2: c",
        "some text: 1 of 2: not a line of progress",
    ]
    assert progress.unfinished(log) == [
        "all: 1 of 2 done, not reached: rerope --window 8",
        "rerope: 0 of 2 done, not reached: c, d",
    ]
    assert progress.unfinished(["compiled 3 of 9: attention_forward"]) == [
        "compiling: 3 of 9 kernels done, not reached: every case"
    ]
    assert progress.unfinished(["...... [ 40/80]", "... [80/80]", "compiled 9 of 9: x"]) == []
