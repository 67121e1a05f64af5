"""The house: modules, files and settings agree with each other and with the syllabus."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import tutorial_engine
from tutorial_engine.learn.build import sources
from tutorial_engine.syllabus import AROUND, LESSONS, Lesson, tree

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tutorial_engine"
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = PYPROJECT["project"]
FILES = sorted(PACKAGE.rglob("*.py"))

LESSON_OF = {module.name: lesson.number for lesson in LESSONS for module in lesson.modules}
NOT_CORE = {"viz", "learn", "tiny"}  # what draws, what teaches, what trains


def name_of(file: Path) -> str:
    """`viz` for viz/plots.py, `rope` for rope.py, `__init__` for the package itself."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def label(value: object) -> str:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else str(value)


every_file = pytest.mark.parametrize("file", FILES, ids=label)
core_files = pytest.mark.parametrize(
    "file", [file for file in FILES if name_of(file) not in NOT_CORE], ids=label
)


def imported(code: str) -> set[str]:
    """Modules of the package that a piece of code imports, by their name below it."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "tutorial_engine":
            names = [f"tutorial_engine.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            names = [node.module or ""]
        found |= {n.split(".")[1] for n in names if n.startswith("tutorial_engine.")}
    return found


# -- the syllabus -------------------------------------------------------------------------------


def test_every_module_is_in_the_syllabus_and_the_other_way_round() -> None:
    listed = [*LESSON_OF, *(module.name for module in AROUND)]
    assert len(listed) == len(set(listed))
    assert sorted(listed) == sorted({name_of(file) for file in FILES} - {"__init__"})
    assert len(LESSON_OF) == sum(len(lesson.modules) for lesson in LESSONS)


def test_every_lesson_has_its_source_and_its_number() -> None:
    assert [lesson.number for lesson in LESSONS] == list(range(1, len(LESSONS) + 1))
    assert sources().keys() == {lesson.notebook for lesson in LESSONS}
    written = {file.stem for file in (ROOT / "notebooks" / "src").glob("*.py")}
    assert written == {lesson.notebook for lesson in LESSONS}


def test_tree_is_in_the_readme_and_in_the_package_docstring() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert any(tree() in block for block in readme.split("```")[1::2]), "in a code block"
    assert tree() in (tutorial_engine.__doc__ or "")


def test_tree_names_every_module_once() -> None:
    lines = tree().splitlines()
    for module in (*AROUND, *(module for lesson in LESSONS for module in lesson.modules)):
        assert sum(line.split()[:1] == [module.name] for line in lines) == 1
        assert sum(line.endswith(f" {module.what}") for line in lines) == 1
    assert max(len(line) for line in lines) <= 88


@every_file
def test_module_says_which_notebook_introduces_it(file: Path) -> None:
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    if file == PACKAGE / "__init__.py":
        assert docstring
        return
    found = re.match(r"Introduced in notebook (\d\d)\. \S", docstring)
    assert found, f"the docstring begins {docstring[:40]!r}"
    number = int(found[1])
    name = name_of(file)
    if name in LESSON_OF and file.parent == PACKAGE:
        assert number == LESSON_OF[name]
    elif name in LESSON_OF:  # a package may grow in later notebooks
        assert number >= LESSON_OF[name]
    assert number in {lesson.number for lesson in LESSONS}
    in_its_name = re.search(r"_(\d\d)\.py$", file.name)  # checks_01.py
    assert in_its_name is None or int(in_its_name[1]) == number


@every_file
def test_module_imports_nothing_of_a_later_notebook(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(text)) or ""
    found = re.match(r"Introduced in notebook (\d\d)", docstring)
    number = int(found[1]) if found else 0
    assert all(LESSON_OF.get(name, number) <= number for name in imported(text))


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.notebook)
def test_notebook_imports_what_was_introduced_by_then(lesson: Lesson) -> None:
    notebook = jupytext.read(sources()[lesson.notebook], fmt="py:percent")
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    used = imported(code)
    allowed = {name for name, number in LESSON_OF.items() if number <= lesson.number}
    assert used <= allowed | {"viz", "learn"}
    assert len(used & allowed) >= 3, "a lesson shows the engine"


# -- the modules --------------------------------------------------------------------------------


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_module_order_holds() -> None:
    said = run_python(
        "import sys; sys.argv = ['lint-imports', '--no-cache']\n"
        "from importlinter.cli import lint_imports_command; lint_imports_command()"
    )
    contracts = PYPROJECT["tool"]["importlinter"]["contracts"]
    assert f"Contracts: {len(contracts)} kept, 0 broken" in said


def test_module_order_is_about_every_module() -> None:
    layers, forbidden = PYPROJECT["tool"]["importlinter"]["contracts"]
    names = [name.strip() for layer in layers["layers"] for name in layer.split(":")]
    assert layers["exhaustive"] is True
    assert sorted(names) == sorted([*LESSON_OF, *(module.name for module in AROUND)])
    core = [name for name in LESSON_OF if name in names]
    assert [n for n in reversed(names) if n in core and n not in ("bench", "doctor")] == [
        n for n in core if n not in ("bench", "doctor")
    ], "the syllabus lists the modules in import order"
    kept_apart = {name.split(".")[1] for name in forbidden["source_modules"]}
    know_the_peer = {"bench", "peers"}  # one compares with it, one lets it use our parts
    assert kept_apart == (LESSON_OF.keys() | {"syllabus"}) - know_the_peer
    assert set(forbidden["forbidden_modules"]) == {
        *("transformers", "matplotlib", "ipywidgets", "IPython", "resvg_py")
    }


def test_core_starts_without_what_only_notebooks_need() -> None:
    loaded = run_python(
        "import json, sys, tutorial_engine.model.checkpoint, tutorial_engine.lab.doctor\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    names = set(json.loads(loaded))
    assert {"torch", "tutorial_engine"} <= names
    unwanted = {"transformers", "matplotlib", "ipywidgets", "IPython", "resvg_py", "PIL"}
    assert not names & (unwanted | {"jupytext", "nbformat", "nbclient", "nbconvert"})


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@every_file
def test_everything_public_has_a_docstring(file: Path) -> None:
    def bare(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            if node.name.startswith("_"):
                continue
            overload = any(ast.unparse(d) == "overload" for d in node.decorator_list)
            if not overload and not ast.get_docstring(node):
                yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from bare(node.body, f"{node.name}.")

    assert not list(bare(ast.parse(file.read_text(encoding="utf-8")).body))


@core_files
def test_core_is_read_in_small_pieces(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 300
    lengths = {
        node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions(ast.parse(text))
    }
    assert not {name: length for name, length in lengths.items() if length > 50}


@every_file
def test_no_star_import_and_no_global_statement(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        assert not isinstance(node, ast.Global)
        if isinstance(node, ast.ImportFrom):
            assert "*" not in {alias.name for alias in node.names}
            assert node.module != "__future__"


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


def test_extras_refer_to_each_other_by_names_that_exist() -> None:
    extras = PROJECT["optional-dependencies"]
    for line in (line for lines in extras.values() for line in lines):
        requirement = Requirement(line)
        if canonicalize_name(requirement.name) == canonicalize_name(PROJECT["name"]):
            assert requirement.extras <= extras.keys()


def top_imports(folder: Path) -> set[str]:
    found = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
    return found


def test_what_is_imported_is_asked_for() -> None:
    asked = {canonicalize_name(r.name) for r in direct()}
    asked |= {"ipython", "nbformat"} & pins().keys()  # come with Jupyter
    other_name = {"PIL": "pillow", "IPython": "ipython", "yaml": "pyyaml"}
    outside = top_imports(PACKAGE) - set(sys.stdlib_module_names) - {"tutorial_engine"}
    assert {"torch", "tokenizers"} <= outside
    assert not {n for n in outside if canonicalize_name(other_name.get(n, n)) not in asked}


def environment() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "environment.yml").read_text())


def conda_packages() -> list[str]:
    return [entry for entry in environment()["dependencies"] if isinstance(entry, str)]


def pip_lines() -> list[str]:
    (section,) = [e for e in environment()["dependencies"] if isinstance(e, dict)]
    assert section.keys() == {"pip"}
    return section["pip"]


def test_environment_is_conda_forge_only() -> None:
    assert environment()["channels"] == ["conda-forge"]
    assert not [entry for entry in conda_packages() if "::" in entry]
    assert environment()["name"] == PROJECT["name"]


def test_environment_has_one_python_that_the_project_supports() -> None:
    found = [e for e in conda_packages() if re.fullmatch(r"python\b.*", e)]
    assert len(found) == 1 and "pip" in conda_packages()
    version = re.fullmatch(r"python\s*={1,2}\s*(3\.\d+)", found[0])
    assert version, f"{found[0]!r} does not name one minor version"
    assert SpecifierSet(PROJECT["requires-python"]).contains(Version(version[1]))
    minors = {c.rsplit(" ", 1)[1] for c in PROJECT["classifiers"] if "Python ::" in c}
    assert version[1] in minors


def test_environment_takes_the_rest_from_pyproject() -> None:
    editable = [line for line in pip_lines() if line.startswith("-e")]
    assert len(editable) == 1
    found = re.fullmatch(r"-e \.\[([\w,-]+)\]", editable[0])
    assert found
    assert set(found[1].split(",")) <= PROJECT["optional-dependencies"].keys()
    assert "notebooks" in found[1].split(",")
    constraints = [line.removeprefix("-c ") for line in pip_lines() if line.startswith("-c ")]
    assert constraints and all((ROOT / name).is_file() for name in constraints)
    assert len(pip_lines()) == len(editable) + len(constraints)  # nothing is said twice


def test_environment_leaves_pythons_packages_to_pip() -> None:
    asked = {canonicalize_name(r.name) for r in direct()}
    assert not [
        e for e in conda_packages() if canonicalize_name(re.split(r"[\s=<>]", e)[0]) in asked
    ]


def test_makefile_installs_what_the_environment_installs() -> None:
    extras = next(line for line in pip_lines() if line.startswith("-e")).removeprefix("-e ")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"install --quiet -c constraints.txt -e '{extras}'" in makefile


def test_every_command_of_the_readme_is_in_the_makefile() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"^`?make ([a-z]+)|`make ([a-z]+)", readme, re.M))
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
HOSTS |= {"example.org", "github.com", "arxiv.org", "huggingface.co", "pytorch.org", "localhost"}


def test_nothing_committed_names_a_place_of_one_machine() -> None:
    seen = 0
    for name, text in texts():
        seen += 1
        assert not [place for place in PLACES if place in text], name
    assert seen > 40


def test_nothing_committed_points_to_an_unknown_host() -> None:
    for name, text in texts():
        hosts = set(re.findall(r"https?://([A-Za-z0-9][A-Za-z0-9.-]*)", text))
        assert {host.rstrip(".") for host in hosts} <= HOSTS, name


def test_no_committed_file_is_large() -> None:
    sizes = {file.relative_to(ROOT): file.stat().st_size for file in committed()}
    assert not {file: size for file, size in sizes.items() if size > 4_000_000}
    assert sum(sizes.values()) < 16_000_000


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
