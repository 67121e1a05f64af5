"""Is this machine set up? `python -m tutorial_engine.lab.doctor`.

Asks for what the package's own metadata asks; changes nothing. Every line is ok, warn or FAIL, with
what to do about it; the exit code is 1 when a line FAILs. Runs, and says so, even without torch.
"""

import argparse
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

# torch and what needs it are imported late, in functions: their absence is a finding, not a crash

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


def free_memory(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes of main memory that are available; None where this system does not tell."""
    text = meminfo.read_text() if meminfo.is_file() else ""
    available = re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.M)
    return 1024 * int(available[1]) if available else None


def check_requirements(requirements: Iterable[str]) -> Iterator[Finding]:
    """A finding per package: FAIL where the engine needs it, WARN where only notebooks do."""
    for requirement in requirements:  # such as: jupyterlab>=4.4; extra == 'notebooks'
        pattern = r"([\w.-]+)>=([\d.]+)(?:\s*;\s*extra == ['\"](\w+)['\"])?"
        parts = re.fullmatch(pattern, requirement)
        if parts is None or parts[3] not in (None, "notebooks"):
            continue
        name, oldest, extra = parts.groups()
        bad, user = (Mark.WARN, "the notebooks need") if extra else (Mark.FAIL, "the engine needs")
        installed = installed_version(name)
        if installed is None:
            yield Finding(bad, f"{name} is not installed; {user} it", INSTALL)
        elif _numbers(installed) < _numbers(oldest):
            fix = f"python -m pip install --upgrade '{name}>={oldest}'"
            yield Finding(bad, f"{name} {installed} is too old", fix)
        else:
            yield Finding(Mark.OK, f"{name} {installed}")


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def check_memory(free: int | None) -> Finding:
    """Whether so many bytes are enough; unknown is no reason to worry."""
    if free is None or free >= GIB:
        told = "unknown" if free is None else f"{free / GIB:.1f} GiB"
        return Finding(Mark.OK, f"memory: {told} free")
    close = "close other programs; a notebook needs 1 GiB"
    mark = Mark.FAIL if free < GIB // 4 else Mark.WARN
    return Finding(mark, f"memory: {free / GIB:.1f} GiB free", close)


def check_threads(threads: int, cores: int) -> Finding:
    """Whether torch has no more threads than cores: more of them wait for each other."""
    what = f"threads: torch uses {threads} on {cores} usable cores"
    if threads > cores:
        return Finding(Mark.WARN, what, f"set OMP_NUM_THREADS={cores} before Python starts")
    return Finding(Mark.OK, what)


def check_torch() -> Iterator[Finding]:
    """Device, bf16 and threads, as torch sees them."""
    import torch

    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda ({torch.cuda.get_device_name()})"
    elif torch.backends.mps.is_available():
        device = "mps"
    yield Finding(Mark.OK, f"device: {device}; processor: {processor_name()}")
    if torch.cuda.is_available():
        from tutorial_engine.model.batched_attention import varlen_kernel

        for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
            kernel, why = varlen_kernel(torch.device("cuda"), dtype)
            fallback = "" if kernel else "; decode steps are padded"
            yield Finding(Mark.OK, f"attention on the GPU, {name}: {why}{fallback}")
        graphs = "recorded and replayed (CUDA graphs), unless cuda_graphs=False"
        yield Finding(Mark.OK, f"decode steps on the GPU: {graphs}")
    abilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    fast = [name for name, has in abilities.items() if has and "bf16" in name]
    told = f"fast ({', '.join(fast)})" if fast else "no fast path is known: stay with float32"
    yield Finding(Mark.OK, f"bfloat16 on the processor: {told}")
    yield check_threads(torch.get_num_threads(), usable_cores())


def self_test(folder: Path) -> Iterator[Finding]:
    """Load the tiny model, let it go on writing, compare its prepacked logits with plain ones."""
    import torch

    from tutorial_engine.model.batch import Batch
    from tutorial_engine.model.checkpoint import TINY, load_model, load_tokenizer
    from tutorial_engine.model.fast import use_fast_layers

    is_tiny = folder == TINY
    name, fix = ("tiny model", REINSTALL) if is_tiny else (f"model in {folder}", GIVE_A_FOLDER)
    began = time.perf_counter()
    try:
        tokenizer, model = load_tokenizer(folder), load_model(folder, fast=False)
        plain = load_model(folder, fast=False)
        use_fast_layers(model, pack_from=0)
    except (ValueError, OSError) as error:
        yield Finding(Mark.FAIL, f"the {name} does not load: {error}", fix)
        return
    loaded = time.perf_counter()
    token_ids = tokenizer.encode(PROMPT).ids
    prompt_len = len(token_ids)
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):  # everything again for each token: no cache yet
            last = model(Batch.from_sequences([token_ids]))[-1:]
            token_ids.append(int(model.compute_logits(last).argmax()))
        done = time.perf_counter()
        batch = Batch.from_sequences([token_ids])
        logits, expected = (m.compute_logits(m(batch)) for m in (model, plain))
    if not bool(logits.isfinite().all()):
        yield Finding(Mark.FAIL, f"the logits of the {name} are not finite", fix)
        return
    new = token_ids[prompt_len:]
    if None in map(tokenizer.id_to_token, new):
        yield Finding(Mark.FAIL, f"the tokenizer knows not all of the ids {new}", fix)
        return
    took = f"loaded in {loaded - began:.2f} s, {NEW_TOKENS} tokens in {done - loaded:.2f} s"
    yield Finding(Mark.OK, f"{name}: {took}; {PROMPT!r} goes on {tokenizer.decode(new)!r}")
    off = (logits - expected).abs().max().item()
    if off <= 1e-4 * max(1.0, expected.abs().max().item()):
        yield Finding(Mark.OK, f"prepacked and plain logits agree, at most {off:.0e} apart")
    else:
        what = f"prepacked and plain logits are {off:.0e} apart"
        yield Finding(Mark.FAIL, what, "use load_model(..., fast=False); another torch may help")


def examine(folder: Path | None = None) -> Iterator[Finding]:
    """Everything, in order. `folder` holds the checkpoint to test; without it, the shipped one."""
    machine = f"{platform.system()} {platform.machine()}"
    yield Finding(Mark.OK, f"Python {platform.python_version()} on {machine}")
    try:
        yield from check_requirements(importlib.metadata.requires("tutorial-engine") or ())
    except importlib.metadata.PackageNotFoundError:
        yield Finding(Mark.WARN, "tutorial-engine runs, but is not installed", INSTALL)
    yield check_memory(free_memory())
    try:
        from tutorial_engine.model.checkpoint import TINY

        yield from check_torch()
    except (ImportError, OSError) as error:  # OSError: a library that torch itself cannot load
        yield Finding(Mark.FAIL, f"the engine cannot be imported: {error}", INSTALL)
        return
    yield from self_test(folder or TINY)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line per finding as it comes; returns the exit code."""
    parser = argparse.ArgumentParser(description="check this machine and the tiny model")
    parser.add_argument("--checkpoint", type=Path, help="another folder than the shipped one")
    marks = []
    for finding in examine(parser.parse_args(argv).checkpoint):
        marks.append(finding.mark)
        print(f"{finding.mark:<5} {finding.what}")
        if finding.mark is not Mark.OK:
            print(f"{'':<5} to fix: {finding.fix}")
    ok, warnings, failures = map(marks.count, Mark)
    print(f"\n{ok} ok, {warnings} warnings, {failures} failures")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
