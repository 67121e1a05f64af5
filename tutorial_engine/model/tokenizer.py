"""What a checkpoint says about its text: the tokenizer, its special tokens, the chat templates.

Knows tokenizer.json and the files beside it, which it reads as transformers does; knows no weights
and no template's language.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

# Named special tokens, in the order in which transformers adds those that are no tokens yet.
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class TextSettings:
    """What stands beside tokenizer.json, in one or several files.

    `special_tokens` are those with a name, which a chat template may use. `chat_templates` are by
    name, too: one alone is "default".
    """

    special_tokens: Mapping[str, str]  # "eos_token" -> "<|im_end|>"
    chat_templates: Mapping[str, str]  # name -> source
    added_tokens: Mapping[int, AddedToken]  # by the id that they are to have
    has_decoder: bool  # do their flags count before those of tokenizer.json?
    other_tokens: tuple[AddedToken, ...]  # become added tokens, unless they are
    splits_special: bool  # is a special token in a prompt read as plain text?


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder, with every token that its settings add.

    What training left in tokenizer.json is taken away: truncation, padding and dropout. ValueError
    for a file that is absent or damaged, and for a token to which two files give different ids.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(
            f"no tokenizer.json in {str(folder)!r}; without one prompts are token ids: "
            "LLM(..., skip_tokenizer_init=True)"
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{file} is damaged or no tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, BPE):
        tokenizer.model.dropout = None  # with it, one text is other tokens each time
    settings = read_text_settings(folder)
    tokenizer.encode_special_tokens = settings.splits_special
    here = tokenizer.get_added_tokens_decoder()
    stated = settings.added_tokens if settings.has_decoder else {**settings.added_tokens, **here}
    known = {token.content for token in (*here.values(), *stated.values())}
    tokens = [stated[token_id] for token_id in sorted(stated)]
    tokens += [token for token in settings.other_tokens if token.content not in known]
    for token in tokens:
        token.special = token.special or token.content in settings.special_tokens.values()
    tokenizer.add_tokens(tokens)  # of one that is there already the flags change
    for token_id, token in settings.added_tokens.items():
        if tokenizer.token_to_id(token.content) != token_id:
            raise ValueError(
                f"the settings in {str(folder)!r} give {token.content!r} the id {token_id}, but "
                f"with its tokenizer.json it gets {tokenizer.token_to_id(token.content)}: take all "
                "of these files from one checkpoint"
            )
    return tokenizer


def eos_token_id(folder: Path, tokenizer: Tokenizer) -> int | None:
    """The id of a tokenizer's own end of text, None where the settings in its folder name none."""
    token = read_text_settings(folder).special_tokens.get("eos_token")
    return None if token is None else tokenizer.token_to_id(token)


def end_ids(eos: int | None, others: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """What ends a text: the tokenizer's eos_token, unless no model's row is its, then the others.

    vLLM tells of the others as it does of stop_token_ids, so they come after it.
    """
    first = [] if eos is None or eos >= vocab_size else [eos]
    return tuple(dict.fromkeys([*first, *others]))


def read_text_settings(folder: Path) -> TextSettings:
    """All of tokenizer_config.json, and of the files that older and newer checkpoints have.

    special_tokens_map.json and added_tokens.json count where tokenizer_config.json has no
    added_tokens_decoder, and .jinja files before its chat_template. ValueError, naming the file,
    for one that is damaged.
    """
    with _read(folder / "tokenizer_config.json") as config:
        named, extra, templates = _named(config), _extra(config), _templates(config)
        decoder = config.get("added_tokens_decoder")
        added = {int(token_id): _token(token) for token_id, token in (decoder or {}).items()}
        splits_special = config.get("split_special_tokens") is True
    if decoder is None:
        with _read(folder / "special_tokens_map.json") as older:
            named, extra = named | _named(older), extra + _extra(older)
        special = {t.content for t in (*map(named.get, NAMED), *extra) if t is not None}
        with _read(folder / "added_tokens.json") as older:
            for text, token_id in older.items():
                is_special = text in special
                added[int(token_id)] = AddedToken(
                    text, special=is_special, normalized=not is_special
                )
    standard = {name: named[name] for name in NAMED if name in named}
    by_name = {name: token for name, token in {**standard, **named}.items() if token is not None}
    return TextSettings(
        special_tokens={name: token.content for name, token in by_name.items()},
        chat_templates=_template_files(folder) or templates,
        added_tokens=added,
        has_decoder=decoder is not None,
        other_tokens=(*by_name.values(), *extra),
        splits_special=splits_special,
    )


@contextmanager
def _read(file: Path) -> Iterator[dict[str, Any]]:
    """A file's JSON object, {} where there is none; what fails while it is used names the file."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if not isinstance(raw, dict):
            raise TypeError(f"it must hold a JSON object, not {type(raw).__name__}")
        yield raw
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error!r}") from error


def _token(value: Any) -> AddedToken:
    """A token from its text, which is a special one then, or from a table with text and flags."""
    table: Any = {"content": value, "special": True} if isinstance(value, str) else value
    return AddedToken(table["content"], **{flag: table[flag] for flag in FLAGS if flag in table})


def _named(settings: Mapping[str, Any]) -> dict[str, AddedToken | None]:
    """The special tokens that have a name: bos_token, ..., image_token."""
    values = {
        name: value
        for name, value in settings.items()
        if name in NAMED
        or (name.endswith("_token") and (isinstance(value, str) or _is_token(value)))
    }
    if isinstance(more := settings.get("extra_special_tokens"), dict):
        values |= more
    return {name: value if value is None else _token(value) for name, value in values.items()}


def _is_token(value: Any) -> bool:
    return isinstance(value, dict) and "content" in value


def _extra(settings: Mapping[str, Any]) -> list[AddedToken]:
    """The special tokens without a name."""
    values = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    return [] if isinstance(values, dict) else [_token(value) for value in values]


def _templates(settings: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates in tokenizer_config.json: one as a text, several as a list with names."""
    template = settings.get("chat_template") or {}
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    elif isinstance(template, str):
        template = {"default": template}
    for source in template.values():
        if not isinstance(source, str):
            raise TypeError(f"a chat_template is text, got {type(source).__name__}")
    return template


def _template_files(folder: Path) -> dict[str, str]:
    """The chat templates that have files of their own."""
    files = {file.stem: file for file in folder.glob("additional_chat_templates/*.jinja")}
    if (default := folder / "chat_template.jinja").is_file():
        files["default"] = default
    try:
        return {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    except UnicodeDecodeError as error:
        raise ValueError(f"a chat template in {str(folder)!r} is damaged: {error}") from None
