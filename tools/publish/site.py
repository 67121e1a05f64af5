"""The site, built from disk: `python -m tools.publish.site`.

Puts lessons, documents, players, glossary and the list of modules side by side, and runs Sphinx.
Knows files and headings; draws nothing and runs no lesson.
"""

import base64
import hashlib
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import nbformat

import tutorial_engine
from tools.publish import players
from tools.publish.build import LESSONS, NOTEBOOKS, Lesson, make_notebook, sources, target
from tools.publish.model_card import facts
from tutorial_engine.viz.tokens import escape

# in reading order; a room that is not named here comes after them
ROOMS = (*"model sampling trace cache engine tiny lab parallel viz learn".split(),)
HEAD = re.compile(r"^Introduced in notebooks? .*?\. ")  # of a package: which lesson opens it
ROOT = NOTEBOOKS.parent
README, CHANGELOG = ROOT / "README.md", ROOT / "CHANGELOG.md"
DOCS, SITE = ROOT / "docs", ROOT / "docs" / "site"
SOURCE, OUT = ROOT / "build" / "site-source", ROOT / "build" / "site"
HEADING = re.compile(r"^# (#{1,3}) (.+)$", re.M)  # in a Markdown cell of a source
NUMBER = re.compile(r"^(?:\w+ · |Exercise \d+: )?(.*?)(?: \(\d+ minutes\))?$")
LINK = re.compile(r"(\[[^\]]*\])\((?!https?:|#)([^)\s]+)\)")
PLAIN_HTML = re.compile(r'(?:src|srcset)="([^":]+)"')  # Sphinx copies only what Markdown names
IMPORTED = re.compile(r"^from (tutorial_engine[\w.]*) import (\(.*?\)|.*?$)", re.M | re.S)
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]+\.(?:png|svg))\)")
WIDE = 560  # a card whose picture is so wide takes a line of its own
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "llama_cpp": "llama.cpp"}


class Term(NamedTuple):
    """A word of the lessons: what it is, where it is explained, and its names elsewhere."""

    name: str
    meaning: str
    lesson: Lesson
    heading: str
    elsewhere: dict[str, str]


# -- headings and links ---------------------------------------------------------------------------


def lesson_of(code: str) -> Lesson:
    """The lesson "01", or "01_attention_rope". ValueError for one that there is not."""
    for lesson in LESSONS:
        if code in (lesson.code, lesson.notebook):
            return lesson
    raise ValueError(f"there is no lesson {code!r}; there are {[one.code for one in LESSONS]}")


def page_of(lesson: Lesson) -> str:
    """Where a lesson's page lies in the site, without its ending."""
    return f"lessons/{_file(lesson)}"


def anchors(lesson: Lesson) -> dict[str, str]:
    """Heading, without number and minutes → its anchor, for all headings of a lesson's source."""
    found = HEADING.findall(sources()[lesson.notebook].read_text(encoding="utf-8"))
    return {NUMBER.sub(r"\1", text): slug(text) for _, text in found}


def slug(heading: str) -> str:
    """The anchor that MyST gives a heading: GitHub's."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def link(lesson: Lesson, heading: str) -> str:
    """A Markdown link to a section. ValueError, with the headings there are, for another one."""
    known = anchors(lesson)
    if heading not in known:
        raise ValueError(f"lesson {lesson.code} has no section {heading!r}; it has {list(known)}")
    return f"[{lesson.code} · {heading}]({page_of(lesson)}.ipynb#{known[heading]})"


def glossary() -> list[Term]:
    """The words of docs/site/glossary.toml, by the alphabet."""
    table = tomllib.loads((SITE / "glossary.toml").read_text(encoding="utf-8"))["term"]
    terms = [
        Term(
            term["name"],
            term["is"],
            lesson_of(term["lesson"]),
            term["heading"],
            {engine: term[key] for key, engine in ENGINES.items() if key in term},
        )
        for term in table
    ]
    return sorted(terms, key=lambda term: term.name.lower())


# -- pages that are made --------------------------------------------------------------------------


def glossary_page() -> str:
    """All words with their sections and their names in other engines."""
    lines = [
        "# Glossary\n",
        f"{len(glossary())} words of the lessons. Each has the section that explains it. The names "
        "are those to search for in the source or the options of the other engine.\n",
        "```{glossary}",
    ]
    for term in glossary():
        lines += [term.name, f"  {term.meaning}", "", f"  Lesson {link(term.lesson, term.heading)}"]
        names = "; ".join(f"{engine}: {name}" for engine, name in term.elsewhere.items())
        lines += ["", f"  Elsewhere: {names}", ""] if names else [""]
    return "\n".join([*lines, "```", ""])


def players_page() -> str:
    """All players, with what is seen in them."""
    lines = [
        "# Players\n",
        "Each player is one page with a recorded run, step by step. It needs no network and no "
        "installation. The keys ← → Home End and the space bar work.\n",
    ]
    for show in players.SHOWS:
        where = link(lesson_of(show.lesson), show.heading)
        lines += [
            f"## {show.title}\n",
            f"{show.words}\n",
            f'<a href="players/{show.file}">Open the player</a> · Lesson {where}\n',
        ]
    return "\n".join(lines)


def links_of(show: players.Show) -> dict[str, str]:
    """Where a player leads to: the section about it, and the others."""
    lesson = lesson_of(show.lesson)
    goal = f"../{page_of(lesson)}.html#{anchors(lesson)[show.heading]}"
    return {
        f"Lesson {lesson.code}: {show.heading}": goal,
        "All players": "../players.html",
        "All lessons": "../lessons/index.html",
    }


def cards() -> str:
    """The moving pictures of the first page."""
    parts = ['<div class="cards">']
    for show in players.SHOWS:
        if show.card is None:
            continue
        _, _, wide, tall = show.card.box
        _, _, small, high = show.card.phone or show.card.box
        title, words, file = escape(show.title), escape(show.words), f"players/{show.file}"
        look = " ".join(["card-of", *["wide"] * (wide >= WIDE), *["small"] * bool(show.card.phone)])
        ratios = f"--tall: {tall / wide:.3f}; --small: {high / small:.3f}"
        parts.append(
            f'<section class="{look}" style="{ratios}"><h2>{title}</h2>'
            f'<div class="strip"><iframe src="{file}?card" title="{title}" loading="lazy"></iframe>'
            "</div>"
            f'<p>{words}</p><p><a href="{file}">Step through it</a></p></section>'
        )
    return "\n".join([*parts, "</div>"])


def lessons_list(folder: str) -> str:
    """Links to the lessons, from a page whose lessons lie in that folder."""
    lines = []
    for lesson in LESSONS:
        title = HEADING.search(sources()[lesson.notebook].read_text(encoding="utf-8"))
        assert title is not None, "a lesson begins with its title"
        lines.append(f"- [{title[2]}]({folder}{_file(lesson)}.ipynb)")
    return "\n".join(lines)


def lessons_page() -> str:
    """The lessons in their order."""
    head = "# Lessons\n\nThe pages show the lessons with the outputs of a run.\n"
    tree = ["```{toctree}", ":hidden:", *map(_file, LESSONS), "```", ""]
    return "\n".join([head, lessons_list(""), "", *tree])


def _file(lesson: Lesson) -> str:
    return lesson.notebook.rpartition("/")[2]


def decisions_page(names: list[str]) -> str:
    """The list of the decision records."""
    head = "# Decision records\n\nChoices that may surprise a newcomer, and their reasons.\n"
    return "\n".join([head, "```{toctree}", ":maxdepth: 1", *names, "```", ""])


def shown_in() -> dict[str, list[Lesson]]:
    """Module of the package → the lessons that import something of it."""
    found: dict[str, list[Lesson]] = {}
    for lesson in LESSONS:
        code = "\n".join(
            cell.source
            for cell in make_notebook(sources()[lesson.notebook], solved=True).cells
            if cell.cell_type == "code"
        )
        for module, names in IMPORTED.findall(code):
            for name in re.findall(r"\w+", names):
                thing = getattr(import_module(module), name, None)
                home = getattr(thing, "__module__", None) or getattr(thing, "__name__", module)
                if lesson not in found.setdefault(home, []):
                    found[home].append(lesson)
    return found


def api_pages() -> Iterator[tuple[str, str]]:
    """(name, page) of each room: what its docstrings say, and the lessons that use a module."""
    lessons = shown_in()
    there = {one.name: one.ispkg for one in pkgutil.iter_modules(tutorial_engine.__path__)}
    rooms = sorted(
        (name for name, is_room in there.items() if is_room),
        key=lambda name: ROOMS.index(name) if name in ROOMS else len(ROOMS),
    )
    for room in rooms:
        package = import_module(f"tutorial_engine.{room}")
        what = HEAD.sub("", (package.__doc__ or "").partition("\n")[0])
        modules = [f"{room}.{one.name}" for one in pkgutil.iter_modules(package.__path__)]
        yield room, api_page(room, what, modules, lessons)
    alone = [name for name, is_room in there.items() if not is_room]
    yield "beside", api_page("beside", "Beside the rooms, below all of them.", alone, lessons)
    tree = ["```{toctree}", ":maxdepth: 1", *rooms, "beside", "```", ""]
    head = "# The package\n\nRooms by concept, in reading order; what the docstrings say.\n"
    yield "index", "\n".join([head, *tree])


def api_page(
    room: str, what: str, modules: Sequence[str], lessons: Mapping[str, list[Lesson]]
) -> str:
    """The page of a room: its modules, those that the first lessons use first."""
    parts = [f"# {room}\n", f"{what}\n"]
    used = {name: lessons.get(f"tutorial_engine.{name}", []) for name in modules}
    for name in sorted(used, key=lambda name: min(map(LESSONS.index, used[name]), default=99)):
        if name.endswith("__main__"):
            continue
        links = [f"[{one.code}](../{page_of(one)}.ipynb)" for one in used[name]]
        told = f"Used in lesson {', '.join(links)}.\n\n" if links else ""
        directive = f".. automodule:: tutorial_engine.{name}\n   :members:"
        parts.append(f"## {name}\n\n{told}```{{eval-rst}}\n{directive}\n```\n")
    return "\n".join(parts)


# -- side by side ---------------------------------------------------------------------------------


def gather(folder: Path) -> None:
    """Put all sources of the site into the folder. ValueError for a lesson that is not built."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(SITE, folder)
    players.write(folder / "extra" / "players", links_of)
    alts: dict[str, str] = {}
    for lesson in LESSONS:
        path = target(lesson.notebook, solved=False)
        if not path.is_file():
            raise ValueError(f"{path} is not there: run `make notebooks` first")
        notebook = nbformat.read(path, as_version=4)
        alts |= captions(notebook)
        for cell in notebook.cells[1:]:
            if cell.cell_type == "markdown":  # a page has one title; a sitting is a section
                cell.source = re.sub(r"^# ", "## ", cell.source, flags=re.M)
                cell.source = with_players(cell.source, lesson)
        _write(folder / f"{page_of(lesson)}.ipynb", nbformat.writes(notebook) + "\n")
    _write(folder / "alts.json", json.dumps(alts, ensure_ascii=False, indent=0, sort_keys=True))
    documents = {README: "README.md", CHANGELOG: "CHANGELOG.md"}
    documents |= {path: str(path.relative_to(DOCS)) for path in DOCS.glob("*.md")}
    for room in ("bench", "decisions", "teaching"):
        documents |= {path: f"{room}/{path.name}" for path in (DOCS / room).glob("*.md")}
    for path, name in documents.items():
        _write(folder / name, localised(path))
        for words in PICTURE.findall(path.read_text(encoding="utf-8")):
            picture = folder / Path(name).parent / words.removeprefix("docs/")
            picture.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path.parent / words, picture)
        for words in PLAIN_HTML.findall(path.read_text(encoding="utf-8")):
            picture = folder / "extra" / Path(name).parent / words
            picture.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path.parent / words, picture)
    decisions = sorted(path.stem for path in (DOCS / "decisions").glob("*.md"))
    made = {
        "glossary.md": glossary_page(),
        "players.md": players_page(),
        "lessons/index.md": lessons_page(),
        "decisions/index.md": decisions_page(decisions),
        **{f"api/{name}.md": page for name, page in api_pages()},
    }
    known = {"cards": cards(), "lessons": lessons_list("lessons/")}
    made["index.md"] = filled((SITE / "index.md").read_text(encoding="utf-8"), known)
    made["model_card.md"] = filled((SITE / "model_card.md").read_text(encoding="utf-8"), facts())
    for name, page in made.items():
        _write(folder / name, page)


def with_players(text: str, lesson: Lesson) -> str:
    """A lesson's text, with the players of a section linked below its heading."""

    def add(match: re.Match[str]) -> str:
        heading = NUMBER.sub(r"\1", match[1])
        links = [
            f'<a href="../players/{show.file}">{escape(show.title)}</a>'
            for show in players.SHOWS
            if show.lesson == lesson.notebook and show.heading == heading
        ]
        return match[0] + (f"\n\nIn the player: {', '.join(links)}.\n" if links else "")

    return re.sub(r"^#{1,3} (.+)$", add, text, flags=re.M)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def filled(page: str, known: dict[str, str]) -> str:
    """The page with each `<!-- name -->` replaced. KeyError for a name that nobody knows."""
    return re.sub(r"<!-- (\w+) -->", lambda match: known[match[1]], page)


def captions(notebook: nbformat.NotebookNode) -> dict[str, str]:
    """What a picture of a notebook is called in the site (its hash) → its caption."""
    return {
        hashlib.sha256(base64.decodebytes(output.data["image/png"].encode())).hexdigest(): (
            output.data["text/plain"]
        )
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    }


def localised(path: Path) -> str:
    """A document of the repository for the site: a link to what is not there becomes its words."""

    def mend(match: re.Match[str]) -> str:
        words, goal = match[1], (path.parent / match[2]).resolve()
        if DOCS not in path.parents and DOCS in goal.parents:
            goal = goal / "index.md" if goal.is_dir() else goal
            return f"{words}({goal.relative_to(DOCS)})"
        if goal.parent == DOCS / "players":  # a player is no source, but a file of the site
            return f'<a href="{match[2]}">{words[1:-1]}</a>'
        if DOCS in goal.parents or goal.suffix == ".png" or goal.name == CHANGELOG.name:
            return match[0]
        return words.removeprefix("[").removesuffix("]")

    return LINK.sub(mend, path.read_text(encoding="utf-8"))


def build(source: Path, out: Path) -> None:
    """Run Sphinx over the sources, from nothing. RuntimeError, with its words, for a warning."""
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "-E", "-W", "--keep-going"]
    trees = out.with_name(f"{out.name}-trees")
    done = subprocess.run(
        [*command, "-d", str(trees), str(source), str(out)],
        env=os.environ | {"PYTHONHASHSEED": "0", "SOURCE_DATE_EPOCH": "0"},
        capture_output=True,
        text=True,
    )
    shutil.rmtree(trees, ignore_errors=True)
    if done.returncode:
        raise RuntimeError(f"Sphinx is not content:\n{done.stdout}{done.stderr}")


def main() -> None:
    """Gather and build into build/site, or into the folder that is named."""
    out = Path(sys.argv[1]).resolve() if sys.argv[1:] else OUT
    gather(SOURCE)
    build(SOURCE, out)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print(f"open {out / 'index.html'} ({size / 2**20:.1f} MB)")


if __name__ == "__main__":
    main()
