"""Introduced in notebook 01. The checks of notebook 01: each knows the usual mistakes by name."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tutorial_engine.learn.verdict import Verdict, close, guarded, not_done, wrong_shape
from tutorial_engine.model.attention import causal_mask, naive_attention
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.rope import RotaryEmbedding, apply_rope


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def check_attention(function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Verdict:
    """Check a learner's function(q [q, D], k [kv, D], v [kv, D], mask [q, kv]) → out [q, D]."""
    q, k, v = _random(3, 8), _random(5, 8), _random(5, 8)
    mask = causal_mask(3, 5)

    def by_the_book(mask: Tensor | None, scale: float | None = None) -> Tensor:
        return naive_attention(q[:, None], k[:, None], v[:, None], mask, scale).out[:, 0]

    def run() -> Verdict:
        got = function(q, k, v, mask)
        bad = not_done("attention", got) or wrong_shape("attention", got, q)
        if bad is not None:
            return bad
        if close(got, by_the_book(mask), 1e-5):
            return Verdict(True, "attention: equal to the package's, q=3, k=5")
        if close(got, by_the_book(None), 1e-5):
            return Verdict(False, "attention: the mask has no effect; queries see the future")
        if close(got, by_the_book(mask, scale=1.0), 1e-5):
            return Verdict(False, "attention: the scores are not divided by √D")
        if close(got, by_the_book(mask, scale=1.0 / q.shape[-1]), 1e-5):
            return Verdict(False, "attention: the scores are divided by D; divide by √D")
        if bool(got.isnan().any()):
            return Verdict(False, "attention: NaN; are forbidden scores −inf BEFORE the softmax?")
        shares = naive_attention(q[:, None], k[:, None], v[:, None]).weights[0]
        if close(got, (shares * mask) @ v, 1e-5):
            return Verdict(
                False, "attention: masked after the softmax; shares no longer add up to 1"
            )
        return Verdict(
            False,
            "attention: other numbers; check the scale (1/√D), that forbidden scores become −inf "
            "before the softmax, and that the softmax runs over the keys (last axis)",
        )

    return guarded("attention", run)


def check_window_mask(function: Callable[[int, int, int], Tensor]) -> Verdict:
    """Check a learner's function(q_len, kv_len, window) → bool [q_len, kv_len]."""

    def upper_left(q_len: int, kv_len: int, window: int) -> Tensor:
        square = causal_mask(kv_len, kv_len, window)[:q_len]
        return square if q_len < kv_len else torch.empty(0)  # the same thing when q = k

    def run() -> Verdict:
        for q_len, kv_len, window in ((4, 4, 2), (1, 5, 3), (3, 7, 4), (2, 2, 9)):
            where = f"q={q_len}, k={kv_len}, window={window}"
            got, want = function(q_len, kv_len, window), causal_mask(q_len, kv_len, window)
            bad = not_done("window_mask", got) or wrong_shape("window_mask", got, want)
            if bad is not None:
                return bad
            if got.dtype != torch.bool:
                return Verdict(
                    False, f"window_mask must be bool, True = may attend; got {got.dtype}"
                )
            if bool((got & ~causal_mask(q_len, kv_len)).any()):
                return Verdict(False, f"window_mask ({where}): a query sees a key after it")
            if torch.equal(got, upper_left(q_len, kv_len, window)):
                return Verdict(
                    False,
                    f"window_mask ({where}): lined up at the upper left; the queries are the LAST "
                    "of the keys, the first stands at kv_len - q_len",
                )
            if not torch.equal(got, want):
                seen, most = int(got.sum(-1).max()), int(want.sum(-1).max())
                if seen == most:
                    return Verdict(
                        False,
                        f"window_mask ({where}): the right number of keys, but not the last ones",
                    )
                return Verdict(
                    False,
                    f"window_mask ({where}): a query sees up to {seen} keys; {most} expected",
                )
        return Verdict(True, "window_mask: right for prefill, decode, chunk and a wide window")

    return guarded("window_mask", run)


def check_rope(function: Callable[[Tensor, Tensor], Tensor]) -> Verdict:
    """Check a learner's function(x [T, heads, D], angles [T, D / 2]) → x turned (half-split)."""
    x = _random(6, 2, 8)
    angles = RotaryEmbedding(8, 10000.0)(torch.arange(6))
    turns = torch.arange(6, dtype=torch.float32)[:, None] * RotaryEmbedding(8, 10000.0).inv_freq

    def interleaved() -> Tensor:
        order = [0, 2, 4, 6, 1, 3, 5, 7]  # brings neighbours half a head apart, and back
        return apply_rope(x[..., order], *angles)[..., torch.tensor(order).argsort()]

    def run() -> Verdict:
        got, want = function(x, turns), apply_rope(x, *angles)
        bad = not_done("rope", got) or wrong_shape("rope", got, want)
        if bad is not None:
            return bad
        if close(got, want, 1e-5):
            return Verdict(True, "rope: equal to the package's, half-split pairs")
        if close(got, apply_rope(x, angles.cos, -angles.sin), 1e-5):
            return Verdict(False, "rope: turned the wrong way round; look at the sign of sin")
        if close(got, interleaved(), 1e-5):
            return Verdict(
                False,
                "rope: neighbours are paired (0 1)(2 3); these checkpoints pair i with i + D/2",
            )
        if close(got, x, 1e-5):
            return Verdict(False, "rope: nothing was turned")
        if close(got[0], x[0], 1e-5):
            return Verdict(
                False, "rope: position 0 is right, others not; look at cos, sin and signs"
            )
        return Verdict(False, "rope: position 0 changed; are the halves joined in the same order?")

    return guarded("rope", run)


def check_kv_bytes(function: Callable[[ModelConfig, int], int], config: ModelConfig) -> Verdict:
    """Check a learner's function(config, itemsize) → bytes of K and V that one token leaves."""
    elements = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim

    def run() -> Verdict:
        got = function(config, 2)
        bad = not_done("kv_bytes", got)
        if bad is not None:
            return bad
        right = elements * 2
        if function(config, 4) == got:
            return Verdict(
                False, f"kv_bytes: {got!r} for 2 and for 4 bytes a number; use the argument"
            )
        wider = replace(config, hidden_size=2 * config.hidden_size)
        if function(wider, 2) != got:
            return Verdict(
                False,
                "kv_bytes: changes with hidden_size; a K/V head has config.head_dim numbers, which "
                "need not be hidden_size / heads",
            )
        deeper = replace(config, num_hidden_layers=2 * config.num_hidden_layers)
        if got == right and function(deeper, 2) == 2 * right:
            return Verdict(True, f"kv_bytes: {right:,} bytes a token")
        usual = [
            (right // 2, "K and V are two tensors: twice as much"),
            (
                right // config.num_hidden_layers,
                "every layer has its own K and V: times the layers",
            ),
            (right * config.group_size, "count K/V heads, not query heads"),
        ]
        hints = [hint for wrong, hint in usual if wrong == got]
        hint = hints[0] if hints else "count K and V, layers, K/V heads"
        return Verdict(False, f"kv_bytes: {got!r}; {hint}")

    return guarded("kv_bytes", run)
