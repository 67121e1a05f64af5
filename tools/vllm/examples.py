"""The scripts of examples/ on both engines: the import line is changed, and the output is not.

Knows files and what they print; knows no engine.
"""

import difflib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tools.vllm import environment

SCRIPTS = environment.ROOT / "examples"
EXPECTED = SCRIPTS / "expected"  # what vLLM printed, NAME.txt; tests/test_examples.py reads it
OURS, THEIRS = "from tutorial_engine import ", "from vllm import "


def scripts() -> list[Path]:
    """All that ask nobody, by name: chat.py waits for a person."""
    return sorted(script for script in SCRIPTS.glob("*.py") if script.stem != "chat")


def for_vllm(source: str) -> str:
    """The same script with its import line changed. ValueError unless there is exactly one."""
    if source.count(OURS) != 1:
        raise ValueError(f"an example has one line {OURS}...; this one has {source.count(OURS)}")
    return source.replace(OURS, THEIRS)


def here(script: Path) -> str:
    """What it prints on this engine."""
    ours = {"PYTHONPATH": str(environment.ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return _output(Path(sys.executable), script, os.environ | ours)


def there(script: Path) -> str:
    """What it prints on vLLM: a copy, in a folder from which it finds the same checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, SCRIPTS.name, script.name)
        copy.parent.mkdir()
        copy.write_text(for_vllm(script.read_text(encoding="utf-8")), encoding="utf-8")
        package = "tutorial_engine"  # not on the copy's path: only its files are read
        Path(folder, package).symlink_to(environment.ROOT / package)
        return _output(environment.PYTHON, copy, environment.settings(1))


def difference(ours: str, theirs: str) -> str:
    """The lines that differ, marked - (vLLM) and + (ours); empty where none does."""
    found = difflib.unified_diff(
        theirs.splitlines(), ours.splitlines(), "vLLM", "ours", n=0, lineterm=""
    )
    return "\n".join(found)


def _output(python: Path, script: Path, settings: Mapping[str, str]) -> str:
    done = subprocess.run(
        [python, script], capture_output=True, text=True, env=settings, timeout=600, check=False
    )
    if done.returncode:
        return f"{script.name} failed:\n{done.stderr[-2000:]}"
    return done.stdout
