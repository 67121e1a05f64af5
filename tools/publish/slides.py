"""Slides for a class: `python -m tools.publish.slides`.

Of each built notebook one page in slides/ that loads nothing from anywhere: objectives, definitions
and formulas, questions and their answers, pictures, open exercises. The rest of the prose becomes
the speaker's notes, which open in a window of their own. The players lie beside the decks, and the
slide that opens a section links to those about it.
"""

import base64
import html
import re
import struct
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import nbformat
from jinja2 import Environment
from nbconvert.filters import markdown2html
from nbformat import NotebookNode

from tools.publish import players
from tools.publish.build import NOTEBOOKS, QUESTION, sources, target
from tools.publish.lesson_pages import NUMBER as NUMBERED
from tutorial_engine.viz.tokens import escape

OUT = NOTEBOOKS.parent / "slides"
DETAILS = re.compile(r"<details>.*?</details>", re.S)
HEADING = re.compile(r"^(?=#{1,4} )", re.M)
OBJECTIVE = re.compile(
    r"\*\*Objective:\*\*\s*((?:\"[^\"]*\"|[^\"])*?(?:[.?]|(?<=[.?]\")))(?=\s|$)", re.S
)
LEAD = re.compile(r"^\*\*([A-Z][^*]*[.?])\*\*\s", re.M)  # a paragraph with a title of its own
SENTENCE = re.compile(r"(?<=[.?!])\s+(?=[A-Z*`])")
TERM = re.compile(r"(?<![*\w])\*\*?[A-Za-z]")  # a word in italics or bold: it is defined here
FORMULA = re.compile(r" [=≤<≥] |`[^`]* [-+*/·] [^`]*`")
SECTION_ABOVE = re.compile(r'<p class="small">.*?</p>')
TITLE = re.compile(r"<h2>(.*?)</h2>")
SECTION = re.compile(r"^##? .*$", re.M)
TASK = re.compile(r"^### Exercise", re.M)  # its text is for who writes it
NUMBER = re.compile(r"(?<![\w.])\d")
NO_NUMBER = re.compile(r"`[^`]*`|([Nn]otebook|[Ss]ections?|[Ee]xercises?) \d+( to \d+)?|\d\.\dB")
MOST_GIVEN = 70  # words above a question
MOST_KEYS = 5  # sentences beside an objective
LEANS = re.compile(r"(So|Then|But|Therefore|It|Its|This|These)\b")  # on what was said before
MOST_LINES = 14  # of a printed output below other things
WHOLE_SLIDE = 22  # ... and alone

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<meta name="viewport" content="width=device-width">
<style>
body { margin: 0; font: clamp(16px, 3.2vmin, 48px)/1.4 system-ui, sans-serif; color: #111; }
section { box-sizing: border-box; min-height: 100vh; padding: 4vh 6vw 7vh; break-after: page;
  display: flex; flex-direction: column; justify-content: center; border-bottom: 1px solid #ccc; }
h1 { font-size: 2.2em; } h2 { font-size: 1.5em; margin: 0 0 .6em; }
.small { font-size: .8em; color: #444; margin: 0 0 .3em; }
img { width: 100%; max-height: 80vh; object-fit: contain; object-position: left; }
.given { font-size: .85em; color: #333; margin: 0 0 .4em; } .given p { margin: .3em 0; }
h2 ~ img { max-height: 62vh; }
pre { font-size: .78em; background: #f4f4f4; padding: .4em .6em; margin: .6em 0;
  overflow: auto; white-space: pre-wrap; }
ol { list-style: upper-alpha; } .notes { font-size: .62em; color: #333; max-width: 50em;
  border-top: 1px solid #999; margin-top: 1em; }
.whole .here img { position: fixed; inset: 0; width: 100vw; height: calc(100vh - 30px);
  max-height: none; object-position: center; background: #fff; }
.wide section { padding: 1vh 1vw 7vh; justify-content: start; }
.wide .here img { max-height: none; }
.deck section { display: none; } .deck section.here { display: flex; border: 0; }
.deck .notes { display: none; } .deck.told .notes { display: block; }
.deck { touch-action: pan-y pinch-zoom; }
nav { position: fixed; right: 1em; bottom: .5em; font-size: 14px; color: #444; background: #fff; }
@media print { .deck section { display: flex; } nav { display: none; } }
</style></head><body>
{% for slide in slides %}<section aria-label="{{ loop.index }} of {{ loop.length }}">
{{ slide.body }}{% if slide.notes %}<div class="notes">{{ slide.notes }}</div>{% endif %}
</section>
{% endfor %}<nav aria-live="polite"></nav>
<script>
const all = [...document.querySelectorAll("section")], nav = document.querySelector("nav");
let at = 0;
let size = 0;  // of the pictures; Z turns to the next
const sizes = ["", "whole", "wide"];
const told = ["larger picture", "as wide as the screen", "small picture"];
function foot() {
  nav.textContent = `${at + 1} / ${all.length} · ` + (matchMedia("(pointer: coarse)").matches
    ? "tap or swipe" : `← → · P: notes in a window · N: notes here · Z: ${told[size]}`);
}
function resize() {
  size = (size + 1) % sizes.length;
  document.body.classList.remove("whole", "wide");
  if (size) document.body.classList.add(sizes[size]);
  scrollTo(0, 0);
  foot();
}
function go(to) {
  all[at].classList.remove("here");
  at = Math.max(0, Math.min(all.length - 1, to || 0));
  all[at].classList.add("here");
  foot();
  history.replaceState(null, "", `#${at + 1}`);
  scrollTo(0, 0);
  tell();
}
let desk = null, began = 0;
function tell() {  // the speaker's window: number, time, notes, what comes next
  if (!desk || desk.closed) return;
  const named = (one) => one?.querySelector("h1, h2, img")?.cloneNode(true);
  const [now, next] = [named(all[at]), named(all[at + 1])];
  const line = (words, one) => Object.assign(document.createElement("p"), {
    textContent: `${words} ${one ? one.textContent || one.alt : ""}` });
  const notes = all[at].querySelector(".notes")?.cloneNode(true) || line("(no notes)");
  notes.className = "";
  const clock = Math.floor((Date.now() - began) / 60000);
  desk.document.body.replaceChildren(
    line(`${at + 1} / ${all.length} · minute ${clock} ·`, now), notes, line("Next:", next));
}
function present() {
  desk = open("", "notes", "width=640,height=720");
  if (!desk) return;
  began = began || Date.now();
  desk.document.title = "Notes: " + document.title;
  desk.document.body.style.cssText = "font: 20px/1.45 system-ui, sans-serif; margin: 1em";
  desk.onkeydown = pressed;
  tell();
}
setInterval(tell, 20000);
const keys = { ArrowRight: () => at + 1, PageDown: () => at + 1, " ": () => at + 1,
  ArrowLeft: () => at - 1, PageUp: () => at - 1, Home: () => 0, End: () => all.length - 1 };
function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const key = event.key.toLowerCase();
  if (event.key in keys) { event.preventDefault(); go(keys[event.key]()); }
  else if (key === "n") document.body.classList.toggle("told");
  else if (key === "z") resize();
  else if (key === "p") present();
}
addEventListener("keydown", pressed);
let touch = null;
addEventListener("touchstart", (event) => {
  touch = event.touches.length === 1 ? event.touches[0] : null;  // two fingers zoom
});
addEventListener("touchend", (event) => {
  if (!touch || event.target.closest("a")) return;
  const end = event.changedTouches[0], x = end.clientX - touch.clientX;
  const y = Math.abs(end.clientY - touch.clientY);
  if (Math.abs(x) > 40 && Math.abs(x) > y) go(at - Math.sign(x));
  else if (Math.abs(x) < 10 && y < 10) go(at + (3 * end.clientX < innerWidth ? -1 : 1));
});
addEventListener("hashchange", () => go(parseInt(location.hash.slice(1)) - 1));
document.body.classList.add("deck");
go(parseInt(location.hash.slice(1)) - 1);
</script></body></html>
"""


class Slide(NamedTuple):
    """What is shown, and what the speaker may say, as HTML; `joins`: on the slide before it."""

    body: str
    notes: str = ""
    joins: bool = False


def slides(learners: NotebookNode, solved: NotebookNode) -> Iterator[Slide]:
    """The slides of a lesson, from its two built copies. Exercises are those of the learner's."""
    section, task, told, titled = "", False, "", False
    inside = _inside(learners)
    since: list[str] = []  # the text since the section began, or the last answer
    for mine, theirs in zip(learners.cells, solved.cells, strict=True):
        if mine.cell_type == "markdown":
            text = DETAILS.sub("", mine.source).strip()
            since = [] if SECTION.search(text) else since
            since.append(TASK.split(SECTION.split(text)[-1])[0])
            told, text = _led(text)
            titled = False
            for part in filter(None, HEADING.split(text)):
                title, _, text = part.partition("\n")
                if not title.startswith("#"):
                    yield Slide(markdown2html(part), joins=True) if task else _said(part, section)
                    continue
                marks, _, title = title.partition(" ")
                task = title.startswith("Exercise")
                titled = len(marks) > 2 and not task
                parts = inside.get(title, []) if len(marks) == 1 and section else []
                yield _titled(title, text.strip(), section if len(marks) > 2 else "", parts)
                section = title if len(marks) < 3 else section
            continue
        if "exercise" in mine.metadata.get("tags", []):
            yield Slide(f"<pre>{escape(mine.source)}</pre>", joins=True)
        else:
            yield from _led_to(told, titled, mine, theirs, section)
            yield from _shown(mine, theirs, section, given("\n\n".join(since)))
            since = [] if ("reveal" in dict(QUESTION.findall(mine.source))) else since
        task, told, titled = False, "", False


def _said(part: str, section: str = "") -> Slide:
    """What is only to be said, unless it defines a term by a formula."""
    shown = any(TERM.search(one) and FORMULA.search(one) for one in keys(part))
    return Slide(_small(section) + _listed(keys(part)) if shown else "", markdown2html(part))


def _listed(sentences: Sequence[str]) -> str:
    return markdown2html("\n".join(f"- {one}" for one in sentences)) if sentences else ""


def _led(text: str) -> tuple[str, str]:
    """(the last paragraphs under a title of their own, what stands before them)."""
    found = list(LEAD.finditer(text))
    at = found[-1].start() if found else len(text)
    return (text[at:], text[:at]) if "\n#" not in text[at:] else ("", text)


def _led_to(
    told: str, titled: bool, mine: NotebookNode, theirs: NotebookNode, section: str
) -> Iterator[Slide]:
    """What a cell printed: with the paragraph that leads to it, or below the title before it.

    A long output has a slide of its own. Is it nothing, or too much, the paragraph is a note.
    """
    printed = "".join(o.text for o in theirs.outputs if o.output_type == "stream").rstrip()
    shown, lines = f"<pre>{escape(printed)}</pre>", printed.count("\n") + 1
    if not printed or QUESTION.search(mine.source) or lines > MOST_LINES:
        if told:
            yield _said(told)
        if titled and MOST_LINES < lines <= WHOLE_SLIDE:
            yield Slide(_small(section) + shown)
        return
    if not told:
        if titled:
            yield Slide(shown, joins=True)
        return
    lead = LEAD.match(told)
    assert lead is not None, "_led cuts before a title"
    last = told[lead.end() :].split("\n\n")[-1]
    body = f"{_small(section)}<h2>{escape(lead[1])}</h2>{markdown2html(last)}"
    yield Slide(body + shown, markdown2html(told))


def _inside(notebook: NotebookNode) -> dict[str, list[str]]:
    """Title of a sitting → its sections."""
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    found = dict[str, list[str]]()
    for part in re.split(r"^# ", text, flags=re.M):
        found[part.partition("\n")[0]] = re.findall(r"^## (.* · .*)$", part, re.M)
    return found


def _titled(title: str, text: str, section: str, parts: Sequence[str] = ()) -> Slide:
    """A heading with the objective and its definitions, an exercise's text, or the beginning.

    Below a sitting's title stand its sections, and below a section's its players.
    """
    objective = OBJECTIVE.search(text)
    shown = text if title.startswith("Exercise") else _beginning(text)
    more = f'<div class="given">{_listed(parts)}</div>' if parts else ""
    if objective:
        shown, rest = f"Objective: {objective[1]}", text[objective.end() :]
        more = _listed(keys(rest)) or markdown2html(_opening(rest))
    body = f"{_small(section)}<h2>{escape(title)}</h2>{markdown2html(shown)}{more}"
    return Slide(body + _players(title), markdown2html(text) if text != shown else "")


def _players(title: str) -> str:
    """Links to the players about a section."""
    about = NUMBERED.sub(r"\1", title)
    found = [show for show in players.entries() if show.heading == about]
    links = [
        f'<a href="players/{show.file}" target="_blank">{escape(show.title)}</a>' for show in found
    ]
    return f'<p class="player">Player: {" · ".join(links)}</p>' if links else ""


def _opening(text: str) -> str:
    """The first sentences, as many as stand above a question; without lists, tables and code."""
    found = list[str]()
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        if re.match(r"- |[#|<]|```", paragraph):
            break
        for one in SENTENCE.split(" ".join(paragraph.split())):
            if len(" ".join([*found, one]).split()) > MOST_GIVEN:
                return " ".join(found)
            found.append(one)
    return " ".join(found)


def _beginning(text: str) -> str:
    """The first paragraph, with the formula or list that it announces."""
    first, _, rest = text.partition("\n\n")
    return f"{first}\n\n{_beginning(rest)}" if first.endswith(":") and rest else first


def keys(text: str) -> list[str]:
    """The first few sentences, or lines of a list, that define a term or have a formula.

    One that leans on what its paragraph said before is shown together with that.
    """
    found = list[str]()
    text = re.sub(
        r"(:| where)\n\n(?=[\w*])", r"\1 ", text
    )  # a formula belongs to the words before it
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        for part in re.split(r"^- ", paragraph, flags=re.M):
            if not re.match(r"[|<`]", part):
                found += _keys(SENTENCE.split(" ".join(part.split())))
    return found[:MOST_KEYS]


def _keys(sentences: list[str]) -> list[str]:
    """Those of one paragraph."""
    found, since = list[str](), 0  # `since`: the first sentence that is not shown yet
    for number, one in enumerate(sentences):
        if TERM.search(one) or FORMULA.search(one):
            whole = " ".join(sentences[since : number + 1])
            leans = LEANS.match(one) and len(whole.split()) <= MOST_GIVEN
            found.append(whole if leans else one)
            since = number + 1
    return found


def given(text: str) -> str:
    """What a question builds on: the last sentences that have a number, and a list, as Markdown."""
    found = list[str]()
    for paragraph in re.split(r"\n\s*\n", OBJECTIVE.sub("", text).strip()):
        if re.match(r"- |\d\. ", paragraph):
            found.append(f"\n\n{paragraph}\n\n")
        elif not re.match(r"[#|<]", paragraph):
            said = SENTENCE.split(" ".join(paragraph.split()))
            found += [one for one in said if NUMBER.search(NO_NUMBER.sub("", one))]
    found = [one for one in found if one.count("(") == one.count(")")]
    while len(" ".join(found).split()) > MOST_GIVEN:
        del found[0]
    return " ".join(found)


def _shown(mine: NotebookNode, theirs: NotebookNode, section: str, known: str) -> Iterator[Slide]:
    """A question below what is known for it, an answer, and the pictures of a cell."""
    kinds = {kind for kind, _ in QUESTION.findall(mine.source)}
    if "ask" in kinds:
        shown = next(o for o in theirs.outputs if "text/plain" in o.get("data", {}))
        asked, *options = shown.data["text/plain"].splitlines()
        listed = "".join(f"<li>{escape(one.replace('( )', '').strip())}</li>" for one in options)
        above = f'<div class="given">{markdown2html(known)}</div>' if known else ""
        yield Slide(f"{_small(section)}{above}<h2>{escape(asked)}</h2><ol>{listed}</ol>")
    pictures = [output for output in theirs.outputs if "image/png" in output.get("data", {})]
    if "reveal" in kinds:
        said = next((o.text for o in theirs.outputs if o.output_type == "stream"), "")
        first, _, rest = said.partition("\n")
        more = f"<pre>{escape(rest.rstrip())}</pre>" if rest.strip() else ""
        if pictures and not more and _is_wide(pictures[0]):
            more = _picture(pictures.pop(0))
        yield Slide(f"{_small(section)}<h2>{escape(first)}</h2>{more}")
    for output in pictures:
        yield Slide(_small(section) + _picture(output))


def _is_wide(output: NotebookNode) -> bool:
    """Does a picture keep its size below a title?"""
    head = base64.b64decode(output.data["image/png"])[16:24]  # of every PNG
    width, height = struct.unpack(">II", head)
    return bool(width > 1.5 * height)


def _picture(output: NotebookNode) -> str:
    png, caption = output.data["image/png"].strip(), escape(output.data["text/plain"])
    return f'<img src="data:image/png;base64,{png}" alt="{caption}">'


def _small(section: str) -> str:
    return f'<p class="small">{escape(section)}</p>' if section else ""


def merged(found: Iterator[Slide]) -> list[Slide]:
    """An exercise's code and what is only to be said go to the slide before them.

    The answer of a question is one of its notes. A question has the heading above it that would
    be a slide of its own.
    """
    kept: list[Slide] = []
    for slide in found:
        if kept and "<h2>Answer: " in slide.body and "<ol>" in kept[-1].body:
            answer = TITLE.findall(slide.body)[0]  # the speaker knows it before it is shown
            kept[-1] = Slide(kept[-1].body, f"{kept[-1].notes}<p>{answer}</p>")
        if "<ol>" in slide.body and kept and _is_bare(kept[-1].body):
            above = kept.pop()
            slide = Slide(above.body + SECTION_ABOVE.sub("", slide.body), above.notes + slide.notes)
        if slide.body and not slide.joins:
            kept.append(slide)
        else:
            kept[-1] = Slide(kept[-1].body + slide.body, kept[-1].notes + slide.notes)
    return kept


def _is_bare(body: str) -> bool:
    """Is it a heading with its objective, and nothing to look at or to do?"""
    return (
        "<p>Objective: " in body
        and len(re.findall(r"<(?:p|li|pre|img|ol)\b", SECTION_ABOVE.sub("", body))) < 2
    )


@cache
def slides_of(name: str) -> list[Slide]:
    """The slides of a lesson. FileNotFoundError where it was not built."""
    both = [nbformat.read(target(name, solved), as_version=4) for solved in (False, True)]
    return merged(slides(*both))


def titles(name: str) -> tuple[list[tuple[str, int]], int]:
    """(the titles of a lesson's deck and their slides, counted from 1; how many slides it has)."""
    found = slides_of(name)
    heads = [
        (html.unescape(title), number)
        for number, slide in enumerate(found, 1)
        for title in TITLE.findall(slide.body)
    ]
    return heads, len(found)


def deck(name: str) -> str:
    """The slides of a lesson as one page. FileNotFoundError where it was not built."""
    page = Environment(autoescape=False).from_string(PAGE)
    title = nbformat.read(target(name, False), as_version=4).cells[0].source.partition("\n")[0]
    return page.render(title=escape(title.lstrip("# ")), slides=slides_of(name))


def main() -> None:
    """Write slides/NN_name.html for every lesson, and slides/players."""
    OUT.mkdir(exist_ok=True)
    players.write(OUT / "players")
    for name in sources():
        file = OUT / f"{Path(name).name}.html"
        file.write_text(deck(name), encoding="utf-8")
        print(f"wrote {file.relative_to(NOTEBOOKS.parent)}, {file.stat().st_size // 1024} KB")


if __name__ == "__main__":
    main()
