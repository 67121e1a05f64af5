"""Chat templates: rendered as by transformers, in a sandbox, with words for what is wrong."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import save_tokenizer
from transformers import PreTrainedTokenizerFast

from tutorial_engine.lab import chat
from tutorial_engine.lab.chat import ChatTemplate, load_chat_template
from tutorial_engine.model.checkpoint import TINY, resolve_checkpoint

QWEN = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, users=0) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}{% set ns.users = ns.users + 1 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
                {{- call.arguments | tojson }}{{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
[{{ ns.users }}]"""

TEMPLATES = {
    "qwen": QWEN,
    "special tokens": (
        "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] | trim }}"
        "{{ eos_token }}\n{% endfor %}{{ pad_token }}"
    ),
    "blocks are trimmed": (
        "{% for m in messages %}\n    {% if loop.first %}\n  first\n    {% endif %}\n"
        "{{ loop.index0 }}/{{ loop.length }}\n{% endfor %}\n"
    ),
    "break and continue": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{{ m.content }}|{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}"
    ),
    "json": (
        "{{ messages | tojson }}\n{{ messages | tojson(indent=2) }}\n"
        "{{ {'b': 1, 'a': '<é&>'} | tojson(sort_keys=true, separators=(',', ':')) }}"
        "{{ 'é' | tojson(ensure_ascii=true) }}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
    ),
    "macro": (
        "{% macro say(m) %}<{{ m.role|upper }}>{{ m.content }}{% endmacro %}"
        "{% for m in messages %}{{ say(m) }}{{ ' ' if not loop.last }}{% endfor %}"
    ),
    "absent variables": (
        "{{ tools is none }} {{ documents is none }} {{ tools is defined }} {{ nothing }}"
        "{{ messages[0].nothing }}{{ add_generation_prompt }}{% if tools %}tools{% endif %}"
    ),
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one question": [{"role": "user", "content": "Hello"}],
    "a conversation": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  What is 2 + 2?\n"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"},
        {"role": "user", "content": "And 'quoted' \"text\" <b>&amp;</b> {{ 7 * 7 }}"},
    ],
    "other scripts": [
        {"role": "user", "content": "Grüße, мир, 世界, שלום, 👩‍👩‍👧, e\u0301, \u200b, \x00"},
        {"role": "assistant", "content": "日本語\r\nzwei"},
    ],
    "a tool": [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}}],
        },
    ],
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
USER = [{"role": "user", "content": "Hello"}]


def save(folder: Path, settings: dict[str, Any] | None = None, jinja: str | None = None) -> Path:
    """A folder with a tokenizer, its settings and, where given, the template in its own file."""
    folder.mkdir(exist_ok=True)
    save_tokenizer(folder)
    if settings is not None:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL, **settings}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    if jinja is not None:
        (folder / "chat_template.jinja").write_text(jinja, encoding="utf-8")
    return folder


def theirs(folder: Path, messages: list[dict[str, Any]], **options: Any) -> str:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def ours(folder: Path, messages: list[dict[str, Any]], **options: Any) -> str:
    template = load_chat_template(folder)
    assert template is not None
    return template.render(messages, **options)


# -- equal to transformers ----------------------------------------------------------------------


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_rendered_as_transformers_does(
    tmp_path: Path, name: str, chat: str, add_generation_prompt: bool
) -> None:
    folder = save(tmp_path, {"chat_template": TEMPLATES[name]})
    options = {"add_generation_prompt": add_generation_prompt}
    text = ours(folder, CHATS[chat], **options)
    assert text == theirs(folder, CHATS[chat], **options)
    assert text


@pytest.mark.parametrize("thinking", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
def test_variables_reach_the_template(tmp_path: Path, thinking: dict[str, bool]) -> None:
    folder = save(tmp_path, {"chat_template": QWEN})
    text = ours(folder, USER, **thinking)
    assert text == theirs(folder, USER, add_generation_prompt=True, **thinking)
    assert ("<think>" in text) == (thinking.get("enable_thinking") is False)


@pytest.mark.parametrize("form", ["string", "list", "file", "file before string"])
def test_template_is_found_wherever_it_is_kept(tmp_path: Path, form: str) -> None:
    other = "other{{ messages[0].content }}"
    settings: dict[str, Any] = {
        "string": {"chat_template": QWEN},
        "list": {
            "chat_template": [
                {"name": "tool_use", "template": other},
                {"name": "default", "template": QWEN},
            ]
        },
        "file": {},
        "file before string": {"chat_template": other},
    }[form]
    folder = save(tmp_path, settings, QWEN if "file" in form else None)
    text = ours(folder, CHATS["a conversation"])
    assert text == theirs(folder, CHATS["a conversation"], add_generation_prompt=True)
    assert "<|im_start|>" in text


def test_template_file_needs_no_settings(tmp_path: Path) -> None:
    folder = save(tmp_path, jinja="{{ bos_token }}[{{ messages[0].content }}]")
    assert ours(folder, USER) == "[Hello]"


def test_special_tokens_may_be_objects(tmp_path: Path) -> None:
    added = {"content": "<é>", "lstrip": False, "special": True, "__type": "AddedToken"}
    settings = {"chat_template": TEMPLATES["special tokens"], "bos_token": added, "pad_token": None}
    folder = save(tmp_path, {**settings, "add_bos_token": True, "additional_special_tokens": ["x"]})
    assert ours(folder, USER) == theirs(folder, USER) == "<é>user: Hello</s>\n"


def test_variables_win_over_special_tokens() -> None:
    template = ChatTemplate("{{ bos_token }}{{ tools }}", {"bos_token": "<s>"})
    assert template.render(USER) == "<s>None"
    assert template.render(USER, bos_token="!", tools=[1]) == "![1]"


def test_template_is_not_rendered_twice() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    text = "{{ 7 * 7 }}{% for %}<b>&"
    assert template.render([{"role": "user", "content": text}]) == text


def test_rendering_changes_no_message() -> None:
    messages = [{"role": "user", "content": "Hello", "more": ["x"]}]
    with pytest.raises(ValueError):
        ChatTemplate("{% set _ = messages[0].update({'role': 'x'}) %}").render(messages)
    with pytest.raises(ValueError):
        ChatTemplate("{% set _ = messages[0].more.append(1) %}").render(messages)
    assert messages == [{"role": "user", "content": "Hello", "more": ["x"]}]


def test_today_is_there_for_templates_that_ask(tmp_path: Path) -> None:
    folder = save(tmp_path, {"chat_template": "{{ strftime_now('%Y') }}"})
    assert ours(folder, USER) == theirs(folder, USER)


# -- what is absent or damaged ------------------------------------------------------------------


@pytest.mark.parametrize("settings", [None, {}, {"chat_template": None}, {"chat_template": ""}])
def test_checkpoint_without_a_template_has_none(
    tmp_path: Path, settings: dict[str, Any] | None
) -> None:
    assert load_chat_template(save(tmp_path, settings)) is None


def test_list_without_a_default_has_none(tmp_path: Path) -> None:
    entries = [{"name": "tool_use", "template": "x"}]
    assert load_chat_template(save(tmp_path, {"chat_template": entries})) is None


def test_shipped_model_is_no_chat_model() -> None:
    assert load_chat_template(TINY) is None


@pytest.mark.parametrize(
    "text",
    [
        "{not json",
        "[1, 2]",
        '"text"',
        '{"chat_template": 7}',
        '{"chat_template": {"default": "x"}}',
        '{"chat_template": [{"name": "default"}]}',
        '{"chat_template": ["x"]}',
        '{"chat_template": [{"name": "default", "template": 7}]}',
        '{"chat_template": "x", "bos_token": {"id": 7}}',
        "\udcff",
    ],
)
def test_damaged_settings_are_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tokenizer_config.json"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is damaged"):
        load_chat_template(tmp_path)


@pytest.mark.parametrize(
    "source", ["{% for m in messages %}", "{{ messages", "{% nonsense %}", "{{ 1 | nofilter }}"]
)
def test_damaged_template_is_refused(tmp_path: Path, source: str) -> None:
    with pytest.raises(ValueError, match="template is damaged"):
        load_chat_template(save(tmp_path, {"chat_template": source}))


def test_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        load_chat_template(tmp_path / "nowhere")


def test_template_file_of_a_hub_checkpoint_is_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import fnmatch

    import huggingface_hub

    asked: list[str] = []

    def download(name: str, allow_patterns: list[str], **_: Any) -> str:
        asked.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve_checkpoint("somebody/something")
    for file in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert any(fnmatch.fnmatch(file, pattern) for pattern in asked), file


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages", [[], (), None, "Hello", {"role": "user", "content": "Hello"}, ["Hello"], [None]]
)
def test_what_is_no_conversation_is_refused(messages: Any) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ValueError, match="messages"):
        template.render(messages)
    assert template.render(USER) == "Hello"


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ messages[0].content + none }}", "str"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ {}['x'].y }}", "x"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "[Rr]ange"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_what_goes_wrong_in_a_template_is_told(source: str, named: str) -> None:
    template = ChatTemplate("{% if messages|length == 1 %}" + source + "{% else %}fine{% endif %}")
    with pytest.raises(ValueError, match=f"refuses these messages.*{named}"):
        template.render(USER)
    assert template.render(USER * 2) == "fine"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ messages.__class__.__base__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__.os.system('true') }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ '{0.__class__}'.format_map({'0': ''}) }}",
        "{% import 'os' as os %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_template_cannot_reach_python(source: str) -> None:
    try:
        text = ChatTemplate(source).render(USER)
    except ValueError:
        return
    assert "class" not in text and "globals" not in text and "root:" not in text
    assert text.strip() == ""


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (LOOPS.replace("BODY", ""), "runs for more than 0.2 seconds"),
        (LOOPS.replace("BODY", "{% set c = a %}"), "runs for more than 0.2 seconds"),
        ("{% macro m() %}" + LOOPS + "{% endmacro %}{{ m() }}", "runs for more than 0.2 seconds"),
        ("{{ 10 ** (10 ** 8) }}", r"\*\* would make more than"),
        ("{{ 'x'|center(10 ** 15) }}", "MemoryError"),
        ("{% set n = 10 ** 8 %}{{ 10 ** n }}", r"\*\* would make more than"),
        ("{{ 'x' * 10 ** 9 }}", r"\* would make more than"),
        ("{{ 10 ** 9 * 'x' }}", r"\* would make more than"),
        ("{{ [0] * 10 ** 9 }}", r"\* would make more than"),
        ("{% for a in range(999) %}{{ 'x' * 99999 }}{% endfor %}", "says more than 10,000,000"),
        ("{{ 'x'.center(10 ** 15) }}", "MemoryError"),
        ("{{ messages + 1 }}", "TypeError: can only concatenate"),
    ],
)
def test_a_template_without_end_is_stopped(
    source: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "MOST_SECONDS", 0.2)
    before = sys.gettrace()
    with pytest.raises(ValueError, match=f"refuses these messages: .*{named}"):
        ChatTemplate(source).render([{"role": "user", "content": "Hello"}])
    assert sys.gettrace() is before


def test_a_template_that_is_nested_too_deeply_is_damaged() -> None:
    with pytest.raises(ValueError, match=r"template is damaged: RecursionError"):
        ChatTemplate("{{ " + "(" * 5000)


def test_what_real_templates_calculate_stays_possible() -> None:
    sums = ("2 ** 10", "3 * 4", "'-' * 3", "2 * [0]", "2.5 * 2", "2 ** 0.5 > 1")
    source = " ".join(f"{{{{ {one} }}}}" for one in sums)
    said = ChatTemplate(source).render([{"role": "user", "content": "Hello"}])
    assert said == "1024 12 --- [0, 0] 5.0 True"
