"""An SVG as PNG: small, always the same, and for a dark page.

Knows colours and bytes; knows nothing of how it was drawn.
"""

import colorsys
import io
import re

import resvg_py
from PIL import Image, ImageChops, ImageFilter

from tutorial_engine.viz.drawing.letters import FONT, font_file

WIDTH = re.compile(r'<svg[^>]* width="([\d.]+)')
# What shows a magnitude, and words on it: parts.SHADE, cells of attention, the map of a plot
SHADED = re.compile('(class|id)="te-(shade|cell)|<image ')
# A tag, or a shaded text of a plot, whose colour stands in a group inside it
TAG = re.compile('(<g id="te-shade.*?</g>\\s*</g>|<[^>]*>)', re.DOTALL)


def png_of(svg: str, zoom: float = 1.4) -> bytes:
    """An SVG as PNG bytes, with the font that ships with matplotlib."""
    return small_png(_rendered(svg, zoom))


def _rendered(svg: str, zoom: float) -> bytes:
    png = resvg_py.svg_to_bytes(
        svg_string=svg,
        zoom=zoom,
        font_files=[str(font_file(bold)) for bold in (False, True)],
        skip_system_fonts=True,
        font_family=FONT,
        sans_serif_family=FONT,
    )
    return bytes(png)


def small_png(png: bytes) -> bytes:
    """The same image with at most 256 colours, a third of the bytes: notebooks stay light.

    The octree spreads its error evenly, so that rare colours, a heat map's brightest, survive.
    """
    image = Image.open(io.BytesIO(png)).convert("RGB")
    image = image.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    out = io.BytesIO()
    image.save(out, format="PNG", optimize=True)
    return out.getvalue()


def at_night(svg: str) -> str:
    """The same picture for a dark page: each colour keeps its hue, and light becomes dark.

    A magnitude keeps its colour: the most is the brightest.
    """

    def turn(match: re.Match[str]) -> str:
        red, green, blue = (int(match[0][i : i + 2], 16) / 255 for i in (1, 3, 5))
        hue, light, strength = colorsys.rgb_to_hls(red, green, blue)
        parts = colorsys.hls_to_rgb(hue, 0.97 - 0.9 * light, strength)
        return "#" + "".join(f"{round(255 * channel):02x}" for channel in parts)

    return "".join(
        tag if SHADED.search(tag) else re.sub("#[0-9a-fA-F]{6}\\b", turn, tag)
        for tag in TAG.split(svg)
    )


def png_at_night(svg: str, width: int) -> bytes:
    """The picture for a dark page as PNG, so many pixels wide."""
    return small_png(_wide(at_night(svg), width))


def kept_at_night(svg: str, size: tuple[int, int]) -> bytes:
    """Where a picture keeps its colours on a dark page: a PNG of this size, else transparent."""
    by_day, by_night = (
        Image.open(io.BytesIO(_wide(each, size[0]))).convert("RGB") for each in (svg, at_night(svg))
    )
    red, green, blue = ImageChops.difference(by_day, by_night).split()
    changed = ImageChops.lighter(ImageChops.lighter(red, green), blue)
    kept = changed.point(lambda change: 255 * (change == 0))
    for alone in (ImageFilter.MinFilter(3), ImageFilter.MaxFilter(3)):  # the grey edge of a letter
        kept = kept.filter(alone)
    out = io.BytesIO()
    kept = kept.resize(size).convert("1", dither=Image.Dither.NONE).convert("P")
    kept.save(out, format="PNG", optimize=True, bits=1, transparency=0)
    return out.getvalue()


def _wide(svg: str, width: int) -> bytes:
    in_pixels = re.sub(r'(<svg[^>]* width="[\d.]+)pt(" height="[\d.]+)pt"', r'\1\2"', svg)
    return _rendered(in_pixels, zoom=width / float(WIDTH.findall(in_pixels)[0]))
