"""Scenes: names are unique, text is text in SVG and PNG, and files are the same every time."""

import base64
import io
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from tutorial_engine.viz import scene as scene_module
from tutorial_engine.viz.picture import Picture, bundle
from tutorial_engine.viz.scene import HATCHED, Scene

NASTY = [
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
SVG = "{http://www.w3.org/2000/svg}"


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


@pytest.mark.parametrize("words", NASTY)
def test_text_stays_text_in_svg(words: str) -> None:
    root = parsed(drawn(words, tip=words, hint=words))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert texts == [words, words, words]  # hint, tip, item
    assert tags(root) == tags(parsed(drawn("plain", tip="plain", hint="plain")))


def test_what_xml_cannot_carry_becomes_a_sign() -> None:
    root = parsed(drawn("a\x00b\x1b\x0b\ud800c"))
    assert root.findall(f".//{SVG}text")[-1].text == "a�b���c"


def test_names_and_attribute_values_cannot_break_out() -> None:
    scene = Scene(10, 10)
    scene.add('a" onload="alert(1)', "rect", fill='red"><script/>')
    rect = parsed(scene).findall(f"{SVG}rect")[-1]
    assert rect.attrib == {"id": 'a" onload="alert(1)', "fill": 'red"><script/>'}


def test_svg_runs_no_script_and_loads_nothing() -> None:
    root = parsed(drawn("words", tip="tip"))
    assert f"{SVG}script" not in tags(root) and f"{SVG}image" not in tags(root)
    for element in root.iter():
        assert not any(name.startswith("on") for name in element.attrib)
        links = [value for name, value in element.attrib.items() if "href" in name]
        assert all(link.startswith("#") for link in links)  # inside the picture itself


def test_hovering_shows_the_tip_of_the_thing() -> None:
    root = parsed(drawn("words", tip="the tip"))
    hot = root.find(f"{SVG}g[@class='te-hot']")
    assert hot is not None
    assert hot[0].attrib["id"] == "box"
    assert [text.text for text in hot[1].iter(f"{SVG}text")] == ["the tip"]
    style = root.find(f"{SVG}style")
    assert style is not None and style.text is not None
    assert "display:none" in style.text and ".te-hot:hover" in style.text


def test_a_name_is_given_once() -> None:
    scene = drawn("words")
    with pytest.raises(ValueError, match="already has an item 'words'"):
        scene.text("words", 0, 0, "again")
    assert scene.items["words"].text == "words"


def test_items_are_drawn_in_the_order_they_were_added() -> None:
    scene = Scene(10, 10)
    for name in ("c", "a", "b"):
        scene.add(name, "rect")
    ids = [element.attrib["id"] for element in parsed(scene) if "id" in element.attrib]
    assert ids == ["c", "a", "b"]


def test_python_names_become_svg_attributes() -> None:
    scene = Scene(10, 10)
    scene.add("line", "line", class_="thin", stroke_width=1.50, x1=2.0, x2=3)
    line = parsed(scene).find(f"{SVG}line")
    assert line is not None
    assert line.attrib == {"id": "line", "class": "thin", "stroke-width": "1.5"} | {
        "x1": "2",
        "x2": "3",
    }


def test_png_is_the_scene_at_its_size_and_never_differs() -> None:
    png = drawn("words").png(zoom=1.0)
    image = Image.open(io.BytesIO(png))
    assert image.format == "PNG" and image.size == (220, 60)
    assert len(set(image.convert("RGB").getdata())) > 2  # not a blank sheet
    assert drawn("words").png(zoom=1.0) == png


def test_words_are_in_the_png() -> None:
    assert pixels(drawn("words").png()) != pixels(drawn("").png())
    assert pixels(drawn("words").png()) != pixels(drawn("other").png())


def test_words_in_the_png_come_from_the_bundled_font(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [Path(file) for file in scene_module._font_files()]
    assert files and all(file.is_file() and "DejaVuSans" in file.name for file in files)
    monkeypatch.setattr(scene_module, "_font_files", lambda: [])
    assert pixels(drawn("words").png()) == pixels(drawn("").png())  # no system font steps in


def test_the_hint_is_in_the_png_and_the_tip_is_not() -> None:
    plain = pixels(drawn("words").png())
    assert pixels(drawn("words", hint="hover").png()) != plain
    assert pixels(drawn("words", tip="secret").png()) == plain


@pytest.mark.parametrize("words", NASTY)
def test_png_of_any_text_can_be_drawn(words: str) -> None:
    assert pixels(drawn(words).png()) != pixels(drawn("").png())


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


def test_saved_svg_is_what_was_drawn(tmp_path: Path) -> None:
    picture = Picture("<svg>naïve</svg>", b"png", "caption")
    picture.save(tmp_path, "x")
    picture.save(tmp_path, "x")  # a second time over the first
    assert (tmp_path / "x.svg").read_text(encoding="utf-8") == picture.svg
    assert (tmp_path / "x.png").read_bytes() == b"png"
