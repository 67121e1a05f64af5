"""The RoPE explorer: query at m, key at n, every pair's clock."""

import math
from collections.abc import Iterable
from typing import Any

import torch

from tutorial_engine.model.rope import RotaryEmbedding, apply_rope
from tutorial_engine.viz.drawing.flow import Piece, column, framed, panel, row, show, table, words
from tutorial_engine.viz.drawing.parts import BOLD, CENTRE, DEAF, RIGHT, WIDTH, Sheet, Style
from tutorial_engine.viz.drawing.request_look import tint
from tutorial_engine.viz.drawing.scene import Scene
from tutorial_engine.viz.drawing.style import BLUE, GREEN, INK, ORANGE, PAPER, QUIET, RED, RULE
from tutorial_engine.viz.explorers.explorer import Explorer, slider

FARTHEST = 64  # the curve shows distances up to this
SHIFTS = 65  # steps of the slider: both positions + 0 .. 64
ROUNDING = (0.0, 0.0, 0.0, 0.005)  # by which the facts of the table may differ
SIDE = 252.0  # of the clocks; about as high is the curve


class RopeExplorer(Explorer):
    """Move query and key, apart or together; each step of Play shifts both by one position."""

    title = "RoPE explorer"
    step_name = "shift both"

    def __init__(self, head_dim: int = 32, theta: float = 10000.0, m: int = 9, n: int = 4) -> None:
        self.rotary = RotaryEmbedding(head_dim, theta)
        # every pair of query and key is (1, 0), a hand of length 1 that points right at position 0:
        # so the score is the sum of the cosines of the angles between the hands
        self.vector = torch.cat((torch.ones(head_dim // 2), torch.zeros(head_dim // 2)))[None, None]
        last = head_dim // 2 - 1
        super().__init__(
            {
                "m": slider("query at m", m, 0, FARTHEST),
                "n": slider("key at n", n, 0, FARTHEST),
                "pair": slider("pair", min(2, last), 0, last),
            }
        )

    def rerun(self) -> int:
        """Turn the query at each distance from a key at FARTHEST, with the engine's own RoPE."""
        positions = torch.arange(2 * FARTHEST + 1)
        queries = self.vector.expand(len(positions), 1, -1)
        turned = apply_rope(queries, *self.rotary(positions))  # [129, 1, D]
        self.curve = (turned @ turned[FARTHEST].T).flatten().tolist()  # [129], m - n = -64 .. 64
        return SHIFTS

    def _score(self, m: int, n: int) -> float:
        q, k = apply_rope(self.vector.expand(2, 1, -1), *self.rotary(torch.tensor([m, n])))
        return float((q * k).sum())

    def _positions(self, step: int) -> tuple[int, int]:
        return self.value("m") + step, self.value("n") + step

    def scene(self, step: int) -> Scene:
        """One pair's clock, all pairs' clocks, the score as a function of m − n, and what stays."""
        (m, n), pair, pairs = self._positions(step), self.value("pair"), len(self.rotary.inv_freq)
        side = math.ceil(math.sqrt(pairs))
        pitch, gap = SIDE / side, 0.16 * SIDE / side
        inks = {"— query": BLUE, "- - key": RED, "◔ angle between": INK}
        speed = float(self.rotary.inv_freq[pair])
        looks = [(INK, 3.0) if i == pair else (RULE, 1.2) for i in range(pairs)]
        clocks = [
            self._clock(i, (m, n), pitch * 0.42, PAPER, *looks[i]).named(f"pair{i}")
            for i in range(pairs)
        ]
        top = row(
            panel(
                f"pair {pair}: {speed:.4g} rad per position",
                self._clock(pair, (m, n), 105, "#f7f9fa", RULE, 1).named("big"),
                row(*(words(said, 12.5, fill=ink) for said, ink in inks.items()), gap=20),
            ),
            panel(
                f"all {pairs} pairs, fast to slow",
                table([clocks[i : i + side] for i in range(0, pairs, side)], gap, gap),
                words(f"score = sum of the {pairs} cosines of these angles", 12.5),
            ),
            panel(
                "score of this query and key against distance",
                Piece(360, SIDE + 28, lambda sheet, _, x, y: self._curve(sheet, x + 22, y, m, n)),
            ),
            gap=24,
            align=0,
        )
        sheet = Sheet(WIDTH, 0)
        sheet.heading(f"query at m = {m}, key at n = {n}, distance m − n = {m - n}", size=14)
        body = column(top, panel("", self._table(step)), gap=14)
        return show(sheet, body, 36, "hover over a clock or the curve to read its numbers")

    def _facts(self, step: int) -> list[tuple[str, float, str]]:
        """What can change when both move on: name, value, and the value in words."""
        (m, n), pair = self._positions(step), self.value("pair")
        speed, score = float(self.rotary.inv_freq[pair]), self._score(m, n)
        angles = [
            (f"query hand of pair {pair}", m * speed),
            (f"key hand of pair {pair}", n * speed),
            ("angle between them", (m - n) * speed),
        ]
        facts = [(name, angle, f"{angle:.4g} rad") for name, angle in angles]
        return [*facts, ("score", score, f"{score:.2f}")]

    def _kept(self, step: int) -> list[bool]:
        """Which of these facts moving both on left as they were, but for fp32's rounding."""
        pairs = zip(self._facts(0), self._facts(step), ROUNDING, strict=True)
        return [abs(now - before) <= room for (_, before, _), (_, now, _), room in pairs]

    def _table(self, step: int) -> Piece:
        """The hands and the score before both moved on and now: what changed, and what did not."""
        now = f"both moved on by {step}" if step else "press Play"
        lines: list[list[Piece | str]] = [["", "at the start", now, ""]]
        facts = zip(self._facts(0), self._facts(step), self._kept(step), strict=True)
        for (name, _, was), (_, _, now), same in facts:
            said, ink = ("= stays the same", GREEN) if same else ("≠ changes", RED)
            after = [now, words(said, 12.5, fill=ink, **BOLD)] if step else ["", ""]
            lines.append([words(name, 12.5, **BOLD), was, *after])
        across = table(list(zip(*lines, strict=True)), 40, 2, [166, *[150] * 4])
        return framed(across, fill="#f7f9fa", rx=6, stroke=RULE)

    def _clock(
        self, pair: int, at: tuple[int, int], r: float, fill: str, edge: str, thick: float
    ) -> Piece:
        """The hands of query and key of one pair; in a large clock the angle between them."""
        (m, n), speed = at, float(self.rotary.inv_freq[pair])
        query, key, apart = m * speed, n * speed, (m - n) * speed
        tip = (
            f"pair {pair} turns {speed:.5f} rad per position: query hand "
            f"{query:.3f} rad, key hand {key:.3f} rad, apart {apart:.3f} rad"
        )

        def fan(x: float, y: float, r: float, angles: Iterable[float]) -> str:
            ends = (f"{x + r * math.cos(a):.1f},{y - r * math.sin(a):.1f}" for a in angles)
            return " ".join([f"{x:.1f},{y:.1f}", *ends])

        def draw(sheet: Sheet, name: str, x: float, y: float) -> None:
            x, y, line = x + r, y + r, Style(stroke_width=2 + r / 60, **DEAF)
            look = Style(fill=fill, stroke=edge, stroke_width=thick)
            sheet.add(f"{name}.face", "circle", tip=tip, cx=x, cy=y, r=r, **look)
            for who, position, ink, dash in (("k", n, RED, "5 3"), ("q", m, BLUE, "none")):
                hand = fan(x, y, r, [position * speed])
                look = Style(stroke=ink, stroke_dasharray=dash)
                sheet.add(f"{name}.{who}", "polyline", points=hand, **look, **line)
            if r > 100:
                apart = math.fmod((m - n) * speed, 2 * math.pi)  # without whole turns
                wedge = fan(x, y, r / 2.5, (n * speed + apart * i / 24 for i in range(25)))
                look = Style(fill=tint(ORANGE, 0.45), stroke=INK, fill_opacity=0.8, **DEAF)
                sheet.add(f"{name}.between", "polygon", points=wedge, **look)

        return Piece(2 * r, 2 * r, draw)

    def _curve(self, sheet: Sheet, left: float, top: float, m: int, n: int) -> None:
        """The score at all distances, and the dot at this one."""
        wide, tall, low, high = 330.0, SIDE - 12, min(self.curve), max(self.curve)

        def place(distance: float, score: float) -> tuple[float, float]:
            x = left + wide * (distance + FARTHEST) / (2 * FARTHEST)
            return x, top + tall * (1 - (score - low) / (high - low))

        bottom = top + tall
        halo: dict[str, Any] = {"stroke": PAPER, "stroke_width": 4, "paint_order": "stroke"}
        box = (left, top - 4, wide / 2, tall + 4)  # a key after the query
        sheet.cell("forbidden", box, "reserved", rx=0, stroke="none", opacity=0.6)
        sheet.note("forbidden.words", left + 8, top + 14, "forbidden by the mask", 12, **halo)
        sheet.note("axis", left + wide / 2, bottom + 34, "m − n", 12, **CENTRE)
        for tick in range(-FARTHEST, FARTHEST + 1, FARTHEST // 2):
            sheet.note(f"tick{tick}", place(tick, low)[0], bottom + 18, str(tick), **CENTRE)
        for name, end in (("low", low), ("high", high)):
            sheet.note(name, left - 6, place(0, end)[1] + 4, f"{end:.0f}", **RIGHT)
        places = (place(d - FARTHEST, s) for d, s in enumerate(self.curve))
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        sheet.add("line", "polyline", points=points, fill="none", stroke=QUIET, stroke_width=1.6)
        score = self._score(m, n)
        x, y = place(m - n, score)
        sheet.add("drop", "line", x1=x, y1=y, x2=x, y2=bottom, stroke=BLUE, stroke_dasharray="3 3")
        dot: dict[str, Any] = {"fill": BLUE, "stroke": INK, "stroke_width": 2}
        tip = f"distance {m - n}: score {score:.3f}"
        sheet.add("dot", "circle", tip=tip, cx=x, cy=y, r=6.5, **dot)
        x, y = min(x + 12, left + wide - 84), max(y - 8, top + 12)
        sheet.text("score", x, y, f"score {score:.2f}", 13, **BOLD, **halo)

    def caption(self, step: int) -> str:
        """The score now, and what moving both on did to it."""
        m, n = self._positions(step)
        pairs, score = len(self.rotary.inv_freq), self._score(m, n)
        begin = (
            f"Query at {m}, key at {n}: the cosines of the angles between the "
            f"hands of all {pairs} pairs add up to a score of {score:.2f}"
        )
        if not step:
            return f"{begin}; press Play to move both on."
        kept = "stay the same" if all(self._kept(step)[2:]) else "CHANGE"
        return (
            f"{begin}; moving both on by {step} turns all hands, but the distance "
            f"{m - n}, the angles between the hands and the score {kept}."
        )
