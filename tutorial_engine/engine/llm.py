"""`LLM`: the offline API of vLLM over this engine.

Knows the names that scripts for vLLM use; decides nothing itself.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from tokenizers import Tokenizer

from tutorial_engine.as_vllm import check_keywords
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.engine.args import EngineArgs
from tutorial_engine.engine.chat import ChatTemplate, Message, load_chat_template
from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.engine.inputs import Prompt
from tutorial_engine.engine.request import RequestOutput
from tutorial_engine.model.checkpoint import TINY
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams

Conversation = Sequence[Message]
P = ParamSpec("P")


def _takes(
    other: Callable[Concatenate[Any, P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Marks a method that hands on what it takes: help, editors and mypy show the other's names."""

    def mark(method: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        method.__wrapped__ = other  # type: ignore[attr-defined]
        return method

    return mark


class LLM:
    """A model that continues prompts: vLLM's class of this name. Options are those of EngineArgs.

    One thing differs on purpose: where a script states no temperature, this engine is greedy, so
    that the text is the same on every machine (vLLM's default is 1.0). It warns once.
    """

    @_takes(EngineArgs.__init__)
    def __init__(self, model: str | Path | CausalLM = TINY, **options: Any) -> None:
        args = EngineArgs(model, **options)
        self.llm_engine = LLMEngine.from_engine_args(args)
        self._text_folder = args.text_folder
        self._has_warned = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **not_here: Any,
    ) -> list[RequestOutput]:
        """Continue every prompt until it stops → one output each, in the order of the prompts.

        A prompt is a text, a list of token ids, or a table with "prompt" or "prompt_token_ids".
        What vLLM takes beside is taken where it asks for nothing, here and in the other methods.
        """
        check_keywords("LLM.generate", not_here)
        self._warn_of_greedy(sampling_params)
        return self.llm_engine.generate(prompts, sampling_params, progress=use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **not_here: Any,
    ) -> list[RequestOutput]:
        """As `generate`, for one conversation or several, written by the checkpoint's own template.

        A conversation is a list of {"role": "user", "content": "Hello"}. `chat_template` is another
        template, its text or its name; the kwargs go to it, as enable_thinking=False for Qwen3. It
        writes all special tokens, and none is added. ValueError where there is none.
        """
        check_keywords("LLM.chat", not_here)
        if self._text_folder is not None:
            template = load_chat_template(self._text_folder, chat_template)
        else:
            template = ChatTemplate(chat_template) if chat_template else None
        if not template:
            raise ValueError(
                "this checkpoint has no chat template: hand one in, llm.chat(messages, "
                "chat_template=...), a name or a Jinja text, or use llm.generate"
            )
        is_list = isinstance(messages, list | tuple) and len(messages) > 0
        is_one = not is_list or isinstance(messages[0], Mapping)
        each: Any = [messages] if is_one else messages
        tokenizer, variables = self.get_tokenizer(), chat_template_kwargs or {}
        prompts = [
            template.prompt(tokenizer, conversation, add_generation_prompt, **variables)
            for conversation in each
        ]
        self._warn_of_greedy(sampling_params)
        return self.llm_engine.generate(prompts, sampling_params, progress=use_tqdm)

    def reset_prefix_cache(self, **not_here: Any) -> bool:
        """Forget all blocks that could be found; False, and nothing forgotten, if one is in use."""
        check_keywords("LLM.reset_prefix_cache", not_here)
        memory = self.llm_engine.memory
        if isinstance(memory, PagedKVCache):
            if memory.blocks.num_free < memory.blocks.num_blocks:
                return False
            memory.blocks.reset()
        return True

    def get_tokenizer(self) -> Tokenizer | None:
        """The checkpoint's: `encode(text).ids`, `decode(ids)`."""
        return self.llm_engine.tokenizer

    def _warn_of_greedy(self, params: SamplingParams | Sequence[SamplingParams] | None) -> None:
        each = params if isinstance(params, list | tuple) else [params]
        if not self._has_warned and not all(getattr(p, "says_temperature", False) for p in each):
            self._has_warned = True
            warnings.warn(
                "no temperature was given: this engine is greedy then, vLLM takes 1.0; state it "
                "(SamplingParams(temperature=0)) where both should say the same",
                stacklevel=3,
            )
