"""The house: rooms in order, settings that agree with each other, pages that say what is there.

And a fork of it: whoever adds a module, a policy, a filter, a backend or a section touches no list.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tools import run_readme, trace_step
from tools.publish.build import LESSONS

ROOT = Path(__file__).parent.parent
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = PYPROJECT["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
CORE = ("model", "sampling", "trace", "cache", "engine")
GITHUB = ROOT / ".github"


def run(*command: str | Path, folder: Path = ROOT, seconds: int = 240) -> str:
    """What a command of this Python's environment says; it must succeed."""
    settings = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=settings,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tool(name: str) -> Path:
    """A command that was installed beside this Python, as `make lint` calls it."""
    return Path(sys.executable).with_name(name)


# -- the rooms ------------------------------------------------------------------------------------


def test_order_of_the_rooms_holds() -> None:
    """`lint-imports` says that it does; it runs on the fork below, too."""
    contracts = PYPROJECT["tool"]["importlinter"]["contracts"]
    order = next(contract for contract in contracts if contract["type"] == "layers")
    rooms = {room for floor in order["layers"] for room in re.split(r" [|:] ", floor)}
    there = {file.parent.name for file in (ROOT / "tutorial_engine").glob("*/__init__.py")}
    files = {"as_vllm", "checks", "doors"}  # modules beside the rooms
    assert rooms - files == there & rooms, "no room that is not there"
    kept_apart = next(contract for contract in contracts if contract["type"] == "forbidden")
    assert {f"tutorial_engine.{room}" for room in CORE} <= {*kept_apart["source_modules"]} | {
        f"tutorial_engine.{room}" for room in set(CORE) - rooms
    }
    assert {"transformers", "matplotlib", "ipywidgets"} <= set(kept_apart["forbidden_modules"])


def test_core_starts_quickly_and_without_what_only_notebooks_need() -> None:
    rooms = ", ".join(f"tutorial_engine.{room}" for room in CORE)
    code = (
        "import json, sys, time, torch, safetensors.torch, tokenizers, tqdm\n"
        f"began = time.process_time()\nimport {rooms}, tutorial_engine.lab.doctor\n"
        "seconds = time.process_time() - began\n"
        "print(json.dumps([sorted({n.split('.')[0] for n in sys.modules}), seconds]))"
    )
    loaded, seconds = json.loads(run(sys.executable, "-c", code))
    unwanted = {"transformers", "matplotlib", "ipywidgets", "IPython", "resvg_py", "PIL", "tools"}
    assert not set(loaded) & (unwanted | {"jupytext", "nbformat", "nbclient", "nbconvert"})
    assert seconds < 1.5, "beside torch, the files of a few rooms"


# -- the settings ---------------------------------------------------------------------------------


def pins() -> dict[str, Version]:
    found = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            (spec,) = requirement.specifier
            assert spec.operator == "==", f"{line!r} pins nothing"
            found[canonicalize_name(requirement.name)] = Version(spec.version)
    return found


def direct() -> list[Requirement]:
    """What pyproject.toml asks for itself, all extras together."""
    lines = [*PROJECT["dependencies"]]
    lines += [line for extra in PROJECT["optional-dependencies"].values() for line in extra]
    requirements = [Requirement(line) for line in lines]
    ours = canonicalize_name(PROJECT["name"])
    return [r for r in requirements if canonicalize_name(r.name) != ours]


def test_direct_dependencies_are_pinned_within_their_ranges() -> None:
    for requirement in direct():
        name = canonicalize_name(requirement.name)
        assert requirement.specifier, f"{name} says no version"
        assert name in pins(), f"{name} is not in constraints.txt"
        assert requirement.specifier.contains(pins()[name]), name


def test_what_is_imported_is_asked_for() -> None:
    outside = set[str]()
    for file in [*(ROOT / "tutorial_engine").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                outside |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0 and node.module, "imports are absolute here"
                top = node.module.split(".")[0]
                assert top != "tools" or file.is_relative_to(ROOT / "tools"), file
                outside.add(top)
    outside -= {*sys.stdlib_module_names, "tutorial_engine", "tools", "tests"}
    outside -= {"vllm"}  # the peer of tools/vllm, in an environment of its own
    outside -= {"hatchling"}  # which builds the package, in an environment of its own
    asked = {canonicalize_name(r.name) for r in direct()}
    asked |= {"ipython", "nbformat", "jupyter-server"} & pins().keys()  # come with Jupyter
    other_name = {"PIL": "pillow", "IPython": "ipython", "yaml": "pyyaml"}
    assert not {n for n in outside if canonicalize_name(other_name.get(n, n)) not in asked}


def test_environment_is_one_python_from_conda_forge_and_the_rest_by_pip() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["channels"] == ["conda-forge"]
    python, pip, section = environment["dependencies"]
    version = re.fullmatch(r"python=(3\.\d+)", python)
    assert version and pip == "pip", "Python's packages are left to pip"
    assert SpecifierSet(PROJECT["requires-python"]).contains(Version(version[1]))
    assert version[1] in named_pythons()
    index, constraints, editable = section["pip"]
    assert index.startswith("--extra-index-url") and index.endswith("/whl/cpu"), "no GPU libraries"
    extras = re.fullmatch(r"-e \.\[([\w,-]+)\]", editable)
    assert constraints == "-c constraints.txt" and extras
    assert set(extras[1].split(",")) <= PROJECT["optional-dependencies"].keys() - {"test"}
    assert f"EXTRAS ?= {extras[1]},test\n" in MAKEFILE
    assert f"PIP := -m pip install --quiet {constraints}\n" in MAKEFILE


def named_pythons() -> set[str]:
    """The versions that pyproject.toml names."""
    return {c.rsplit(" ", 1)[1] for c in PROJECT["classifiers"] if "Python ::" in c}


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))


def test_workflows_run_what_the_makefile_has_on_every_python() -> None:
    flows = {f.stem: yaml.safe_load(f.read_text()) for f in GITHUB.glob("workflows/*.yml")}
    for flow in flows.values():
        assert flow["permissions"]["contents"] == "read"
        for job in flow["jobs"].values():
            for step in job["steps"]:
                assert ("run" in step) != ("uses" in step)
                for called in re.findall(r"^\s*make ([\w-]+)", step.get("run", ""), re.M):
                    assert called in targets()
    tests = flows["test"]["jobs"]
    assert {*tests["test"]["strategy"]["matrix"]["python"]} == named_pythons()
    assert {"push", "pull_request"} <= flows["test"][True].keys(), "YAML reads `on` as true"
    assert flows["test"]["env"]["PIP_EXTRA_INDEX_URL"].endswith("/whl/cpu")
    assert tests["browser"]["env"]["REQUIRE_BROWSER"] == 1
    site = flows["pages"]["jobs"]["site"]["steps"]
    (path,) = (step["with"]["path"] for step in site if "upload-pages" in step.get("uses", ""))
    assert path == "build/site"


def test_the_form_for_who_is_lost_names_the_lessons() -> None:
    """The site's pages lead to it with the name of one of them."""
    form = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / "lost.yml").read_text())
    names = {one.notebook.rpartition("/")[2] for one in LESSONS}
    assert names <= {*form["body"][0]["attributes"]["options"]}


# -- the files ------------------------------------------------------------------------------------


def committed() -> list[Path]:
    """Every file that git knows and that is still there; in an unpacked archive, every file."""
    git = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if git.returncode == 0:
        return [ROOT / name for name in git.stdout.split("\0") if (ROOT / name).is_file()]
    made = {"__pycache__", "html", "build", "dist"}  # and hidden folders: .venv and caches
    folders = [f for f in ROOT.iterdir() if f.name not in made and not f.name.startswith(".")]
    files = [f for top in folders for f in (top.rglob("*") if top.is_dir() else [top])]
    return [f for f in files if f.is_file() and "__pycache__" not in f.parts]


def texts() -> Iterator[tuple[str, str]]:
    for file in committed():
        try:
            yield str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            assert file.suffix in (".png", ".safetensors", ".gz"), f"{file} is no text"


# Put together here, so that this file does not contain what it looks for.
PLACES = ["/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/", "/Us" + "ers/", "/tm" + "p/w"]
PLACES += ["pypi" + ".org", "python" + "hosted.org", "npm" + "js.org", "index-" + "url = http"]


def test_nothing_committed_is_large_or_names_a_place_of_one_machine_or_a_registry() -> None:
    for name, text in texts():
        assert not [place for place in PLACES if place in text], name
    assert not [file for file in committed() if file.stat().st_size > 4_000_000]


# -- the pages ------------------------------------------------------------------------------------


def test_commands_and_links_of_the_readme_are_there() -> None:
    commands = set(re.findall(r"`make ([a-z-]+)", README))
    assert {"lab", "test"} <= commands <= targets()
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`make ([a-z-]+)", page)) == targets() - {"clean", "test-site"}
    links = [t for t in re.findall(r"\]\(([^)#]+)", README) if not t.startswith("http")]
    assert not [target for target in links if not (ROOT / target).exists()]


def test_the_python_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but what needs the hub. `make test-wheel` runs it on the wheel alone."""
    monkeypatch.chdir(tmp_path)  # one block writes a picture
    run_readme.main()
    assert run_readme.blocks() and f"block {len(run_readme.blocks())} of" in capsys.readouterr().out


def test_the_architecture_page_shows_the_step_as_it_runs() -> None:
    with torch.inference_mode():
        outline = trace_step.decode_step().text()
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert outline in page, "python -m tools.draw_step draws and inserts it anew"


# -- a fork ---------------------------------------------------------------------------------------

POLICY = '''"""A scheduling policy of one's own."""

from tutorial_engine.engine.request import Request
from tutorial_engine.engine.scheduler import Scheduler


class LongestFirst(Scheduler):
    """The longest prompt is admitted first."""

    def next_waiting(self) -> Request:
        return max(self.waiting, key=lambda request: request.num_tokens)
'''
BACKEND = '''"""An attention backend of one's own."""

from torch import Tensor

from tutorial_engine.model.attention import SdpaAttention


class Counting(SdpaAttention):
    """Counts its calls."""

    calls = 0

    def attend(self, *args, **options) -> Tensor:  # type: ignore[no-untyped-def]
        self.calls += 1
        return super().attend(*args, **options)
'''
FILTER = '''"""A sampling filter of one's own."""

from torch import Tensor


def top_k(logits: Tensor, k: Tensor) -> Tensor:
    """In place of the package's: keeps the likeliest, whatever k is."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True), float("-inf"))
'''
MODULE = '"""An instrument of one\'s own."""\n\nANSWER = 42\n'
SECTION = """
# %% [markdown]
# ## A section of my own
#
# It prints a number.

# %%
print(6 * 7)
"""
TEST = """
from tools.publish.build import make_notebook, sources
from tutorial_engine.engine import LLMEngine
from tutorial_engine.engine.longest_first import LongestFirst
from tutorial_engine.model import load_model, load_tokenizer
from tutorial_engine.model.counting import Counting


def test_what_was_added_is_used() -> None:
    engine = LLMEngine(load_model(), load_tokenizer(), scheduler=LongestFirst)
    told = engine.generate(["Once", "One day Mia"])
    assert [len(one.outputs[0].token_ids) for one in told] == [16, 16] and Counting.calls == 0
    assert make_notebook(sources()["03_scheduler"], True).cells[-1].source == "print(6 * 7)"
""".lstrip()
ADDED = {
    "tutorial_engine/engine/longest_first.py": POLICY,
    "tutorial_engine/model/counting.py": BACKEND,
    "tutorial_engine/sampling/likeliest.py": FILTER,
    "tutorial_engine/lab/answer.py": MODULE,
    "tutorial_engine/answer.py": MODULE,
    "tools/answer.py": MODULE,
    "tests/test_answer.py": TEST,
    "notebooks/my_03_scheduler.ipynb": "{}",
    "notebooks/Untitled.ipynb": "",
    "notebooks/scratch.py": "import os,sys\nx=1",
}


@pytest.fixture(scope="module")
def fork(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree as git knows it, with something of each kind added, and nothing else changed."""
    git = shutil.which("git") or pytest.skip("a fork is made with git")
    top = tmp_path_factory.mktemp("fork")
    for file in committed():
        copy = top / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    for name, text in ADDED.items():
        (top / name).write_text(text, encoding="utf-8")
    for lesson in (top / "notebooks" / "src").glob("*.py"):
        lesson.write_text(lesson.read_text(encoding="utf-8") + SECTION, encoding="utf-8")
    for step in (["init", "-q"], ["add", "-A"]):
        run(git, *step, folder=top)
    return top


@pytest.mark.parametrize("command", ["ruff check .", "ruff format --check .", "lint-imports"])
def test_a_fork_passes_the_linters(fork: Path, command: str) -> None:
    """All but mypy, which has no list that a new file could be missing from."""
    name, *options = command.split()
    run(tool(name), *options, folder=fork)


def test_a_fork_passes_its_test_and_those_of_the_house(fork: Path) -> None:
    chosen = "not (fork or runs or quickly)"
    tests = ("tests/test_layout.py", "tests/test_answer.py")
    pytest_ = "-m pytest -q --noconftest -k".split()  # which would import transformers
    run(sys.executable, *pytest_, chosen, *tests, folder=fork, seconds=600)
