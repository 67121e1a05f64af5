"""A conversation with an engine: each turn's prompt begins with all that was said before.

So the prefix cache finds it. Times are measured with this machine's clock. Knows engines and chat
templates; draws nothing.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tutorial_engine.engine.chat import ChatTemplate
from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.engine.request import RequestOutput
from tutorial_engine.sampling.params import SamplingParams


@dataclass(frozen=True, repr=False)
class Turn:
    """A question, its answer, and what it took: tokens, and seconds."""

    question: str
    answer: str
    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    num_found: int  # of the prompt's tokens, in the prefix cache
    ttft: float  # time to the first token
    seconds: float

    @property
    def line(self) -> str:
        """What was found, and how long it took."""
        rate = (len(self.token_ids) - 1) / max(self.seconds - self.ttft, 1e-9)
        return (
            f"{len(self.prompt_token_ids)} tokens in the prompt, {self.num_found} of them found; "
            f"first token after {self.ttft:.2f} s, {rate:.0f} tokens/s"
        )

    def __repr__(self) -> str:
        return f"you:   {self.question}\nmodel: {self.answer}\n[{self.line}]"


class Conversation:
    """Turns with a model over one engine. `system` is what the model is told first.

    Several conversations may share an engine, one turn at a time.
    """

    def __init__(
        self,
        engine: LLMEngine,
        template: ChatTemplate,
        params: SamplingParams | None = None,
        system: str = "",
        name: str = "T",
    ) -> None:
        self.engine, self.template, self.name = engine, template, name
        self.params = params or SamplingParams(max_tokens=60)
        self.messages = [{"role": "system", "content": system}] if system else []
        self.turns: list[Turn] = []

    def say(self, question: str, show: Callable[[str], None] = lambda text: None) -> Turn:
        """Ask, run the request to its end, and keep both. `show` gets the answer as it grows.

        Ctrl-C ends the answer, and what has come is kept. ValueError for a prompt that has no room,
        RuntimeError for an answer that ended with an error. What raises leaves no turn.
        """
        asked = [*self.messages, {"role": "user", "content": question}]
        prompt = self.template.prompt(self.engine.tokenizer, asked)
        request, began, first = f"{self.name}{len(self.turns) + 1}", time.perf_counter(), 0.0
        output: RequestOutput | None = None
        self.engine.add_request(request, prompt, self.params)
        try:
            while self.engine.has_unfinished_requests():
                for output in self.engine.step():
                    if output.outputs[0].token_ids:
                        first = first or time.perf_counter()
                        show(output.outputs[0].text)
        except KeyboardInterrupt:
            self._end(request)
        except BaseException:
            self._end(request)
            raise
        end = time.perf_counter()
        answer, ids, found = "", [], 0
        if output is not None:
            if output.error is not None:
                raise RuntimeError(f"the answer ended with an error: {output.error}")
            answer, ids = output.outputs[0].text, [*output.outputs[0].token_ids]
            found = output.num_cached_tokens or 0
        turn = Turn(
            *(question, answer, prompt["prompt_token_ids"], ids, found),
            *((first or end) - began, end - began),
        )
        self.messages = [*asked, {"role": "assistant", "content": answer}]
        self.turns.append(turn)
        return turn

    def _end(self, request: str) -> None:
        self.engine.abort_request([request])
        while self.engine.has_unfinished_requests():
            self.engine.step()
