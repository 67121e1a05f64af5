"""Runs the Python of the README and of two pages of docs, each block in an empty namespace.

    python tools/run_readme.py

Blocks that name a checkpoint of the hub are left out, for they download it, and blocks for which
the real model, transformers or matplotlib is not here. `make test-wheel` calls it far from the
checkout, so it says which tutorial_engine it found.
"""

import re
import time
from importlib.util import find_spec
from pathlib import Path

from tutorial_engine.lab.real import where_it_is

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / name for name in ("README.md", "docs/python.md", "docs/architecture.md")]
HUB = "Qwen/"


def blocks() -> list[str]:
    """The Python of the pages that runs without the hub."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    found = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    return [block for block in found if can_run(block)]


def can_run(block: str) -> bool:
    """Is what it needs here?"""
    if "real_model" in block:
        return find_spec("platformdirs") is not None and where_it_is().is_dir()
    if "tutorial_engine.viz" in block and find_spec("matplotlib") is None:
        return False  # a plain install draws nothing
    if "from transformers" in block:
        return find_spec("transformers") is not None
    return HUB not in block


def main() -> None:
    """Runs them, and says how long each took."""
    import tutorial_engine

    print(f"tutorial_engine is in {Path(tutorial_engine.__file__).parent}")
    for number, block in enumerate(blocks(), 1):
        began = time.perf_counter()
        exec(compile(block, f"block {number}", "exec"), {"__name__": "__main__"})
        print(f"-- block {number} of {len(blocks())}: {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
