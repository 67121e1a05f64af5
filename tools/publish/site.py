"""The site, built from disk: `python -m tools.publish.site`.

Puts lessons, documents, players, glossary and the list of modules side by side, and runs Sphinx.
Knows files and headings; draws nothing and runs no lesson.
"""

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
from tools.publish import cheat_sheet, players
from tools.publish.build import LESSONS, NOTEBOOKS, REPOSITORY, Lesson, make_notebook, sources
from tools.publish.lesson_pages import (
    FIGURES,
    NUMBER,
    Page,
    headings,
    name_of,
    pages,
    questions,
    write_pictures,
)
from tools.publish.model_card import facts
from tools.publish.references import linked
from tutorial_engine.viz.tokens import escape

ROOMS = (*"model sampling trace cache engine lab parallel".split(),)  # what a user calls
HOME = (*"pages scheduler cache transplant".split(),)  # whose cards it shows
HEAD = re.compile(r"^Introduced in notebooks? .*?\. ")  # of a package: which lesson opens it
ROOT = NOTEBOOKS.parent
README, CHANGELOG = ROOT / "README.md", ROOT / "CHANGELOG.md"
DOCS, SITE = ROOT / "docs", ROOT / "docs" / "site"
SOURCE, OUT = ROOT / "build" / "site-source", ROOT / "build" / "site"
ROW = re.compile(  # of the readme's table: lesson, time, aim
    r"^\| \[(\w\d) [^\]]*\]\(\S+\)<br>([^|]+) \| (.+?)(?:\.<br>.*)? \|$", re.M
)
ADDRESS = "https://{}.github.io/{}/".format(*REPOSITORY.split("/")[3:5])
LINK = re.compile(r"(\[[^\]]*\])\((?!https?:|#)([^)\s]+)\)")
PLAIN_HTML = re.compile(r'(?:src|srcset)="([^":]+)"')  # Sphinx copies only what Markdown names
IMPORTED = re.compile(r"^from (tutorial_engine[\w.]*) import (\(.*?\)|.*?$)", re.M | re.S)
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]+\.(?:png|svg))\)")
NEIGHBOURS = "```{toctree}\n:hidden:\n:glob:\n*\n```\n"  # the pages beside this one, by name
DECISIONS = f"""# Decision records

Choices that may surprise a newcomer, and their reasons.

{NEIGHBOURS.replace(":hidden:", ":maxdepth: 1")}"""
UNSEARCHED = "---\nnosearch: true\n---\n"  # so that lessons are found first
SOCIAL = "04_pages.png"  # what a message with a link to the site shows
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
    """Where a lesson's first page lies in the site, without its ending."""
    return f"lessons/{name_of(lesson)}"


def place(lesson: Lesson, heading: str, ending: str) -> str:
    """Where a section lies in the site. ValueError, with the known headings, for another one."""
    known = headings(lesson)
    if heading not in known:
        raise ValueError(f"lesson {lesson.code} has no section {heading!r}; it has {list(known)}")
    page, anchor = known[heading]
    return f"lessons/{page}{ending}#{anchor}"


def link(lesson: Lesson, heading: str) -> str:
    """A Markdown link to a section."""
    return f"[{lesson.code} · {heading}]({place(lesson, heading, '.ipynb')})"


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
    first = {term.name[0].upper(): term.name for term in glossary()[::-1]}  # of each letter
    lines = [
        "# Glossary\n",
        f"{len(glossary())} words of the lessons. Each has the section that explains it. The names "
        "are those to search for in the source or the options of the other engine.\n",
        " · ".join(f"{{term}}`{letter} <{name}>`" for letter, name in sorted(first.items())) + "\n",
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
        "Each player is one page. It needs no network and no installation. In the first one you "
        "search; the others show a recorded run step by step, and the keys ← → Home End and the "
        "space bar work.\n",
    ]
    for show in players.entries():
        where = f" · Lesson {link(lesson_of(show.lesson), show.heading)}"
        lines += [
            f"## {show.title}\n",
            f'<a href="players/{show.file}">{stills(show)}</a>\n',
            f"{show.words}\n",
            f'<a href="players/{show.file}">Open the player</a>{where}\n',
        ]
    return "\n".join(lines)


def stills(show: players.Entry) -> str:
    """A player's still picture, and the one for a dark page; furo shows one of them."""
    return "".join(
        f'<img class="poster only-{page}" src="players/{show.name}{end}.png" '
        f'alt="{escape(show.title)}: a step of it">'
        for page, end in (("light", ""), ("dark", "-dark"))
    )


def links_of(show: players.Entry) -> dict[str, str]:
    """Where a player leads to: the section about it, and the others."""
    lesson = lesson_of(show.lesson)
    goal = f"../{place(lesson, show.heading, '.html')}"
    return {
        f"Lesson {lesson.code}: {show.heading}": goal,
        "All players": "../players.html",
        "All lessons": "../lessons/index.html",
    }


def cards() -> str:
    """The moving pictures of the first page."""
    parts = ['<div class="cards">']
    for show in map(players.show_of, HOME):
        assert show.card is not None
        _, _, wide, tall = show.card.box
        _, _, small, high = show.card.phone or show.card.box
        title, words, file = escape(show.title), escape(show.words), f"players/{show.file}"
        look = " ".join(["card-of", *["wide"] * (wide >= WIDE), *["small"] * bool(show.card.phone)])
        ratios = f"--tall: {tall / wide:.3f}; --small: {high / small:.3f}"
        parts.append(
            f'<section class="{look}" style="{ratios}"><h2>{title}</h2>'
            f'<div class="strip"><iframe src="players/{show.name}-card.html" title="{title}" '
            'loading="lazy"></iframe></div>'
            f'<p>{words}</p><p><a href="{file}">Step through it</a></p></section>'
        )
    return "\n".join([*parts, "</div>"])


def lessons_list(folder: str) -> str:
    """The lessons' pages, times and aims, from a page whose lessons lie in that folder."""
    rows = {code: more for code, *more in ROW.findall(README.read_text(encoding="utf-8"))}
    lines = ["| lesson | time | you will be able to |", "|---|---|---|"]
    for lesson in LESSONS:
        links = [f"[{one.title}]({folder}{one.name}.ipynb)" for one in pages(lesson)]
        time, aim = rows.get(lesson.code, ("", ""))
        lines.append(f"| {'<br>'.join(links)} | {time.replace(' h', ' h')} | {aim} |")
    return "\n".join(lines)


def lessons_page() -> str:
    """The lessons in their order."""
    head = (
        "# Lessons\n\nThe pages show the lessons with the outputs of a run. At **Predict**, choose "
        "an answer: the page says whether it is right, and why. To write the exercises, run the "
        "notebook.\n"
    )
    return "\n".join([head, lessons_list(""), "", NEIGHBOURS])


def bridge(lesson: Lesson) -> str:
    """The ways from a lesson's page to what runs, and to us."""
    path, owner = f"notebooks/{lesson.notebook}.ipynb", "/".join(REPOSITORY.split("/")[3:5])
    colab = "https://colab.research.google.com/github"
    links = {
        "Open in Colab": f"{colab}/{owner}/blob/HEAD/{path}",
        "Open in Binder": f"https://mybinder.org/v2/gh/{owner}/HEAD?urlpath=lab/tree/{path}",
        "Notebook": f"{REPOSITORY}/blob/HEAD/{path}",
        "I got lost here": f"{REPOSITORY}/issues/new?template=lost.yml&notebook={name_of(lesson)}",
    }
    return " · ".join(f"[{words}]({goal})" for words, goal in links.items())


def quiz_page() -> str:
    """All questions of the lessons."""
    every = {lesson: questions(lesson) for lesson in LESSONS}
    lines = [
        "# Quiz\n",
        f"All {sum(map(len, every.values()))} questions of the lessons; a run answered each.\n",
        '<p id="score" role="status"></p>\n',
    ]
    for lesson, asked in every.items():
        lines.append(f"## {pages(lesson)[0].title}\n")
        for number, one in enumerate(asked.values(), 1):
            where = f"{lesson.code}.{number} · Section {link(lesson, one.heading)}"
            lines += [one.html(""), "", where, ""]
    return "\n".join(lines)


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
    rooms = [name for name in ROOMS if there[name]]
    for room in rooms:
        package = import_module(f"tutorial_engine.{room}")
        what = HEAD.sub("", (package.__doc__ or "").partition("\n")[0])
        modules = [f"{room}.{one.name}" for one in pkgutil.iter_modules(package.__path__)]
        yield room, api_page(room, what, modules, lessons)
    tree = ["```{toctree}", ":maxdepth: 1", *rooms, "```", ""]
    head = "# The package\n\nRooms by concept, in reading order; what the docstrings say.\n"
    yield "index", "\n".join([UNSEARCHED, head, *tree])


def api_page(
    room: str, what: str, modules: Sequence[str], lessons: Mapping[str, list[Lesson]]
) -> str:
    """The page of a room: its modules, those that the first lessons use first."""
    parts = [UNSEARCHED, f"# {room}\n", f"{what}\n"]
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
    shutil.copy(FIGURES / SOCIAL, folder / "extra" / "social.png")
    write_pictures(LESSONS, folder / "extra")
    for lesson in LESSONS:
        for sitting in pages(lesson):
            write_lesson(sitting, lesson, folder / "lessons")
    where = {"repository": REPOSITORY, "address": ADDRESS}
    _write(folder / "site.json", json.dumps(where))
    documents = {README: "README.md", CHANGELOG: "CHANGELOG.md"}
    documents |= {path: str(path.relative_to(DOCS)) for path in DOCS.glob("*.md")}
    for room in ("bench", "decisions", "teaching"):
        documents |= {path: f"{room}/{path.name}" for path in (DOCS / room).glob("*.md")}
    for path, name in documents.items():
        under = f"\n{NEIGHBOURS}" if name == "teaching/README.md" else ""
        alone = "---\norphan: true\n---\n" if path == CHANGELOG else ""
        _write(folder / name, alone + localised(path) + under)
        for words in PICTURE.findall(path.read_text(encoding="utf-8")):
            picture = folder / Path(name).parent / words.removeprefix("docs/")
            picture.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path.parent / words, picture)
        for words in PLAIN_HTML.findall(path.read_text(encoding="utf-8")):
            picture = folder / "extra" / Path(name).parent / words
            picture.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path.parent / words, picture)
    made = {
        "glossary.md": glossary_page(),
        "players.md": players_page(),
        "lessons/index.md": lessons_page(),
        "quiz.md": quiz_page(),
        "decisions/index.md": DECISIONS,
        **{f"api/{name}.md": page for name, page in api_pages()},
    }
    known = {"cards": cards(), "lessons": lessons_list("lessons/"), "first": name_of(LESSONS[0])}
    made["index.md"] = filled((SITE / "index.md").read_text(encoding="utf-8"), known)
    there = {
        name: link(lesson_of(code), words) for name, (code, words) in cheat_sheet.SECTIONS.items()
    }
    sheet = (SITE / "cheat_sheet.md").read_text(encoding="utf-8")
    made["cheat_sheet.md"] = filled(sheet, cheat_sheet.figures() | there)
    made["model_card.md"] = filled((SITE / "model_card.md").read_text(encoding="utf-8"), facts())
    for name, page in made.items():
        _write(folder / name, page)


def write_lesson(page: Page, lesson: Lesson, folder: Path) -> None:
    """A sitting's page, with the ways out below its title, and the players of its sections."""
    known = set[str]()  # papers that the page has linked
    for number, cell in enumerate(page.notebook.cells):
        for output in cell.get("outputs", []):
            if "text/html" in output.get("data", {}):
                output.data["text/html"] = linked(output.data["text/html"], known)
        if cell.cell_type == "markdown" and not cell.source.startswith('<div class="ask"'):
            cell.source = linked(beside(with_players(cell.source, lesson)), known)
            if number == 0:
                cell.source = re.sub(
                    r"\A(# .+)$", rf"\1\n\n{bridge(lesson)}\n", cell.source, flags=re.M
                )
    _write(folder / f"{page.name}.ipynb", nbformat.writes(page.notebook) + "\n")


def beside(text: str) -> str:
    """A lesson's text, with its links to pages of docs/ and to other notebooks as the site's."""
    text = text.replace("](../docs/", "](../")
    text = re.sub(r'"\.\./docs/([\w-]+)\.md"', r'"../\1.html"', text)
    return re.sub(r"\]\((?:appendix/)?(\w+\.ipynb)\)", r"](\1)", text)


def with_players(text: str, lesson: Lesson) -> str:
    """A lesson's text, with the players of a section linked below its heading."""

    def add(match: re.Match[str]) -> str:
        heading = NUMBER.sub(r"\1", match[1])
        links = [
            f'<a href="../players/{show.file}">{escape(show.title)}</a>'
            for show in players.entries()
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
        if NOTEBOOKS in goal.parents and "solutions" not in goal.parts and goal.exists():
            up = "" if path.parent == ROOT else "../" * (len(path.parent.relative_to(DOCS).parts))
            return f"{words}({up}lessons/{goal.name})"
        if ROOT in goal.parents and goal.exists():
            kind = "tree" if goal.is_dir() else "blob"
            return f"{words}({REPOSITORY}/{kind}/HEAD/{goal.relative_to(ROOT)})"
        return words.removeprefix("[").removesuffix("]")

    return linked(LINK.sub(mend, path.read_text(encoding="utf-8")))


def build(source: Path, out: Path) -> None:
    """Run Sphinx over the sources, from nothing. RuntimeError, with its words, for a warning."""
    shutil.rmtree(out, ignore_errors=True)
    options = "-b html -q -E -W --keep-going -j auto".split()
    trees = out.with_name(f"{out.name}-trees")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, "-d", str(trees), str(source), str(out)],
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
