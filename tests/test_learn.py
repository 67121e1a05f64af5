"""The lesson's machinery: checks that name the mistake, predictions that are kept, bugs that go."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoints import QWEN3_06B
from torch import Tensor

from tutorial_engine.learn.bugs import BUGS_01, planted
from tutorial_engine.learn.checks_01 import (
    check_attention,
    check_kv_bytes,
    check_rope,
    check_window_mask,
)
from tutorial_engine.learn.predict import UNDECIDED, Predictions
from tutorial_engine.learn.source import show_source
from tutorial_engine.learn.verdict import Verdict, check_close, guarded, not_done, wrong_shape
from tutorial_engine.model.attention import NaiveAttention, naive_attention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM

VIEW = "application/vnd.jupyter.widget-view+json"


def config(layers: int, heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=512,
    )


SIX_TWO = config(layers=4, heads=6, kv_heads=2, head_dim=32)


# -- right solutions, by other means than the package's ----------------------------------------


def right_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    rows = []
    for query, allowed in zip(q, mask, strict=True):
        shares = [math.exp(float(query @ key) / math.sqrt(len(key))) for key in k]
        shares = [s if bool(ok) else 0.0 for s, ok in zip(shares, allowed, strict=True)]
        rows.append(sum(s / sum(shares) * value for s, value in zip(shares, v, strict=True)))
    return torch.stack(rows)  # type: ignore[arg-type]


def right_window(q_len: int, kv_len: int, window: int) -> Tensor:
    first = kv_len - q_len
    return torch.tensor(
        [[0 <= first + q - k < window for k in range(kv_len)] for q in range(q_len)]
    )


def right_rope(x: Tensor, angles: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.view_as_complex(torch.stack((x[..., :half], x[..., half:]), dim=-1))
    turned = turned * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


def right_bytes(c: ModelConfig, itemsize: int) -> int:
    return sum(
        2 * c.num_key_value_heads * c.head_dim * itemsize for _ in range(c.num_hidden_layers)
    )


CHECKS: dict[str, tuple[Callable[[Any], Verdict], Callable[..., Any]]] = {
    "attention": (check_attention, right_attention),
    "window_mask": (check_window_mask, right_window),
    "rope": (check_rope, right_rope),
    "kv_bytes, 6/2 heads": (lambda f: check_kv_bytes(f, SIX_TWO), right_bytes),
    "kv_bytes, Qwen3-0.6B": (lambda f: check_kv_bytes(f, QWEN3_06B), right_bytes),
}
every_check = pytest.mark.parametrize("name", CHECKS)


@every_check
def test_right_solution_is_accepted(name: str) -> None:
    check, right = CHECKS[name]
    verdict = check(right)
    assert verdict.ok is True and repr(verdict).startswith("✔ "), verdict


@every_check
@pytest.mark.parametrize("value", [None, ...])
def test_untouched_exercise_is_open_not_wrong(name: str, value: object) -> None:
    verdict = CHECKS[name][0](lambda *_: value)
    assert verdict.ok is None and repr(verdict).startswith("☐ not done yet"), verdict


@every_check
@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyError("q"), ZeroDivisionError()])
def test_function_that_raises_gets_a_verdict(name: str, error: Exception) -> None:
    def broken(*_: object) -> None:
        raise error

    verdict = CHECKS[name][0](broken)
    assert verdict.ok is False
    assert type(error).__name__ in verdict.message and str(error) in verdict.message


@every_check
def test_function_of_other_arguments_gets_a_verdict(name: str) -> None:
    verdict = CHECKS[name][0](lambda: 1)
    assert verdict.ok is False and "TypeError" in verdict.message


@pytest.mark.parametrize("name", ["attention", "window_mask", "rope"])
def test_other_shapes_and_types_are_named(name: str) -> None:
    check = CHECKS[name][0]
    for value, words in (
        (torch.zeros(2, 9, 1), "returned shape [2, 9, 1], expected ["),
        ([1.0, 2.0], "must return a tensor, got list"),
        (3, "must return a tensor, got int"),
    ):
        verdict = check(lambda *_, value=value: value)
        assert verdict.ok is False and words in verdict.message


# -- each usual mistake, and the words that name it ---------------------------------------------


def naive(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    return naive_attention(q[:, None], k[:, None], v[:, None], mask, scale).out[:, 0]


def masked_after(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    shares = (q @ k.T / k.shape[-1] ** 0.5).softmax(-1).masked_fill(~mask, float("-inf"))
    return (shares / shares.sum(-1, keepdim=True)) @ v


def zeroed_after(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return ((q @ k.T / q.shape[-1] ** 0.5).softmax(dim=-1) * mask) @ v


def over_queries(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ k.T / k.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=0) @ v


def halves(x: Tensor, angles: Tensor, sign: int = 1) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None], sign * angles.sin()[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def neighbours(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def upper_left(q_len: int, kv_len: int, window: int) -> Tensor:
    back = torch.arange(q_len)[:, None] - torch.arange(kv_len)[None, :]
    return (back >= 0) & (back < window)


def window_off(by: int) -> Callable[[int, int, int], Tensor]:
    return lambda q_len, kv_len, window: right_window(q_len, kv_len, window + by)


MISTAKES: list[tuple[str, Callable[..., Any], str]] = [
    ("attention", lambda q, k, v, mask: naive(q, k, v, None, None), "the mask has no effect"),
    ("attention", lambda q, k, v, mask: naive(q, k, v, mask, 1.0), "not divided by √D"),
    ("attention", masked_after, "−inf BEFORE the softmax"),
    ("attention", over_queries, "the softmax runs over the keys"),
    ("attention", lambda q, k, v, mask: naive(q, k, v, mask, 1 / 8), "divide by √D"),
    ("attention", zeroed_after, "masked after the softmax"),
    ("window_mask", lambda q, k, w: torch.ones(q, k, dtype=torch.bool), "sees a key after it"),
    ("window_mask", lambda q, k, w: right_window(q, k, k), "sees up to 4 keys; 2 expected"),
    ("window_mask", window_off(+1), "sees up to 3 keys; 2 expected"),
    ("window_mask", window_off(-1), "sees up to 1 keys; 2 expected"),
    ("window_mask", upper_left, "(q=1, k=5, window=3): lined up at the upper left"),
    ("rope", lambda x, angles: halves(x, angles, -1), "turned the wrong way round"),
    ("rope", neighbours, "neighbours are paired"),
    ("rope", lambda x, angles: x, "nothing was turned"),
    ("rope", lambda x, angles: halves(x, angles + 1), "position 0 changed"),
    ("rope", lambda x, angles: x * float("nan"), "position 0 changed"),
    ("rope", lambda x, angles: halves(x, 2 * angles), "position 0 is right, others not"),
]
for kv in ("kv_bytes, 6/2 heads", "kv_bytes, Qwen3-0.6B"):
    MISTAKES += [
        (kv, lambda c, size: right_bytes(c, size) // 2, "K and V are two tensors"),
        (kv, lambda c, size: right_bytes(c, size) // c.num_hidden_layers, "times the layers"),
        (kv, lambda c, size: right_bytes(c, size) * c.group_size, "not query heads"),
        (kv, lambda c, size: right_bytes(c, 4), "use the argument"),
        (kv, lambda c, size: 17 * size, "34; count K and V, layers, K/V heads"),
        (kv, lambda c, size: [17], "[17] for 2 and for 4 bytes a number"),
    ]


@pytest.mark.parametrize(
    ("name", "wrong", "words"), MISTAKES, ids=[f"{m[0]}: {m[2]}" for m in MISTAKES]
)
def test_mistake_is_named(name: str, wrong: Callable[..., Any], words: str) -> None:
    verdict = CHECKS[name][0](wrong)
    assert verdict.ok is False and repr(verdict).startswith("✘ ")
    assert words in verdict.message


def test_messages_of_a_check_differ_from_mistake_to_mistake() -> None:
    for name in CHECKS:
        told = [CHECKS[name][0](wrong).message for n, wrong, _ in MISTAKES if n == name]
        assert len(set(told)) >= len(told) - 1, told  # "other numbers" may be said twice


def test_masks_of_ones_and_zeros_are_not_bool() -> None:
    verdict = check_window_mask(lambda q, k, w: right_window(q, k, w).int())
    assert verdict.ok is False and "must be bool" in verdict.message


def test_bytes_that_fit_one_config_by_chance_are_refused() -> None:
    assert check_kv_bytes(lambda c, _: right_bytes(c, 2), SIX_TWO).ok is False, "fits bf16 only"
    for function, words in (
        (
            lambda c, size: 2 * c.num_hidden_layers * c.hidden_size * size,
            "changes with hidden_size",
        ),
        (lambda c, size: 57_344 * size, "count K and V, layers"),
    ):
        assert function(QWEN3_06B, 2) == 114_688  # the right number, for the wrong reason
        verdict = check_kv_bytes(function, QWEN3_06B)
        assert verdict.ok is False and words in verdict.message


def test_window_that_sees_the_right_number_of_wrong_keys_is_told_so() -> None:
    def shifted(q_len: int, kv_len: int, window: int) -> Tensor:
        right = right_window(q_len, kv_len, window)
        return right if q_len == kv_len else right.roll(-1, dims=-1)

    verdict = check_window_mask(shifted)
    assert verdict.ok is False
    assert "sees 3 keys, at most 3 expected" not in verdict.message  # would explain nothing


# -- verdicts -----------------------------------------------------------------------------------


def test_verdicts_are_shown_by_their_mark_and_zero_and_false_are_answers() -> None:
    assert [repr(Verdict(ok, "so")) for ok in (True, False, None)] == ["✔ so", "✘ so", "☐ so"]
    assert all(not_done("f", answer) is None for answer in (0, False, torch.zeros(2)))


def test_interrupting_a_check_is_not_swallowed() -> None:
    def interrupted() -> Verdict:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guarded("f", interrupted)


def test_close_numbers_pass_and_a_difference_is_told_with_place_and_size() -> None:
    verdict = check_close(torch.ones(2, 3), torch.ones(2, 3) + 1e-6, 1e-5, "twins")
    assert verdict == Verdict(True, "twins: max |Δ| ≤ 1e-05 over 6 numbers")
    a = torch.zeros(2, 3, 4)
    b = a.clone()
    b[1, 2, 3], b[0, 1, 0] = -0.25, 0.125
    verdict = check_close(a, b, 1e-5, "twins")
    assert verdict == Verdict(False, "twins: differs most at [1, 2, 3], by 0.25 > 1e-05")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_never_close(bad: float) -> None:
    a = torch.zeros(2, 2)
    b = a.clone()
    b[1, 0] = bad
    for first, second in ((a, b), (b, a)):
        verdict = check_close(first, second, 1e9, "twins")
        assert verdict.ok is False and "[1, 0], by inf" in verdict.message
    nan = torch.tensor([float("nan")])
    assert check_close(nan, nan, 1, "x").ok is False


def test_what_is_no_tensor_or_only_broadcasts_is_a_verdict_too() -> None:
    verdict = wrong_shape("f", torch.zeros(1, 3), torch.zeros(2, 3))
    assert verdict is not None and "[1, 3], expected [2, 3]" in verdict.message
    assert check_close(torch.zeros(1, 3), torch.zeros(2, 3), 1.0, "f").ok is False
    for value in (None, 3.0, [1.0]):
        assert check_close(value, torch.ones(1), 1e-5, "x").ok is False  # type: ignore[arg-type]


# -- predictions --------------------------------------------------------------------------------


@pytest.fixture
def predictions() -> Predictions:
    return Predictions()


def test_right_and_wrong_predictions_are_told_and_scored(
    predictions: Predictions, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, choice in (("a", "1"), ("b", "2"), ("c", None)):
        question = predictions.ask(name, "How many?", ["1", "2"])
        assert question.choice is None and question.buttons.value == UNDECIDED
        if choice is not None:
            question.buttons.value = choice
        predictions.reveal(name, "1")
    assert capsys.readouterr().out.splitlines() == [
        "Answer: 1. ✔ As you predicted.",
        "Answer: 1. ✘ You predicted: 2. What did you overlook?",
        "No prediction yet: choose above, then run this cell again to see the answer.",
    ]
    assert predictions.score() == "1 of 2 predictions were right; 1 not made."


def test_choice_is_kept_when_asked_again_and_scored_when_revealed(
    predictions: Predictions,
) -> None:
    predictions.ask("a", "?", ["1", "2"]).buttons.value = "2"
    assert predictions.score() == "0 of 0 predictions were right; 0 not made."
    assert predictions.ask("a", "?", ["1", "2"]).choice == "2"
    assert predictions.ask("a", "?", ["1", "3"]).choice is None  # its option is gone
    assert len(predictions.questions) == 1


def test_revealed_question_cannot_be_changed_any_more(predictions: Predictions) -> None:
    with pytest.raises(ValueError, match="no question 'a' was asked; run its cell first"):
        predictions.reveal("a", "1")
    question = predictions.ask("a", "?", ["1", "2"])
    with pytest.raises(ValueError, match="'3' is none of the options"):
        predictions.reveal("a", "3")
    assert question.truth is None
    predictions.reveal("a", "2")
    assert not question.buttons.disabled  # nothing was chosen: it waits
    question.buttons.value = "1"
    predictions.reveal("a", "2")
    assert question.buttons.disabled and question.truth == "2"


def test_question_is_shown_live_and_as_text(predictions: Predictions) -> None:
    question = predictions.ask("a", "Is 1 < 2 & so on?", ["yes", "<script>"])
    data = question._repr_mimebundle_()
    assert data[VIEW]["model_id"] == question.view.model_id
    assert data["text/plain"] == "Predict: Is 1 < 2 & so on?\n  ( ) yes\n  ( ) <script>"
    title = question.view.children[0].value
    assert title == "<b>Predict:</b> Is 1 &lt; 2 &amp; so on?"
    assert question.buttons in question.view.children


# -- sources ------------------------------------------------------------------------------------


def shown(thing: Callable[..., Any], capsys: pytest.CaptureFixture[str], **options: bool) -> str:
    show_source(thing, **options)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "thing",
    [naive_attention, Qwen3DecoderLayer.forward, Qwen3DecoderLayer, Verdict, Predictions.reveal],
)
def test_source_is_the_installed_code_without_its_docstring(
    thing: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert thing.__doc__
    said = shown(thing, capsys).rstrip("\n").splitlines()
    real = inspect.getsource(thing).rstrip().splitlines()
    left_out = [line for line in real if line not in said]
    quotes = [i for i, line in enumerate(real) if '"""' in line]
    size = 1 if real[quotes[0]].count('"""') == 2 else quotes[1] - quotes[0] + 1
    assert said == real[: quotes[0]] + real[quotes[0] + size :]
    assert '"""' in left_out[0] and thing.__doc__.split("\n")[0].strip() in left_out[0]


def test_source_shows_the_docstring_when_asked_and_all_of_what_has_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = shown(naive_attention, capsys, docstring=True)
    assert said.rstrip() == inspect.getsource(naive_attention).rstrip()
    assert "by the book" in said
    assert shown(upper_left, capsys).rstrip() == inspect.getsource(upper_left).rstrip()


# -- bugs ---------------------------------------------------------------------------------------

IDS = [[40, 7, 99, 250, 7, 13, 300, 41], [5, 6, 7]]


def naive_logits(model: Qwen3ForCausalLM) -> Tensor:
    return model.compute_logits(model(Batch.from_sequences(IDS), NaiveAttention()))


def test_each_bug_changes_the_logits_in_its_own_way_and_goes_again(
    model: Qwen3ForCausalLM,
) -> None:
    right = naive_logits(model)
    results = [right]
    for name, (owner, attribute, wrong) in BUGS_01.items():
        before = getattr(owner, attribute)
        with pytest.raises(RuntimeError, match="interrupted"), planted(name):
            assert getattr(owner, attribute) is wrong
            results.append(naive_logits(model))
            raise RuntimeError("interrupted")
        assert getattr(owner, attribute) is before
        assert torch.equal(naive_logits(model), right)
    assert len(results) == 5 and all(bool(logits.isfinite().all()) for logits in results)
    for i, one in enumerate(results):
        assert all((one - other).abs().max() > 1e-4 for other in results[i + 1 :])


def test_unknown_bug_is_refused_with_the_names_of_the_known() -> None:
    with pytest.raises(ValueError, match="no bug 'moth'") as error, planted("moth"):
        pass
    assert all(name in str(error.value) for name in BUGS_01)
