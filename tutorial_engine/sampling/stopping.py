"""When a request is over, and which of its text may be shown by then.

Knows token ids, the tokenizer and one request's parameters; knows no logits, model or scheduler.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from tokenizers import Tokenizer

from tutorial_engine.sampling.params import SamplingParams, check_params

FinishReason = Literal["stop", "length", "abort", "error"]

MOST_BYTES = 4  # of a character in UTF-8
REPLACEMENT = "\ufffd"  # what decoders show for bytes that are no character, or not yet one


class Finish(NamedTuple):
    """Why a request ended: "stop" by EOS (None), a stop id or a stop string; or "length" (None).

    In an engine (notebook 03) also "abort" and "error".
    """

    reason: FinishReason
    stop_reason: int | str | None = None


class Detokenizer:
    """Token ids to text, one at a time, at a cost that does not grow with the text.

    A character may be spread over several tokens, and the text of a token may depend on the one
    before it: so a few last tokens are decoded together. While their text ends within a character,
    nothing of it is handed out, as in vLLM (tokenizers' DecodeStream). What it says adds up to
    tokenizer.decode(all ids) for byte-level tokenizers (GPT-2's, Qwen's, Llama 3's). `before`: the
    prompt's ids, after which Llama 2's tokenizer keeps the first space.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        window = list(before[-2 * MOST_BYTES :])
        text = tokenizer.decode(window)
        if text.endswith(REPLACEMENT):  # it ends within a character, of which nothing was said
            window, text = [], ""
        self._window = window  # the ids decoded together: known ones, then new ones
        self._known = len(window)  # how many ids of the window have been handed out
        self._told = len(text)  # how many characters of the window's text they are
        self._held = ""  # U+FFFD of ids before the window, to be handed out with what follows

    def push(self, token_id: int) -> str:
        """The text that this token completes, often none; special tokens have no text."""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        if len(text) > self._told and not text.endswith(REPLACEMENT):
            new, self._held = self._held + text[self._told :], ""
            self._window = self._window[self._known :]
            self._known = len(self._window)
            self._told = len(self._tokenizer.decode(self._window))
            return new
        if len(self._window) - self._known > 2 * MOST_BYTES:
            self._shorten(text)
        return ""

    def _shorten(self, text: str) -> None:
        """Keep only the last ids of a long window: a model may babble bytes that are no character.

        Only the last few can still become one. The cut must lie between two characters: there, and
        only there, both parts say together what the window says, `text`.
        """
        for cut in range(len(self._window) - MOST_BYTES, self._known, -1):
            head, tail = map(self._tokenizer.decode, (self._window[:cut], self._window[cut:]))
            if head + tail == text:
                self._held += head[self._told :]
                self._told = max(0, self._told - len(head))
                self._window, self._known = self._window[cut:], 0
                return


def token_text(tokenizer: Tokenizer, token_id: int, before: Sequence[int] = ()) -> str:
    """A token's own text after the tokens `before` it; "" while a character is not complete.

    As vLLM's `decoded_token`: the token that completes a character has all of it, and a special
    token has its name. Four tokens before are enough for every character.
    """

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    text, before = decode([token_id]), before[-MOST_BYTES:]
    if not text.endswith(REPLACEMENT):
        return text
    for first in reversed(range(len(before))):  # one token before, two, ...
        text = decode([*before[first:], token_id])
        if not text.endswith(REPLACEMENT):
            whole = len(before)  # the tokens before the character's first one
            while whole > first and decode([before[whole - 1]]).endswith(REPLACEMENT):
                whole -= 1
            return text.removeprefix(decode(before[first:whole]))
    return ""


class StopChecker:
    """Looks at every token of ONE request, the first and the last too, and keeps its text.

    A stop string comes before EOS and stop ids, and those before the length. The first EOS id is
    the tokenizer's own; another one is told of as a stop id. Tokens end it from min_tokens on, and
    strings which a token after min_tokens completes. The limit is the smaller of max_tokens and
    max_new_tokens, which is what the model's context has left. All of it is vLLM's.
    ValueError for stop strings without a tokenizer; text is "" without one.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Sequence[int] = (),
        tokenizer: Tokenizer | None = None,
        max_new_tokens: int | None = None,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        check_params(params)
        if params.stop and tokenizer is None:
            raise ValueError(f"stop strings {params.stop} need a tokenizer; or use stop_token_ids")
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        self.params = params
        self.num_tokens = 0
        self.finish: Finish | None = None
        ends = () if params.ignore_eos else tuple(eos_token_ids)
        self._eos, self._stop_ids = ends[:1], {*ends[1:], *params.stop_token_ids}
        self._limit = min(params.max_tokens, max_new_tokens or params.max_tokens)
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer and Detokenizer(tokenizer, prompt_token_ids)
        self._text = ""
        self._hold = 0  # characters at the end that may be the start of a stop string
        if params.stop and not params.include_stop_str_in_output:
            self._hold = max(map(len, params.stop)) - 1

    @property
    def text(self) -> str:
        """What is safe to show: no later token can make a part of it part of a stop string."""
        end = len(self._text) if self.finish else max(0, len(self._text) - self._hold)
        return self._text[:end]

    def decode(self, token_id: int, before: Sequence[int] = ()) -> str | None:
        """A token's own text after those `before` it; None without a tokenizer."""
        return None if self._tokenizer is None else token_text(self._tokenizer, token_id, before)

    def update(self, token_id: int) -> Finish | None:
        """Count one sampled token; its Finish, or None to go on. ValueError once finished.

        EOS and stop ids are no part of the text, and a stop string is cut from it with all that
        follows in the same token; with include_stop_str_in_output they stay. Bytes at the end that
        are no whole character are dropped.
        """
        if self.finish is not None:
            raise ValueError(f"token {token_id} comes after the end, {self.finish}: do not run it")
        if not isinstance(token_id, int):
            raise ValueError(f"a token id is an int, got {token_id!r}; int() makes it one")
        self.num_tokens += 1
        finish = None
        if self.num_tokens >= self.params.min_tokens:
            if token_id in self._eos:
                finish = Finish("stop")
            elif token_id in self._stop_ids:
                finish = Finish("stop", token_id)
        if self._detokenizer and (finish is None or self.params.include_stop_str_in_output):
            finish = self._add(self._detokenizer.push(token_id)) or finish
        if finish is None and self.num_tokens >= self._limit:
            finish = Finish("length")
        self.finish = finish
        return finish

    def end(self, finish: Finish) -> None:
        """End it from outside, without another token: what was held back is text now."""
        self.finish = finish

    def _add(self, new: str) -> Finish | None:
        """Append text; cut it at the stop string that is completed first in `new`, if one is.

        Of those that end together it is the one that stands first in `stop`.
        """
        old = len(self._text)
        self._text += new
        if not new or self.num_tokens <= self.params.min_tokens:
            return None
        starts = [(self._text.find(s, max(0, old - len(s) + 1)), s) for s in self.params.stop]
        ends = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        if not ends:
            return None
        end, start, stop = min(ends, key=lambda found: found[0])
        self._text = self._text[: end if self.params.include_stop_str_in_output else start]
        return Finish("stop", stop)
