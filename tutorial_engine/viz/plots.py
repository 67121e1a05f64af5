"""Introduced in notebook 01. Masks, heads, training, cost: numbers in, Picture out.

Every caption is computed from the same numbers that are drawn.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor

from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.style import (
    BLUE,
    GREEN,
    INK,
    MAGNITUDE,
    ORANGE,
    PLAIN,
    QUIET,
    RED,
    RULE,
    finish,
    house_style,
    new_figure,
)


def mask_picture(masks: Mapping[str, Tensor]) -> Picture:
    """Bool masks [q, kv] side by side, all with square cells of one size: row = query."""
    with house_style():
        wide = sum(mask.shape[1] + 2.2 for mask in masks.values())
        tall = max(mask.shape[0] for mask in masks.values())
        figure = new_figure(0.38 * wide + 0.4, 0.38 * tall + 1.7)
        ax = figure.subplots()
        left, parts = 0.0, []
        for title, mask in masks.items():
            _cells(ax, mask, left)
            ax.text(left - 0.5, -1.5, title, fontweight="bold", fontsize=11)
            left += mask.shape[1] + 2.2
            parts.append(f"{title}: {int(mask.sum())} of {mask.numel()} pairs")
        ax.set(xlim=(-1.9, left - 2.2), ylim=(tall + 0.6, -2.2), aspect="equal")
        ax.axis("off")
        rule = "Blue with ✓: may attend, because key_pos ≤ query_pos. "
        return finish(figure, rule + "; ".join(parts) + ".")


def _cells(ax: Axes, mask: Tensor, left: float) -> None:
    """One mask from x = left on, with the positions of its queries and keys."""
    q_len, kv_len = mask.shape
    quiet: dict[str, Any] = {"ha": "center", "va": "center", "color": QUIET, "fontsize": 9}
    for (row, column), allowed in np.ndenumerate(mask.numpy()):
        look: dict[str, Any] = {"facecolor": "white", "hatch": "////"}
        if allowed:
            look = {"facecolor": "#bcd7ea"}
        corner = (left + column - 0.46, row - 0.46)
        ax.add_patch(
            Rectangle(corner, 0.92, 0.92, edgecolor=BLUE if allowed else RULE, linewidth=1, **look)
        )
        if allowed:
            ax.text(left + column, row, "✓", ha="center", va="center", color=INK)
    for column in range(kv_len):
        ax.text(left + column, -0.8, str(column), **quiet)
    for row in range(q_len):
        ax.text(left - 0.8, row, str(kv_len - q_len + row), **quiet)
    ax.text(left - 1.35, (q_len - 1) / 2, "query", rotation=90, **quiet)
    ax.text(left + (kv_len - 1) / 2, q_len - 0.1, "key", **quiet)


def heads_picture(weights: Tensor, scores: Tensor, labels: Sequence[str]) -> Picture:
    """Attention weights [layers, heads, n, n] as small maps; induction heads are framed.

    `scores` [layers, heads] is the induction score of each head.
    """
    layers, heads = scores.shape
    best = divmod(int(scores.argmax()), heads)
    with house_style():
        figure = new_figure(1.5 * heads, 1.55 * layers + 0.8)
        grid = figure.subplots(layers, heads, squeeze=False)
        for layer in range(layers):
            for head in range(heads):
                ax = grid[layer][head]
                ax.imshow(_seen(weights[layer, head]), cmap=MAGNITUDE, vmin=0, vmax=1)
                ax.set_xticks([])
                ax.set_yticks([])
                ax.set_title(f"L{layer} H{head}  {scores[layer, head]:.2f}", fontsize=9)
                frame = bool(scores[layer, head] > 0.4)
                for spine in ax.spines.values():
                    spine.set(
                        visible=True, edgecolor=RED if frame else RULE, linewidth=3 * frame + 1
                    )
        strong = int((scores > 0.4).sum())
        return finish(
            figure,
            f"Attention of all {layers * heads} heads over {len(labels)} tokens (row = query, "
            "column = key, bright = 1, white = forbidden); above each map its induction score. "
            f"Framed: the {strong} heads that score above 0.40; the best is layer {best[0]}, head "
            f"{best[1]} with {scores.max():.2f}.",
        )


def _seen(weights: Tensor) -> np.ndarray:
    """Weights [n, n] with the forbidden future left blank: zero and forbidden are two things."""
    future = torch.ones_like(weights, dtype=torch.bool).triu(1)
    return weights.masked_fill(future, float("nan")).numpy()


def attention_picture(weights: Tensor, labels: Sequence[str], title: str) -> Picture:
    """One head's weights [n, n] with its tokens on both axes; the last query is framed."""
    n = len(labels)
    with house_style():
        size = max(4.5, 0.27 * n + 1.6)
        figure = new_figure(size + 1, size)
        ax = figure.subplots()
        image = ax.imshow(_seen(weights), cmap=MAGNITUDE, vmin=0, vmax=1)
        ax.set_xticks(range(n), labels, rotation=90, fontsize=9)
        ax.set_yticks(range(n), labels, fontsize=9)
        ax.set_xlabel("key")
        ax.set_ylabel("query")
        ax.set_title(title)
        ax.add_patch(
            Rectangle(
                (-0.5, n - 1.5), n, 1, fill=False, edgecolor=RED, linewidth=2.5, clip_on=False
            )
        )
        figure.colorbar(image, ax=ax, label="weight (white = forbidden)", shrink=0.7)
        best = int(weights[-1].argmax())
        return finish(
            figure,
            f"Framed: query {n - 1} “{labels[-1]}” gives {weights[-1, best]:.2f} of its attention "
            f"to key {best} “{labels[best]}”.",
        )


def variance_picture(
    head_dims: Sequence[int], raw: Sequence[float], scaled: Sequence[float]
) -> Picture:
    """Measured variance of q · k for random vectors, before and after division by √head_dim."""
    with house_style():
        figure = new_figure(8, 3.6)
        ax = figure.subplots()
        ax.plot(head_dims, raw, "o-", color=RED, label="q · k")
        ax.plot(head_dims, scaled, "s--", color=BLUE, label="q · k / √head_dim")
        ax.set(xscale="log", yscale="log", xlabel="head_dim", ylabel="variance of the scores")
        ax.set_xticks(head_dims, [str(d) for d in head_dims])
        ax.yaxis.set_major_formatter(PLAIN)
        ax.minorticks_off()
        ax.legend()
        return finish(
            figure,
            f"From head_dim {head_dims[0]} to {head_dims[-1]} the variance of the raw scores grows "
            f"from {raw[0]:.0f} to {raw[-1]:.0f}; divided by √head_dim it stays between "
            f"{min(scaled):.2f} and {max(scaled):.2f}.",
        )


def training_picture(curve: Sequence[Mapping[str, float]]) -> Picture:
    """Loss and induction score of the tiny model's training, from its curve.json."""
    steps = [point["step"] for point in curve]
    induction = [point["induction"] for point in curve]
    with house_style():
        figure = new_figure(8, 3.8)
        ax = figure.subplots()
        ax.plot(steps, [p["text_loss"] for p in curve], color=BLUE, label="loss on stories")
        ax.plot(
            steps,
            [p["repeat_loss"] for p in curve],
            color=ORANGE,
            linestyle="--",
            label="loss on repeated random tokens",
        )
        ax.set(xlabel="training step", ylabel="loss (nats per token)", ylim=(0, 7))
        right = ax.twinx()
        right.plot(
            steps,
            induction,
            color=GREEN,
            linewidth=2.2,
            linestyle="-.",
            label="best induction score",
        )
        right.set(ylim=(0, 1.05), ylabel="induction score")
        right.spines["right"].set_visible(True)
        lines = ax.get_lines() + right.get_lines()
        ax.legend(lines, [str(line.get_label()) for line in lines], loc="center right")
        span = min(2, len(curve) - 1)  # the steepest stretch of two intervals
        rises = [induction[i + span] - induction[i] for i in range(len(curve) - span)]
        before = rises.index(max(rises))
        after = before + span
        return finish(
            figure,
            f"Between step {steps[before]} and step {steps[after]} the best head's induction "
            f"score goes from {induction[before]:.2f} to {induction[after]:.2f}; "
            f"the loss on repeated random tokens ends at {curve[-1]['repeat_loss']:.2f}, "
            f"on stories at {curve[-1]['text_loss']:.2f}.",
        )


def cost_picture(tokens_run: Sequence[int], prompt_tokens: int) -> Picture:
    """Tokens that went through the model at each step of generation by recomputing everything."""
    steps = range(1, len(tokens_run) + 1)
    needed = [prompt_tokens] + [1] * (len(tokens_run) - 1)
    total, useful = sum(tokens_run), sum(needed)
    with house_style():
        figure = new_figure(8, 3.4)
        ax = figure.subplots()
        ax.bar(steps, tokens_run, color="white", edgecolor=RED, hatch="////", label="run again")
        ax.bar(steps, needed, color=BLUE, edgecolor=BLUE, label="not seen before")
        ax.set(xlabel="step", ylabel="tokens run")
        ax.legend(loc="upper left")
        return finish(
            figure,
            f"{len(tokens_run)} new tokens cost {total} token runs, of which {total - useful} "
            f"({100 * (total - useful) / total:.0f} %) repeat work already done.",
        )
