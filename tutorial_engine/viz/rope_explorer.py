"""Introduced in notebook 01. The RoPE explorer: query at m, key at n, every pair's clock."""

import math
from typing import Any

import ipywidgets as widgets
import torch

from tutorial_engine.model.rope import RotaryEmbedding, apply_rope
from tutorial_engine.viz.explorer import Explorer
from tutorial_engine.viz.scene import Scene
from tutorial_engine.viz.style import BLUE, INK, QUIET, RED, RULE

FARTHEST = 64  # the curve shows distances up to this
SHIFTS = 65  # steps of the slider: both positions + 0 .. 64


class RopeExplorer(Explorer):
    """Move query and key, apart or together; each step of Play shifts both by one position."""

    title = "RoPE explorer"
    step_name = "shift both"

    def __init__(self, head_dim: int = 32, theta: float = 10000.0, m: int = 9, n: int = 4) -> None:
        self.rotary = RotaryEmbedding(head_dim, theta)
        self.vector = torch.ones(
            1, 1, head_dim
        )  # query and key alike: the score is a sum of cosines
        pairs = head_dim // 2

        def knob(name: str, value: int, last: int) -> widgets.IntSlider:
            return widgets.IntSlider(
                value, 0, last, description=name, layout=widgets.Layout(width="290px")
            )

        super().__init__(
            {
                "m": knob("query at m", m, 64),
                "n": knob("key at n", n, 64),
                "pair": knob("pair", min(2, pairs - 1), pairs - 1),
            }
        )

    def rerun(self) -> None:
        """Turn the query at each distance from a key at FARTHEST, with the engine's own RoPE."""
        positions = torch.arange(2 * FARTHEST + 1)
        turned = apply_rope(
            self.vector.expand(len(positions), 1, -1), *self.rotary(positions)
        )  # [129, 1, D]
        self.curve = (turned @ turned[FARTHEST].T).flatten().tolist()  # [129], m - n = -64 .. 64

    @property
    def num_steps(self) -> int:
        """One step a shift."""
        return SHIFTS

    def _score(self, m: int, n: int) -> float:
        q, k = apply_rope(self.vector.expand(2, 1, -1), *self.rotary(torch.tensor([m, n])))
        return float((q * k).sum())

    def _positions(self, step: int) -> tuple[int, int]:
        return self.value("m") + step, self.value("n") + step

    def scene(self, step: int) -> Scene:
        """One pair's clock, all pairs' clocks, and the score as a function of m − n."""
        m, n = self._positions(step)
        scene = Scene(960, 372, tip_at=(10, 362))
        scene.hint = "hover over a clock or the curve to read its numbers"
        scene.text(
            "title",
            10,
            20,
            f"query at m = {m}, key at n = {n}, distance m − n = {m - n}",
            14,
            font_weight="bold",
        )
        self._big_clock(scene, m, n)
        self._all_clocks(scene, m, n)
        self._curve(scene, m, n)
        return scene

    def _hands(
        self,
        scene: Scene,
        name: str,
        pair: int,
        m: int,
        n: int,
        x: float,
        y: float,
        r: float,
        look: dict[str, Any],
    ) -> None:
        speed = float(self.rotary.inv_freq[pair])
        scene.add(
            f"{name}.face",
            "circle",
            cx=x,
            cy=y,
            r=r,
            **look,
            tip=f"pair {pair} turns {speed:.5f} rad a position: query hand {m * speed:.3f} rad, "
            f"key hand {n * speed:.3f} rad, apart {(m - n) * speed:.3f} rad",
        )
        for who, position, color, dash in (("k", n, RED, "5 3"), ("q", m, BLUE, "none")):
            angle = position * speed
            scene.add(
                f"{name}.{who}",
                "line",
                x1=x,
                y1=y,
                x2=x + r * math.cos(angle),
                y2=y - r * math.sin(angle),
                stroke=color,
                stroke_width=2 + r / 60,
                stroke_dasharray=dash,
                pointer_events="none",
            )

    def _big_clock(self, scene: Scene, m: int, n: int) -> None:
        pair, x, y, r = self.value("pair"), 130.0, 178.0, 105.0
        speed = float(self.rotary.inv_freq[pair])
        scene.text("big", 10, 52, f"pair {pair}: {speed:.4f} rad a position", 12.5, fill=QUIET)
        self._hands(scene, "big", pair, m, n, x, y, r, {"fill": "#f7f9fa", "stroke": RULE})
        scene.text("q hand", 10, 306, f"— query: m · ω = {m * speed:.2f} rad", 12.5, fill=BLUE)
        scene.text("k hand", 10, 324, f"- - key: n · ω = {n * speed:.2f} rad", 12.5, fill=RED)
        scene.text(
            "apart",
            10,
            342,
            f"apart: (m − n) · ω = {(m - n) * speed:.2f} rad",
            12.5,
            font_weight="bold",
        )

    def _all_clocks(self, scene: Scene, m: int, n: int) -> None:
        pairs, chosen = len(self.rotary.inv_freq), self.value("pair")
        columns = math.ceil(math.sqrt(pairs))
        pitch = 252.0 / columns
        scene.text("all", 292, 52, f"all {pairs} pairs, fast to slow", 12.5, fill=QUIET)
        for pair in range(pairs):
            row, column = divmod(pair, columns)
            x, y = 292 + (column + 0.5) * pitch, 66 + (row + 0.5) * pitch
            look: dict[str, Any] = {
                "fill": "#ffffff",
                "stroke": INK if pair == chosen else RULE,
                "stroke_width": 3.0 if pair == chosen else 1.2,
            }
            self._hands(scene, f"pair{pair}", pair, m, n, x, y, pitch * 0.42, look)

    def _curve(self, scene: Scene, m: int, n: int) -> None:
        left, top, width, height = 612.0, 66.0, 330.0, 240.0
        low, high = min(self.curve), max(self.curve)
        bottom = top + height

        def place(distance: float, score: float) -> tuple[float, float]:
            x = left + width * (distance + FARTHEST) / (2 * FARTHEST)
            return x, top + height * (1 - (score - low) / (high - low))

        title = "score of this query and key against distance"
        scene.text("curve", left - 22, 52, title, 12.5, fill=QUIET)
        middle: dict[str, Any] = {"fill": QUIET, "text_anchor": "middle"}
        scene.text("axis", left + width / 2, bottom + 36, "m − n", 12, **middle)
        for tick in (-FARTHEST, -FARTHEST // 2, 0, FARTHEST // 2, FARTHEST):
            scene.text(f"tick{tick}", place(tick, 0)[0], bottom + 18, f"{tick}", 11, **middle)
        end: dict[str, Any] = {"fill": QUIET, "text_anchor": "end"}
        for name, score in (("low", low), ("high", high)):
            scene.text(name, left - 6, place(0, score)[1] + 4, f"{score:.0f}", 11, **end)
        points = " ".join(
            "{:.1f},{:.1f}".format(*place(d - FARTHEST, s)) for d, s in enumerate(self.curve)
        )
        scene.add("line", "polyline", points=points, fill="none", stroke=QUIET, stroke_width=1.6)
        score = self._score(m, n)
        x, y = place(m - n, score)
        drop: dict[str, Any] = {"stroke": BLUE, "stroke_dasharray": "3 3"}
        scene.add("drop", "line", x1=x, y1=y, x2=x, y2=bottom, **drop)
        dot: dict[str, Any] = {"fill": BLUE, "stroke": INK, "stroke_width": 2}
        tip = f"distance {m - n}: score {score:.3f}"
        scene.add("dot", "circle", tip=tip, cx=x, cy=y, r=6.5, **dot)
        x, y = min(x + 12, left + width - 84), max(y - 8, top + 12)
        scene.text("score", x, y, f"score {score:.2f}", 13, font_weight="bold")

    def caption(self, step: int) -> str:
        """The score now, and what shifting both did to it."""
        m, n = self._positions(step)
        start = self._score(m - step, n - step)
        change = abs(self._score(m, n) - start)
        moved = (
            f"; shifting both by {step} changed it by less than 0.01"
            if step and change < 0.01
            else f"; shifting both by {step} changed it by {change:.2f}"
            if step
            else ""
        )
        return f"Query at {m}, key at {n}: the score is {self._score(m, n):.2f}{moved}."
