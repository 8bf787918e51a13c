"""Runs bench/on_gpu.sh with a replacement for python3 that pretends to have a GPU. Also tests the progress lines that
the script reads from logs."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from bench import results_page as page
from bench.report.records import Record, Run
from bench.speed.problem import Problem

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
  "-m bench device table"*) exec {python} "$@" ;;
  "-c "*ptxas*) echo /bin/true ;;
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


@pytest.mark.slow
@needs_bash
def test_one_file_with_logs_results_and_what_was_not_reached(tmp_path):
    done = run(tmp_path, "-t", "0.05", "-o", "out", "smoke", "decode", "hope", "tests", "rotation")
    files = packed(tmp_path / "out")
    assert done.returncode == 1, done.stderr
    [attach] = [line for line in done.stdout.splitlines() if "Attach this file to an issue: " in line]
    assert attach.endswith(".tgz")
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


@pytest.mark.slow
@needs_bash
@pytest.mark.parametrize(
    ("words", "stub", "message"),
    [
        ((), "#!/bin/sh\necho 'no GPU: none here' >&2; exit 1\n", "on_gpu.sh: no GPU: none here"),
        (("sleep",), STUB, "on_gpu.sh: unknown step sleep; see bench/on_gpu.sh -h"),
        (("-p", "/nowhere"), STUB, "on_gpu.sh: -p: expected a folder, got /nowhere"),
        (("-t", "soon"), STUB, "on_gpu.sh: -t: expected a number of minutes, got soon"),
    ],
    ids=["no GPU", "step", "packages", "time"],
)
def test_refuses_in_one_line(tmp_path, words, stub, message):
    done = run(tmp_path, "-o", "out", *words, stub=stub)
    assert (done.returncode, done.stderr, done.stdout) == (2, message + "\n", "")
    assert not (tmp_path / "out").exists()


def words_of(name: str) -> list[str]:
    return re.search(rf"^{name}=\(([^)]*)\)", SCRIPT.read_text(), re.MULTILINE)[1].split()


def limits() -> dict[str, int]:
    found = re.search(r"^declare -A limits=\(([^)]*)\)", SCRIPT.read_text(), re.MULTILINE)[1]
    return {name: int(seconds) for name, seconds in re.findall(r"\[([a-z0-9-]+)\]=(\d+)", found)}


@needs_bash
def test_help_explains_every_step():
    done = subprocess.run(["bash", SCRIPT, "-h"], capture_output=True, text=True, check=True)
    listed = done.stdout.split("Options:")[0].split("Steps:")[1]
    steps = re.findall(r"^  ([a-z0-9-]+) {2,}", listed, re.MULTILINE)
    halves = words_of("first") + words_of("second")
    assert steps == halves + [word for word in words_of("order") if word[0] not in '"$']
    assert sorted(steps) == sorted(limits())
    assert "at most 12 minutes" in done.stdout
    for name in ("first", "second"):
        assert re.search(rf"^  {name}   ? ?compile ", done.stdout, re.MULTILINE), name


def test_each_half_fits_into_six_minutes():
    limit = limits()
    for half in (words_of("first"), ["compile", *words_of("second")]):
        assert sum(limit[step] for step in half) <= 350  # ten seconds remain for versions and packing
    assert limit["correct"] == 120 and re.search(r"^half_limit=360$", SCRIPT.read_text(), re.MULTILINE)


def measured(revision: str) -> str:
    """Returns the JSON file of a run on the GPU of the stub."""
    sizes = Problem(2, 8192, 16, 16, 128, torch.bfloat16, torch.device("cpu")).sizes()
    common = dict(sizes=sizes, backward=True, low=4.9, high=5.1, rounds=10, ceiling="product_tflops", share=0.5)
    found = [
        Record("seqlen 8192", "RoPE with tile grad_qkv=64,128,8,3", False, milliseconds=4.5, tflops=430.0,
               ratios={"flashrope RoPE": 0.9}, **common),
        Record("seqlen 8192", "flashrope RoPE", True, milliseconds=5.0, tflops=387.0, **common),
    ]  # fmt: skip
    versions = {"revision": revision, "torch": "2", "triton": "3", "cuda": "13"}
    made = Run("hope", "python -m bench hope", {"name": "NVIDIA Test", "hardware": "x"}, versions, {}, found)
    return json.dumps(dataclasses.asdict(made))


STEPS_STUB = STUB.replace(
    '  "-m bench all"',
    """  "-m bench device ncu"*) mkdir -p "${{@: -1}}"; echo counted > "${{@: -1}}/forward.csv" ;;
  "-m bench device packages"*) echo '{{"contestant": "Gluon, RoPE", "seqlen": 8192, "batch": 2, "milliseconds": 1.0,'\
    '"tflops": 550.0, "error": 0.001}}' ;;
  "-m bench device prefill"*) mkdir -p "${{@: -1}}/device"; cp measured.json "${{@: -1}}/device/hope-a.json"; exit 1 ;;
  "-m bench device"*) echo "$* $TRITON_OVERRIDE_ARCH" ;;
  "-m bench correct"*) echo '{{"forward, RoPE": 0.001, "decoding, int8": 0.5}}' > "${{@: -1}}" ;;
  "-m bench all\"""",
).replace("cp measured.json", "cp {folder}/measured.json")


def run_steps(folder: Path, *words: str, revision: str = "abc") -> subprocess.CompletedProcess:
    (folder / "measured.json").write_text(measured(revision))
    nvidia_smi = folder / "programs" / "nvidia-smi"
    nvidia_smi.parent.mkdir(exist_ok=True)
    nvidia_smi.write_text("#!/bin/sh\necho '2026/11/28 10:00:00, 1755, 98, 600.1, 61'\n")
    nvidia_smi.chmod(0o755)
    return run(folder, "-o", "out", *words, stub=STEPS_STUB.replace("{folder}", str(folder)))


def table_of(done: subprocess.CompletedProcess) -> list[list[str]]:
    """Returns the cells of the table that the script printed last."""
    lines = done.stdout.rstrip().splitlines()
    start = max(at for at, line in enumerate(lines) if line.startswith("contestant"))
    return [re.split(r" {2,}", line) for line in lines[start:]]


def started(done: subprocess.CompletedProcess) -> list[str]:
    return re.findall(r"^== ([a-z0-9-]+), at most", done.stdout, re.MULTILINE)


@pytest.mark.slow
@needs_bash
@pytest.mark.parametrize("words", [(), ("second",)], ids=" ".join)
def test_the_halves_run_in_order_and_end_with_one_table(tmp_path, words):
    """A step that fails does not stop the others, and its results are in the table, which has the revision."""
    (tmp_path / "builds").mkdir()
    done = run_steps(tmp_path, "-p", str(tmp_path / "builds"), *words, revision="abc-dirty")
    halves = words or ("first", "second")
    expected = words_of("first") if "first" in halves else ["compile"]
    expected = expected + (words_of("second") if "second" in halves else [])
    assert started(done) == expected, done.stderr
    files, rows = packed(tmp_path / "out"), table_of(done)
    assert files["table.txt"].splitlines()[-1] == done.stdout.rstrip().splitlines()[-1]
    assert rows[-1] == ["running clock", "-", "-", "-", "1755 MHz, 1755 to 1755", "-", "-", "-"]
    if "first" in halves:
        assert done.returncode == 1 and re.search(r"^prefill +\d+ s +FAILED", files["summary.txt"], re.MULTILINE)
        assert rows[1][4] == "1 of 2 are correct; not decoding, int8"
        assert rows[2] == ["RoPE with tile grad_qkv=64,128,8,3", "both", "8192 x 2", "4.500", "430 TFLOP/s", "50%",
                           "0.90 of RoPE", "abc with uncommitted changes"]  # fmt: skip
        assert rows[4][:5] == ["Gluon, RoPE", "forward", "8192 x 2", "1.000", "550 TFLOP/s"]
        [run_folder] = [path for path in (tmp_path / "out").iterdir() if path.name.startswith("flashrope-gpu")
                        and path.is_dir()]  # fmt: skip
        [(folder, [(_, kept)])] = page.devices(run_folder / "results")
        assert folder.name == "device" and kept.records[1].tflops == 387  # bench report takes the packed results
    if "second" in halves:
        assert "--code 80" in files["compile.log"] and "sm80" in files["sm80.log"] and "ncu/forward.csv" in files
        assert files["tune.log"].startswith("ran -m bench tune --direction grad_qkv")


def test_the_kernel_tests_are_there():
    listed = re.search(r"^kernel_tests=\([^)]*\)", SCRIPT.read_text(), re.MULTILINE)[0]
    names = subprocess.run(
        ["bash", "-c", listed + "; echo ${kernel_tests[@]}"], capture_output=True, text=True, check=True
    )
    assert names.stdout and all((ROOT / "tests" / f"{name}.py").exists() for name in names.stdout.split())


# ---- progress
