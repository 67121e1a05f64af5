"""Tokens in pictures: literal, visible, and never markup."""

import html
import re
import unicodedata
import xml.etree.ElementTree as ET

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from tutorial_engine.viz.tokens import SPACE, cut_label, escape, token_label, token_labels, visible

BYTE = re.compile(r"<0x([0-9A-F]{2})>")

# Text in which a label's own signs do not occur, so that a label can be read back.
readable = st.text(
    st.characters(exclude_categories=("Cs", "Cc"), exclude_characters=f"<{SPACE}↵⇥"), max_size=40
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
        assert not any(c == " " or unicodedata.category(c) == "Cc" for c in label), repr(label)


def test_every_id_of_the_vocabulary_has_a_label_of_its_own(tokenizer: Tokenizer) -> None:
    labels = token_labels(tokenizer, list(range(tokenizer.get_vocab_size())))
    assert all(labels) and len(set(labels)) == len(labels)


def test_special_token_is_written_as_it_is(tokenizer: Tokenizer) -> None:
    assert token_label(tokenizer, 0) == "<|endoftext|>"


def test_bytes_of_an_emoji_are_written_one_by_one(tokenizer: Tokenizer) -> None:
    labels = token_labels(tokenizer, tokenizer.encode("😀").ids)
    assert labels == [f"<0x{byte:02X}>" for byte in "😀".encode()]


def test_leading_blank_is_seen(tokenizer: Tokenizer) -> None:
    with_blank, without = (tokenizer.encode(text).ids[0] for text in (" Anna", "Anna"))
    assert token_label(tokenizer, with_blank).startswith(SPACE)
    assert not token_label(tokenizer, without).startswith(SPACE)


@pytest.mark.parametrize("past", [0, 1, 10**6, 2**32, 2**80])
def test_id_past_the_vocabulary_is_refused_by_name(tokenizer: Tokenizer, past: int) -> None:
    bad = tokenizer.get_vocab_size() + past
    with pytest.raises(ValueError, match=rf"{bad}.*vocabulary.*{tokenizer.get_vocab_size()}"):
        token_labels(tokenizer, [1, bad])


@pytest.mark.parametrize("bad", [-1, -100])
def test_negative_id_is_refused_by_name(tokenizer: Tokenizer, bad: int) -> None:
    with pytest.raises(ValueError, match=str(bad)):
        token_label(tokenizer, bad)


def test_another_kind_of_tokenizer_keeps_its_own_spelling() -> None:
    words = {"日本": 0, "two words": 1, "▁Anna": 2}
    tokenizer = Tokenizer(models.WordLevel(vocab=words, unk_token="日本"))
    assert token_labels(tokenizer, [0, 1, 2]) == ["日本", f"two{SPACE}words", "▁Anna"]


def test_visible_names_control_characters() -> None:
    assert visible("a b\n\t\x00\x7f") == f"a{SPACE}b↵⇥<U+0000><U+007F>"


def test_escaped_markup_is_read_back_as_the_same_text() -> None:
    for text in ("<script>", "<s>", "<think>", "\"quoted\" 'too'", "&amp;", "😀", "]]>", "$x$"):
        assert html.unescape(escape(text)) == text
        assert not set("<>\"'") & set(escape(text))


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


def test_long_labels_are_cut_and_say_so() -> None:
    assert cut_label("·kite") == "·kite"
    assert cut_label("x" * 10) == "x" * 10
    assert cut_label("x" * 11) == "x" * 9 + "…"
