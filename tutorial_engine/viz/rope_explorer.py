"""The RoPE explorer: query at m, key at n, every pair's clock."""

import math
from typing import Any

import torch

from tutorial_engine.model.rope import RotaryEmbedding, apply_rope
from tutorial_engine.viz.explorer import Explorer, slider
from tutorial_engine.viz.parts import (
    BOLD,
    CENTRE,
    DEAF,
    RIGHT,
    Grid,
    Sheet,
)
from tutorial_engine.viz.request_look import tint
from tutorial_engine.viz.scene import Scene
from tutorial_engine.viz.style import BLUE, GREEN, INK, ORANGE, PAPER, QUIET, RED, RULE

FARTHEST = 64  # the curve shows distances up to this
SHIFTS = 65  # steps of the slider: both positions + 0 .. 64
ROUNDING = (0.0, 0.0, 0.0, 0.005)  # by which the facts of the table may differ
TABLE = 358.0  # top of the table below the panels
HEAD, TOP = 52.0, 66.0  # baseline of the panels' titles, and where the panels begin
CLOCKS, CURVE = (292.0, 252.0), (612.0, 330.0)  # left and width of two panels
TALL = 240.0  # of the curve


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
        m, n = self._positions(step)
        scene = Sheet(960, 474, tip_at=(10, 464))
        scene.hint = "hover over a clock or the curve to read its numbers"
        title = f"query at m = {m}, key at n = {n}, distance m − n = {m - n}"
        scene.heading(title, size=14)
        self._big_clock(scene, m, n)
        self._all_clocks(scene, m, n)
        self._curve(scene, m, n)
        self._table(scene, step)
        panels = ((0, 284), (284, 308), (580, 380))
        scene.parts = [[(x, HEAD - 14, wide, TABLE - HEAD + 10)] for x, wide in panels]
        for x in (226, 411, 596, 781):
            scene.parts.append([(8, TABLE - 2, 182, 96), (x, TABLE - 2, 171, 96)])
        return scene

    def _facts(self, step: int) -> list[tuple[str, float, str]]:
        """What can change when both move on: name, value, and the value in words."""
        (m, n), pair = self._positions(step), self.value("pair")
        speed, score = float(self.rotary.inv_freq[pair]), self._score(m, n)
        return [
            (f"query hand of pair {pair}", m * speed, f"{m * speed:.4g} rad"),
            (f"key hand of pair {pair}", n * speed, f"{n * speed:.4g} rad"),
            ("angle between them", (m - n) * speed, f"{(m - n) * speed:.4g} rad"),
            ("score", score, f"{score:.2f}"),
        ]

    def _kept(self, step: int) -> list[bool]:
        """Which of these facts moving both on left as they were, but for fp32's rounding."""
        pairs = zip(self._facts(0), self._facts(step), ROUNDING, strict=True)
        return [abs(now - before) <= room for (_, before, _), (_, now, _), room in pairs]

    def _table(self, scene: Sheet, step: int) -> None:
        """The hands and the score before both moved on and now: what changed, and what did not."""
        scene.rect("table", (10, TABLE, 940, 92), "#f7f9fa", rx=6, stroke=RULE)
        rows = ("at the start", f"both moved on by {step}" if step else "press Play", "")
        for i, words in enumerate(rows):
            scene.text(f"table{i}", 24, TABLE + 40 + 20 * i, words, 12.5)
        facts = zip(self._facts(0), self._facts(step), self._kept(step), strict=True)
        for column, ((name, _, was), (_, _, is_), same) in enumerate(facts):
            x = 230.0 + 185 * column
            scene.text(f"fact{column}", x, TABLE + 20, name, 12.5, **BOLD)
            scene.text(f"before{column}", x, TABLE + 40, was, 12.5)
            if step:
                words, ink = ("= stays the same", GREEN) if same else ("≠ changes", RED)
                scene.text(f"now{column}", x, TABLE + 60, is_, 12.5)
                scene.text(f"verdict{column}", x, TABLE + 80, words, 12.5, fill=ink, **BOLD)

    def _clock(
        self,
        scene: Sheet,
        name: str,
        pair: int,
        at: tuple[int, int],
        circle: tuple[float, float, float],
        **look: Any,
    ) -> None:
        """The hands of query and key of one pair, at their positions; a circle is (x, y, r)."""
        (m, n), (x, y, r) = at, circle
        speed = float(self.rotary.inv_freq[pair])
        tip = (
            f"pair {pair} turns {speed:.5f} rad per position: query hand {m * speed:.3f} rad, "
            f"key hand {n * speed:.3f} rad, apart {(m - n) * speed:.3f} rad"
        )
        scene.add(f"{name}.face", "circle", tip=tip, cx=x, cy=y, r=r, **look)
        for who, position, colour, dash in (("k", n, RED, "5 3"), ("q", m, BLUE, "none")):
            angle = position * speed
            end: dict[str, Any] = {"x2": x + r * math.cos(angle), "y2": y - r * math.sin(angle)}
            style: dict[str, Any] = {"stroke": colour, "stroke_width": 2 + r / 60, **DEAF}
            style |= {"stroke_dasharray": dash}
            scene.add(f"{name}.{who}", "line", x1=x, y1=y, **end, **style)

    def _big_clock(self, scene: Sheet, m: int, n: int) -> None:
        pair = self.value("pair")
        speed = float(self.rotary.inv_freq[pair])
        x, y, r = 130.0, 172.0, 105.0
        scene.note("big", 10, HEAD, f"pair {pair}: {speed:.4g} rad per position", 12.5)
        self._clock(scene, "big", pair, (m, n), (x, y, r), fill="#f7f9fa", stroke=RULE)
        apart = math.fmod((m - n) * speed, 2 * math.pi)  # without whole turns
        angles = (n * speed + apart * i / 24 for i in range(25))
        points = (
            f"{x + r / 2.5 * math.cos(a):.1f},{y - r / 2.5 * math.sin(a):.1f}" for a in angles
        )
        wedge: dict[str, Any] = {"fill": tint(ORANGE, 0.45), "stroke": INK, "fill_opacity": 0.8}
        scene.add("big.between", "polygon", points=" ".join([f"{x},{y}", *points]), **wedge, **DEAF)
        words = (("— query", BLUE), ("- - key", RED), ("◔ angle between", INK))
        for i, (name, ink) in enumerate(words):
            scene.text(f"angle{i}", 10 + 80 * i, TOP + TALL, name, 12.5, fill=ink)

    def _all_clocks(self, scene: Sheet, m: int, n: int) -> None:
        pairs, (left, wide) = len(self.rotary.inv_freq), CLOCKS
        columns = math.ceil(math.sqrt(pairs))
        pitch = wide / columns
        grid = Grid(left + pitch / 2, TOP + pitch / 2, pitch, pitch, columns)
        scene.note("all", left, HEAD, f"all {pairs} pairs, fast to slow", 12.5)
        words = f"score = sum of the {pairs} cosines of these angles"
        scene.text("sum", left, TOP + TALL + 36, words, 12.5)
        for pair in range(pairs):
            x, y, *_ = grid.box(pair)
            ink, thick = (INK, 3.0) if pair == self.value("pair") else (RULE, 1.2)
            look = {"fill": PAPER, "stroke": ink, "stroke_width": thick}
            self._clock(scene, f"pair{pair}", pair, (m, n), (x, y, pitch * 0.42), **look)

    def _curve(self, scene: Sheet, m: int, n: int) -> None:
        (left, wide), low, high = CURVE, min(self.curve), max(self.curve)
        bottom = TOP + TALL

        def place(distance: float, score: float) -> tuple[float, float]:
            x = left + wide * (distance + FARTHEST) / (2 * FARTHEST)
            return x, TOP + TALL * (1 - (score - low) / (high - low))

        title = "score of this query and key against distance"
        scene.note("curve", left - 22, HEAD, title, 12.5)
        scene.note("axis", left + wide / 2, bottom + 36, "m − n", 12, **CENTRE)
        for tick in range(-FARTHEST, FARTHEST + 1, FARTHEST // 2):
            x, _ = place(tick, low)
            scene.note(f"tick{tick}", x, bottom + 18, str(tick), **CENTRE)
        for name, end in (("low", low), ("high", high)):
            y = place(0, end)[1] + 4
            scene.note(name, left - 6, y, f"{end:.0f}", **RIGHT)
        places = (place(d - FARTHEST, s) for d, s in enumerate(self.curve))
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        scene.add("line", "polyline", points=points, fill="none", stroke=QUIET, stroke_width=1.6)
        score = self._score(m, n)
        x, y = place(m - n, score)
        scene.add("drop", "line", x1=x, y1=y, x2=x, y2=bottom, stroke=BLUE, stroke_dasharray="3 3")
        dot: dict[str, Any] = {"fill": BLUE, "stroke": INK, "stroke_width": 2}
        tip = f"distance {m - n}: score {score:.3f}"
        scene.add("dot", "circle", tip=tip, cx=x, cy=y, r=6.5, **dot)
        x, y = min(x + 12, left + wide - 84), max(y - 8, TOP + 12)
        halo: dict[str, Any] = {"stroke": PAPER, "stroke_width": 4, "paint_order": "stroke"}
        scene.text("score", x, y, f"score {score:.2f}", 13, **BOLD, **halo)

    def caption(self, step: int) -> str:
        """The score now, and what moving both on did to it."""
        m, n = self._positions(step)
        facts = self._facts(step)
        text = (
            f"Query at {m}, key at {n}: the cosines of the angles between the hands of all "
            f"{len(self.rotary.inv_freq)} pairs add up to a score of {facts[-1][1]:.2f}"
        )
        if not step:
            return text + "; press Play to move both on."
        kept = "stay the same" if all(self._kept(step)[2:]) else "CHANGE"
        return (
            f"{text}; moving both on by {step} turns all hands, but the distance "
            f"{m - n}, the angles between the hands and the score {kept}."
        )
