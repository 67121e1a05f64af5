"""What every picture is made of: tokens as labels, words, and a scene of named items."""

import base64
import io
import re
import unicodedata
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer, models
from traces import SVG

from tutorial_engine.viz import scene as scene_module
from tutorial_engine.viz.picture import bundle
from tutorial_engine.viz.scene import HATCHED, Scene
from tutorial_engine.viz.tokens import (
    SPACE,
    escape,
    token_label,
    token_labels,
    token_names,
    visible,
    written,
)
from tutorial_engine.viz.words import percent

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


MARKUP = [
    "<script>alert(1)</script>",
    "<s>",
    "<think>hm</think>",
    "<pad><img src=x onerror=alert(1)>",
    "\"double\" and 'single'",
    "&amp; &lt; &#65;",
    "naïve 😀 日本",
    "]]>",
    "<!-- no comment -->",
    "$x$ and $\\frac{1}{2}$",
    "</text></svg>",
]


def drawn(words: str, tip: str = "", hint: str = "") -> Scene:
    scene = Scene(220, 60, tip_at=(4, 52))
    scene.hint = hint
    scene.add("box", "rect", x=2, y=2, width=40, height=20, fill=HATCHED, tip=tip)
    scene.text("words", 50, 20, words)
    return scene


def parsed(scene: Scene) -> ET.Element:
    return ET.fromstring(scene.svg())


def tags(root: ET.Element) -> Counter[str]:
    return Counter(element.tag for element in root.iter())


def pixels(png: bytes) -> bytes:
    return Image.open(io.BytesIO(png)).convert("RGB").tobytes()


@pytest.mark.parametrize("words", MARKUP)
def test_text_stays_text_in_svg(words: str) -> None:
    root = parsed(drawn(words, tip=words, hint=words))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert texts == [words, words, words]  # hint, tip, item
    assert tags(root) == tags(parsed(drawn("plain", tip="plain", hint="plain")))


def test_what_xml_cannot_carry_becomes_a_sign() -> None:
    scene = drawn("a\x00b\x1b\u202e\ud800c", tip="\u200b")
    assert [e.text for e in parsed(scene).iter(f"{SVG}text")] == [
        "<U+200B>",
        "a<U+0000>b<U+001B><U+202E>�c",
    ]
    assert scene.picture("\ufeffa").caption == "<U+FEFF>a"


def test_svg_runs_no_script_and_loads_nothing() -> None:
    root = parsed(drawn("words", tip="tip"))
    assert f"{SVG}script" not in tags(root) and f"{SVG}image" not in tags(root)
    for element in root.iter():
        assert not any(name.startswith("on") for name in element.attrib)
        links = [value for name, value in element.attrib.items() if "href" in name]
        assert all(link.startswith("#") for link in links)  # inside the picture itself


def test_png_is_the_scene_at_its_size_and_never_differs() -> None:
    png = drawn("words").png(zoom=1.0)
    image = Image.open(io.BytesIO(png))
    assert image.format == "PNG" and image.size == (220, 60)
    assert len(set(image.convert("RGB").getdata())) > 2  # not a blank sheet
    assert drawn("words").png(zoom=1.0) == png


def test_words_in_the_png_come_from_the_bundled_font(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [Path(file) for file in scene_module._font_files()]
    assert files and all(file.is_file() and "DejaVuSans" in file.name for file in files)
    monkeypatch.setattr(scene_module, "_font_files", lambda: [])
    assert pixels(drawn("words").png()) == pixels(drawn("").png())  # no system font steps in


def test_picture_is_shown_as_png_with_its_caption_as_alt_text() -> None:
    picture = drawn("words").picture('3 < 4 & "so on" 😀')
    data, metadata = picture._repr_mimebundle_()
    assert data.keys() == {"image/png", "text/plain"}
    assert base64.b64decode(data["image/png"]) == picture.png
    assert data["text/plain"] == picture.caption == '3 < 4 & "so on" 😀'
    assert metadata["image/png"]["alt"] == picture.caption
    assert (data, metadata) == bundle(picture.png, picture.caption)


def test_saving_twice_gives_the_same_files(tmp_path: Path) -> None:
    def save(folder: Path) -> dict[str, bytes]:
        drawn("naïve 😀", tip="tip").picture("A caption.").save(folder, "01_name")
        return {file.name: file.read_bytes() for file in folder.iterdir()}

    first, second = save(tmp_path / "a" / "new"), save(tmp_path / "b")
    assert first == second and first.keys() == {"01_name.svg", "01_name.png"}
    assert ET.fromstring(first["01_name.svg"]).tag == f"{SVG}svg"


# -- words -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "said"),
    [(0.0, "< 1 %"), (0.0049, "< 1 %"), (0.43, "43 %"), (0.994, "99 %"), (1.0, "> 99 %")],
)
def test_per_cents_never_claim_what_is_not_so(p: float, said: str) -> None:
    assert percent(p) == said
