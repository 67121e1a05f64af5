"""What every picture is made of: tokens as labels, words, and a scene of named items."""

import base64
import io
import re
import unicodedata
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer, models
from traces import SVG, check_phone, check_words

from tutorial_engine.viz import words
from tutorial_engine.viz.drawing import flow, png
from tutorial_engine.viz.drawing.letters import text_width, wrapped
from tutorial_engine.viz.drawing.parts import Sheet
from tutorial_engine.viz.drawing.scene import HATCHED, Scene
from tutorial_engine.viz.drawing.style import INK, PAPER
from tutorial_engine.viz.run.block_run import blocks_said
from tutorial_engine.viz.tokens import (
    SPACE,
    escape,
    token_label,
    token_labels,
    token_names,
    visible,
    written,
)

# -- tokens ----------------------------------------------------------------------------------------


BLANKS = "".join(c for c in map(chr, range(0x3001)) if unicodedata.category(c) == "Zs")[1:]
BYTE = re.compile(r"<0x([0-9A-F]{2})>")


readable = st.text(
    st.characters(
        exclude_categories=("Cs", "Cc", "Cf", "Zl", "Zp"), exclude_characters=f"<{SPACE}↵⇥" + BLANKS
    ),
    max_size=40,
)


def bytes_of(label: str) -> bytes:
    """What a label stands for, if its text does not contain the label's own signs."""
    parts = BYTE.split(label.replace(SPACE, " "))  # text, hex, text, hex, ..., text
    return b"".join(
        bytes([int(part, 16)]) if i % 2 else part.encode() for i, part in enumerate(parts)
    )


@settings(max_examples=150, deadline=None)
@given(text=readable)
@example(text="naïve 😀 日本 e\u0301")
@example(text="{'a': 0x41} $x$ ]]> &amp;")
def test_labels_joined_are_the_bytes_of_the_text(tokenizer: Tokenizer, text: str) -> None:
    labels = token_labels(tokenizer, tokenizer.encode(text).ids)
    assert b"".join(bytes_of(label) for label in labels) == text.encode()


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40))
@example(text="<script>alert('<s>')</script>\x00\x1b[31m\r\n\t\x7f\x85")
def test_every_text_has_labels_that_can_be_seen(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    labels = token_labels(tokenizer, ids)
    assert len(labels) == len(ids)
    for label in labels:
        assert label
        hidden = {"Cc", "Cf", "Zs", "Zl", "Zp"} & {*map(unicodedata.category, label)}
        assert not hidden or "\u200d" in label, repr(label)


def test_every_id_of_the_vocabulary_has_a_label_of_its_own(tokenizer: Tokenizer) -> None:
    labels = token_labels(tokenizer, list(range(tokenizer.get_vocab_size())))
    assert all(labels) and len(set(labels)) == len(labels)


@pytest.mark.parametrize("past", [0, 1, 10**6, 2**32, 2**80])
def test_id_past_the_vocabulary_is_refused_by_name(tokenizer: Tokenizer, past: int) -> None:
    bad = tokenizer.get_vocab_size() + past
    with pytest.raises(ValueError, match=rf"{bad}.*vocabulary.*{tokenizer.get_vocab_size()}"):
        token_labels(tokenizer, [1, bad])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a b\n\t\x00\x7f", f"a{SPACE}b↵⇥<U+0000><U+007F>"),
        ("\x1b[31mred", "<U+001B>[31mred"),
        ("\u202egpj.exe\u2066x\u2069", "<U+202E>gpj.exe<U+2066>x<U+2069>"),
        ("\ufeffa\u200bb\u200cc\u200dd\u2060", "<U+FEFF>a<U+200B>b<U+200C>c<U+200D>d<U+2060>"),
        ("a\u00a0b\u3000c\u2028d\u00ade", "a<U+00A0>b<U+3000>c<U+2028>d<U+00AD>e"),
        ("\U000e0041\U0001d173", "<U+E0041><U+1D173>"),
        *((same, same) for same in ("naïve e\u0301 日本 ไทย नमस्ते", "😀👍🏽❤\ufe0f")),
        *((same, same) for same in ("👩\u200d💻", "👩🏽\u200d🚀", "❤\ufe0f\u200d🔥")),
    ],
)
def test_what_nobody_would_see_is_written_out(text: str, shown: str) -> None:
    assert visible(text) == shown.replace(" ", SPACE)
    assert written(text) == shown.replace(SPACE, " ")
    assert token_label(Tokenizer(models.WordLevel({text: 0}, unk_token=text)), 0) == visible(text)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(), max_size=30))
@example(text="\x00\x08\x0b\x1f\x7f\x9f")
@example(text="\ufffe\uffff")
@example(text="\ud800")
def test_escaped_text_is_always_wellformed_xml(text: str) -> None:
    element = ET.fromstring(f'<a b="{escape(text)}">{escape(text)}</a>')
    assert len(element) == 0 and element.attrib.keys() == {"b"}
    shown = element.text or ""
    for old, new in zip(text, shown, strict=True):
        assert new == old or (new == "�" and unicodedata.category(old) in ("Cc", "Cs", "Cn"))


def test_a_token_that_the_tokenizer_does_not_have_has_a_label(tokenizer: Tokenizer) -> None:
    assert token_names(tokenizer, [70, 9999]) == {70: token_label(tokenizer, 70), 9999: "<id 9999>"}


# -- scenes ----------------------------------------------------------------------------------------


def drawn(words: str, tip: str = "", hint: str = "") -> Scene:
    scene = Scene(220, 60, tip_at=(4, 52), hint=hint)
    scene.add("box", "rect", x=2, y=2, width=40, height=20, fill=HATCHED, tip=tip)
    scene.text("words", 50, 20, words)
    return scene


def texts(scene: Scene) -> list[str | None]:
    """Of the hint, the tip, and the item."""
    return [element.text for element in ET.fromstring(scene.svg()).iter(f"{SVG}text")]


@pytest.mark.parametrize(
    "words", ["</text></svg><script>1</script>", "<s> &amp; \"]]>'", "naïve 😀"]
)
def test_text_stays_text_in_svg(words: str) -> None:
    assert texts(drawn(words, tip=words, hint=words)) == [words] * 3
    plain = drawn("plain", tip="plain", hint="plain").svg()
    assert drawn(words, tip=words, hint=words).svg().count("<") == plain.count("<")


def test_two_pictures_on_a_page_share_no_id() -> None:
    svg = drawn("words", tip="tip", hint="hint").svg()
    assert not re.search(r"\sid=|url\(#|href", svg), "it means the first of a page, drawn or not"


@given(
    x=st.floats(0, 40),
    y=st.floats(0, 40),
    w=st.floats(0, 90),
    h=st.floats(0, 40),
    edge=st.booleans(),
)
def test_stripes_stay_inside_their_box(x: float, y: float, w: float, h: float, edge: bool) -> None:
    scene = Scene(200, 100)
    scene.rect("box", (x, y, w, h), HATCHED, **({"stroke": INK} if edge else {}))
    found = re.search('class="te-stripes" d="([^"]+)"', scene.svg())
    lines = re.findall(r"M([\d.]+) ([\d.]+)l([\d.]+) -([\d.]+)", found[1]) if found else []
    assert bool(lines) or min(w, h) < 9.5, "from stripe to stripe there are 8.5 pixels"
    for line in lines:
        x0, y0, right, up = map(float, line)
        assert right == up  # they all rise alike
        assert x <= x0 and x0 + right <= x + w + 0.1 and y0 <= y + h + 0.1 and y <= y0 - up + 0.1


def test_what_xml_cannot_carry_becomes_a_sign() -> None:
    scene = drawn("a\x00b\x1b\u202e\ud800c", tip="\u200b")
    assert texts(scene) == ["<U+200B>", "a<U+0000>b<U+001B><U+202E>�c"]
    assert scene.picture("\ufeffa").caption == "<U+FEFF>a"


def test_words_in_the_png_come_from_the_bundled_font(monkeypatch: pytest.MonkeyPatch) -> None:
    def pixels(scene: Scene) -> bytes:
        return Image.open(io.BytesIO(scene.png())).convert("RGB").tobytes()

    assert pixels(drawn("words")) != pixels(drawn(""))
    monkeypatch.setattr(png, "font_file", lambda bold: Path(__file__))  # no font
    assert pixels(drawn("words")) == pixels(drawn("")), "no system font steps in"


@settings(max_examples=60, deadline=None)
@example("W" * 400)
@example("Wendy and MAXIMILIAN WWWW. " * 20)
@given(st.text(max_size=300))
def test_a_caption_stays_inside_its_picture_and_loses_no_word(caption: str) -> None:
    lines = wrapped(caption, 300, 13)
    assert all(text_width(line, 13) <= 300 for line in lines)
    assert "".join(lines).replace(" ", "") == "".join(written(caption).split())
    few, many = (wrapped(letter * 100, 300, 13) for letter in "iW")
    assert len(few) < len(many), "lines are measured, not counted"


def test_a_picture_has_its_caption_as_alt_text_and_is_saved_as_it_is_shown(tmp_path: Path) -> None:
    picture = drawn("words").picture('3 < 4 & "so on" 😀')
    data, metadata = picture._repr_mimebundle_()
    assert base64.b64decode(data["image/png"]) == picture.png
    assert data["text/plain"] == picture.caption == '3 < 4 & "so on" 😀'
    assert metadata["image/png"]["alt"] == picture.caption
    picture.save(tmp_path / "new", "01_name")
    assert (tmp_path / "new" / "01_name.png").read_bytes() == picture.png
    assert (tmp_path / "new" / "01_name.svg").read_text(encoding="utf-8") == picture.svg


# -- the layout core -------------------------------------------------------------------------------


short = st.text("abcdefgh mW", min_size=1, max_size=12).map(str.strip).filter(bool)
boxes = st.builds(flow.words, short, st.sampled_from([11, 12, 14])) | st.builds(
    flow.cell, st.integers(8, 90), st.integers(18, 30), st.just("free"), said=short
)
stacks = boxes | st.lists(boxes, min_size=1, max_size=3).map(lambda some: flow.column(*some))
some_row = st.lists(boxes, min_size=1, max_size=2).map(lambda some: flow.row(*some))
pieces = stacks | some_row | st.builds(flow.framed, boxes, fill=st.just(PAPER))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(pieces, min_size=1, max_size=7), min_size=1, max_size=5), short)
def test_pieces_lie_over_no_others_and_a_phone_sees_each_whole(
    lines: list[list[flow.Piece]], title: str
) -> None:
    table = flow.table(lines, least=[40], across=[0, 1, 0.5])
    both = flow.column(flow.panel(title, table), flow.panel("", flow.words("below", 12)))
    sheet = flow.show(Sheet(max(both.wide, 300) + 30, 0), both, 44)
    check_words(sheet, widest=2000)
    check_phone([sheet])


# -- words ----------------------------------------------------------------------------------------


def test_counts_and_lists_are_said_as_people_do() -> None:
    assert [words.tokens(1), words.tokens(2)] == ["1 token", "2 tokens"]
    assert words.verb("ABC", "waits", "wait") == "A, B and C wait"
    assert words.numbered([4], "cell") == "cell 4" and words.signed(-2) == "−2"
    assert words.numbered([1, 0], "cell") == "cells 0 and 1"
    assert words.numbered(range(5), "cell") == "cells 0 to 4"
    assert blocks_said([3]) == "block 3" and blocks_said([*range(4), 9]) == "blocks 0 to 3 and 9"


@pytest.mark.parametrize(
    ("p", "said"),
    [(0.0, "< 1 %"), (0.0049, "< 1 %"), (0.43, "43 %"), (0.994, "99 %"), (1.0, "> 99 %")],
)
def test_per_cents_never_claim_what_is_not_so(p: float, said: str) -> None:
    assert words.percent(p) == said
