"""What may be handed in as prompts, and what is said about the rest."""

from typing import Any

import pytest
from tokenizers import Tokenizer

from tutorial_engine.engine.intake import check_token_ids, prompt_token_ids


def test_texts_and_ids_may_be_mixed_and_keep_their_order(tokenizer: Tokenizer) -> None:
    text = tokenizer.encode("One day").ids
    assert prompt_token_ids("One day", tokenizer) == [text]
    mine = [5]
    got = prompt_token_ids(["One day", (3, 4), mine, range(2)], tokenizer)
    assert got == [text, [3, 4], [5], [0, 1]]
    got[2].append(3)
    assert mine == [5], "the ids are a copy"
    assert prompt_token_ids([[1, 2], [3]], None) == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("prompts", "named"),
    [
        *((nothing, "no prompt given") for nothing in ([], (), None)),
        *(([[1], empty], "prompt 1 is empty") for empty in ([], ())),
        ([[1], "One day"], "prompt 1 is text: pass tokenizer"),
        ([7, 8], "prompt 0 is the number 7: pass a list of token id"),
        (7, "got the number 7"),
    ],
)
def test_what_is_no_prompt_is_refused_by_its_number(prompts: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        prompt_token_ids(prompts, None)


def test_an_empty_text_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        prompt_token_ids(["a", ""], tokenizer)


@pytest.mark.parametrize("bad", [-1, 10, 10**9, 1.0, True, None, "3"])
def test_an_id_that_is_none_of_the_vocabulary_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError) as error:
        check_token_ids("the prompt of request r7", [0, 9, bad, -5], vocab_size=10)
    assert str(error.value).startswith(f"the prompt of request r7 holds {bad!r};")
    assert "from 0 to 9" in str(error.value)
    check_token_ids("it", [0, 9], vocab_size=10)
