"""An engine over the learner's parts: its runner, sampler and story.

`OwnEngine` runs the loop of the package over the model of own.py. A part that fails is told, and
the package's runs in its place.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.engine.generate import generate, serve
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.runner import Run
from tutorial_engine.lab.sink import Stay
from tutorial_engine.learn.exercises.verdict import Verdict, open_verdict
from tutorial_engine.learn.parts.cache import (
    CACHES,
    EDITS,
    Memory,
    MyCache,
    Noting,
    bytes_copied,
    make_cache,
)
from tutorial_engine.learn.parts.holder import Parts, PartsHolder, Plugged
from tutorial_engine.learn.parts.model import PARTS, OwnAttention, OwnModel
from tutorial_engine.model.attention import NoCache
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import FILTERS, Sampler
from tutorial_engine.sampling.stopping import Finish, StopChecker


class OwnSampler(Sampler):
    """The package's sampler with the part `keep_top_p` as its top-p filter."""

    def __init__(self, params: SamplingParams, eos_token_ids: Sequence[int], parts: Parts) -> None:
        super().__init__(params, eos_token_ids)

        def top_p(logits: Tensor, p: float) -> Tensor:
            if p >= 1:
                return logits
            return logits.masked_fill(~parts("keep_top_p", logits.softmax(-1), p), -math.inf)

        self.filters = tuple(top_p if f.__name__ == "top_p" else f for f in FILTERS)


class OwnChecker(StopChecker):
    """A StopChecker beside which the part `why_finished` says when to end."""

    def __init__(self, parts: Parts, params: SamplingParams, *given: Any) -> None:
        super().__init__(params, *given)
        self._parts, self._ids = parts, list[int]()

    def update(self, token_id: int) -> Finish | None:
        self._ids.append(token_id)
        assert self._tokenizer is not None, "the part looks at text"
        text, enders = self._tokenizer.decode(self._ids), (*self._eos, *sorted(self._stop_ids))
        state = list(self._ids), text, enders, self.params.stop, self.params.max_tokens
        self._parts.shadow("why_finished", *state)
        return super().update(token_id)


# -- what the notebooks use -----------------------------------------------------------------------

IN_01 = ("project", "attention", "window_mask", "kv_head", "rope", "layer")


class OwnEngine(PartsHolder):
    """The engine with the learner's parts in it: `use` puts one in, `tell` tells a story with all.

    `cached=False` recomputes everything for each token, as notebook 01 does; with True the part
    `run_new` decides what runs, over one of the two caches: the one that was handed in last.
    """

    def __init__(self, model: CausalLM, tokenizer: Tokenizer, cached: bool = False) -> None:
        super().__init__({**PARTS, **EDITS})
        self.package, self.tokenizer, self.cached = model, tokenizer, cached
        self.model, self.cache_part = OwnModel(model, self.parts), "MyCache"

    @property
    def names(self) -> tuple[str, ...]:
        """The parts that this notebook is about; of the two caches, the one that runs."""
        unused = {*CACHES} - {self.cache_part}
        return tuple(name for name in PARTS if name not in unused) if self.cached else IN_01

    @property
    def label(self) -> str:
        """The name of a row of the ledger over these parts: how many of them are the learner's."""
        num_own = sum(name in self.parts.own for name in self.names)
        return f"your engine ({num_own} of {len(self.names)} parts yours)"

    def use(self, function: Callable[..., Any], check: Callable[..., Verdict]) -> Plugged:
        """A cache takes the place of the other one; the edits of a memory run in no model."""
        plugged = super().use(function, check)
        if plugged.name in EDITS:
            return plugged._replace(where="cells below")
        if plugged.name in CACHES:
            self.cache_part = plugged.name
            for other in {*CACHES} - {plugged.name}:
                self.parts.own.pop(other, None)
        return plugged

    def bytes_copied(self, num_tokens: int) -> int:
        """Bytes of old K and V that the cache that runs here copies for a text of so many tokens.

        PartFailed when the learner's raises.
        """
        config = self.model.config
        cache = make_cache(self.parts, self.cache_part, config, num_tokens)
        with self.parts.blamed(self.cache_part):
            return bytes_copied(cache, config, num_tokens)

    def empty_cache(self, max_len: int) -> OwnAttention:
        """An attention over a new cache, of the part that runs here. PartFailed when it raises."""
        cache = make_cache(self.parts, self.cache_part, self.model.config, max_len)
        return OwnAttention(self.parts, cache, cache_part=self.cache_part)

    # -- a memory to look at and to change: always over MyCache, through its `update` alone -------

    def memory(self, text: str, num_tokens: int | None = None) -> Memory:
        """K and V of a text's first tokens as `MyCache` holds them: layer → (k, v).

        Without a number of all but its last token. They are copies that may be changed. PartFailed
        when a part raises.
        """
        ids = self.tokenizer.encode(text).ids
        return self._memory(ids[:-1] if num_tokens is None else ids[:num_tokens])

    @torch.no_grad()
    def _memory(self, token_ids: list[int]) -> Memory:
        noting = Noting(make_cache(self.parts, MyCache.__name__, self.model.config, 0))
        self.parts("run_new", self.model, OwnAttention(self.parts, noting), token_ids, 0)
        return {layer: (k.clone(), v.clone()) for layer, (k, v) in noting.kv.items()}

    def transplant(
        self, memory: Memory, donor: Memory, layer: int, slots: Sequence[int], which: str
    ) -> Memory:
        """A memory as the part of this name changes it. PartFailed when it raises."""
        return self.parts("transplant", memory, donor, layer, slots, which)

    def go_on(self, memory: Memory, text: str, num_tokens: int = 24) -> str:
        """A text and what follows it, when the memory holds its first tokens, changed or not.

        The other tokens of the text run. PartFailed as `generate`.
        """
        params = SamplingParams(max_tokens=num_tokens)
        return text + self.generate(text, params, edit=lambda _: memory).checker.text

    @torch.no_grad()
    def logits_after(self, memory: Memory, token_id: int, position: int) -> Tensor:
        """Logits [V] after one token that runs at this position, over a memory. PartFailed."""
        batch = Batch.from_sequences([[token_id]], [position])
        return self.model.compute_logits(self.model(batch, self._holding(memory)))[0]

    @torch.no_grad()
    def next_token(self, memory: Memory, text: str) -> Tensor:
        """Probabilities [V] of what follows a text, when the memory holds its first tokens.

        The other tokens of the text run. PartFailed as `generate`.
        """
        ids, held = self.tokenizer.encode(text).ids, len(memory[0][0])
        return self.parts("run_new", self.model, self._holding(memory), ids, held).softmax(-1)

    @torch.no_grad()
    def loss(self, text: str, num_tokens: int, stay: Stay) -> float:
        """The mean loss (nats) of a text's last tokens, when each sees only the slots that stay.

        As `lab.sink.loss_without`, over the learner's cache: each of them runs alone, and what
        `stay` does not name is thrown away before. PartFailed as `generate`.
        """
        ids, total = self.tokenizer.encode(text).ids, 0.0
        begin = len(ids) - num_tokens - 1  # this token's logits foretell the first of the last
        held: Memory = self._memory(ids[:begin])
        slots = list(range(begin))
        for at in range(begin, len(ids) - 1):
            left = list(stay(slots))
            rows = [slots.index(slot) for slot in left]
            kept = {layer: (k[rows], v[rows]) for layer, (k, v) in held.items()}
            attention = self._holding(kept)
            attention.cache = noting = Noting(attention.cache)
            logits = self.parts("run_new", self.model, attention, ids[: at + 1], at)
            total -= float(logits.log_softmax(-1)[ids[at + 1]])
            held, slots = noting.kv, [*left, at]
        return total / num_tokens

    def _holding(self, memory: Memory) -> OwnAttention:
        """An attention over a new `MyCache` to which the memory was handed in one `update`."""
        cache = make_cache(self.parts, MyCache.__name__, self.model.config, 0)
        with self.parts.blamed(MyCache.__name__):
            for layer, (k, v) in memory.items() if len(memory[0][0]) else ():
                cache.update(layer, k, v, Batch.from_sequences([[0] * len(k)]))
        return OwnAttention(self.parts, cache)

    def runner(
        self, window: int | None = None, edit: Callable[[Memory], Memory] | None = None
    ) -> Run:
        """What runs the parts as they are, each sequence alone: for `serve`, or for the ledger.

        `edit` changes what is remembered of a prompt before its last token runs.
        """
        model, parts, cache_part = self.model, self.parts, self.cache_part
        attentions: dict[str, OwnAttention] = {}  # request_id -> its backend, with its cache

        def run_alone(request: Request) -> Tensor:
            if not self.cached:
                attention = OwnAttention(parts, NoCache(), window)
                return parts("run_new", model, attention, request.token_ids, 0)
            name, computed = request.request_id, request.num_computed_tokens
            if computed == 0:
                longest = request.num_tokens + request.params.max_tokens
                cache = make_cache(parts, cache_part, model.config, longest)
                attentions[name] = OwnAttention(parts, cache, window, cache_part)
            if computed == 0 and edit:
                memory = edit(self._memory(request.token_ids[:-1]))
                attentions[name], computed = self._holding(memory), len(memory[0][0])
            logits = parts("run_new", model, attentions[name], request.token_ids, computed)
            request.num_computed_tokens = request.num_tokens
            return logits

        @torch.inference_mode()
        def run(requests: Sequence[Request]) -> Tensor:
            return torch.stack([run_alone(request) for request in requests])

        return run

    def generate(
        self,
        prompt: str,
        params: SamplingParams | None = None,
        window: int | None = None,
        on_token: Callable[[Request], None] = lambda request: None,
        edit: Callable[[Memory], Memory] | None = None,
    ) -> Request:
        """Continue a prompt through the loop of the package, with the parts → its request.

        `on_token` is called after each token; `edit` as in `runner`. PartFailed when a part raises.
        """
        params = SamplingParams(max_tokens=24) if params is None else params
        eos = self.model.config.eos_token_ids
        sampler = OwnSampler(params, eos, self.parts)
        checker = OwnChecker(self.parts, params, eos, self.tokenizer)
        ids = self.tokenizer.encode(prompt).ids
        request = Request("yours", ids, params, sampler=sampler, checker=checker)
        for _ in serve(self.runner(window, edit), [request]):
            on_token(request)
        return request

    def story(self, prompt: str, window: int | None = None) -> str:
        """The text that the parts put after a prompt, 24 tokens of it. PartFailed as `generate`."""
        return self.generate(prompt, window=window).checker.text

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Logits [T, V] after each of the ids, without a cache. PartFailed when a part raises."""
        return self.model.compute_logits(self.model(Batch.from_sequences([list(token_ids)])))

    def last_logits(self, token_ids: Sequence[int]) -> Tensor:
        """Logits [V] after the last of the ids. PartFailed as `logits`."""
        return self.logits(token_ids)[-1]

    def tell(
        self,
        prompt: str,
        params: SamplingParams | None = None,
        live: bool = False,
    ) -> None:
        """Print the story that follows a prompt, which parts ran, and whether the package agrees.

        A part that raises, or without which the tokens would be the package's, is taken out, and
        the story is told without it. `live` prints each token when it comes, in a second run.
        """
        params = SamplingParams(max_tokens=24) if params is None else params
        wanted = generate(self.package, prompt, params, tokenizer=self.tokenizer)[0].outputs[0]

        def wrong(request: Request) -> str:
            right = request.output_token_ids == wanted.token_ids
            return "" if right else "the tokens are not the package's."

        request = self.settle(lambda: self.generate(prompt, params), wrong)
        if live:
            self._tell_live(prompt, params, request.checker.text)
        else:
            print(prompt + request.checker.text)
        print(self.who_ran({"project": "layer", "rope": "layer"}))
        many, mark = len(wanted.token_ids), "✔ " * bool(self.parts.own)
        print(f"{mark}{many} of {many} tokens are those of the package's engine.")

    def _tell_live(self, prompt: str, params: SamplingParams, text: str) -> None:
        """Print a prompt and then its text, which is known, as far as the tokens have come."""
        shown = 0

        def show(request: Request) -> None:
            nonlocal shown
            so_far = len(self.tokenizer.decode([*request.output_token_ids]))
            print(text[shown:so_far], end="", flush=True)
            shown = max(shown, so_far)

        self.parts.calls.clear()
        print(prompt, end="", flush=True)
        self.generate(prompt, params, on_token=show)
        print(text[shown:])

    def hear(
        self, prompt: str, params: SamplingParams | None = None, **parts: Callable[..., Any]
    ) -> None:
        """Print the story that these functions tell, past every check; none stays in the model.

        They are named as the parts are: `hear(PROMPT, rope=rope)`. ValueError for another name. Of
        one that nobody has touched it says so.
        """
        unknown = sorted({*parts} - {*PARTS})
        if unknown:
            raise ValueError(f"{unknown} are no parts of the engine; the parts are {sorted(PARTS)}")
        untouched = [verdict for part in parts.items() if (verdict := open_verdict(*part))]
        if untouched:
            print(*untouched, sep="\n")
            return
        try:
            with self.trying(parts):
                print(prompt + self.generate(prompt, params).checker.text)
        except Exception as error:  # nobody has checked what runs here
            print(f"✘ {error}")

    @contextmanager
    def trying(self, parts: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
        """Inside the block these functions run as parts, past every check."""
        mine, cache_part = self.parts.own, self.cache_part
        tried = {**mine, **parts}
        if {"project", "rope"} & {*parts} and "layer" not in parts:
            tried.pop("layer", None)  # the learner's calls its own ones, past these
        self.parts.own = tried
        self.cache_part = next((name for name in parts if name in CACHES), cache_part)
        try:
            yield
        finally:
            self.parts.own, self.cache_part = mine, cache_part
