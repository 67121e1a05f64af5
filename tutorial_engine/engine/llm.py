"""`LLM`: the offline API of vLLM over this engine.

Knows the names that scripts for vLLM use; decides nothing itself.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.engine.args import EngineArgs
from tutorial_engine.engine.chat import ChatTemplate, Message, load_chat_template
from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.engine.inputs import Prompt
from tutorial_engine.engine.request import RequestOutput
from tutorial_engine.model.checkpoint import TINY
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams

Conversation = Sequence[Message]


class LLM:
    """A model that continues prompts: vLLM's class of this name. Options are those of EngineArgs.

    One thing differs on purpose: where a script states no temperature, this engine is greedy, so
    that the text is the same on every machine (vLLM's default is 1.0). It warns once.
    """

    def __init__(self, model: str | Path | Qwen3ForCausalLM = TINY, **options: Any) -> None:
        self.llm_engine = LLMEngine.from_engine_args(EngineArgs(model, **options))
        self._checkpoint = None if isinstance(model, Qwen3ForCausalLM) else model
        self._has_warned = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue every prompt until it stops → one output each, in the order of the prompts.

        A prompt is a text, a list of token ids, or a table with "prompt" or "prompt_token_ids".
        """
        self._warn_of_greedy(sampling_params)
        return self.llm_engine.generate(prompts, sampling_params, progress=use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """As `generate`, for one conversation or several, written by the checkpoint's own template.

        A conversation is a list of {"role": "user", "content": "Hello"}. `chat_template` is the
        text of another template; the kwargs go to it, as enable_thinking=False for Qwen3.
        ValueError where there is none.
        """
        template = self._checkpoint and load_chat_template(self._checkpoint)
        if chat_template is not None:
            template = ChatTemplate(chat_template, template.special_tokens if template else None)
        if not template:
            raise ValueError("this checkpoint has no chat template: hand one in, or use generate")
        is_list = isinstance(messages, list | tuple) and len(messages) > 0
        is_one = not is_list or isinstance(messages[0], Mapping)
        each: Any = [messages] if is_one else messages
        prompts = [
            template.render(conversation, add_generation_prompt, **(chat_template_kwargs or {}))
            for conversation in each
        ]
        self._warn_of_greedy(sampling_params)
        return self.llm_engine.generate(prompts, sampling_params, progress=use_tqdm)

    def reset_prefix_cache(self) -> bool:
        """Forget all blocks that could be found; False, and nothing forgotten, if one is in use."""
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
