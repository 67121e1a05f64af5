"""How a token is written in a picture: literally, and never as markup.

Knows tokenizers; knows no picture.
"""

import html
import re
import unicodedata
from collections.abc import Iterable
from functools import cache, lru_cache

from tokenizers import Tokenizer

# control characters, halves of surrogate pairs, and what Unicode says is no character
_UNWRITABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
SPACE = "·"  # stands for a leading blank, so that ' Anna' and 'Anna' can be told apart


@cache
def _byte_of() -> dict[str, int]:
    """The letters that byte-level BPE writes bytes with (GPT-2's table) → the byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


def token_label(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as plain text for a picture: blanks as ·, line breaks as ↵, lone bytes as <0xF0>.

    ValueError for an id that the tokenizer does not have.
    """
    known = 0 <= token_id < 1 << 32  # the library takes no other numbers
    piece = tokenizer.id_to_token(token_id) if known else None
    if piece is None:
        raise ValueError(
            f"token id {token_id} is not in the vocabulary of {tokenizer.get_vocab_size()} tokens"
        )
    if token_id in tokenizer.get_added_tokens_decoder():
        return piece  # <|endoftext|> and its like are not byte-level
    raw = [_byte_of().get(letter) for letter in piece]
    if None in raw:  # another kind of tokenizer: its own spelling
        return visible(piece)
    try:
        return visible(bytes(byte for byte in raw if byte is not None).decode("utf-8"))
    except UnicodeDecodeError:  # part of an emoji, say
        return "".join(f"<0x{byte:02X}>" for byte in raw)


def token_labels(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """`token_label` of each."""
    return [token_label(tokenizer, i) for i in ids]


def token_names(tokenizer: Tokenizer, ids: Iterable[int]) -> dict[int, str]:
    """Token id -> its label; `<id 7>` for one that the tokenizer does not have.

    A checkpoint may have more rows than its tokenizer has tokens.
    """
    found = {}
    for token in set(ids):
        try:
            found[token] = token_label(tokenizer, token)
        except ValueError:
            found[token] = f"<id {token}>"
    return found


def cut_label(label: str, max_len: int = 10) -> str:
    """A label that fits: at most so many characters, the last of them … where it was longer."""
    return label if len(label) <= max_len else label[: max_len - 1] + "…"


def written(text: str) -> str:
    """Text inside a sentence: what nobody would see is written out, as ↵, ⇥ or <U+202E>.

    That is: control characters, marks that turn the line round, what has no width, and blanks that
    are not the usual one. Accents stay on their letters, and parts of one emoji stay together.
    """
    if text.isprintable():
        return text
    text = text.replace("\n", "↵").replace("\t", "⇥")
    hidden = [unicodedata.category(c) in ("Cc", "Cf", "Zs", "Zl", "Zp") and c != " " for c in text]
    for i in range(1, len(text) - 1):  # the joiner of two pictures in one: 👩‍💻
        if text[i] == "\u200d" and unicodedata.category(text[i + 1]) == "So":
            hidden[i] = unicodedata.category(text[i - 1]) not in ("So", "Sk", "Mn")
    return "".join(f"<U+{ord(c):04X}>" if h else c for c, h in zip(text, hidden, strict=True))


def visible(text: str) -> str:
    """A token or a name by itself: as `written`, and blanks can be seen as well."""
    return written(text).replace(" ", SPACE)


@lru_cache(4096)  # attributes and labels come again from picture to picture
def escape(text: str) -> str:
    """Text as HTML or SVG shows it literally: <script> stays six letters in angle brackets.

    Characters that XML cannot carry at all become the replacement sign.
    """
    return html.escape(_UNWRITABLE.sub("\ufffd", text), quote=True)
