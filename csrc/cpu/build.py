"""Compiles the CPU kernels: ``python csrc/cpu/build.py FOLDER [TARGET ...]``, as setup.py does at installation.

Every target becomes one library FOLDER/TARGET.so, for processors that have the target's instructions.
python/flashrope/backends/cpu/loader.py chooses among the libraries. x86-64-v4-bf16 and x86-64-v4-amx are exceptions:
their libraries have only the functions for bfloat16, and extend the library of x86-64-v4. FOLDER/build.json names the
compiler and gives the reason for every missing library. The build needs only a C++ compiler, neither torch nor
Python's headers.

CXX names the compiler, with options: ``CXX="python -m ziglang c++ -target aarch64-linux-gnu.2.28"`` compiles for ARM
on any machine. The targets are those of the machine that the compiler compiles for.

A library is compiled once per user: a cache keeps it for other environments, under a hash of the sources, the system's
headers, the flags, the compiler, its assembler and its linker. FLASHROPE_BUILD_CACHE=DIR moves the cache from
$XDG_CACHE_HOME/flashrope/cpu-kernels (~/.cache/...), and FLASHROPE_BUILD_CACHE=0 switches it off.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-shared", "-fPIC")
TARGETS = {
    "x86_64": {
        "x86-64-v3": ["-march=x86-64-v3"],
        "x86-64-v4": ["-march=x86-64-v4"],
        "x86-64-v4-bf16": ["-march=x86-64-v4", "-mavx512bf16"],
        "x86-64-v4-amx": ["-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
    },
    "aarch64": {"armv8-a": ["-march=armv8-a"], "armv8.2-a": ["-march=armv8.2-a+fp16"]},
}
# Targets whose sources are in a subfolder. Their library extends the library of another target (loader.py).
PARTS = {"x86-64-v4-bf16": "bf16", "x86-64-v4-amx": "bf16"}
ZIG_TARGETS = {  # zig c++ has its own names for targets
    "x86-64-v3": ["-mcpu=x86_64_v3"],
    "x86-64-v4": ["-mcpu=x86_64_v4"],
    "x86-64-v4-bf16": ["-mcpu=x86_64_v4+avx512bf16"],
    "x86-64-v4-amx": ["-mcpu=x86_64_v4+avx512bf16+amx_tile+amx_bf16"],
    "armv8-a": ["-mcpu=generic"],
    "armv8.2-a": ["-mcpu=generic+v8_2a+fullfp16"],
}
# The versions that manylinux_2_28 guarantees (PEP 600). torch's own wheels, from 2.11 on, need the same.
MANYLINUX = "manylinux_2_28"
NEWEST = {b"GLIBC": (2, 28), b"GLIBCXX": (3, 4, 24), b"CXXABI": (1, 3, 11), b"GCC": (7, 0, 0)}
SYSTEM_LIBRARIES = {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1", "libc.so.6", "libdl.so.2", "libgcc_s.so.1"} | {
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
    "libstdc++.so.6",
}
CACHE_SWITCH = "FLASHROPE_BUILD_CACHE"
CACHE_ENTRIES = 16  # the most recently used entries are kept, up to 1.6 MB each
# Environment variables that compilers read.
COMPILER_VARIABLES = (
    *("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX"),
    *("LD_RUN_PATH", "LDEMULATION", "ZIG_LIB_DIR", "CCC_OVERRIDE_OPTIONS"),
)
ELF_MACHINES = {62: "x86_64", 183: "aarch64"}


def build(folder: Path, targets: list[str] | None = None, machine: str = "") -> dict[str, str]:
    """Compiles the targets, by default all targets of the compiler's machine.

    Returns a dict from the name of each missing target to the reason.
    """
    folder.mkdir(parents=True, exist_ok=True)
    compiler = command()
    known = TARGETS.get(machine or target_machine(compiler), {})
    if any("zig" in Path(word).name for word in compiler):
        known = {name: ZIG_TARGETS[name] for name in known}
    report = {"compiler": version(compiler), "missing": {}}

    def compiled(target: str) -> str:
        arguments = [*compiler, *FLAGS, *known[target]]
        return compile_target(arguments, folder / f"{target}.so", sources(PARTS.get(target, "")))

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        names = list(targets or known)
        for target, error in zip(names, threads.map(compiled, names), strict=True):
            if error:
                report["missing"][target] = error
    (folder / "build.json").write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return report["missing"]


def command() -> list[str]:
    return shlex.split(os.environ.get("CXX") or "c++")


def has_compiler() -> bool:
    return shutil.which(command()[0]) is not None


def version(compiler: list[str]) -> str:
    try:
        done = subprocess.run([*compiler, "--version"], capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.partition("\n")[0]


def target_machine(compiler: list[str]) -> str:
    """Returns Python's name of the machine that the compiler compiles for, or of this machine if that is unknown."""
    try:
        done = subprocess.run([*compiler, "-E", "-dM", "-x", "c++", os.devnull], capture_output=True, text=True)
    except OSError:
        return platform.machine()
    return next((name for name in TARGETS if f"#define __{name}__ 1" in done.stdout), platform.machine())


def platform_tag(folder: Path) -> str | None:
    """Returns the platform tag of a wheel with the libraries of a folder, or None if the folder has no libraries.

    The tag follows from the machine that the libraries are compiled for and from the system versions that they need:
    manylinux_2_28_x86_64, or linux_x86_64 if a library needs a newer system.
    """
    libraries = [path.read_bytes() for path in sorted(folder.glob("*.so"))]
    if not libraries:
        return None
    (machine,) = {ELF_MACHINES[int.from_bytes(library[18:20], "little")] for library in libraries}
    return f"{MANYLINUX if all(map(_suits_manylinux, libraries)) else 'linux'}_{machine}"


def _suits_manylinux(library: bytes) -> bool:
    """Whether a library runs on manylinux_2_28. Reads every string that looks like a version or a library, so a string
    that merely looks like one can only make the answer False."""
    versions = re.findall(rb"\0(GLIBC|GLIBCXX|CXXABI|GCC)_(\d[\d.]*)(?=\0)", library)
    needed = re.findall(rb"\0((?:lib|ld-)[\w+-]+\.so[.\d]*)(?=\0)", library)
    return all(tuple(map(int, version.split(b"."))) <= NEWEST[name] for name, version in versions) and (
        {name.decode() for name in needed} <= SYSTEM_LIBRARIES
    )


def sources(part: str = "") -> list[str]:
    """Returns the relative paths of a library's sources, so that no absolute path gets into the library."""
    return sorted(path.relative_to(SOURCES).as_posix() for path in (SOURCES / part).glob("*.cpp"))


def compile_target(arguments: list[str], library: Path, names: list[str]) -> str:
    """Compiles one library. Returns the error, or "". An existing library stays until the new one is complete."""
    if not has_compiler():
        library.unlink(missing_ok=True)
        return f"no C++ compiler: {arguments[0]} is not on PATH"
    new = library.with_suffix(f".{os.getpid()}.tmp")
    key = cache_key(arguments, names) if (cached := cache_folder()) else None
    if cached and key and (content := read_cached(cached, key)) is not None:
        new.write_bytes(content)
        new.chmod(0o777 & ~umask())
        os.replace(new, library)
        return ""
    done = subprocess.run([*arguments, *names, "-o", new.resolve()], cwd=SOURCES, capture_output=True, text=True)
    if done.returncode == 0:
        os.replace(new, library)
        if cached and key:
            write_cached(cached, key, library.read_bytes())
        return ""
    new.unlink(missing_ok=True)
    library.unlink(missing_ok=True)
    lines = done.stderr.splitlines()
    reason = next(
        (line for line in lines if "error" in line.lower()), lines[0] if lines else f"exit code {done.returncode}"
    )
    return f"{shlex.join(arguments)} failed: {reason[:300]}"


# ---- the cache of compiled libraries


def cache_folder() -> Path | None:
    """Returns the cache's folder, or None if it is switched off, not this user's own or not writable."""
    chosen = os.environ.get(CACHE_SWITCH)
    if chosen in ("", "0"):
        return None
    try:
        home = os.environ.get("XDG_CACHE_HOME", "")
        folder = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
        folder = Path(chosen) if chosen else folder / "flashrope" / "cpu-kernels"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        own = folder.stat().st_uid == os.getuid()  # false under sudo, where root would run what another user wrote
    except (OSError, RuntimeError):
        return None
    return folder if own and os.access(folder, os.W_OK) else None


def cache_key(arguments: list[str], names: list[str]) -> str | None:
    """Returns a hash of everything that determines the library's bytes, or None if the compiler cannot run or cannot
    preprocess the sources.

    arguments: the compiler with its options. names: the sources. The hash covers the sources and all headers, and also
    the preprocessor's output for the sources.
    """
    digest = hashlib.sha256()

    def add(*parts: bytes) -> None:
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part)

    for name in sorted([*names, *(path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.h"))]):
        add(name.encode(), (SOURCES / name).read_bytes())
    add(*map(str.encode, arguments))
    add(*(f"{name}={os.environ.get(name)}".encode() for name in COMPILER_VARIABLES))
    included = "".join(f'#include "{name}"\n' for name in names)
    try:
        unit = ["-E", "-I", ".", "-x", "c++", "-", "-o", "/dev/stdout"]
        preprocessed = said([*arguments, *unit], included.encode())
        versions = [said([*arguments, "-v"])]
        for tool in ("as", "ld"):
            if path := said([*arguments, f"-print-prog-name={tool}"]).stdout.decode().strip():
                versions.append(said([path, "--version"]))
    except OSError:
        return None
    if preprocessed.returncode or not preprocessed.stdout:
        return None
    add(version(arguments).encode(), preprocessed.stdout, *(done.stdout + done.stderr for done in versions))
    return digest.hexdigest()


def said(command: list[str], given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, input=given, cwd=SOURCES, capture_output=True)


def read_cached(folder: Path, key: str) -> bytes | None:
    """Returns the library of this key, or None if the cache does not have the library or its file is damaged."""
    path = folder / key
    try:
        content = path.read_bytes()
        if content[:32] != hashlib.sha256(content[32:]).digest():
            return None
        os.utime(path)
    except OSError:
        return None
    return content[32:]


def write_cached(folder: Path, key: str, library: bytes) -> None:
    """Stores a library atomically, and deletes the least recently used libraries. A full disk is not an error."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".", delete=False) as file:
            try:
                file.write(hashlib.sha256(library).digest() + library)
                file.flush()
                os.replace(file.name, folder / key)
            except BaseException:
                os.unlink(file.name)
                raise
        entries = sorted(folder.glob("[0-9a-f]*"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in entries[CACHE_ENTRIES:]:
            path.unlink(missing_ok=True)
    except OSError:
        pass


def umask() -> int:
    """Returns the process's umask."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    problems = build(Path(sys.argv[1]), sys.argv[2:] or None)
    sys.exit("\n".join(f"{target}: {problem}" for target, problem in problems.items()) or 0)
