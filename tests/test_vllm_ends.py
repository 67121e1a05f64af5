"""How vLLM 0.32 ended 200 random requests, recorded from it, and how this engine ends them.

Stop strings that tie, stop tokens, several ends of text, min_tokens, ignore_eos, kept stop strings,
and texts that break off within a character. tools/vllm/record_ends.py asked vLLM.
"""

from collections import Counter
from pathlib import Path

import pytest

from tools.vllm.ends import answers, difference, read
from tutorial_engine.learn.stories.bugs import Zoo, edited, planted
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.sampler import Sampler
from tutorial_engine.sampling.stopping import Detokenizer, StopChecker

RECORDED = Path(__file__).parent / "vllm_ends.json.gz"
CASES = read(RECORDED)


def test_every_request_ends_as_in_vllm(model: CausalLM) -> None:
    """Text, token ids, both reasons, and each token's own text."""
    ours = answers(model, CASES)
    told = [difference(mine, case["answer"]) for mine, case in zip(ours, CASES, strict=True)]
    wrong = {i: (CASES[i]["params"], what) for i, what in enumerate(told) if what}
    assert not wrong and len(told) == 200


def test_all_kinds_are_among_them() -> None:
    """Of ends, of what is asked for, and of text that is not ASCII or breaks off."""
    ends = Counter(
        (case["answer"]["finish_reason"], type(case["answer"]["stop_reason"])) for case in CASES
    )
    assert min(ends["length", type(None)], ends["stop", str], ends["stop", int]) > 40
    assert ends["stop", type(None)] > 10
    asked = Counter(name for case in CASES for name in case["params"])
    assert min(asked.values()) > 60 and len(asked) == 7, asked
    assert sum(not case["answer"]["text"].isascii() for case in CASES) > 20
    assert sum(len(case["eos_token_ids"]) > 1 for case in CASES) == 100
    other_ends = [case for case in CASES if case["answer"]["stop_reason"] in case["eos_token_ids"]]
    assert len(other_ends) > 10


MISTAKES: Zoo = {
    "the last of the stop strings that end together": edited(
        StopChecker, "_add", ("min(ends,", "min(ends[::-1],")
    ),
    "a stop string at min_tokens": edited(
        StopChecker, "_add", ("<= self.params.min_tokens", "< self.params.min_tokens")
    ),
    "the text of a stop token is lost": edited(
        StopChecker, "update", ("or self.params.include_stop_str_in_output", "")
    ),
    "another end of text is told of as the first": edited(
        StopChecker, "__init__", ("ends[:1]", "ends")
    ),
    "ignored ends of text do not wait for min_tokens": edited(
        Sampler,
        "__init__",
        ("*eos_token_ids}", "*(() if params.ignore_eos else eos_token_ids)}"),
    ),
    "text that ends within a character": edited(
        Detokenizer, "push", ("not text.endswith(REPLACEMENT)", "True")
    ),
    "a token's text without those before it": edited(
        StopChecker, "decode", ("token_id, before)", "token_id)")
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_seen(name: str, model: CausalLM) -> None:
    with planted(name, MISTAKES):
        for some in (CASES[start::10] for start in range(10)):
            ours = answers(model, some)
            if any(difference(mine, case["answer"]) for mine, case in zip(ours, some, strict=True)):
                return
    pytest.fail("all 200 end as in vLLM")
