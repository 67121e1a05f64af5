"""The house: rooms, modules, files and settings agree with each other and with the syllabus."""

import ast
import importlib
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jupytext
import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import tutorial_engine
from tutorial_engine.learn.build import sources
from tutorial_engine.syllabus import BESIDE, LESSONS, ROOMS, Lesson, Room, tree

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tutorial_engine"
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = PYPROJECT["project"]
FILES = sorted(file for file in PACKAGE.rglob("*.py") if file != PACKAGE / "__init__.py")
CORE = ("model", "sampling", "trace", "cache", "engine")
NUMBERS = {lesson.number for lesson in LESSONS}

every_file = pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
every_room = pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def notebooks_of(file: Path) -> list[int]:
    """The notebooks that a file says it belongs to: [2], or [2, 3] for a room of two."""
    docstring = ast.get_docstring(parsed(file)) or ""
    found = re.match(r"Introduced in notebooks? (\w\d)(?: and (\w\d))?\. \S", docstring)
    assert found, f"the docstring of {file.name} begins {docstring[:40]!r}"
    numbers = {lesson.code: lesson.number for lesson in LESSONS}
    return [numbers[code] for code in found.groups() if code]


def handed_out(room: Path) -> dict[str, Path]:
    """What a room's __init__ hands out, and the file that each name comes from."""
    found = {}
    for node in parsed(room / "__init__.py").body:
        if isinstance(node, ast.ImportFrom):
            found |= {alias.name: file_of(node.module or "") for alias in node.names}
    return found


def file_of(module: str) -> Path:
    """`tutorial_engine.cache.paged` → cache/paged.py; a room is its __init__.py."""
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imported(code: ast.Module) -> set[Path]:
    """The files of the package that a piece of code imports from, through a room's door too."""
    found = set()
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            found |= {file_of(alias.name) for alias in node.names if _is_ours(alias.name)}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            module = node.module or ""
            for name in (alias.name for alias in node.names if _is_ours(module)):
                room = ROOT / module.replace(".", "/")
                is_module = (room / name).is_dir() or (room / f"{name}.py").is_file()
                if is_module:
                    found.add(file_of(f"{module}.{name}"))
                else:
                    found.add(handed_out(room)[name] if room.is_dir() else file_of(module))
    return found - {PACKAGE / "__init__.py"}


def _is_ours(module: str) -> bool:
    return module.split(".")[0] == "tutorial_engine"


# -- the syllabus -------------------------------------------------------------------------------


def test_every_room_and_module_is_in_the_syllabus_and_the_other_way_round() -> None:
    there = {file.relative_to(PACKAGE).with_suffix("") for file in FILES}
    rooms = {path.parts[0] for path in there if len(path.parts) > 1}
    assert [room.name for room in ROOMS] == list(dict.fromkeys(room.name for room in ROOMS))
    assert {room.name for room in ROOMS} == rooms
    assert {module.name for module in BESIDE} == {str(p) for p in there if len(p.parts) == 1}
    for room in ROOMS:
        files = {p.name for p in there if p.parts[0] == room.name and not p.name.startswith("__")}
        assert all(len(path.parts) == 2 for path in there if path.parts[0] == room.name)
        listed = [module.name for module in room.modules]
        assert sorted(listed) == sorted(files if listed else []), room.name
    assert set(CORE) <= {room.name for room in ROOMS if room.modules}


@every_room
def test_room_says_what_it_is_for_and_hands_out_little(room: Room) -> None:
    init = parsed(PACKAGE / room.name / "__init__.py")
    assert set(notebooks_of(PACKAGE / room.name / "__init__.py")) <= NUMBERS
    names = handed_out(PACKAGE / room.name)
    public = [sorted(ast.literal_eval(n.value)) for n in init.body if isinstance(n, ast.Assign)]
    assert public == ([sorted(names)] if names else []), "__all__ is what it imports"
    assert len(names) <= 8
    rest = [n for n in init.body[1:] if not isinstance(n, ast.ImportFrom | ast.Assign)]
    assert not rest, "no code at the door"
    opens = min(notebooks_of(PACKAGE / room.name / "__init__.py"))
    assert all(module.notebook >= opens for module in room.modules)


@every_file
def test_module_says_which_notebook_introduces_it(file: Path) -> None:
    numbers = notebooks_of(file)
    assert set(numbers) <= NUMBERS
    room, name = file.parent.name, file.stem
    listed = {(r.name, m.name): m.notebook for r in ROOMS for m in r.modules}
    listed |= {(PACKAGE.name, module.name): module.notebook for module in BESIDE}
    assert numbers == [listed.get((room, name), numbers[0])] or name == "__init__"
    in_its_name = re.search(r"_(\d\d)$", name)  # checks_01.py
    assert in_its_name is None or [int(in_its_name[1])] == numbers


@pytest.mark.parametrize("room", CORE)
def test_core_module_imports_nothing_of_a_later_notebook(room: str) -> None:
    """But the recorder that a memory may be given: what it notes is the matter of notebook 03."""
    for file in (PACKAGE / room).glob("[!_]*.py"):
        number = max(notebooks_of(file))
        used = {other for other in imported(parsed(file)) if other.parent.name != "trace"}
        assert not {str(other) for other in used if min(notebooks_of(other)) > number}, file


def test_every_lesson_has_its_source_and_its_number() -> None:
    codes = [lesson.code for lesson in LESSONS]
    chapters, appendices = len([code for code in codes if code.isdigit()]), len(codes)
    wanted = [f"{number:02}" for number in range(1, chapters + 1)]
    assert codes == wanted + [f"A{number}" for number in range(1, appendices - chapters + 1)]
    assert [lesson.is_appendix for lesson in LESSONS] == [not code.isdigit() for code in codes]
    folder = ROOT / "notebooks" / "src"
    written = {str(file.relative_to(folder).with_suffix("")) for file in folder.rglob("*.py")}
    assert written == sources().keys() == {lesson.notebook for lesson in LESSONS}


# Notebook 01 ends with a row of the ledger, a price for the cache to come, and a longer story.
GLIMPSES = {
    1: {
        *("cache/config.py", "engine/runner.py", "sampling/params.py"),
        *("lab/hf.py", "lab/ledger.py"),
    }
}


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.notebook)
def test_notebook_uses_what_was_introduced_by_then(lesson: Lesson) -> None:
    notebook = jupytext.read(sources()[lesson.notebook], fmt="py:percent")
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    used = imported(ast.parse(code))
    ahead = {file for file in used if min(notebooks_of(file)) > lesson.number}
    assert {str(file.relative_to(PACKAGE)) for file in ahead} == GLIMPSES.get(lesson.number, set())
    assert len([file for file in used if file.parent.name in CORE]) >= 3, "it shows the engine"


def test_tree_is_in_the_readme_and_in_the_package_docstring() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert any(tree() in block for block in readme.split("```")[1::2]), "in a code block"
    assert tree() in (tutorial_engine.__doc__ or "")
    lines = tree().splitlines()
    assert max(map(len, lines)) <= 88
    for module in (*BESIDE, *(module for room in ROOMS for module in room.modules)):
        assert sum(line.endswith(f" {module.what}") for line in lines) == 1, module
    for room in ROOMS:
        assert sum(line.split()[:1] == [f"{room.name}/"] for line in lines) == 1, room


# -- the modules --------------------------------------------------------------------------------


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_order_of_the_rooms_holds() -> None:
    """Of all rooms, as the linter holds it and as the syllabus tells it."""
    contracts = PYPROJECT["tool"]["importlinter"]["contracts"]
    said = run_python(
        "import sys; sys.argv = ['lint-imports', '--no-cache']\n"
        "from importlinter.cli import lint_imports_command; lint_imports_command()"
    )
    assert f"Contracts: {len(contracts)} kept, 0 broken" in said
    order = next(contract for contract in contracts if contract["type"] == "layers")
    assert order["exhaustive"] is True, "a new room needs a place"
    floors = [re.split(r" [|:] ", floor) for floor in order["layers"]]
    height = {name: -i for i, floor in enumerate(floors) for name in floor}
    names = [room.name for room in ROOMS]
    for file in FILES:
        for other in imported(parsed(file)):
            if file.parent != other.parent != PACKAGE:
                mine, theirs = names.index(file.parent.name), names.index(other.parent.name)
                assert height[file.parent.name] > height[other.parent.name], file
                assert mine > theirs or "tiny" in (file.parent.name, other.parent.name), file
    kept_apart = next(contract for contract in contracts if contract["type"] == "forbidden")
    assert {f"tutorial_engine.{room}" for room in CORE} <= set(kept_apart["source_modules"])
    assert {"transformers", "matplotlib", "ipywidgets"} <= set(kept_apart["forbidden_modules"])


def test_core_starts_quickly_and_without_what_only_notebooks_need() -> None:
    rooms = ", ".join(f"tutorial_engine.{room}" for room in CORE)
    loaded, seconds = json.loads(
        run_python(
            "import json, sys, time, torch, safetensors.torch, tokenizers, tqdm.auto\n"
            f"began = time.perf_counter()\nimport {rooms}, tutorial_engine.lab.doctor\n"
            "seconds = time.perf_counter() - began\n"
            "print(json.dumps([sorted({n.split('.')[0] for n in sys.modules}), seconds]))"
        )
    )
    assert {"torch", "tutorial_engine"} <= set(loaded)
    unwanted = {"transformers", "matplotlib", "ipywidgets", "IPython", "resvg_py", "PIL"}
    assert not set(loaded) & (unwanted | {"jupytext", "nbformat", "nbclient", "nbconvert"})
    assert seconds < 1.5, "beside torch, the files of a few rooms"


@every_file
def test_everything_public_has_a_docstring_of_few_lines(file: Path) -> None:
    def public(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            overload = any(ast.unparse(d) == "overload" for d in node.decorator_list)
            if not node.name.startswith("_") and not overload:
                yield prefix + node.name, node
                if isinstance(node, ast.ClassDef):
                    yield from public(node.body, f"{node.name}.")

    lines = {
        name: len((ast.get_docstring(node) or "").splitlines())
        for name, node in public(parsed(file).body)
    }
    # what implements a protocol need not say so again (see D102 in pyproject.toml)
    least = {name: 0 if "." in name else 1 for name in lines}
    assert not {name: many for name, many in lines.items() if not least[name] <= many <= 8}


@every_file
def test_no_star_import_and_no_global_statement(file: Path) -> None:
    for node in ast.walk(parsed(file)):
        assert not isinstance(node, ast.Global)
        if isinstance(node, ast.ImportFrom):
            assert "*" not in {alias.name for alias in node.names}
            assert node.module != "__future__"


@pytest.mark.parametrize("room", CORE)
def test_core_is_read_in_pieces(room: str) -> None:
    for file in (PACKAGE / room).glob("*.py"):
        assert len(file.read_text(encoding="utf-8").splitlines()) <= 400, file
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 60, f"{file}: {node.name}"


# -- the settings -------------------------------------------------------------------------------


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


@pytest.mark.parametrize("requirement", direct(), ids=lambda r: r.name)
def test_direct_dependency_is_pinned_within_its_range(requirement: Requirement) -> None:
    name = canonicalize_name(requirement.name)
    assert requirement.specifier, f"{name} says no version"
    assert name in pins(), f"{name} is not in constraints.txt"
    assert requirement.specifier.contains(pins()[name])


def test_what_is_imported_is_asked_for() -> None:
    outside = set()
    for node in (node for file in FILES for node in ast.walk(parsed(file))):
        if isinstance(node, ast.Import):
            outside |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            outside.add((node.module or "").split(".")[0])
    outside -= {*sys.stdlib_module_names, "tutorial_engine"}
    assert {"torch", "tokenizers"} <= outside
    asked = {canonicalize_name(r.name) for r in direct()}
    asked |= {"ipython", "nbformat"} & pins().keys()  # come with Jupyter
    other_name = {"PIL": "pillow", "IPython": "ipython", "yaml": "pyyaml"}
    assert not {n for n in outside if canonicalize_name(other_name.get(n, n)) not in asked}


def test_environment_is_one_python_from_conda_forge_and_the_rest_by_pip() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["channels"] == ["conda-forge"]
    assert environment["name"] == PROJECT["name"]
    conda = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    assert "pip" in conda and not [entry for entry in conda if "::" in entry]
    (python,) = [entry for entry in conda if re.fullmatch(r"python\b.*", entry)]
    version = re.fullmatch(r"python\s*={1,2}\s*(3\.\d+)", python)
    assert version, f"{python!r} does not name one minor version"
    assert SpecifierSet(PROJECT["requires-python"]).contains(Version(version[1]))
    assert version[1] in {c.rsplit(" ", 1)[1] for c in PROJECT["classifiers"] if "Python ::" in c}
    asked = {canonicalize_name(r.name) for r in direct()}
    names = {canonicalize_name(re.split(r"[\s=<>]", entry)[0]) for entry in conda}
    assert not names & asked, "Python's packages are left to pip"
    (section,) = [entry for entry in environment["dependencies"] if isinstance(entry, dict)]
    constraints, editable = section["pip"]
    assert constraints == "-c constraints.txt" and (ROOT / "constraints.txt").is_file()
    extras = re.fullmatch(r"-e \.\[([\w,-]+)\]", editable)
    assert extras and "notebooks" in extras[1].split(",")
    assert set(extras[1].split(",")) <= PROJECT["optional-dependencies"].keys()
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"install --quiet {constraints} -e '.[{extras[1]}]'" in makefile


def test_every_command_of_the_readme_is_in_the_makefile() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"^`?make ([a-z-]+)|`make ([a-z-]+)", readme, re.M))
    commands = {a or b for a, b in named}
    assert {"lab", "test"} <= commands <= targets


# -- the files ----------------------------------------------------------------------------------


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
            assert file.suffix in (".png", ".safetensors"), f"{file} is no text"


# Put together here, so that this file does not contain what it looks for.
PLACES = ["/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/", "/Us" + "ers/", "/tm" + "p/w"]
PLACES += ["pypi" + ".org", "python" + "hosted.org", "download.py" + "torch.org"]
PLACES += ["ana" + "conda.org", "ana" + "conda.com", "npm" + "js.org", "index-" + "url = http"]
HOSTS = {"www.apache.org", "www.w3.org", "purl.org", "creativecommons.org", "127.0.0.1"}
HOSTS |= {"mybinder.org", "colab.research.google.com"}
HOSTS |= {"example.org", "github.com", "arxiv.org", "huggingface.co", "pytorch.org", "localhost"}


def test_nothing_committed_names_a_place_of_one_machine_or_an_unknown_host() -> None:
    seen = 0
    for name, text in texts():
        seen += 1
        assert not [place for place in PLACES if place in text], name
        hosts = set(re.findall(r"https?://([A-Za-z0-9][A-Za-z0-9.-]*)", text))
        assert {host.rstrip(".") for host in hosts} <= HOSTS, name
    assert seen > 40


def test_no_committed_file_is_large() -> None:
    sizes = {file.relative_to(ROOT): file.stat().st_size for file in committed()}
    assert not {file: size for file, size in sizes.items() if size > 4_000_000}
    assert sum(sizes.values()) < 18_000_000


def test_text_files_end_with_one_line_break() -> None:
    for name, text in texts():
        if name.endswith((".py", ".md", ".toml", ".yml", "Makefile", ".txt")):
            assert text.endswith("\n") and not text.endswith("\n\n"), name
            assert "\r" not in text and ("\t" not in text or name == "Makefile"), name


def test_license_is_apache_2_in_full() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert [int(n) for n in re.findall(r"^   (\d)\. [A-Z]", text, re.M)] == list(range(1, 10))
    assert "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["license"] == "Apache-2.0" and PROJECT["license-files"] == ["LICENSE"]


def test_version_has_an_entry_in_the_changelog() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert PROJECT["version"] in changelog or "Unreleased" in changelog


def test_links_of_the_readme_lead_somewhere() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = [t for t in re.findall(r"\]\(([^)#]+)", readme) if not t.startswith("http")]
    assert links
    assert not [target for target in links if not (ROOT / target).exists()]


def test_the_python_of_the_readme_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but what needs the hub. `make test-wheel` runs it on the wheel alone."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    run_readme = importlib.import_module("run_readme")
    run_readme.main()
    assert run_readme.blocks() and f"block {len(run_readme.blocks())} of" in capsys.readouterr().out


def test_the_architecture_page_shows_the_step_as_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    trace_step = importlib.import_module("trace_step")
    with torch.inference_mode():
        outline = trace_step.decode_step().text()
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert outline in page, "python tools/draw_step.py draws and inserts it anew"
    assert len(outline.splitlines()) - 2 <= 60, "functions"
