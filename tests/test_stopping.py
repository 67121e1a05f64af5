"""When a request ends, and its text: nothing of a stop string is shown, nothing else is lost."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tutorial_engine.sampling.sampler import SamplingParams
from tutorial_engine.sampling.stopping import Detokenizer, Finish, StopChecker, token_text

EOS = 0  # of the tiny tokenizer, where it is <|endoftext|>
LETTERS = bytes_to_unicode()  # byte -> the letter by which a byte-level vocabulary writes it


def feed(checker: StopChecker, ids: Sequence[int]) -> tuple[int, Finish | None]:
    """Give ids until the finish; how many were taken, and the finish."""
    for n, token_id in enumerate(ids, 1):
        finish = checker.update(token_id)
        assert checker.finish == finish
        if finish is not None:
            return n, finish
    return len(ids), None


def spell(tokenizer: Tokenizer, data: bytes, rng: random.Random | None = None) -> list[int]:
    """Ids for these bytes: one a byte, or, with rng, cut at random into tokens there are."""
    ids, at = [], 0
    while at < len(data):
        longest = rng.randint(1, 6) if rng else 1
        for size in range(min(longest, len(data) - at), 0, -1):
            token_id = tokenizer.token_to_id("".join(LETTERS[b] for b in data[at : at + size]))
            if token_id is not None:
                break
        assert token_id is not None
        ids.append(token_id)
        at += size
    return ids


# -- tokens and lengths -------------------------------------------------------------------------


ENDS: list[tuple[dict[str, Any], list[int], int, Finish]] = [  # params, ids, taken, finish
    ({}, [1, 2, 9, 3], 3, Finish("stop", None)),
    ({}, [1, 2, 8, 3], 3, Finish("stop", 8)),  # an end of text that is not the tokenizer's
    ({"stop_token_ids": [5, 6]}, [1, 6, 5], 2, Finish("stop", 6)),
    ({"stop_token_ids": [9]}, [9], 1, Finish("stop", None)),  # the EOS comes before
    ({"ignore_eos": True, "max_tokens": 3}, [9, 8, 9, 9], 3, Finish("length")),
    ({"ignore_eos": True, "stop_token_ids": [9]}, [9], 1, Finish("stop", 9)),
    ({"max_tokens": 2, "stop_token_ids": [5]}, [1, 5], 2, Finish("stop", 5)),  # over length
    ({"min_tokens": 2}, [9, 9], 2, Finish("stop", None)),
    ({"min_tokens": 3, "stop_token_ids": [5]}, [5, 5, 5], 3, Finish("stop", 5)),
    ({"max_tokens": 7}, [1] * 9, 4, Finish("length")),  # the context ends it
    ({"min_tokens": 5}, [9] * 9, 4, Finish("length")),
]


def test_what_ends_it_by_hand() -> None:
    for params, ids, taken, finish in ENDS:
        checker = StopChecker(SamplingParams(**params), [9, 8], None, max_new_tokens=4)
        assert feed(checker, ids) == (taken, finish), params
        assert checker.num_tokens == taken


@pytest.mark.parametrize("stop", ["a", "two", "one two"])
def test_stop_string_in_one_long_token_and_before_an_open_character(stop: str) -> None:
    """Text before an open character waits for the character, as in vLLM."""
    first, *others = [LETTERS[byte] for byte in "€".encode()]
    vocab = {"oneĠtwoĠa" + first: 0, "".join(others): 1, "?": 2}
    made = Tokenizer(models.WordLevel(vocab, "?"))
    made.decoder = decoders.ByteLevel()
    assert made.decode([0]) == "one two a\ufffd" and made.decode([0, 1]) == "one two a€"
    checker = StopChecker(SamplingParams(stop=stop), [], made)
    assert checker.update(0) is None and checker.text == ""
    assert checker.update(1) == Finish("stop", stop)
    assert checker.text == "one two a".partition(stop)[0]


PLAIN, KEEP = {"max_tokens": 9}, {"max_tokens": 9, "include_stop_str_in_output": True}
STOPS: list[tuple[dict[str, Any], str, str, int | str | None]] = [  # params, text, shown, reason
    ({**PLAIN, "stop": ["bc", "abc"]}, "abc", "a", "bc"),  # the first that is stated
    ({**PLAIN, "stop": ["abc", "bc"]}, "abc", "", "abc"),
    ({**PLAIN, "stop": ["abc", "b"]}, "ab", "a", "b"),  # ends before
    ({**KEEP, "stop": ["bc", "abc"]}, "abc", "abc", "bc"),
    ({**KEEP, "stop_token_ids": ["c"]}, "abc", "abc", "c"),
    ({**PLAIN, "stop_token_ids": ["c"]}, "abc", "ab", "c"),
    ({**KEEP, "stop_token_ids": ["c"], "stop": ["bc"]}, "abc", "abc", "bc"),  # a string wins
    ({**PLAIN, "stop_token_ids": ["c"], "stop": ["bc"]}, "abc", "ab", "c"),  # has no text
    ({**PLAIN, "stop": ["b"], "min_tokens": 1}, "ab", "a", "b"),
    ({**PLAIN, "stop": ["b"], "min_tokens": 2}, "abab", "aba", "b"),  # the second one
    ({**PLAIN, "stop": ["ba"], "min_tokens": 2}, "aba", "a", "ba"),  # one of its tokens is late
    ({**PLAIN, "stop": ["ab"], "min_tokens": 2}, "ab  ab", "ab  ", "ab"),
    ({**PLAIN, "stop_token_ids": ["c"], "min_tokens": 3}, "abc", "ab", "c"),
    ({"max_tokens": 2, "stop": ["b"]}, "ab", "a", "b"),  # over length
]


@pytest.mark.parametrize("number", range(len(STOPS)))
def test_which_stop_wins_and_what_is_cut(number: int, tokenizer: Tokenizer) -> None:
    """A token for each letter."""
    params, text, shown, reason = STOPS[number]
    ids = {letter: tokenizer.token_to_id(LETTERS[ord(letter)]) for letter in "abc "}
    params = params | {"stop_token_ids": [ids[one] for one in params.get("stop_token_ids", ())]}
    checker = StopChecker(SamplingParams(**params), [EOS], tokenizer)
    taken, finish = feed(checker, [ids[letter] for letter in text])
    is_token = bool(params["stop_token_ids"]) and reason == "c"
    assert finish == Finish("stop", ids["c"] if is_token else reason)
    assert (taken, checker.text) == (len(text), shown)


# -- the same by definition: everything decoded and searched again after every token --------------


def by_definition(
    tokenizer: Tokenizer, ids: Sequence[int], params: SamplingParams
) -> tuple[int, Finish, str]:
    """(tokens, finish, text), slow and plain; ids may hold the EOS."""
    before = ""
    for n, token_id in enumerate(ids, 1):
        if token_id == EOS and n >= params.min_tokens and not params.include_stop_str_in_output:
            return n, Finish("stop"), before
        text = tokenizer.decode(ids[:n])
        text = before if text.endswith("\ufffd") else text  # until the character is complete
        for end in range(len(before) + 1, len(text) + 1):
            hits = [stop for stop in params.stop if text[:end].endswith(stop)]
            if hits and n > params.min_tokens:
                cut = end if params.include_stop_str_in_output else end - len(hits[0])
                return n, Finish("stop", hits[0]), text[:cut]
        if token_id == EOS and n >= params.min_tokens:
            return n, Finish("stop"), text
        if n == params.max_tokens:
            return n, Finish("length"), text
        before = text
    raise AssertionError("the ids do not reach max_tokens")


def check_case(tokenizer: Tokenizer, ids: list[int], params: SamplingParams) -> Finish:
    n, finish, text = by_definition(tokenizer, ids, params)
    checker = StopChecker(params, [EOS], tokenizer)
    stream = decoders.DecodeStream(skip_special_tokens=True)  # vLLM's detokenizer
    hold = 0 if params.include_stop_str_in_output else max(map(len, params.stop), default=1) - 1
    so_far = ""
    for i, token_id in enumerate(ids[:n], 1):
        before = checker.text
        got = checker.update(token_id)
        shown = checker.text
        assert shown.startswith(before), "what was shown was taken back"
        assert text.startswith(shown), "a character of a stop string was shown"
        if i < n:
            assert got is None
            so_far += stream.step(tokenizer, token_id) or ""
            assert shown == so_far[: max(0, len(so_far) - hold)], "late, or early"
    assert got == finish
    assert checker.text == text
    return finish


TEXT = [character.encode() for character in "ab\n é€👩"]
BROKEN = [*TEXT, b"\xe2", b"\x82", b"\xac", b"\xf0", b"\x9f", b"\x91", b"\xa9", b"\xff", b"\xc3"]


@pytest.mark.parametrize("pieces", [TEXT, BROKEN], ids=["text", "bytes that are no text"])
def test_text_is_the_cut_text_by_definition(pieces: list[bytes], tokenizer: Tokenizer) -> None:
    """Always the same cases: so it can be asked that all kinds are among them."""
    finishes = []
    for seed in range(500):
        rng = random.Random(seed)
        data = b"".join(rng.choices(pieces, k=rng.randint(0, 25)))
        ids = [*spell(tokenizer, data, rng), tokenizer.token_to_id("b")]
        if rng.random() < 0.3:
            ids.insert(rng.randrange(len(ids)), EOS)
        stops = ["".join(rng.choices("ab\n é€👩", k=rng.randint(1, 4))) for _ in range(3)]
        params = SamplingParams(
            stop=stops[: rng.randint(0, 3)],
            include_stop_str_in_output=rng.random() < 0.5,
            max_tokens=len(ids),
            min_tokens=min(rng.randint(0, 6), len(ids)) if rng.random() < 0.3 else 0,
        )
        finishes.append(check_case(tokenizer, ids, params))
    by_string = sum(isinstance(finish.stop_reason, str) for finish in finishes)
    by_length = sum(finish.reason == "length" for finish in finishes)
    assert by_string > 60 and by_length > 60 and len(finishes) - by_string - by_length > 20


def test_without_a_tokenizer_there_is_no_text_and_after_the_end_no_token() -> None:
    checker = StopChecker(SamplingParams(max_tokens=2))
    assert feed(checker, [1, 2]) == (2, Finish("length")) and checker.text == ""
    with pytest.raises(ValueError, match=r"token 7 comes after the end, .*length"):
        checker.update(7)


# -- the detokenizer ----------------------------------------------------------------------------


class Watched:
    """A tokenizer that notes how many ids it is asked to decode at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.sizes: list[int] = []

    def decode(self, ids: list[int]) -> str:
        self.sizes.append(len(ids))
        return self.tokenizer.decode(ids)


def test_spaces_survive_a_decoder_that_strips_the_first_one() -> None:
    vocab = {"▁the": 0, "▁cat": 1, "s": 2, "?": 3}
    made = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    ids = [0, 1, 2, 1, 0]
    detokenizer = Detokenizer(made)
    assert "".join(map(detokenizer.push, ids)) == made.decode(ids) == "the cats cat the"


def test_bytes_of_a_byte_fallback_vocabulary_become_a_character() -> None:
    vocab = {"A": 0, "<0xE2>": 1, "<0x82>": 2, "<0xAC>": 3, "?": 4}
    made = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    detokenizer = Detokenizer(made)
    said = [detokenizer.push(i) for i in [0, 1, 2, 3, 1, 2, 3, 0]]
    assert said == ["A", "", "", "€", "", "", "€", "A"]


STORY = [b"One day ", "👩‍👩‍👧".encode(), b" and I met."]
BABBLE = [b"\xff", b"\x80", b"\xf0\x9f", b"\xe2\x82", b"A\xff", b"\xc3", "🪁".encode(), b"\xa9"]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("pieces", [STORY, BABBLE], ids=["a story", "babble"])
def test_text_is_told_as_it_comes_at_a_cost_that_does_not_grow(
    tokenizer: Tokenizer, pieces: list[bytes], seed: int
) -> None:
    """As `decode(all ids)` has it; bytes that are no character as well."""
    rng = random.Random(seed)
    some = rng.sample(pieces, rng.randint(1, len(pieces)))
    data = b"One day" + b"".join(rng.choices(some, k=120)) + b" at last"
    ids, watched = spell(tokenizer, data, rng), Watched(tokenizer)
    detokenizer = Detokenizer(watched)  # type: ignore[arg-type]
    told = [detokenizer.push(token_id) for token_id in ids]
    stream = decoders.DecodeStream(skip_special_tokens=True)
    assert told == [stream.step(tokenizer, token_id) or "" for token_id in ids]
    assert "".join(told) == tokenizer.decode(ids)
    assert max(watched.sizes) <= 24 and sum(watched.sizes) < 20 * len(ids)


def test_the_first_token_keeps_its_space_after_a_prompt() -> None:
    """As vLLM has it; the decoder of Llama 2 strips the first space of what it is given."""
    made = Tokenizer(models.WordLevel({"▁the": 0, "▁sea": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    for prompt in ([0], [1, 0], [0] * 20):
        stream = decoders.DecodeStream(ids=prompt, skip_special_tokens=True)
        checker = StopChecker(SamplingParams(), [], made, None, prompt)
        checker.update(1)
        assert checker.text == stream.step(made, 1) == " sea"


# -- a token's own text ---------------------------------------------------------------------------


def test_a_character_is_the_text_of_its_last_token(tokenizer: Tokenizer) -> None:
    """As vLLM tells it: '', '', '€'. A special token has its name, and four tokens are enough."""
    ids = spell(tokenizer, "a€🪁".encode())
    told = [token_text(tokenizer, token_id, ids[:i]) for i, token_id in enumerate(ids)]
    assert told == ["a", "", "", "€", "", "", "", "🪁"]
    assert token_text(tokenizer, EOS, ids) == "<|endoftext|>"
    assert token_text(tokenizer, ids[-1]) == "", "nothing before it"
    assert token_text(tokenizer, ids[3], ids[:1]) == "", "a byte in the middle of no character"
    assert token_text(tokenizer, ids[0], ids[:2]) == "a", "whole by itself"


def test_a_token_without_text_takes_nothing_from_the_next_one() -> None:
    """A decoder that strips the first space must still see what stood before a special token."""
    vocab = {"▁the": 0, "<end>": 1, "?": 2}
    made = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.add_special_tokens(["<end>"])
    detokenizer = Detokenizer(made)
    assert [detokenizer.push(i) for i in [0, 1, 1, 0]] == ["the", "", "", " the"]
