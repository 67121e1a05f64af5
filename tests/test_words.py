"""The words of pictures in one place: with another table of templates no English word is left."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable
from pathlib import Path
from string import ascii_letters
from typing import Any

import ipywidgets as widgets
import pytest
from explorers import MAKE, PROMPT, Text, inside, message_of, turn
from inputs import recorded_softmax
from traces import SVG, check_phone, check_words

from tutorial_engine import viz
from tutorial_engine.lab.vllm import recorded_run
from tutorial_engine.model.checkpoint import load_model, load_tokenizer
from tutorial_engine.viz import words
from tutorial_engine.viz.block_facts import blocks_said
from tutorial_engine.viz.cache_explorer import CacheExplorer
from tutorial_engine.viz.explorer import Explorer, choice, number
from tutorial_engine.viz.jukebox_view import Take, jukebox_frames
from tutorial_engine.viz.leak_view import Held, Leak
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.player import Frame
from tutorial_engine.viz.scene import Scene
from tutorial_engine.viz.softmax_view import RecordedSoftmax, softmax_frames

GREEK = str.maketrans(ascii_letters, "αβγδεζηθικλμνξοπρςστυφχψωϊΑΒΓΔΕΖΗΘΙΚΛΜΝΞΟΠΡΣΤΥΦΧΨΩΪΫ")
ROOM = {"queue", "jukebox", "overlap", "radix", "leak"}  # for words a third longer
UNITS = {"KiB"}  # of numbers
NUMBERS = {i: str(i) for i in range(40)}
THERE = tuple(tuple(Held(who, i, str(i)) for i in range(4)) for who in (0, 1))
LEAK = Leak(
    *(("A", "B", "C"), ("1", "2", "1"), ("3", "4", "5"), (0,)),
    held=((THERE[0],), ((*THERE[1][:3], THERE[0][3]),)),
    wanted=(("0", "1", "2", "9"),),
)
TAKES = [Take("4", "5", 7.25, 0.125), Take("6", "7", 21.5, 9.0)]


class Invented(dict[str, str]):
    """A table with every template in it: its words in Greek letters; `longer`: by a third."""

    def __init__(self, longer: bool = False) -> None:
        self.longer = longer

    def get(self, template: str, english: Any = None) -> str:
        parts = re.split(r"(\{.*?\})", template)  # every other one is a field
        parts[::2] = [self._other(part) for part in parts[::2]]
        return "".join(parts)

    def _other(self, said: str) -> str:
        more = re.sub("([a-z])([a-z]{2})", r"\1\2\1", said) if self.longer else said
        return more.translate(GREEK)


def explorer(name: str) -> Explorer:
    made = MAKE[name](load_model(), load_tokenizer(), PROMPT)
    if isinstance(made, CacheExplorer):
        turn(made, chunk=6)
        made.run.labels = {token: f"·{token}" for token in made.run.labels}  # not English
    return made


def softmax() -> RecordedSoftmax:
    run = recorded_softmax()
    return run._replace(labels=tuple(map(str, range(len(run.labels)))))


def steps_of(made: Explorer) -> list[Frame]:
    steps = {0, 1, 2, made.num_steps - 1}
    return [Frame(made.scene(step), made.caption(step)) for step in steps]


VIEWS: dict[str, Callable[[], list[Frame] | Picture]] = {
    "rope": lambda: steps_of(explorer("rope")),
    "cache": lambda: steps_of(explorer("cache")),
    "queue": lambda: viz.queue_picture(recorded_run("long_prompt"), [13, 19]),
    "jukebox": lambda: jukebox_frames("1, 2.", "3", TAKES),
    "overlap": lambda: viz.overlap_picture(3, 7, 4),
    "radix": lambda: viz.radix_tree([[*range(9)], [*range(7), 30], [*range(7), 31]], NUMBERS, 4),
    "leak": lambda: viz.leak_picture(LEAK),
    "softmax": lambda: viz.running_softmax_picture(softmax()),
    "softmax steps": lambda: softmax_frames(softmax()),
}


def english(said: Iterable[str]) -> set[str]:
    """Words of more than one Latin letter; names of knobs in quotes and of files are none."""
    text = " ".join(re.sub(r"'\w+'|[\w-]+\.html", "", one) for one in said)
    return set(re.findall("[A-Za-z]{2,}", text)) - UNITS


def drawn(name: str) -> tuple[list[Scene | Picture], list[str]]:
    """What is seen, and what it says: words, tips, hints, captions."""
    view = VIEWS[name]()
    pairs = [(view, view.caption)] if isinstance(view, Picture) else view
    svgs = [one.svg if isinstance(one, Picture) else one.svg() for one, _ in pairs]
    said = [e.text or "" for svg in svgs for e in ET.fromstring(svg).iter(f"{SVG}text")]
    return [one for one, _ in pairs], said + [caption for _, caption in pairs]


@pytest.mark.parametrize("name", VIEWS)
def test_no_english_word_is_left_in_a_picture(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do longer words lie over others: by a third, and in the explorers by an eighth."""
    monkeypatch.setattr(Scene, "png", lambda *_: b"")
    assert len(english(drawn(name)[1])) > 20, "the trap is armed"
    monkeypatch.setattr(words, "TABLE", Invented(longer=name in ROOM))
    shown, said = drawn(name)
    assert not english(said)
    for one in shown if name in ROOM | MAKE.keys() else ():
        check_words(one)
    if name in MAKE:
        check_phone([one for one in shown if isinstance(one, Scene)])


def controls(made: Explorer) -> list[str]:
    """What stands on the controls, their tips, and the texts between them."""
    found = []
    for one in inside(made.view):
        html = one.value if isinstance(one, widgets.HTML) else ""
        found += [getattr(one, "description", ""), getattr(one, "tooltip", None) or ""]
        found.append("" if "<svg" in html or "<style" in html else Text(html).words)
    return found


def refusals(made: Explorer) -> list[str]:
    """What is said of knobs that cannot be turned so, and of a page that is saved."""
    found = []
    asked: list[Callable[[], object]] = [
        lambda: made.set(step=999),
        lambda: made.set(nothing=1),
        lambda: number("n", 5, 0, 4),
        lambda: choice("n", ["1"], "2"),
    ]
    if isinstance(made, CacheExplorer):
        asked.append(lambda: CacheExplorer(made.model, made.tokenizer, ["1"] * 4))
        for prompt in ("", "1 " * 40):
            found += [message_of(turn(made, A=prompt)), made.error]
    else:
        asked.append(lambda: made.set(m=1000))
    for ask in asked:
        with pytest.raises(ValueError) as refused:
            ask()
        found.append(str(refused.value))
    made._save_page()
    return [*found, message_of(made)]


@pytest.mark.parametrize("name", ["rope", "cache"])
def test_no_english_word_is_left_around_a_picture(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Controls, the alt text, and what is refused."""

    def around() -> list[str]:
        made = explorer(name)
        alt = made._repr_mimebundle_()[1]["image/png"]["alt"]
        return [*controls(made), alt, *refusals(made)]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Scene, "png", lambda *_: b"")
    before = around()
    monkeypatch.setattr(words, "TABLE", Invented())
    after = around()
    assert len(english(before)) > 20 and not english(after)
    assert len(before) == len(after)


def test_the_queue_is_refused_in_other_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "TABLE", Invented())
    with pytest.raises(ValueError) as refused:
        viz.queue_picture(recorded_run("long_prompt"), [0])
    assert not english([str(refused.value)])


def test_counts_and_lists_are_whole_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    def said() -> list[str]:
        return [
            *(words.tokens(1), words.tokens(2), words.num_bytes(300)),
            *(words.verb("A", "waits", "wait"), words.verb("ABC", "waits", "wait")),
            *(words.numbered([4], "cell"), words.numbered([1, 0], "cell")),
            *(words.numbered(range(5), "cell"), blocks_said([3]), blocks_said([*range(4), 9])),
        ]

    before = said()
    assert "2 tokens" in before and "A, B and C wait" in before and "cells 0 to 4" in before
    table = {
        "1 token": "un jeton",
        "{count} tokens": "{count} jetons",
        "{count:.0f} bytes": "{count:.0f} octets",
        "{who} waits": "{who} attend",
        "{who} wait": "{who} attendent",
        "{most} and {last}": "{most} et {last}",
        "cell {number}": "la {number}",
        "cells {numbers}": "les {numbers}",
        "cells {first} to {last}": "de {first} à {last}",
        "{first} to {last}": "{first} à {last}",
        "block {numbers}": "le {numbers}",
        "blocks {numbers}": "les {numbers}",
    }
    monkeypatch.setattr(words, "TABLE", table)
    assert said() == [
        *("un jeton", "2 jetons", "300 octets", "A attend", "A, B et C attendent"),
        *("la 4", "les 0 et 1", "de 0 à 4", "le 3", "les 0 à 3 et 9"),
    ]
