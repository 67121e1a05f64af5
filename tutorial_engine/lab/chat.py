"""Introduced in notebook 02. Messages to a prompt, by the template that a chat checkpoint brings.

Knows templates (Jinja, sandboxed); knows no tokenizer and no model.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tutorial_engine.model.checkpoint import resolve_checkpoint

Message = Mapping[str, Any]  # {"role": "user", "content": "Hello"}


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; here it changes nothing."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A checkpoint's chat template: `render(messages)` → the text to tokenize.

    ValueError for a template that is damaged. Untrusted templates cannot reach Python.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.special_tokens = dict(special_tokens or {})
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        env.filters["tojson"] = _to_json
        env.globals["raise_exception"] = _refuse
        env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = env.from_string(source)
        except TemplateError as error:
            raise ValueError(f"the chat template is damaged: {error}") from error

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The conversation as one text, ending where the assistant is to speak.

        `variables` go to the template, e.g. enable_thinking=False for Qwen3. ValueError for no
        message, for what is none, or for messages that the template refuses.
        """
        if not messages or not all(isinstance(message, Mapping) for message in messages):
            raise ValueError(
                f"messages must be a list like [{{'role': 'user', 'content': 'Hello'}}], got "
                f"{messages!r}"
            )
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                **{"tools": None, "documents": None, **self.special_tokens, **variables},
            )
        except Exception as error:  # a template is a program: it can fail in any way
            raise ValueError(f"the chat template refuses these messages: {error}") from error


def load_chat_template(path_or_id: str | Path) -> ChatTemplate | None:
    """The template of a checkpoint (folder or hub id), None when it brings none.

    ValueError, naming the file, for settings that are damaged.
    """
    folder = resolve_checkpoint(path_or_id)
    settings_file, own_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    source, special = None, {}
    if settings_file.is_file():
        try:
            settings = json.loads(settings_file.read_text(encoding="utf-8"))
            source, special = _default_template(settings), _special_tokens(settings)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{settings_file} is damaged: {error!r}") from error
    if own_file.is_file():
        source = own_file.read_text(encoding="utf-8")
    return ChatTemplate(source, special) if source else None


def _default_template(settings: Mapping[str, Any]) -> str | None:
    source = settings.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not isinstance(source, str | None):
        raise TypeError(f"a chat_template is text, got {type(source).__name__}")
    return source


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in settings.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
