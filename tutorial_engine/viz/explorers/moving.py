"""Recorded steps as one SVG that moves by itself, without a script.

For places that show a picture but run no program, as GitHub's page of a repository does. Knows
the film of a player; knows no engine, no view.
"""

from collections.abc import Iterator, Sequence

from tutorial_engine.viz.drawing.letters import FONT
from tutorial_engine.viz.drawing.scene import CSS, PATTERN, Frame, plain
from tutorial_engine.viz.drawing.style import PAPER
from tutorial_engine.viz.explorers.player import film_of, look_at
from tutorial_engine.viz.tokens import escape

REST = 3  # the last step stands for so many more


def moving(
    frames: Sequence[Frame],
    words: str,
    speed: float = 0.8,
    box: tuple[float, float, float, float] | None = None,
) -> str:
    """The steps one after the other, `speed` a second, for ever.

    `words` are for who cannot see it. Who wants less motion sees the first step. `box`: the part
    (x, y, width, height) that is shown; None: the whole.
    """
    last = len(frames) - 1
    whole = max(frame.scene.width for frame in frames), max(frame.scene.height for frame in frames)
    x, y, width, height = map(plain, box or (0, 0, *whole))
    runs, parts = set[tuple[int, int]](), list[str]()
    for item in film_of(frames)["items"]:
        looks = [look_at(item, step) for step in range(len(frames))]
        for first, end in _runs(looks):
            look = dict(looks[first] or {})
            inside, kind = escape(look.pop("words", "")), ""
            if (first, end) != (0, last):
                runs.add((first, end))
                kind = f"{'te-off ' if first else ''}s{first}-{end}"
            look["class"] = f"{look.get('class', '')} {kind}".strip()
            attributes = "".join(
                f' {name}="{escape(value)}"' for name, value in look.items() if value
            )
            parts.append(f"<{item['tag']}{attributes}>{inside}</{item['tag']}>")
    seconds = plain((last + 1 + REST) / speed)
    names = sorted(f"s{first}-{end}" for first, end in runs)
    rules = "".join(f".{name}{{animation:{name} {seconds}s step-end infinite}}" for name in names)
    css = (
        f"{CSS}.te-off{{visibility:hidden}}@media (prefers-reduced-motion:no-preference){{{rules}}}"
        + "".join(_keyframes(first, end, last) for first, end in sorted(runs))
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" class="te-scene" '
        f'viewBox="{x} {y} {width} {height}" width="{width}" '
        f'height="{height}" font-family="{FONT}, sans-serif" role="img">'
        f"<title>{escape(words)}</title><style>{css}</style>{PATTERN}"
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{PAPER}"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _runs(looks: Sequence[dict[str, str] | None]) -> Iterator[tuple[int, int]]:
    """(first, last step) of each time in which an item is seen and does not change."""
    first = 0
    for step, look in enumerate(looks):
        if step + 1 < len(looks) and looks[step + 1] == look:
            continue
        if look is not None:
            yield first, step
        first = step + 1


def _keyframes(first: int, end: int, last: int) -> str:
    """When what is seen from step `first` to `end` comes and goes."""

    def at(step: int) -> str:
        return f"{plain(100 * step / (last + 1 + REST))}%"

    comes = f"0%{{visibility:{'hidden' if first else 'visible'}}}"
    comes += f"{at(first)}{{visibility:visible}}" if first else ""
    goes = f"{at(end + 1)}{{visibility:hidden}}" if end < last else ""
    return f"@keyframes s{first}-{end}{{{comes}{goes}}}"
