"""The bug zoos: each bug shows where it is said to, and goes again."""

import inspect
import math
import re

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from traces import items, words

from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.learn.block_checks import leak
from tutorial_engine.learn.bugs import BUGS_01, edited, planted, zoo
from tutorial_engine.learn.bugs_04 import StaleBlocks
from tutorial_engine.learn.eager_pages import cost, drama, tokens
from tutorial_engine.model import attention as attention_module
from tutorial_engine.model.attention import NaiveAttention, naive_attention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.trace.events import Finished
from tutorial_engine.viz.timeline_plots import timeline, timelines

# -- notebook 01 ---------------------------------------------------------------------------------

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


def test_a_bug_made_from_another_source_than_the_installed_is_refused() -> None:
    for text in ("this is not there", "heads"):
        count = inspect.getsource(naive_attention).count(text)
        with pytest.raises(ValueError, match=f"'{text}' is {count} times in naive_attention"):
            edited(attention_module, "naive_attention", (text, "x"))


def test_zoo_says_what_a_test_does_not_catch(
    model: Qwen3ForCausalLM, capsys: pytest.CaptureFixture[str]
) -> None:
    right = naive_logits(model)
    bugs = {name: BUGS_01[name] for name in ("RoPE turns neighbours", "gate and up swapped")}
    assert zoo(bugs, lambda: right) == 0
    said = capsys.readouterr().out
    assert said.count("  not caught: max |Δ| = 0\n") == 2 and "✔" not in said
    assert zoo(bugs, lambda: naive_logits(model), tolerance=1e9) == 0
    assert capsys.readouterr().out.count("not caught: max |Δ| < 1e+0") == 2
    assert zoo(bugs, lambda: naive_logits(model) * math.nan, right) == 2, "NaN is caught"


# -- notebook 05 ---------------------------------------------------------------------------------


def test_a_stale_block_gives_one_user_the_text_of_another(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer
) -> None:
    anna, tom = "One day Anna had an old lamp.", "One day Tom had a yellow coat."
    asked = {"user 1": anna, "user 2": tom, "user 1 again": anna}
    wrong, right = (leak(model, tokenizer, asked, one) for one in (StaleBlocks, BlockManager))
    assert "yellow coat" in wrong.answers[2] and "yellow coat" not in "".join(wrong.answers[0])
    assert wrong.stale == list(wrong.blocks) == [0, 1] and len(wrong.held[1][0]) == 4
    assert [slot.who for slot in wrong.held[0][0]] == [0] * 4, "they were user 1's"
    assert " ".join(slot.label for slot in wrong.held[1][0][:2]) == "·yellow ·coat"
    assert right.answers[2] == right.answers[0] == wrong.answers[0] and not right.stale
    same = leak(model, tokenizer, {"a": anna, "b": anna}, BlockManager, num_blocks=20)
    assert same.blocks and not same.stale, "found, and rightly"


# -- the naive admission: right tokens, and what they cost -----------------------------------------


def test_the_drama_is_one(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    """Many times the tokens and several times as long, for the same answers; the users suffer."""
    runs = drama(model, tokenizer)
    right, eager = runs.values()
    assert tokens(right) == tokens(eager) and sorted(tokens(right)) == list("ABCDE")
    good, bad = cost(right), cost(eager)
    assert good.num_preemptions == 0 == good.num_recomputed and bad.preempted.keys() == {"E"}
    assert bad.num_tokens > 5 * good.num_tokens and bad.milliseconds > 3 * good.milliseconds
    assert bad.num_tokens - bad.num_recomputed == good.num_tokens
    for trace in (right, eager):
        ended = {e.request_id: e.time for e in trace.events if isinstance(e, Finished)}
        assert max(ended, key=lambda name: ended[name]) == "E"


def test_a_box_too_narrow_for_hatching_has_a_cross(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer
) -> None:
    runs = drama(model, tokenizer)
    by_time, by_step = timelines(runs), timeline(runs["the first chunk fits"])
    for picture, crosses in ((by_time, 13), (by_step, 0)):
        assert "preempted" in {one.text for one in words(picture)}
        drawn = [name for name in items(picture) if re.fullmatch(r"cross\..*\.line", name)]
        assert len(drawn) == crosses
