"""Introduced in notebook 01. Is this machine set up? `python -m tutorial_engine.lab.doctor`.

Knows what the course needs and how to get it; changes nothing. Every line is ok, warn or FAIL, with
what to do about it; the exit code is 1 when a line FAILs. Runs, and says so, even without torch.
"""

import argparse
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

# torch and what needs it are imported late, in functions: their absence is a finding, not a crash

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
GIB = 2**30
PROMPT = "Once upon a time Anna had a red kite."
NEW_TOKENS = 12
INSTALL = "make setup, or: python -m pip install -e '.[notebooks]'"
REINSTALL = "install the package again, or: python -m tutorial_engine.tiny.train (15 minutes)"
GIVE_A_FOLDER = "give --checkpoint a folder with config.json, tokenizer.json, model.safetensors"


class Mark(StrEnum):
    """How a finding is meant: fine, works but could be better, does not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


class Finding(NamedTuple):
    """One line of the report: its mark, what was found, and what to do if it is not ok."""

    mark: Mark
    what: str
    fix: str = ""


class Memory(NamedTuple):
    """Main memory in bytes; None where this system does not tell."""

    total: int | None
    available: int | None


def processor_name() -> str:
    """The processor as its maker calls it, or the architecture where no name is told."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        named = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(errors="replace"), re.M)
        if named:
            return named[1].strip()
    if sys.platform == "darwin":
        command = ("sysctl", "-n", "machdep.cpu.brand_string")
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return platform.processor() or platform.machine() or "unknown"


def installed_version(package: str) -> str | None:
    """Version of an installed package from its metadata, nothing imported; None without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def usable_cores(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may use; a container's share counts (2.5 cores are 2)."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    if cpu_max.is_file():
        quota, _, period = cpu_max.read_text().strip().partition(" ")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def read_memory(meminfo: Path = Path("/proc/meminfo")) -> Memory:
    """Total and available memory: from /proc on Linux, the total alone from sysconf elsewhere."""
    if meminfo.is_file():
        told = dict(re.findall(r"^(\w+):\s+(\d+) kB$", meminfo.read_text(), re.M))
        total, available = (told.get(key) for key in ("MemTotal", "MemAvailable"))
        return Memory(*(int(kib) * 1024 if kib else None for kib in (total, available)))
    try:
        return Memory(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), None)
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return Memory(None, None)


def check_python(version: tuple[int, ...]) -> Finding:
    """Whether this Python is one that the course is tested with."""
    told, oldest, newest = (".".join(map(str, v)) for v in (version, OLDEST_PYTHON, NEWEST_PYTHON))
    if version[:2] < OLDEST_PYTHON:
        return Finding(Mark.FAIL, f"Python {told} is too old", f"install {oldest} to {newest}")
    if version[:2] > NEWEST_PYTHON:
        return Finding(Mark.WARN, f"Python {told} is not tested", f"prefer {oldest} to {newest}")
    return Finding(Mark.OK, f"Python {told} on {platform.system()} {platform.machine()}")


def check_package(name: str, oldest: str, installed: str | None, needed: bool) -> Finding:
    """Whether a package is there and new enough: FAIL without one that the engine needs."""
    bad = Mark.FAIL if needed else Mark.WARN
    if installed is None:
        user = "the engine needs" if needed else "the notebooks need"
        return Finding(bad, f"{name} is not installed; {user} it", INSTALL)
    have, want = ([int(n) for n in re.findall(r"\d+", v)[:2]] for v in (installed, oldest))
    if have < want:
        fix = f"python -m pip install --upgrade '{name}>={oldest}'"
        return Finding(bad, f"{name} {installed} is too old", fix)
    return Finding(Mark.OK, f"{name} {installed}")


def check_packages(requirements: Iterable[str] | None = None) -> Iterator[Finding]:
    """A finding per package of the engine and its notebooks, as the installed metadata asks."""
    if requirements is None:
        try:
            requirements = importlib.metadata.requires("tutorial-engine") or ()
        except importlib.metadata.PackageNotFoundError:
            yield Finding(Mark.WARN, "tutorial-engine runs, but is not installed", INSTALL)
            requirements = ("torch>=2.13", "safetensors>=0.5", "tokenizers>=0.21")
    for requirement in requirements:  # such as: jupyterlab>=4.4; extra == 'notebooks'
        parts = re.fullmatch(
            r"([\w.-]+)>=([\d.]+)(?:\s*;\s*extra == ['\"](\w+)['\"])?", requirement
        )
        if parts and parts[3] in (None, "notebooks"):
            version = installed_version(parts[1])
            yield check_package(parts[1], parts[2], version, needed=parts[3] is None)


def check_memory(memory: Memory) -> Finding:
    """Whether a notebook on the tiny model (under 1 GiB) fits; unknown is no reason to worry."""
    total, available = (f"{n / GIB:.1f} GiB" if n is not None else "unknown" for n in memory)
    what = f"memory: {total} in all, {available} available"
    usable = memory.total if memory.available is None else memory.available
    if usable is not None and usable < GIB:
        mark = Mark.FAIL if usable < GIB // 2 else Mark.WARN
        return Finding(mark, what, "close other programs; a notebook needs 1 GiB")
    return Finding(Mark.OK, what)


def check_disk(free: int) -> Finding:
    """Whether figures and rendered notebooks fit on the disk. `free` in bytes."""
    what = f"disk: {free / GIB:.1f} GiB free"
    if free < GIB:
        mark = Mark.FAIL if free < GIB // 10 else Mark.WARN
        return Finding(mark, what, "make room: notebooks cannot be saved on a full disk")
    return Finding(Mark.OK, what)


def check_threads(threads: int, cores: int) -> Finding:
    """Whether torch has no more threads than cores: more of them wait for each other."""
    what = f"threads: torch uses {threads} on {cores} usable cores"
    if threads > cores:
        return Finding(Mark.WARN, what, f"set OMP_NUM_THREADS={cores} before Python starts")
    return Finding(Mark.OK, what)


def check_chromium() -> Finding:
    """Where Chromium is. Always ok: only the browser tests need one."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    cache = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache/ms-playwright")
    found = [*filter(None, map(shutil.which, names)), *sorted(cache.glob("chromium*")), "none"]
    return Finding(Mark.OK, f"Chromium: {found[0]} (only the browser tests need one)")


def check_torch() -> Iterator[Finding]:
    """Device, bf16, threads and prepacking, as torch sees them."""
    import torch

    from tutorial_engine.model.fast import can_prepack

    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda ({torch.cuda.get_device_name()})"
    elif torch.backends.mps.is_available():
        device = "mps"
    yield Finding(Mark.OK, f"device: {device}; processor: {processor_name()}")
    abilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    fast = [name for name, has in abilities.items() if has and "bf16" in name]
    told = f"fast ({', '.join(fast)})" if fast else "no fast path is known: stay with float32"
    yield Finding(Mark.OK, f"bfloat16 on the processor: {told}")
    yield check_threads(torch.get_num_threads(), usable_cores())
    can = [d for d in (torch.float32, torch.bfloat16) if can_prepack(torch.device("cpu"), d)]
    told = ", ".join(map(str, can)) or "not here: plain ones, as right but slower"
    yield Finding(Mark.OK, f"prepacked linears: {told}")


def self_test(folder: Path) -> Iterator[Finding]:
    """Load the tiny model, let it go on writing, compare its fast layers with the plain ones."""
    import torch

    from tutorial_engine.model.batch import Batch
    from tutorial_engine.model.checkpoint import TINY, load_model, load_tokenizer
    from tutorial_engine.model.fast import use_fast_layers

    ours = folder == TINY
    name, fix = ("tiny model", REINSTALL) if ours else (f"model in {folder}", GIVE_A_FOLDER)
    began = time.perf_counter()
    try:
        tokenizer, model = load_tokenizer(folder), load_model(folder, fast=False)
        plain = load_model(folder, fast=False)
        use_fast_layers(model, pack_from=0)
    except (ValueError, OSError) as error:
        yield Finding(Mark.FAIL, f"the {name} does not load: {error}", fix)
        return
    loaded = time.perf_counter()
    prompt = ids = tokenizer.encode(PROMPT).ids
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):  # everything again for each token: no cache yet
            last = model(Batch.from_sequences([ids]))[-1:]
            ids = [*ids, int(model.compute_logits(last).argmax())]
        done = time.perf_counter()
        batch = Batch.from_sequences([ids])
        logits, expected = (m.compute_logits(m(batch)) for m in (model, plain))
    took = f"loaded in {loaded - began:.2f} s, {NEW_TOKENS} tokens in {done - loaded:.2f} s"
    new = ids[len(prompt) :]
    if None in (tokenizer.id_to_token(i) for i in new):
        yield Finding(Mark.FAIL, f"the tokenizer knows not all of the ids {new}", fix)
        return
    yield Finding(Mark.OK, f"{name}: {took}; {PROMPT!r} goes on {tokenizer.decode(new)!r}")
    off = (logits - expected).abs().max().item()
    if off <= 1e-4 * max(1.0, expected.abs().max().item()):
        yield Finding(Mark.OK, f"fast and plain logits agree, at most {off:.0e} apart")
    else:
        what = f"fast and plain logits are {off:.0e} apart"
        yield Finding(Mark.FAIL, what, "use load_model(..., fast=False); another torch may help")


def examine(folder: Path | None = None) -> Iterator[Finding]:
    """Everything, in order. `folder` holds the checkpoint to test; without it, the shipped one."""
    yield check_python(sys.version_info[:3])
    yield from check_packages()
    yield check_memory(read_memory())
    yield check_disk(shutil.disk_usage(Path(__file__).parent).free)
    yield check_chromium()
    try:
        from tutorial_engine.model.checkpoint import TINY

        yield from check_torch()
    except (ImportError, OSError) as error:  # OSError: a library that torch itself cannot load
        yield Finding(Mark.FAIL, f"the engine cannot be imported: {error}", INSTALL)
        return
    yield from self_test(folder or TINY)


def exit_code(findings: Iterable[Finding]) -> int:
    """0 when nothing FAILed, else 1; warnings do not count."""
    return int(any(finding.mark is Mark.FAIL for finding in findings))


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line per finding as it comes; returns the exit code."""
    parser = argparse.ArgumentParser(description="check this machine and the tiny model")
    parser.add_argument("--checkpoint", type=Path, help="another folder than the shipped one")
    findings = []
    for finding in examine(parser.parse_args(argv).checkpoint):
        findings.append(finding)
        print(f"{finding.mark:<5} {finding.what}")
        if finding.mark is not Mark.OK:
            print(f"{'':<5} to fix: {finding.fix}")
    counts = [sum(f.mark is mark for f in findings) for mark in Mark]
    print(f"\n{counts[0]} ok, {counts[1]} warnings, {counts[2]} failures")
    return exit_code(findings)


if __name__ == "__main__":
    sys.exit(main())
