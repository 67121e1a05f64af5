"""Introduced in notebook 01. The RoPE explorer: query at m, key at n, every pair's clock."""

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
from tutorial_engine.viz.scene import Scene
from tutorial_engine.viz.style import BLUE, INK, PAPER, QUIET, RED, RULE

FARTHEST = 64  # the curve shows distances up to this
SHIFTS = 65  # steps of the slider: both positions + 0 .. 64
HEAD, TOP = 52.0, 66.0  # baseline of the panels' titles, and where the panels begin
CLOCKS, CURVE = (292.0, 252.0), (612.0, 330.0)  # left and width of two panels
TALL = 240.0  # of the curve


class RopeExplorer(Explorer):
    """Move query and key, apart or together; each step of Play shifts both by one position."""

    title = "RoPE explorer"
    step_name = "shift both"

    def __init__(self, head_dim: int = 32, theta: float = 10000.0, m: int = 9, n: int = 4) -> None:
        self.rotary = RotaryEmbedding(head_dim, theta)
        # query and key are alike: the score is a sum of cosines
        self.vector = torch.ones(1, 1, head_dim)
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
        """One pair's clock, all pairs' clocks, and the score as a function of m − n."""
        m, n = self._positions(step)
        scene = Sheet(960, 372, tip_at=(10, 362))
        scene.hint = "hover over a clock or the curve to read its numbers"
        title = f"query at m = {m}, key at n = {n}, distance m − n = {m - n}"
        scene.heading(title, size=14)
        self._big_clock(scene, m, n)
        self._all_clocks(scene, m, n)
        self._curve(scene, m, n)
        return scene

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
            f"pair {pair} turns {speed:.5f} rad a position: query hand {m * speed:.3f} rad, "
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
        scene.note("big", 10, HEAD, f"pair {pair}: {speed:.4f} rad a position", 12.5)
        self._clock(scene, "big", pair, (m, n), (130, 178, 105), fill="#f7f9fa", stroke=RULE)
        lines: tuple[tuple[str, dict[str, Any]], ...] = (
            (f"— query: m · ω = {m * speed:.2f} rad", {"fill": BLUE}),
            (f"- - key: n · ω = {n * speed:.2f} rad", {"fill": RED}),
            (f"apart: (m − n) · ω = {(m - n) * speed:.2f} rad", BOLD),
        )
        for i, (words, style) in enumerate(lines):
            scene.text(f"angle{i}", 10, TOP + TALL + 18 * i, words, 12.5, **style)

    def _all_clocks(self, scene: Sheet, m: int, n: int) -> None:
        pairs, (left, wide) = len(self.rotary.inv_freq), CLOCKS
        columns = math.ceil(math.sqrt(pairs))
        pitch = wide / columns
        grid = Grid(left + pitch / 2, TOP + pitch / 2, pitch, pitch, columns)
        scene.note("all", left, HEAD, f"all {pairs} pairs, fast to slow", 12.5)
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
        scene.text("score", x, y, f"score {score:.2f}", 13, **BOLD)

    def caption(self, step: int) -> str:
        """The score now, and what shifting both did to it."""
        m, n = self._positions(step)
        score = self._score(m, n)
        change = abs(score - self._score(m - step, n - step))
        by = "less than 0.01" if change < 0.01 else f"{change:.2f}"
        moved = f"; shifting both by {step} changed it by {by}" if step else ""
        return f"Query at {m}, key at {n}: the score is {score:.2f}{moved}."
