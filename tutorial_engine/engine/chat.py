"""Messages to a prompt, by the template that a chat checkpoint brings.

Knows templates (Jinja, sandboxed) and what they leave to the tokenizer; knows no model.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from tutorial_engine.engine.inputs import token_ids_of
from tutorial_engine.model.checkpoint import resolve_checkpoint
from tutorial_engine.model.tokenizer import read_text_settings

Message = Mapping[str, Any]  # {"role": "user", "content": "Hello"}
PARTS = re.compile(r"\bfor\s+\w+\s+in\s+\w+(\.|\[['\"])content\b")  # it takes content by parts


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; here it changes nothing."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A checkpoint's chat template: `render(messages)` → the text to tokenize.

    ValueError for a template that is damaged. Jinja's sandbox keeps an untrusted template from
    Python itself. It may run without end, as in any engine: Ctrl-C stops it.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.special_tokens = dict(special_tokens or {})
        self._takes_parts = PARTS.search(source) is not None
        extensions = [loopcontrols, _Generation]
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions
        )
        env.filters["tojson"] = _to_json
        env.globals["raise_exception"] = _refuse
        env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = env.from_string(source)
        except Exception as error:  # constants are worked out here, which can fail in any way
            raise ValueError(f"the chat template is damaged: {_told(error)}") from error

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The conversation as one text, ending where the assistant is to speak.

        `variables` go to the template, e.g. enable_thinking=False for Qwen3. Content in parts of
        text becomes lines, unless the template takes parts. ValueError for no message, for what is
        none, for pictures and sound, or for messages that the template refuses.
        """
        is_list = isinstance(messages, list | tuple) and len(messages) > 0
        if not is_list or not all(isinstance(message, Mapping) for message in messages):
            raise ValueError(
                f"messages must be a list like [{{'role': 'user', 'content': 'Hello'}}], got "
                f"{messages!r}"
            )
        messages = [self._with_text(message) for message in messages]
        variables = {"tools": None, "documents": None, **self.special_tokens, **variables}
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(variables)
        except Exception as error:  # a template is a program: it can fail in any way
            raise ValueError(f"the chat template refuses these messages: {_told(error)}") from error

    def prompt(
        self,
        tokenizer: Tokenizer | None,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> dict[str, Any]:
        """The conversation as a prompt for `generate`: the text of `render`, and its token ids.

        The template has written all special tokens, so the tokenizer adds none to them.
        """
        text = self.render(messages, add_generation_prompt, **variables)
        token_ids = token_ids_of(text, tokenizer, "the conversation", add_special_tokens=False)
        return {"prompt": text, "prompt_token_ids": token_ids}

    def _with_text(self, message: Message) -> Message:
        """A message whose content is text, as vLLM makes it of parts; None is no text."""
        content = message.get("content", "")
        if isinstance(content, str):
            return message
        if content is not None and not isinstance(content, list | tuple):
            raise ValueError(f"the content of a message is a text or a list, got {content!r}")
        texts = [_text_of(part) for part in content or ()]
        if content and self._takes_parts:
            return {**message, "content": [{"type": "text", "text": text} for text in texts]}
        return {**message, "content": "\n".join(texts)}


def _text_of(part: Any) -> str:
    """The text of a part of a message. ValueError for a part of another kind."""
    kind, text = ("text", part) if isinstance(part, str) else (None, None)
    if isinstance(part, Mapping):
        kind, text = part.get("type"), part.get("text")
    if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
        raise ValueError(
            f"this engine reads text only: a part of a message is {{'type': 'text', 'text': "
            f"'Hello'}}, got {part!r:.200}"
        )
    return text


def load_chat_template(path_or_id: str | Path, template: str | None = None) -> ChatTemplate | None:
    """The template of a checkpoint (folder or hub id), None when it brings none.

    `template` asks for another: the name of one of several, or its text. ValueError, naming the
    file, for settings that are damaged.
    """
    settings = read_text_settings(resolve_checkpoint(path_or_id, weights=False))
    source = settings.chat_templates.get("default" if template is None else template, template)
    return ChatTemplate(source, settings.special_tokens) if source else None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    options = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # type: ignore[arg-type]


def _told(error: Exception) -> str:
    """What it says; of errors of Python its name, too: a MemoryError says nothing."""
    return str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
