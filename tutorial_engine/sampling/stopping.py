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
    before it: so a few last tokens are decoded together, up to the last whole character. What it
    says adds up to tokenizer.decode(all ids) for byte-level tokenizers (GPT-2's, Qwen's, Llama 3's)
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # the ids decoded together: known ones, then new ones
        self._known = 0  # how many ids of the window ended on a whole character
        self._told = 0  # how many characters of the window's text were handed out
        self._held = ""  # U+FFFD of ids before the window, to be handed out with what follows

    def push(self, token_id: int) -> str:
        """The characters that this token completes, often none; special tokens have no text."""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        whole = text.rstrip(REPLACEMENT)
        new = whole[self._told :]
        self._told += len(new)
        if new:
            new, self._held = self._held + new, ""
        if len(whole) == len(text):  # nothing is open: what comes later cannot change this text
            self._window = self._window[self._known :]
            self._known = len(self._window)
            self._told = len(self._tokenizer.decode(self._window))
        elif len(self._window) - self._known > 2 * MOST_BYTES:
            self._shorten(text)
        return new

    def flush(self) -> str:
        """What is left when no token follows: a U+FFFD for each incomplete character."""
        return self._held + self._tokenizer.decode(self._window)[self._told :]

    def _shorten(self, text: str) -> None:
        """Keep only the last ids of a long window: a model may babble bytes that are no character.

        Only the last few can still become one. The cut must lie between two characters: there, and
        only there, both parts say together what the window says, `text`.
        """
        for cut in range(len(self._window) - MOST_BYTES, self._known, -1):
            head, tail = map(self._tokenizer.decode, (self._window[:cut], self._window[cut:]))
            if head + tail == text:
                self._held += head[self._told :]  # nothing but U+FFFD
                self._told = max(0, self._told - len(head))
                self._window, self._known = self._window[cut:], 0
                return


class StopChecker:
    """Looks at every token of ONE request, the first and the last too, and keeps its text.

    EOS, then stop ids, then stop strings, then the length, so that stop wins. None of the first
    three ends it before min_tokens; a stop string completed by then stays in the text. The limit is
    the smaller of max_tokens and max_new_tokens, which is what the model's context has left.
    `text` is what is safe to show: the start of a stop string is held back until it is none.
    ValueError for stop strings without a tokenizer; text is "" without one.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Sequence[int] = (),
        tokenizer: Tokenizer | None = None,
        max_new_tokens: int | None = None,
    ) -> None:
        check_params(params)
        if params.stop and tokenizer is None:
            raise ValueError(f"stop strings {params.stop} need a tokenizer; or use stop_token_ids")
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        self.params = params
        self.num_tokens = 0
        self.finish: Finish | None = None
        self._eos = frozenset(() if params.ignore_eos else eos_token_ids)
        self._limit = min(params.max_tokens, max_new_tokens or params.max_tokens)
        self._tokenizer, self._detokenizer = tokenizer, tokenizer and Detokenizer(tokenizer)
        self.text = ""  # safe to show: no later token can make a part of it part of a stop string
        self._tail = ""  # comes after it, and may be the start of a stop string
        self._hold = max(map(len, params.stop), default=1) - 1

    def decode(self, token_id: int) -> str | None:
        """A token's own text; None without a tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.decode([token_id])

    def update(self, token_id: int) -> Finish | None:
        """Count one sampled token; its Finish, or None to go on. ValueError once finished.

        EOS and stop ids are no part of the text. A stop string is cut from it with all that follows
        in the same token, or all but itself with include_stop_str_in_output.
        """
        if self.finish is not None:
            raise ValueError(f"token {token_id} comes after the end, {self.finish}: do not run it")
        if not isinstance(token_id, int):
            raise ValueError(f"a token id is an int, got {token_id!r}; int() makes it one")
        self.num_tokens += 1
        may_stop = self.num_tokens >= self.params.min_tokens
        if may_stop and token_id in self._eos:
            self.finish = Finish("stop")
        elif may_stop and token_id in self.params.stop_token_ids:
            self.finish = Finish("stop", token_id)
        if self.finish is None and self._detokenizer is not None:
            self.finish = self._add(self._detokenizer.push(token_id), may_stop)
            if self.finish is not None:
                return self.finish  # the text is cut already
        if self.finish is None and self.num_tokens >= self._limit:
            self.finish = Finish("length")
        if self.finish is not None and self._detokenizer is not None:
            self.text += self._tail + self._detokenizer.flush()
            self._tail = ""
        return self.finish

    def end(self, finish: Finish) -> None:
        """End it from outside, without another token: what was held back is text now.

        A character of which only some bytes came is dropped.
        """
        self.finish = finish
        self.text += self._tail
        self._tail = ""

    def _add(self, new: str, may_stop: bool) -> Finish | None:
        """Append text; cut it at the stop string that is completed first in `new`, if one is."""
        text = self._tail + new
        looks = may_stop and self.params.stop
        found = self._find(text, len(self._tail)) if looks else None
        if found is None:
            split = max(0, len(text) - self._hold)
            self.text += text[:split]
            self._tail = text[split:]
            return None
        end, stop = found
        whole = self.params.include_stop_str_in_output
        self.text += text[: end if whole else end - len(stop)]
        self._tail = ""
        return Finish("stop", stop)

    def _find(self, text: str, old: int) -> tuple[int, str] | None:
        """(end, stop string) that ends first, but after `old`; the longest of those that tie."""
        found = []
        for stop in self.params.stop:
            start = text.find(stop, max(0, old - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), stop))
        return min(found, key=lambda hit: (hit[0], -len(hit[1])), default=None)
