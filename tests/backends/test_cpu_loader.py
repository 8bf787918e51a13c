"""Tests how the compiled CPU kernels are built and chosen. A missing or wrong library is never an error."""

import json
import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import support
import torch
from caching import cached_call
from flashrope import Rotary, attention
from flashrope.backends.cpu import loader
from flashrope.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "csrc/cpu/build.py"
V3, V4, BF16, AMX = (loader.INSTRUCTIONS[f"x86-64-{name}"] for name in ("v3", "v4", "v4-bf16", "v4-amx"))
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the compiled CPU kernels are for Linux")


@pytest.fixture
def installation(tmp_path, monkeypatch):
    """Returns an empty folder for libraries, on a processor with AVX-512."""
    monkeypatch.setattr(loader, "FOLDER", tmp_path)
    monkeypatch.setattr(loader, "SOURCES", tmp_path / "no checkout")
    monkeypatch.setattr(loader, "instructions", lambda: V4)
    monkeypatch.setattr(loader, "Library", opened)
    monkeypatch.setattr(loader, "find", loader.find.__wrapped__)
    return tmp_path


def opened(path: Path, bfloat16: Path | None = None) -> Path:
    """Replaces opening a library. Raises OSError for an empty file, which stands for a damaged library."""
    for each in filter(None, (path, bfloat16)):
        if not each.read_text():
            damaged(each)
    return bfloat16 or path


def write(folder: Path, **contents: str) -> None:
    for name, content in contents.items():
        (folder / f"{name.replace('_', '-')}.so").write_text(content)


def damaged(path):
    raise OSError(f"{path.name}: file too short")


def test_the_best_that_the_processor_can_run(installation, monkeypatch):
    write(installation, x86_64_v3="3", x86_64_v4="4")
    assert loader.find()[1:] == ("x86-64-v4", "")
    for missing in sorted(V4 - V3):  # an illegal instruction would end the process
        monkeypatch.setattr(loader, "instructions", lambda missing=missing: V4 - {missing})
        assert loader.find()[1:] == ("x86-64-v3", "")
    for missing in sorted(V3):
        monkeypatch.setattr(loader, "instructions", lambda missing=missing: V4 - {missing})
        library, target, problem = loader.find()
        assert library is None and not target and "neither AVX2 nor" in problem


def test_bfloat16_extends_the_library_of_avx512(installation, monkeypatch):
    """The target for bfloat16 is chosen only if the processor has its instructions and both libraries can be opened.
    Otherwise the next best target is chosen."""
    monkeypatch.setattr(loader, "instructions", lambda: BF16)
    write(installation, x86_64_v3="3", x86_64_v4="4", x86_64_v4_bf16="bf16")
    assert loader.find()[1:] == ("x86-64-v4-bf16", "")
    assert loader.parts("x86-64-v4-bf16") == ["x86-64-v4-bf16", "x86-64-v4"]
    for missing in sorted(BF16 - V3):  # otherwise an illegal instruction would end the process
        monkeypatch.setattr(loader, "instructions", lambda missing=missing: BF16 - {missing})
        assert loader.find().target == ("x86-64-v4" if missing == "avx512_bf16" else "x86-64-v3")
    monkeypatch.setattr(loader, "instructions", lambda: BF16)
    write(installation, x86_64_v4_bf16="")
    assert loader.find().target == "x86-64-v4"
    (installation / "x86-64-v4-bf16.so").unlink()
    assert loader.find().target == "x86-64-v4"
    write(installation, x86_64_v4_bf16="bf16")
    (installation / "x86-64-v4.so").unlink()
    assert loader.find().target == "x86-64-v3"


def test_amx_needs_permission(installation, monkeypatch):
    """The target for AMX is chosen only if the processor has its instructions and Linux permits their use. If Linux
    refuses, the library cannot be opened by name either, because its first instruction would end the process."""
    write(installation, x86_64_v4="4", x86_64_v4_bf16="bf16", x86_64_v4_amx="amx")
    monkeypatch.setattr(loader, "instructions", lambda: AMX)
    monkeypatch.setattr(loader, "permitted", lambda target: True)
    assert loader.find()[1:] == ("x86-64-v4-amx", "")
    for missing in sorted(AMX - BF16):
        monkeypatch.setattr(loader, "instructions", lambda missing=missing: AMX - {missing})
        assert loader.find().target == "x86-64-v4-bf16"
    monkeypatch.setattr(loader, "instructions", lambda: AMX)
    monkeypatch.setattr(loader, "permitted", lambda target: target != "x86-64-v4-amx")
    assert loader.find()[1:] == ("x86-64-v4-bf16", "")
    with pytest.raises(OSError, match="Linux does not permit this process to use the registers of x86-64-v4-amx"):
        loader.open_target("x86-64-v4-amx")


def test_every_target_of_the_build_is_known():
    targets = runpy.run_path(str(BUILD))["TARGETS"]
    assert sorted(name for names in targets.values() for name in names) == sorted(loader.INSTRUCTIONS)


def test_the_next_library_serves_where_one_is_missing(installation):
    write(installation, x86_64_v3="3")
    assert loader.find()[1:] == ("x86-64-v3", "")


def test_a_damaged_library(installation, monkeypatch, capsys):
    write(installation, x86_64_v4="")
    monkeypatch.setattr(loader, "Library", damaged)
    library, target, problem = loader.find()
    assert library is None and "x86-64-v4: cannot be loaded (x86-64-v4.so: file too short); install" in problem
    assert main(["info"]) == 0
    assert f"none, PyTorch's run instead: {problem}\n" in capsys.readouterr().out


def test_why_a_library_is_missing(installation):
    expected = "x86-64-v4, x86-64-v3: not in this installation, which was built without a C++ compiler"
    assert loader.find().problem == expected
    reasons = {"x86-64-v4": "c++ failed:\n unknown -march", "x86-64-v3": "?"}
    (installation / "build.json").write_text(json.dumps({"missing": reasons}))
    assert loader.find().problem == "x86-64-v4: c++ failed: unknown -march; x86-64-v3: ?"
    for broken in ("", "[]", '{"missing": 3}'):
        (installation / "build.json").write_text(broken)
        assert "not in this installation" in loader.find().problem


def test_a_library_older_than_its_sources(installation, monkeypatch):
    write(installation, x86_64_v4="4")
    sources = installation / "csrc"
    sources.mkdir()
    (sources / "decode.cpp").write_text("")
    monkeypatch.setattr(loader, "SOURCES", sources)
    os.utime(installation / "x86-64-v4.so", (1, 1))
    assert f"python csrc/cpu/build.py {installation}" in loader.find().problem
    os.utime(sources / "decode.cpp", (0, 0))
    assert loader.find().target == "x86-64-v4"


def test_one_warning_at_the_first_call(installation, monkeypatch):
    script = f"""
import sys, torch
from flashrope import Rotary, attention
from flashrope.backends.cpu import loader
from pathlib import Path
loader.FOLDER = Path({str(installation)!r})
q = torch.randn(1, 4, 1, 16)
for _ in range(3):
    attention(q, q, q, Rotary.rope(16))
    print("called", file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    warning = "UserWarning: flashrope: attention on the CPU is slow without its compiled kernels"
    first, *others = done.stderr.split("called\n")
    assert first.count(warning) == 1 and "not in this installation" in first
    assert len(others) == 3 and warning not in "".join(others)


def test_other_systems_do_not_warn(installation, monkeypatch):
    monkeypatch.setattr(loader.sys, "platform", "darwin")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loader.warn_once.__wrapped__() is None
    assert "need Linux, this is darwin" in loader.find().problem


# ---- the build


def build(folder: Path, compiler: str, *targets: str):
    env = {**os.environ, "CXX": compiler, "FLASHROPE_BUILD_CACHE": "0"}
    return subprocess.run([sys.executable, BUILD, folder, *targets], capture_output=True, text=True, env=env)


def fake_compiler(folder: Path, body: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_without_a_compiler(installation, tmp_path):
    write(installation, x86_64_v4="of before")
    done = build(installation, "no-such-compiler", "x86-64-v4")
    assert done.returncode == 1 and done.stderr == "x86-64-v4: no C++ compiler: no-such-compiler is not on PATH\n"
    assert [path.name for path in installation.iterdir()] == ["build.json"]
    assert "no C++ compiler: no-such-compiler" in loader.find().problem


def test_an_old_compiler_leaves_one_target_out(installation, tmp_path_factory):
    old = fake_compiler(
        tmp_path_factory.mktemp("bin"),
        """case "$*" in *v4*) echo "bad value x86-64-v4 for -march" >&2; exit 3;; --version) exit;; esac
for last; do :; done
echo library > "$last" """,
    )
    done = build(installation, old, "x86-64-v3", "x86-64-v4")
    assert done.returncode == 1 and "bad value x86-64-v4 for -march" in done.stderr
    assert sorted(path.name for path in installation.iterdir()) == ["build.json", "x86-64-v3.so"]
    assert loader.find()[1:] == ("x86-64-v3", "")


@pytest.mark.parametrize("target", loader.runnable())
def test_every_library_of_this_processor_is_right(compiled, monkeypatch, tmp_path, target):
    if missing := [part for part in loader.parts(target) if not (loader.FOLDER / f"{part}.so").exists()]:
        subprocess.run([sys.executable, loader.SOURCES / "build.py", tmp_path, *loader.parts(target)], check=True)
        monkeypatch.setattr(loader, "FOLDER", tmp_path)
    library = loader.open_target(target)
    assert library.multiplies(torch.bfloat16, 64) == (target in loader.EXTENDED), missing
    monkeypatch.setattr(loader, "load", lambda: library)
    for dtype in (torch.float16, torch.bfloat16):
        of_type = support.Target("cpu", dtype, "cpu")
        support.check(of_type, support.problem(of_type, Rotary.hope(40, 64).rectify(70), 150, batch=2))
    q, k, v = torch.randn(3, 2, 150, 2, 40).unbind()
    q.requires_grad_()
    rotary = Rotary.rope(40).rectify(70)
    got, want = (attention(q, k, v, rotary, impl=impl) for impl in ("cpu", "reference"))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    grads = [torch.autograd.grad(out.sum(), q)[0] for out in (got, want)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    new = [torch.randn(2, 90, 2, 40) for _ in range(2)]
    for cache_dtype in (torch.float32, torch.int8):
        results = []
        for impl in ("cpu", "reference"):
            caches = [torch.zeros(2, 96, 2, 40, dtype=cache_dtype) for _ in range(2)]
            scales = {} if cache_dtype == torch.float32 else _scales()
            results.append(_append_and_decode(q[:, -1:].detach(), caches, new, rotary, scales, impl))
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def _scales() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(2, 96, 2) for name in ("k_scale", "v_scale")}


def _append_and_decode(q, caches, new, rotary, scales, impl: str) -> list[torch.Tensor]:
    """Returns the output of a step, and the caches after 90 new keys were written. The last of these keys came with
    q."""
    options = dict(rotary=rotary, cache_seqlens=torch.zeros(2, dtype=torch.int32), impl=impl, **scales)
    queries = torch.cat((torch.zeros_like(q).expand(-1, 89, -1, -1), q), 1)
    cached_call(queries, *caches, k=new[0], v=new[1], **options)
    options["cache_seqlens"] = torch.full((2,), 90, dtype=torch.int32)
    return [cached_call(q, *caches, **options), *caches, *scales.values()]
