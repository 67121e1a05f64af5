"""The site: what it is made from, always; the built pages in a browser with `make test-site`."""

import os
import re
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
from browser import APPEARANCE, barriers, chromium
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tools.publish import cheat_sheet, lesson_pages, site
from tools.publish.build import LESSONS
from tools.publish.players import SHOWS, show_of
from tools.publish.references import linked
from tutorial_engine.model.checkpoint import load_model, load_tokenizer

ROOT = Path(__file__).resolve().parents[1]

# -- what it is made from -------------------------------------------------------------------------


def test_each_word_of_the_glossary_links_to_a_heading_that_exists() -> None:
    terms = site.glossary()
    assert len({term.name for term in terms}) == len(terms)
    for term in terms:
        assert site.link(term.lesson, term.heading).count("#") == 1
        assert term.meaning.endswith((".", ".)")) and term.meaning.count("`") % 2 == 0, term.name
    with pytest.raises(ValueError, match="no section 'The block chain'; it has"):
        site.link(terms[0].lesson, "The block chain")


def test_the_pages_that_are_made_have_all_players_and_leave_no_blank() -> None:
    assert site.cards().count("<iframe") == len(site.HOME) == 4
    assert all(f"players/{show.file}" in site.players_page() for show in SHOWS)
    with pytest.raises(KeyError, match="nobody"):
        site.filled("<!-- nobody -->", {})


def test_a_card_cuts_no_line_of_text_in_two() -> None:
    """Its box is typed, and the picture may change; at the right a phone may cut a row of cells."""
    model, tokenizer = load_model(), load_tokenizer()
    for show in map(show_of, site.HOME):
        assert show.card is not None
        items = show.make(model, tokenizer).runs[0][-1].scene.items.values()
        for x, y, wide, tall in filter(None, (show.card.box, show.card.phone)):
            for item in items:
                if item.tag != "text":
                    continue
                at, base, size = (float(item.attributes[k]) for k in ("x", "y", "font-size"))
                for edge in (y, y + tall):
                    inside = base - 0.8 * size < edge < base + 0.2 * size and x <= at < x + wide
                    assert not inside, f"{show.name}: {item.text} lies on {edge}"


def test_a_link_to_what_the_site_does_not_have_becomes_words(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("[a](b.py), [c](https://example.org), ![e](f.png) and [g](#h)")
    assert site.localised(page) == "a, [c](https://example.org), ![e](f.png) and [g](#h)"
    readme = site.localised(ROOT / "README.md")
    assert "(architecture.md)" in readme and "(lessons/01_attention_rope.ipynb)" in readme
    assert f"({site.REPOSITORY}/tree/HEAD/examples)" in readme
    lesson = site.localised(ROOT / "docs" / "teaching" / "05.md")
    assert '<a href="../players/preemption.html#t=7">' in lesson


def test_what_a_text_names_can_be_opened() -> None:
    """Files, a thread and papers, each paper once; nothing in code, headings, links and tags."""
    known = set[str]()
    text = linked("`vllm/v1/engine/core.py`: look. PagedAttention, and PagedAttention.", known)
    file, paper = re.findall('href="([^"]+)"', text)
    assert file == "https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/engine/core.py"
    assert paper in known and "<code>vllm/v1/engine/core.py</code></a>: look." in text
    assert 'vllm/pull/37307">pull request 37307</a>' in linked("see pull request 37307")
    for kept in (
        "PagedAttention once more",
        "# FlashAttention",
        "[FlashAttention](a.md)",
        "`FlashAttention()`",
        "```\nvllm/v1/engine/core.py\n```",
        "tools/vllm/serve.py",
        '<a href="b">FlashAttention</a>',
    ):
        assert linked(kept, known) == kept
    reading = (ROOT / "docs" / "reading-on.md").read_text(encoding="utf-8")
    files = re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|h|cpp))`", reading)
    assert len(files) > 15 and all(f'/{one}">' in linked(reading) for one in files)


def test_a_module_of_the_package_names_the_lessons_that_use_it() -> None:
    used = site.shown_in()
    assert [one.code for one in used["tutorial_engine.model.rope"]] == ["01"]
    assert used["tutorial_engine.cache.paged"][0].code == "04", "a name that its room hands out"
    pages = dict(site.api_pages())
    assert pages["cache"].index("## cache.rows") < pages["cache"].index("## cache.paged")
    assert all(f"\n{room}\n" in pages["index"] for room in site.ROOMS)


def sources(cells: list[nbformat.NotebookNode], kind: str) -> list[str]:
    return [cell.source for cell in cells if cell.cell_type == kind]


def test_a_lesson_page_is_for_readers_and_loses_no_cell() -> None:
    """No installer, no word of a cell that waits for a run; every question with its answer."""
    for lesson in LESSONS:
        notebook, sittings = lesson_pages.built(lesson), lesson_pages.pages(lesson)
        asked = lesson_pages.questions(lesson)
        inside = "".join(nbformat.writes(page.notebook) for page in sittings)
        for words in ("Choose an answer above, then run", "not done yet: the body", "google.colab"):
            assert words not in inside, words
        assert inside.count('class=\\"ask\\"') == len(asked) > 0
        assert inside.count("data:image/png;base64,") == 0, "pictures are files"
        cells = [cell for page in sittings for cell in page.notebook.cells]
        kept = [one for one in sources(cells, "markdown") if not one.startswith("<div class")]
        assert len(kept) >= len(sources(notebook.cells, "markdown")) - len(sittings)
        all_code = sources(notebook.cells, "code")
        assert len(sources(cells, "code")) >= len(all_code) - 1 - len(asked)
        for page in sittings:
            assert page.notebook.cells[0].source.startswith(f"# {page.title}")


def test_a_picture_of_a_lesson_opens_alone_and_a_figure_as_svg() -> None:
    """All but two: what a run measures is not what the run of the figures measured."""
    for lesson in LESSONS:
        inside = [nbformat.writes(page.notebook) for page in lesson_pages.pages(lesson)]
        shown = "".join(inside).count('<a class=\\"picture\\"')
        goals = re.findall(r'<a class=\\"picture\\" href=\\"../(\w+)/', "".join(inside))
        assert len(goals) == shown > 0
        assert goals.count("figures") >= shown - {"02": 2, "06": 1}.get(lesson.code, 0), lesson


def test_each_question_has_one_right_answer_and_that_is_the_runs() -> None:
    quiz = site.quiz_page()
    for lesson in LESSONS:
        for name, one in lesson_pages.questions(lesson).items():
            assert len({*one.options}) == len(one.options) >= 2 and one.right in one.options, name
            assert one.html("").count(" data-right>") == 1 and "\n" not in one.html("")
            assert one.html("") in quiz
            assert site.link(lesson, one.heading) in quiz
        files = lesson_pages.pictures(lesson)
        assert all(png.startswith(b"\x89PNG") for png in files.values())
        asked = "".join(one.html("") for one in lesson_pages.questions(lesson).values())
        shown = {*re.findall(r'<img[^>]* src="pictures/([^"]+)"', asked)}
        both = files.keys() | {lesson_pages.by_night(file) for file in files}
        assert shown <= both and len(shown & files.keys()) == asked.count('<a class="picture"')


def test_a_heading_leads_to_the_page_of_its_sitting() -> None:
    for lesson in LESSONS:
        for page in lesson_pages.pages(lesson):
            text = "\n".join(sources(page.notebook.cells, "markdown"))
            found = {lesson_pages.slug(one) for one in re.findall(r"^#{1,3} (.+)$", text, re.M)}
            ours = {a for name, a in lesson_pages.headings(lesson).values() if name == page.name}
            assert ours <= found, page.name


def test_the_cheat_sheet_has_a_worked_example_of_each_formula() -> None:
    page = (site.SITE / "cheat_sheet.md").read_text(encoding="utf-8")
    blanks = set(re.findall(r"<!-- (\w+) -->", page))
    figures = cheat_sheet.figures()
    assert blanks == figures.keys() | cheat_sheet.SECTIONS.keys()
    for code, heading in cheat_sheet.SECTIONS.values():
        assert site.link(site.lesson_of(code), heading)
    rows = [line for line in page.splitlines() if line.startswith("| **")]
    assert len(rows) > 8 and all("<!--" in row for row in rows)
    assert figures["token_bytes"] == f"{2 * 28 * 8 * 128 * 2:,} bytes" and figures["slot"] == "6"


# -- the built pages ------------------------------------------------------------------------------


class Links(HTMLParser):
    """Ids, links and pictures of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.ids, self.goals, self.alts = set[str](), list[str](), list[str]()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.ids.add(known.get("id") or "")
        if tag == "img":
            self.alts.append(known.get("alt") or "")
        goal = known.get("href") or known.get("src")
        if goal and tag != "use":
            self.goals.append(goal)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built once: one of several workers does it, and the others wait."""
    pytest.importorskip("sphinx")
    top = tmp_path_factory.getbasetemp()
    folder = (top.parent if "PYTEST_XDIST_WORKER" in os.environ else top) / "built"
    try:
        folder.mkdir()
    except FileExistsError:  # another worker is at it
        until = time.monotonic() + 600
        while not (folder / "done").is_file():
            assert time.monotonic() < until, "the other worker does not come to an end"
            time.sleep(0.1)
    else:
        try:
            site.gather(folder / "source")
            site.build(folder / "source", folder / "site")
        finally:
            (folder / "done").touch()
    return folder / "site"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def offline(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(offline=True)
    yield context
    context.close()


# Folders whose pages are looked at; "": all others. Those of the last one are long and alike, and
# are seen on a screen only.
PARTS = ("lessons", "", "players", "api")


def part_of(file: Path, built: Path) -> str:
    """The folder of a page, if it is one of those that are looked at by themselves."""
    folder = file.relative_to(built).parts[0]
    return folder if folder in PARTS else ""


def watched(context: BrowserContext) -> tuple[Page, list[str]]:
    """A page, and what goes wrong on it: failed or remote requests, words on the console."""
    page, wrong = context.new_page(), list[str]()
    page.on("requestfailed", lambda request: wrong.append(f"failed: {request.url}"))
    page.on("console", lambda message: wrong.append(f"said: {message.text}"))
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on(
        "request",
        lambda request: request.url.startswith(("file:", "data:")) or wrong.append(request.url),
    )
    return page, wrong


@pytest.mark.site
def test_no_file_names_this_machine(built: Path) -> None:
    files = [file for file in built.rglob("*") if file.is_file()]
    assert len(files) > 100
    assert [file for file in files if f"{ROOT}/".encode() in file.read_bytes()] == []


@pytest.mark.site
def test_every_link_lands_and_every_picture_has_its_words(built: Path) -> None:
    pages = {page: Links(page) for page in built.rglob("*.html")}
    assert len(pages) > 40
    for page, found in pages.items():
        assert all(found.alts), page
        for goal in found.goals:
            parts = urlsplit(goal)
            if parts.scheme:
                continue
            file = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            assert file.is_file(), f"{page}: {goal}"
            if parts.fragment and file.suffix == ".html" and not parts.fragment.startswith("t="):
                assert unquote(parts.fragment) in pages[file].ids, f"{page}: {goal}"
    for show in SHOWS:
        assert "../players.html" in pages[built / "players" / show.file].goals
    for lesson in LESSONS:
        file = built / f"{site.page_of(lesson)}.html"
        captions = [words for words in pages[file].alts if len(words.split()) > 8]
        assert captions or "/" in lesson.notebook, "pictures have their captions as alt texts"
        for sitting in lesson_pages.pages(lesson):
            size = (built / "lessons" / f"{sitting.name}.html").stat().st_size
            assert size <= 300 * 1024, f"{sitting.name} has {size // 1024} KB"


@pytest.mark.site
@pytest.mark.browser
@pytest.mark.parametrize(
    ("part", "scheme"),
    [(part, scheme) for part in PARTS for scheme in ("light", "dark")][:-1],
)
def test_every_page_opens_from_disk_and_shuts_out_nobody(
    built: Path, browser: Browser, part: str, scheme: str
) -> None:
    """On a screen all rules; on a dark phone those that colours and sizes decide, and all of them
    on one page of each folder: the rest of the markup is the same on both."""
    phone = scheme == "dark"
    context = browser.new_context(
        offline=True, color_scheme=scheme, viewport={"width": 390 if phone else 1280, "height": 844}
    )
    page, wrong = watched(context)
    files = [file for file in sorted(built.rglob("*.html")) if part_of(file, built) == part]
    assert len(files) > 4
    known = set[Path]()
    for file in files:
        page.goto(file.as_uri())
        all_rules = not phone or file.parent not in known
        assert barriers(page, () if all_rules else APPEARANCE) == [], file
        assert page.title() and wrong == [], file
        known.add(file.parent)
    context.close()


@pytest.mark.site
@pytest.mark.browser
def test_what_shuts_somebody_out_is_found(built: Path, offline: BrowserContext) -> None:
    page, _ = watched(offline)
    page.goto((built / "players" / f"{site.HOME[0]}-card.html").as_uri())
    assert barriers(page) == []
    page.evaluate("document.getElementById('play').textContent = ''")
    assert any(one.startswith("button-name") for one in barriers(page))
    page.goto((built / "players" / SHOWS[0].file).as_uri())
    page.evaluate("document.getElementById('caption').style.color = '#ccc'")
    for only in ((), APPEARANCE):
        assert any(one.startswith("color-contrast") for one in barriers(page, only))


@pytest.mark.site
@pytest.mark.browser
def test_the_search_finds_from_disk(built: Path, offline: BrowserContext) -> None:
    page, wrong = watched(offline)
    page.goto((built / "index.html").as_uri())
    while not page.evaluate("document.activeElement.placeholder === 'Search'"):
        page.keyboard.press("Tab")
    page.keyboard.type("block table")
    page.keyboard.press("Enter")
    found = page.locator("#search-results li a")
    expect(found.filter(has_text="Glossary").first).to_be_visible()
    lesson = page.locator('#search-results li a[href*="lessons/0"]')
    expect(lesson.first).to_be_visible(timeout=15_000)  # the list grows as it is searched
    assert page.locator('#search-results li a[href*="api/"]').count() == 0, "lessons come first"
    assert wrong == []


@pytest.mark.site
@pytest.mark.browser
@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_the_first_page_moves_where_it_may_and_fits_a_phone(
    built: Path, browser: Browser, motion: str
) -> None:
    context = browser.new_context(
        offline=True, reduced_motion=motion, viewport={"width": 390, "height": 844}
    )
    page, wrong = watched(context)
    page.goto((built / "index.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    frames = page.locator("iframe").all()
    assert len(frames) == len(site.HOME)
    for frame in frames:
        frame.scroll_into_view_if_needed()
        inside = frame.content_frame
        button = inside.locator("#play")
        expect(button).to_have_text("▶ Play" if motion == "reduce" else "❚❚ Pause")
        before = inside.locator("#caption").text_content()
        if motion == "reduce":
            page.wait_for_timeout(300)
            assert inside.locator("#caption").text_content() == before
        else:
            expect(inside.locator("#caption")).not_to_have_text(before or "", timeout=10_000)
        button.click()
        expect(button).to_have_text("❚❚ Pause" if motion == "reduce" else "▶ Play")
    assert wrong == []
    context.close()


@pytest.mark.site
@pytest.mark.browser
def test_a_question_is_answered_with_the_keyboard_alone(
    built: Path, offline: BrowserContext
) -> None:
    page, wrong = watched(offline)
    page.goto((built / "quiz.html").as_uri())
    asks = page.locator(".ask")
    count = asks.count()
    assert count == sum(len(lesson_pages.questions(lesson)) for lesson in LESSONS)
    for number, ask in enumerate(asks.all(), 1):
        button = ask.locator(
            "button[data-right]" if number % 2 else "button:not([data-right])"
        ).first
        assert not ask.locator("details").evaluate("one => one.open")
        button.focus()
        page.keyboard.press("Enter")
        assert ask.locator("details").evaluate("one => one.open")
        assert ask.locator("button[aria-pressed=true]").count() == 1
        good = "As you predicted." if number % 2 else "Read the answer to see why."
        expect(ask.locator(".ask-said")).to_have_text(good)
        ask.locator("button").last.press("Enter")  # the first choice counts
        assert ask.locator("button[aria-pressed=true]").count() == 1
    expect(page.locator("#score")).to_have_text(f"{(count + 1) // 2} of {count} right; 0 to go.")
    assert wrong == []


@pytest.mark.site
def test_no_page_of_the_site_loads_from_another_host(built: Path) -> None:
    loads = re.compile(
        r"""(?:<(?:script|img|iframe|link)\b[^>]*(?:src|href)=|@import\s+|url\()["']?(https?:)?//"""
    )
    for file in [*built.rglob("*.html"), *built.rglob("*.css")]:
        text = re.sub(r'<link rel="canonical"[^>]*>', "", file.read_text(encoding="utf-8"))
        assert not loads.search(text), file
