"""How wide words are, in the font of all pictures: cut to a width, and wrapped into lines.

Knows letters and pixels; draws nothing.
"""

from functools import cache, lru_cache
from pathlib import Path
from unicodedata import east_asian_width

import matplotlib
from PIL import ImageFont

from tutorial_engine.viz.tokens import visible, written

FONT = "DejaVu Sans"  # ships with matplotlib, so every machine draws the same letters
UNITS = 2048  # of the font in an em: at this size its widths are whole, the same everywhere


def font_file(bold: bool) -> Path:
    """Where its letters are."""
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name


@cache
def _font(bold: bool) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(font_file(bold), UNITS, layout_engine=ImageFont.Layout.BASIC)


@lru_cache(4096)  # a slider shows most of the words again
def text_width(words: str, size: float, bold: bool = False) -> float:
    """Pixels that the words take at that font size; the font has no CJK: these take an em each."""
    wide = "" if words.isascii() else "".join(c for c in words if east_asian_width(c) in "WF")
    plain = words.translate(dict.fromkeys(map(ord, wide))) if wide else words
    return _font(bold).getlength(plain) * size / UNITS + size * len(wide)


def cut_to(words: str, width: float, size: float, bold: bool = False, keep: bool = False) -> str:
    """Words as a picture shows them, shortened with … to at most so many pixels.

    Blanks and line breaks are made visible, unless they are to be kept.
    """
    words = written(words) if keep else visible(words)
    if text_width(words, size, bold) <= width:
        return words
    while words and text_width(words + "…", size, bold) > width:
        words = words[:-1]
    return words + "…"


def name_in(room: float, name: str, size: float) -> tuple[str, float]:
    """A request's name in so many pixels, and the size of its letters: smaller, then cut."""
    size = size if text_width(name, size, bold=True) <= room else min(size, 9.0)
    return cut_to(name, room, size, bold=True, keep=True), size


def wrapped(text: str, width: float, size: float, bold: bool = False) -> list[str]:
    """The words in lines of at most so many pixels; a word that is wider is broken."""
    lines = [""]
    for word in written(text).split():
        longer = f"{lines[-1]} {word}".lstrip()
        if text_width(longer, size, bold) <= width:
            lines[-1] = longer
            continue
        lines += [""] * bool(lines[-1])
        for letter in word:
            if lines[-1] and text_width(lines[-1] + letter, size, bold) > width:
                lines.append("")
            lines[-1] += letter
    return [line for line in lines if line]
