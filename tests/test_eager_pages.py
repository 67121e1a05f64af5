"""The naive admission: right tokens, and what they cost."""

from collections.abc import Sequence
from typing import Any

import pytest
from learners import PROMPT_IDS as PROMPTS
from tokenizers import Tokenizer

from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.learn.eager_pages import EagerPages, cost, crowd, drama, tokens
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.trace.events import Finished, Trace

LONG = [PROMPTS[0] * 2, PROMPTS[0][::-1] * 2, (PROMPTS[1] * 3)[:20]]


def both(model: Qwen3ForCausalLM, prompts: Sequence[Sequence[int]], **sizes: Any) -> list[Trace]:
    return [crowd(pages, model, prompts, **sizes) for pages in (EagerPages, PagedKVCache)]


def test_eager_admission_throws_one_request_out_four_times(model: Qwen3ForCausalLM) -> None:
    eager, right = both(model, PROMPTS)
    assert cost(eager)[:4] == (22, 6, {"B": 4, "C": 2}, 27)
    assert cost(right)[:4] == (23, 2, {"B": 1, "C": 1}, 16)
    assert tokens(eager) == tokens(right) and len(tokens(right)) == 3


def test_long_prompts_thrash_though_they_need_not(model: Qwen3ForCausalLM) -> None:
    eager, right = both(model, LONG, num_blocks=9, max_tokens=12)
    assert cost(eager)[:4] == (54, 13, {"B": 5, "C": 8}, 85)
    assert cost(right)[:4] == (54, 0, {}, 0)
    assert tokens(eager) == tokens(right)
    assert all(len(set(got)) > 3 for got in tokens(right).values()), "the test would prove little"


def test_with_room_for_all_eager_pages_cost_nothing(model: Qwen3ForCausalLM) -> None:
    eager, right = both(model, PROMPTS, num_blocks=16)
    assert cost(eager) == cost(right) and not cost(eager).num_recomputed
    assert tokens(eager) == tokens(right)


def test_eager_pages_find_prefixes_like_others(model: Qwen3ForCausalLM) -> None:
    alike = [PROMPTS[0], PROMPTS[0] + PROMPTS[1]]
    sizes = {"num_blocks": 16, "prefix_caching": True}
    eager, right = both(model, alike, **sizes)
    plain = crowd(PagedKVCache, model, alike, num_blocks=16)
    assert tokens(eager) == tokens(right) == tokens(plain)


def test_the_drama_is_one(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
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
    assert drama(model, tokenizer) == runs
    kept = drama(model, tokenizer, prefix_caching=True)
    assert [tokens(trace) for trace in kept.values()] == [tokens(trace) for trace in runs.values()]
    patient, eager = (cost(trace) for trace in kept.values())
    assert eager.num_preemptions and eager.num_tokens < 1.2 * patient.num_tokens
