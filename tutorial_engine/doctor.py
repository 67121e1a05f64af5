"""Introduced in notebook 01. Says whether this machine is set up: `python -m tutorial_engine.doctor`.

Knows what the course needs and how to get it; changes nothing. Every line is ok, warn or FAIL, with
what to do about it; the exit code is 1 when a line FAILs. Runs, and says so, even without torch.
"""

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # at run time torch is imported late: its absence is a finding, not a crash
    from torch import Tensor

    from tutorial_engine.model import Qwen3ForCausalLM

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
CORE = {  # package -> oldest version that will do; a test holds both tables to pyproject.toml
    "torch": "2.8",
    "numpy": "1.26",
    "safetensors": "0.5",
    "tokenizers": "0.21",
    "huggingface_hub": "0.30",
    "tqdm": "4.66",
}
NOTEBOOKS = {
    "transformers": "5",
    "jupyterlab": "4.4",
    "ipywidgets": "8.1",
    "matplotlib": "3.10",
    "resvg-py": "0.2",
    "jupytext": "1.16",
    "nbclient": "0.10",
    "nbconvert": "7.16",
}
GIB = 2**30
PROMPT = "Once upon a time Anna had a red kite."
NEW_TOKENS = 12
INSTALL = "make setup, or: python -m pip install -e '.[notebooks]'"


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
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if sys.platform == "darwin":
        command = ("sysctl", "-n", "machdep.cpu.brand_string")
        told = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        if told:
            return told
    return platform.processor() or platform.machine() or "unknown"


def installed_version(package: str) -> str | None:
    """Version of an installed package from its metadata, nothing imported; None without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def read_memory(meminfo: Path = Path("/proc/meminfo")) -> Memory:
    """Total and available memory: from /proc on Linux, the total alone from sysconf elsewhere."""
    if meminfo.is_file():
        lines = (line.split() for line in meminfo.read_text().splitlines())
        kib = {words[0]: int(words[1]) for words in lines if len(words) > 1}
        total, available = (kib.get(key) for key in ("MemTotal:", "MemAvailable:"))
        return Memory(total and total * 1024, available and available * 1024)
    try:
        return Memory(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), None)
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return Memory(None, None)


def check_python(version: tuple[int, ...]) -> Finding:
    """Whether this Python is one that the course is tested with."""
    what = f"Python {'.'.join(map(str, version))} on {platform.system()} {platform.machine()}"
    span = f"{'.'.join(map(str, OLDEST_PYTHON))} to {'.'.join(map(str, NEWEST_PYTHON))}"
    if version[:2] < OLDEST_PYTHON:
        return Finding(Mark.FAIL, f"{what} is too old", f"install a Python from {span}")
    if version[:2] > NEWEST_PYTHON:
        return Finding(Mark.WARN, f"{what} is not tested", f"prefer a Python from {span}")
    return Finding(Mark.OK, what)


def check_package(name: str, oldest: str, installed: str | None, needed: bool) -> Finding:
    """Whether a package is there and new enough: FAIL without one that the core needs."""
    bad = Mark.FAIL if needed else Mark.WARN
    use = "the engine" if needed else "the notebooks"
    if installed is None:
        return Finding(bad, f"{name} is not installed; {use} need it", INSTALL)
    if _numbers(installed) < _numbers(oldest):
        return Finding(
            bad,
            f"{name} {installed} is too old",
            f"python -m pip install --upgrade '{name}>={oldest}'",
        )
    return Finding(Mark.OK, f"{name} {installed}")


def _numbers(version: str) -> tuple[int, ...]:
    """'2.13.0+cpu' → (2, 13, 0); stops at the first part that is no number ('5.0rc1' → (5,))."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def check_memory(memory: Memory) -> Finding:
    """Whether a notebook on the tiny model (under 1 GiB) fits."""
    told = [f"{n / GIB:.1f} GiB" if n is not None else "unknown" for n in memory]
    what = f"memory: {told[0]} in all, {told[1]} available"
    fix = "close other programs; a notebook needs 1 GiB"
    usable = memory.total if memory.available is None else memory.available
    if usable is not None and usable < GIB // 2:
        return Finding(Mark.FAIL, what, fix)
    if usable is not None and usable < GIB:
        return Finding(Mark.WARN, what, fix)
    return Finding(Mark.OK, what)


def check_disk(free: int) -> Finding:
    """Whether figures, rendered notebooks and a browser cache fit on the disk."""
    what = f"disk: {free / GIB:.1f} GiB free"
    if free < GIB // 10:
        return Finding(Mark.FAIL, what, "make room: notebooks cannot be saved")
    if free < GIB:
        return Finding(Mark.WARN, what, "make room: 1 GiB is comfortable")
    return Finding(Mark.OK, what)


def check_threads(threads: int, cores: int) -> Finding:
    """Whether torch has no more threads than cores: more of them wait for each other."""
    what = f"threads: torch uses {threads}, {cores} cores are ours"
    if threads > cores:
        return Finding(Mark.WARN, what, f"set OMP_NUM_THREADS={cores} before Python starts")
    return Finding(Mark.OK, what)


def usable_cores(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may use; a container's share counts (2.5 cores are 2)."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    if cpu_max.is_file():
        quota, _, period = cpu_max.read_text().strip().partition(" ")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def check_chromium(path: str | None = None) -> Finding:
    """Whether a Chromium is there. Always ok: only the browser tests need one."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    found = path or next(filter(None, map(shutil.which, names)), None)
    cache = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache/ms-playwright")
    if found is None and cache.is_dir():
        found = next((str(folder) for folder in sorted(cache.glob("chromium*"))), None)
    if found is None:
        return Finding(Mark.OK, "Chromium: none found (only the browser tests need one)")
    return Finding(Mark.OK, f"Chromium: {found}")
