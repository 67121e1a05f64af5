"""Chat templates: rendered as by transformers, in a sandbox, with words for what is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import edit_json, save_random, save_tokenizer
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from tutorial_engine.engine.chat import ChatTemplate, load_chat_template
from tutorial_engine.engine.generate import generate
from tutorial_engine.engine.llm import LLM
from tutorial_engine.model.checkpoint import TINY, load_model, load_tokenizer, resolve_checkpoint
from tutorial_engine.sampling.params import SamplingParams

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
    "filters": (
        "{{ messages | map(attribute='role') | map('upper') | join(', ') }} {{ messages | length }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | first | tojson(indent=4) }}"
        "{{ messages[0].content | replace('e', 'E') | indent(2) }}"
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


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_rendered_as_transformers_does(tmp_path: Path, name: str, chat: str) -> None:
    folder = save(tmp_path, {"chat_template": TEMPLATES[name]})
    for options in (
        {"add_generation_prompt": False},
        {"add_generation_prompt": True},
        {"add_generation_prompt": True, "enable_thinking": False},
    ):
        text = ours(folder, CHATS[chat], **options)
        assert text and text == theirs(folder, CHATS[chat], **options)


EVERY = "|".join(
    f"{{{{ {name} }}}}"
    for name in (
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token"),
        *("mask_token", "image_token", "boi", "additional_special_tokens", "add_bos_token"),
    )
)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"sep_token": "A", "mask_token": None, "image_token": "<image>"}},
        {"tokenizer_config": {"extra_special_tokens": {"boi": "<boi>"}, "add_bos_token": True}},
        {"tokenizer_config": {"additional_special_tokens": ["<x>"], "pad_token": ""}},
        {"special_tokens_map": {"bos_token": {"content": "<b>", "lstrip": True}, "cls_token": "A"}},
        {"special_tokens_map": {"bos_token": None, "additional_special_tokens": ["<x>"]}},
        {
            "special_tokens_map": {"bos_token": "<b>", "unk_token": "A"},
            "tokenizer_config": {"added_tokens_decoder": {}, "unk_token": "B"},
        },
    ],
)
def test_a_template_may_name_what_it_may_name_in_transformers(
    tmp_path: Path, files: dict[str, Any]
) -> None:
    folder = save(tmp_path, {"chat_template": EVERY})
    for name, content in files.items():
        edit_json(folder, f"{name}.json", **content)
    assert ours(folder, USER) == theirs(folder, USER) != "|" * 10


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


@pytest.mark.parametrize("default", [None, "{{ messages[0].content }}"])
def test_one_of_several_templates_is_asked_for_by_its_name(
    tmp_path: Path, default: str | None
) -> None:
    folder = save(tmp_path, {"chat_template": "this is none of them"}, default)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(LINES)
    asked, text = load_chat_template(folder, "tool_use"), load_chat_template(folder, "as it is")
    assert asked is not None and text is not None
    assert asked.render(USER) == theirs(folder, USER, chat_template="tool_use") == "user: Hello\n"
    assert text.render(USER) == theirs(folder, USER, chat_template="as it is") == "as it is"
    if default is None:
        assert load_chat_template(folder) is None
    else:
        assert ours(folder, USER) == theirs(folder, USER) == "Hello"


def test_special_tokens_may_be_objects(tmp_path: Path) -> None:
    added = {"content": "<é>", "lstrip": False, "special": True, "__type": "AddedToken"}
    settings = {"chat_template": TEMPLATES["special tokens"], "bos_token": added, "pad_token": None}
    folder = save(tmp_path, settings)
    assert ours(folder, USER) == theirs(folder, USER) == "<é>user: Hello</s>\n"


def test_rendering_changes_no_message() -> None:
    with pytest.raises(ValueError):
        ChatTemplate("{% set _ = messages[0].update({'role': 'x'}) %}").render(USER)
    assert USER == [{"role": "user", "content": "Hello"}]


LINES = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
BY_PARTS = (
    "{% for m in messages %}{% for c in m['content'] %}[{{ c['text'] }}]{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("content", "lines", "parts"),  # as vLLM 0.32 writes them
    [
        ([{"type": "text", "text": "One day"}], "user: One day\n", "[One day]"),
        ([{"type": "text", "text": "One"}, "day"], "user: One\nday\n", "[One][day]"),
        ([{"type": "input_text", "text": "One day"}], "user: One day\n", "[One day]"),
        ([], "user: \n", ""),
        (None, "user: \n", ""),
    ],
)
def test_parts_of_text_are_text(content: Any, lines: str, parts: str) -> None:
    messages = [{"role": "user", "content": content}]
    assert ChatTemplate(LINES).render(messages) == lines
    assert ChatTemplate(BY_PARTS).render(messages) == parts
    assert messages[0]["content"] is content


@pytest.mark.parametrize(
    "content",
    [
        {"type": "text", "text": "One day"},
        [{"text": "One day"}],
        [{"type": "text", "text": None}],
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}],
    ],
)
def test_what_is_no_text_is_refused(content: Any) -> None:
    with pytest.raises(ValueError, match=r"content of a message|reads text only"):
        ChatTemplate(LINES).render([{"role": "user", "content": content}])


# -- what the tokenizer makes of it --------------------------------------------------------------

WITH_BOS = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"


def save_with_ends(folder: Path) -> Path:
    """A random model with a tokenizer that adds <s> and </s>, and a template that writes them."""
    save_random(folder, vocab_size=300)
    save(folder, {"chat_template": WITH_BOS})
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([*SPECIAL.values()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in SPECIAL.values()],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_prompt_from_a_template_gets_no_further_special_tokens(tmp_path: Path) -> None:
    folder = save_with_ends(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = theirs.apply_chat_template(USER, tokenize=True, return_dict=False)
    assert ids == [256, *theirs.encode("Hello", add_special_tokens=False), 257]
    tokenizer, template = load_tokenizer(folder), load_chat_template(folder)
    assert template is not None
    prompt = template.prompt(tokenizer, USER)
    assert prompt == {"prompt": "<s>Hello</s>", "prompt_token_ids": ids}
    greedy, model = SamplingParams(temperature=0, max_tokens=3), load_model(folder)
    (by_loop,) = generate(model, prompt, greedy, tokenizer=tokenizer)
    (by_chat,) = LLM(folder).chat(USER, greedy, use_tqdm=False)
    written = {"chat_template": "{{ bos_token }}Hello</s>", "use_tqdm": False}
    (other,) = LLM(folder).chat([USER], greedy, **written)
    for output in (by_loop, by_chat, other):
        assert list(output.prompt_token_ids) == ids and output.prompt == "<s>Hello</s>"
        assert output.outputs[0].token_ids == by_loop.outputs[0].token_ids
    (plain,) = LLM(folder).generate("Hello", greedy, use_tqdm=False)
    assert list(plain.prompt_token_ids) == ids, "a plain text still gets them"


def test_the_recipe_of_the_docs_gives_these_tokens(tmp_path: Path) -> None:
    folder = save_with_ends(tmp_path)
    page = (Path(__file__).parent.parent / "docs" / "python.md").read_text(encoding="utf-8")
    (recipe,) = [block for block in page.split("```") if "Qwen/Qwen3" in block]
    names: dict[str, Any] = {}
    exec(recipe.removeprefix("python").replace('"Qwen/Qwen3-0.6B"', repr(str(folder))), names)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = theirs.apply_chat_template(names["messages"], tokenize=True, return_dict=False)
    assert list(names["answer"].prompt_token_ids) == ids


def test_the_template_is_that_of_the_tokenizers_folder(tmp_path: Path) -> None:
    mine = save_with_ends(tmp_path / "mine")
    other = save(tmp_path / "other", {"chat_template": "other{{ bos_token }}", "bos_token": "<o>"})
    without = save(tmp_path / "without")
    model, tokenizer = load_model(mine), load_tokenizer(mine)

    def prompt(model: Any, **options: Any) -> str | None:
        params = SamplingParams(temperature=0, max_tokens=1)
        return LLM(model, **options).chat(USER, params, use_tqdm=False)[0].prompt

    assert prompt(mine) == prompt(mine, tokenizer=tokenizer) == "<s>Hello</s>"
    assert prompt(mine, tokenizer=other) == prompt(model, tokenizer=str(other)) == "other<o>"
    for options in (
        {"model": mine, "tokenizer": without},
        {"model": model, "tokenizer": tokenizer},
    ):
        with pytest.raises(ValueError, match="no chat template: hand one in"):
            prompt(**options)
    with pytest.raises(ValueError, match="the conversation is text: pass tokenizer"):
        prompt(mine, skip_tokenizer_init=True)


# -- what is absent or damaged ------------------------------------------------------------------


def test_checkpoint_without_a_template_has_none(tmp_path: Path) -> None:
    named = {"chat_template": [{"name": "tool_use", "template": "x"}]}
    for settings in (None, {}, {"chat_template": None}, {"chat_template": ""}, named):
        assert load_chat_template(save(tmp_path, settings)) is None
    assert load_chat_template(TINY) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{not json", r"tokenizer_config\.json is damaged"),
        ('{"chat_template": [{"name": "default", "template": 7}]}', "json is damaged"),
        ('{"chat_template": "x", "bos_token": {"id": 7}}', "json is damaged"),
        ('{"chat_template": 7}', "json is damaged"),
        ('{"chat_template": ["x"]}', "json is damaged"),
        ("[]", r"tokenizer_config\.json is damaged"),
        ('{"chat_template": "{% for m in messages %}"}', "template is damaged"),
        ('{"chat_template": "{{ %s"}' % ("(" * 5000), "template is damaged"),
    ],
)
def test_what_is_damaged_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        load_chat_template(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"a chat template in .* is damaged"):
        load_chat_template(tmp_path)


def test_template_file_of_a_hub_checkpoint_is_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []

    def download(name: str, allow_patterns: list[str], **_: Any) -> str:
        asked.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    resolve_checkpoint("somebody/something", weights=False)
    assert asked == ["*.json", "*.jinja"]


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("messages", [[], None, "Hello", {"role": "user"}, ["Hello"]])
def test_what_is_no_conversation_is_refused(messages: Any) -> None:
    with pytest.raises(ValueError, match="messages"):
        ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}").render(messages)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ '{0.__class__}'.format('') }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_template_cannot_reach_python(source: str) -> None:
    try:
        text = ChatTemplate(source).render(USER)
    except ValueError:
        return
    assert text.strip() == ""


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{{ messages + 1 }}", "TypeError: can only concatenate"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ],
)
def test_a_template_without_sense_is_told(source: str, named: str) -> None:
    with pytest.raises(ValueError, match=f"refuses these messages: .*{named}"):
        ChatTemplate(source).render(USER)


def test_what_real_templates_calculate_stays_possible() -> None:
    values = {
        "'-' * 3": "---",
        "2 * [0]": "[0, 0]",
        "7 % 4": "3",
        "'%02d:%s, %d%%' % (7, 'x', 5)": "07:x, 5%",
        "'%.2f' | format(0.5)": "0.50",
        "'{{a}} {:>4} {b!r}'.format(1, b='9999999')": "{a}    1 '9999999'",
        "'a-b'.replace('-', '+')": "a+b",
        "(['a'] * 3) | join(', ')": "a, a, a",
    }
    for expression, value in values.items():
        assert ChatTemplate("{{ " + expression + " }}").render(USER) == value
    long = [{"role": "user", "content": "x" * 2_000_000}]
    source = "{{ messages[0].content.split('</think>')[-1].strip() | replace('y', 'zz') | length }}"
    assert ChatTemplate(source).render(long) == "2000000"
