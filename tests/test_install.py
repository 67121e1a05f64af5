"""A machine that is new to the course: `make setup`, and docs/install.md without make."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from test_layout import MAKEFILE, README, ROOT, named_pythons

PAGE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
CPU_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"

# Stands for a Python: it notes what it is called with, and makes an environment of itself.
PYTHON = """#!/bin/sh
echo "$@" >> "$LOG"
case "$*" in
  -V) echo "Python {version}" ;;
  *sys.exit*) exit {fits} ;;
  *print*) echo "Python {version}" ;;
  "-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip config list") echo "$PIP_SAYS" ;;
esac
"""


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


class Machine:
    """A PATH with what `make setup` needs, and with the commands that are named."""

    def __init__(self, folder: Path, system: str = "Linux", gpu: bool = False) -> None:
        self.folder, self.log, self.venv = folder, folder / "log", folder / "venv"
        for name in ("env", "grep", "mkdir", "cp", "touch", "sh"):
            found = shutil.which(name)
            assert found
            (folder / "bin").mkdir(exist_ok=True)
            (folder / "bin" / name).symlink_to(found)
        script(folder / "bin" / "uname", f"#!/bin/sh\necho {system}\n")
        if gpu:
            script(folder / "bin" / "nvidia-smi", "#!/bin/sh\n")
        self.python = self.has_python("3.12", True)

    def has_python(self, version: str, fits: bool) -> Path:
        text = PYTHON.format(version=version, fits=int(not fits))
        return script(self.folder / f"python{version}", text)

    def setup(
        self, *options: str, python: Path | None = None, settings: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """`make setup` there → its exit code, and what it said and called."""
        make = shutil.which("make")
        if make is None:
            pytest.skip("there is no make here")
        self.log.write_text("")
        done = subprocess.run(
            [make, "setup", f"VENV={self.venv}", f"PYTHON={python or self.python}", *options],
            cwd=ROOT,
            env={"PATH": str(self.folder / "bin"), "LOG": str(self.log), **(settings or {})},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout + done.stderr + self.log.read_text()


@pytest.mark.parametrize(
    ("system", "gpu", "settings", "options", "index"),
    [
        ("Linux", False, {}, [], CPU_INDEX),
        ("Linux", True, {}, [], ""),  # pip takes the build for its GPU
        ("Darwin", False, {}, [], ""),  # pip's only build is for CPUs there
        ("Linux", False, {"PIP_EXTRA_INDEX_URL": "https://mine"}, [], ""),  # theirs is kept
        ("Linux", False, {"PIP_SAYS": "global.index-url='https://mine'"}, [], ""),
        ("Linux", False, {"PIP_SAYS": "global.timeout='60'\n:env:.find-links=''"}, [], CPU_INDEX),
        ("Linux", True, {}, ["TORCH_INDEX=https://x"], "--extra-index-url https://x"),
        ("Linux", False, {}, ["TORCH_INDEX="], ""),
    ],
)
def test_pytorch_for_cpus_is_asked_for_where_pip_would_take_gigabytes(
    tmp_path: Path,
    system: str,
    gpu: bool,
    settings: dict[str, str],
    options: list[str],
    index: str,
) -> None:
    code, said = Machine(tmp_path, system, gpu).setup(*options, settings=settings)
    assert code == 0, said
    (install,) = re.findall(r"^-m pip install .* -e .*", said, re.M)
    assert (index in install) if index else ("index-url" not in install), install
    assert ("(PyTorch for CPUs)" in said) == bool(index)


def test_an_environment_of_another_python_is_made_anew_and_its_own_is_kept(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for leftover, clear in (("3.10", True), ("3.12", False)):
        script(machine.venv / "bin" / "python", PYTHON.format(version=leftover, fits=0))
        code, said = machine.setup("-W", "pyproject.toml")
        (line,) = re.findall(r"^-m venv .*", said, re.M)
        assert code == 0 and line.endswith("--clear") == clear, said
    (machine.venv / "bin" / "python").unlink()  # a first attempt that was broken off
    assert "--clear" in machine.setup("-W", "pyproject.toml")[1]


def test_a_python_that_does_not_fit_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    code, said = machine.setup(python=machine.has_python("3.10", False))
    assert code and "3.10 is Python 3.10. Install one, or name it: make setup PYTHON=" in said
    code, said = machine.setup(python=tmp_path / "nowhere")
    assert code and "Python 3.11 to 3.14 is needed" in said
    code, said = machine.setup("PYTHON=")
    assert code and "none was found" in said
    assert not machine.venv.exists()


def test_the_pythons_are_the_same_everywhere() -> None:
    minor = sorted(int(name.split(".")[1]) for name in named_pythons())
    first, last = f"3.{minor[0]}", f"3.{minor[-1]}"
    assert minor == [*range(minor[0], minor[-1] + 1)]
    assert f"(3, {minor[0]}) <= sys.version_info[:2] <= (3, {minor[-1]})" in MAKEFILE
    assert all(f"python{name}" in MAKEFILE for name in named_pythons())
    students = (ROOT / "docs" / "teaching" / "students.md").read_text(encoding="utf-8")
    for text in (MAKEFILE, README, PAGE, students):
        assert f"Python {first} to {last}" in text


def without_make() -> list[str]:
    """The steps of the page that are the same on all systems."""
    section = PAGE.partition("## Without make")[2]
    return re.findall(r"^```bash\n(.*?)^```", section, re.M | re.S)[0].splitlines()


def test_a_workflow_follows_the_page_on_each_system() -> None:
    flow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    job = flow["jobs"]["newcomer"]
    systems = {name.partition("-")[0] for name in job["strategy"]["matrix"]["os"]}
    assert systems == {"ubuntu", "macos", "windows"}
    runs = [step["run"] for step in job["steps"] if "run" in step]
    *install, last = without_make()
    assert last == "python -m tools.lab", "it stays open, so the job makes its copies only"
    assert [line for line in runs if line in [*install, "python -m tools.mine"]] == [
        *install,
        "python -m tools.mine",
    ]


def test_lab_starts_without_make(tmp_path: Path) -> None:
    """As far as its version: nothing else is on the PATH."""
    shutil.copy(ROOT / "notebooks" / "01_attention_rope.ipynb", tmp_path)
    settings = {name: text for name, text in os.environ.items() if name != "PATH"}
    said = subprocess.run(
        [sys.executable, "-m", "tools.lab", str(tmp_path), "--version"],
        cwd=ROOT,
        env=settings | {"PATH": ""},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    assert re.search(r"my_01\.ipynb\.\n\d+\.\d+", said)
    assert (tmp_path / "my_01.ipynb").is_file()
