"""The bug zoos: each bug shows where it is said to, and goes again."""

import inspect
import math
import re
from collections.abc import Sequence

import pytest
import torch
from learners import PROMPT_IDS
from tokenizers import Tokenizer
from torch import Tensor
from traces import items, words

from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.runner import decode, prefill
from tutorial_engine.learn.exercises.lesson_05_blocks import leak
from tutorial_engine.learn.stories.bugs import Zoo, diff, edited, planted, zoo
from tutorial_engine.learn.stories.bugs_02 import BUGS_02
from tutorial_engine.learn.stories.bugs_03 import BUGS_03
from tutorial_engine.learn.stories.bugs_04 import (
    BUGS_04,
    Seen,
    StaleBlocks,
    stress,
)
from tutorial_engine.learn.stories.eager_pages import EagerPages, cost, crowd, drama, tokens
from tutorial_engine.model import attention as attention_module
from tutorial_engine.model import decoder as decoder_module
from tutorial_engine.model.attention import NaiveAttention, naive_attention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.model.layers import SiluAndMul
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.events import Finished
from tutorial_engine.viz.views.timeline import timeline, timelines

# -- bugs of the model --------------------------------------------------------------------------

MODEL_BUGS: Zoo = {
    "RoPE turns neighbours": edited(
        decoder_module,
        "apply_rope",
        ("x.chunk(2, dim=-1)", "x[..., 0::2], x[..., 1::2]"),
    ),
    "q_norm and k_norm after RoPE": edited(
        decoder_module.SelfAttention,
        "forward",
        ("apply_rope(self.q_norm(q), *angles)", "self.q_norm(apply_rope(q, *angles))"),
        ("apply_rope(self.k_norm(k), *angles)", "self.k_norm(apply_rope(k, *angles))"),
    ),
    "query head h reads K/V head h % n": edited(
        attention_module,
        "naive_attention",
        ("k.repeat_interleave(heads // kv_heads, dim=1)", "k.repeat(1, heads // kv_heads, 1)"),
        ("v.repeat_interleave(heads // kv_heads, dim=1)", "v.repeat(1, heads // kv_heads, 1)"),
    ),
    "gate and up swapped": edited(
        SiluAndMul, "forward", ("gate, up = x.chunk", "up, gate = x.chunk")
    ),
}

IDS = [[40, 7, 99, 250, 7, 13, 300, 41], [5, 6, 7]]


def naive_logits(model: CausalLM) -> Tensor:
    return model.compute_logits(model(Batch.from_sequences(IDS), NaiveAttention()))


def test_each_bug_changes_the_logits_in_its_own_way_and_goes_again(
    model: CausalLM,
) -> None:
    right = naive_logits(model)
    results = [right]
    for name, (owner, attribute, wrong) in MODEL_BUGS.items():
        before = getattr(owner, attribute)
        with pytest.raises(RuntimeError, match="interrupted"), planted(name, MODEL_BUGS):
            assert getattr(owner, attribute) is wrong
            results.append(naive_logits(model))
            raise RuntimeError("interrupted")
        assert getattr(owner, attribute) is before
        assert torch.equal(naive_logits(model), right)
    assert len(results) == 5 and all(bool(logits.isfinite().all()) for logits in results)
    for i, one in enumerate(results):
        assert all((one - other).abs().max() > 1e-4 for other in results[i + 1 :])


@pytest.mark.parametrize("bugs", [MODEL_BUGS, BUGS_02])
def test_diff_of_a_bug_is_what_was_changed_in_the_installed_source(bugs: Zoo) -> None:
    for name, bug in bugs.items():
        owner, attribute, wrong = bug
        right = inspect.getsource(getattr(owner, attribute))
        mended = inspect.getsource(getattr(wrong, "__func__", wrong))
        lines = diff(bug).splitlines()
        removed = [line[2:] for line in lines if line.startswith("- ")]
        added = [line[2:] for line in lines if line.startswith("+ ")]
        assert removed and added and len(lines) == len(removed) + len(added) <= 5, name
        assert all(line in right and line not in mended for line in removed)
        assert all(line in mended and line not in right for line in added)


def test_a_bug_made_from_another_source_than_the_installed_is_refused() -> None:
    for text in ("this is not there", "heads"):
        count = inspect.getsource(naive_attention).count(text)
        with pytest.raises(ValueError, match=f"'{text}' is {count} times in naive_attention"):
            edited(attention_module, "naive_attention", (text, "x"))


def test_zoo_says_what_a_test_does_not_catch(
    model: CausalLM, capsys: pytest.CaptureFixture[str]
) -> None:
    right = naive_logits(model)
    bugs = {name: MODEL_BUGS[name] for name in ("RoPE turns neighbours", "gate and up swapped")}
    assert zoo(bugs, lambda: right) == 0
    said = capsys.readouterr().out
    assert said.count("  not caught: max |Δ| = 0\n") == 2 and "✔" not in said
    assert zoo(bugs, lambda: naive_logits(model), tolerance=1e9) == 0
    assert capsys.readouterr().out.count("not caught: max |Δ| < 1e+0") == 2
    factors = iter((1, math.nan, math.nan))
    assert zoo(bugs, lambda: right * next(factors)) == 2, "NaN is caught"


# -- notebook 02 ---------------------------------------------------------------------------------


def path(model: CausalLM, chunk_size: int | None) -> Tensor:
    """Logits after a prefill of 8 tokens and 4 decodes, in memory that holds zeros."""
    cache = StaticKVCache.from_config(model.config, max_len=16)
    cache.storage.k.zero_()
    cache.storage.v.zero_()
    request = Request("a", list(range(40, 48)))
    logits = [prefill(model, cache, [request], chunk_size=chunk_size)]
    for token in (50, 60, 70, 80):
        request.token_ids.append(token)
        logits.append(decode(model, cache, [request]))
    return torch.cat(logits)


@pytest.mark.parametrize("name", BUGS_02)
def test_bug_of_the_cache_is_found_by_logits_and_goes_again(model: CausalLM, name: str) -> None:
    chunk_size = 4 if "chunk" in name else None
    right = path(model, None)
    with planted(name, BUGS_02):
        wrong = path(model, chunk_size)
    assert torch.allclose(path(model, chunk_size), right, atol=1e-3)
    assert (wrong - right).abs().amax(-1)[1:].min() > 0.01
    if chunk_size is None:
        assert torch.allclose(wrong[0], right[0], atol=1e-3), "the first new token is right"


# -- notebook 03 ---------------------------------------------------------------------------------

PROMPTS = [list(range(40, 50)), list(range(60, 67)), [70, 71, 72]]


def texts(
    model: CausalLM, chosen: list[int], budget: int, temperature: float
) -> dict[str, tuple[int, ...]]:
    engine = LLMEngine(model, config=EngineConfig(max_model_len=32, max_num_batched_tokens=budget))
    for i in chosen:
        params = SamplingParams(max_tokens=8, temperature=temperature, seed=i, ignore_eos=True)
        engine.add_request(str(i), PROMPTS[i], params)
    return {out.request_id: out.outputs[0].token_ids for out in engine.run()}


@pytest.mark.parametrize("name", BUGS_03)
def test_bug_of_the_scheduler_shows_in_company_only_and_goes_again(
    model: CausalLM, name: str
) -> None:
    def alone() -> dict[str, tuple[int, ...]]:
        return {str(i): texts(model, [i], 64, 1.0)[str(i)] for i in range(3)}  # whole prompts

    right = alone()
    with planted(name, BUGS_03):
        assert alone() == right
        together = texts(model, [0, 1, 2], 8, 1.0)
    harmless = name == "each request has the whole budget"
    assert (together == right) == harmless
    assert texts(model, [0, 1, 2], 8, 1.0) == right


# -- notebook 05 ---------------------------------------------------------------------------------


def test_a_stale_block_gives_one_user_the_text_of_another(
    model: CausalLM, tokenizer: Tokenizer
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


# -- the bug zoo ------------------------------------------------------------------------------

# bug -> the tests that see it; every bug is seen by another one
SEEN: dict[str, set[str]] = {
    "no bug": set(),
    "a taken block keeps its hash": {"small_pool", "found", "integrity"},
    "a hash of own tokens only": {"together"},
    "found too early": {"together"},
    "a shared block is written": {"samples", "integrity"},
    "blocks are freed head first": {"found"},
}


@pytest.fixture(scope="module")
def rows(model: CausalLM) -> list[Seen]:
    return stress(model, PROMPT_IDS)


def test_table_has_a_row_for_each_bug(rows: Sequence[Seen]) -> None:
    assert [row.bug for row in rows] == ["no bug", *BUGS_04] == list(SEEN)
    assert rows[0] == Seen("no bug", "3 of 3", "5 of 5", "3 of 3", "4 of 4", 8, "fine")


@pytest.mark.parametrize("name", SEEN)
def test_a_bug_of_blocks_is_seen_by_some_tests_and_never_alone(
    rows: Sequence[Seen], name: str
) -> None:
    right = rows[0]._asdict()
    got = next(row for row in rows if row.bug == name)._asdict()
    assert {test for test in got if got[test] != right[test]} - {"bug"} == SEEN[name], got
    assert got["alone"] == "3 of 3"


# -- the naive admission: right tokens, and what they cost -----------------------------------------


def test_eager_admission_throws_one_request_out_four_times(model: CausalLM) -> None:
    eager, right = (crowd(pages, model, PROMPT_IDS) for pages in (EagerPages, PagedKVCache))
    assert cost(eager)[:4] == (22, 6, {"B": 4, "C": 2}, 27)
    assert cost(right)[:4] == (23, 2, {"B": 1, "C": 1}, 16)
    assert tokens(eager) == tokens(right) and len(tokens(right)) == 3


def test_the_drama_is_one(model: CausalLM, tokenizer: Tokenizer) -> None:
    """Many times the tokens and several times as long, for the same answers; the users suffer."""
    runs = drama(model, tokenizer)
    right, eager = runs.values()
    assert tokens(right) == tokens(eager) and sorted(tokens(right)) == list("ABCDE")
    good, bad = cost(right), cost(eager)
    assert good.num_preemptions == 0 == good.num_recomputed and bad.preempted.keys() == {"E"}
    assert bad.num_tokens > 5 * good.num_tokens and bad.milliseconds > 3 * good.milliseconds
    assert bad.num_tokens - bad.num_recomputed == good.num_tokens
    clock = VirtualClock()
    for trace, found in ((right, good), (eager, bad)):
        seconds = found.num_steps * clock.per_forward + found.num_tokens * clock.per_token
        assert found.milliseconds == pytest.approx(1000 * seconds)
        ended = {e.request_id: e.time for e in trace.events if isinstance(e, Finished)}
        assert max(ended, key=lambda name: ended[name]) == "E"
    kept = drama(model, tokenizer, prefix_caching=True)
    assert [tokens(trace) for trace in kept.values()] == [tokens(trace) for trace in runs.values()]
    patient, eager = (cost(trace) for trace in kept.values())
    assert eager.num_preemptions and eager.num_tokens < 1.2 * patient.num_tokens


def test_a_box_too_narrow_for_hatching_has_a_cross(model: CausalLM, tokenizer: Tokenizer) -> None:
    runs = drama(model, tokenizer)
    by_time, by_step = timelines(runs), timeline(runs["the first chunk fits"])
    for picture, crosses in ((by_time, 13), (by_step, 0)):
        assert "preempted" in {one.text for one in words(picture)}
        drawn = [name for name in items(picture) if re.fullmatch(r"cross\..*\.line", name)]
        assert len(drawn) == crosses
