"""What vLLM's methods take, by its own signatures: each of their keywords is tried on ours.

tools/vllm/record_signatures.py asked vLLM; `make vllm` asks again.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engines import random_model

from tutorial_engine.as_vllm import FILE, HARMLESS, check_keywords, takes
from tutorial_engine.engine.args import EngineArgs
from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.engine.llm import LLM
from tutorial_engine.sampling.params import SamplingParams

RECORDED = json.loads(FILE.read_text(encoding="utf-8"))["takes"]
REQUIRED = "(required)"
MODEL = random_model()
ONE = SamplingParams(temperature=0, max_tokens=1)
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"

OURS: dict[str, Callable[..., Any]] = {
    "SamplingParams": SamplingParams,
    "SamplingParams.from_optional": SamplingParams.from_optional,
    "SamplingParams.clone": SamplingParams.clone,
    "EngineArgs": EngineArgs,
    "LLM": LLM,
    "LLM.generate": LLM.generate,
    "LLM.chat": LLM.chat,
    "LLM.get_tokenizer": LLM.get_tokenizer,
    "LLM.reset_prefix_cache": LLM.reset_prefix_cache,
    "LLMEngine.from_engine_args": LLMEngine.from_engine_args,
    "LLMEngine.add_request": LLMEngine.add_request,
    "LLMEngine.step": LLMEngine.step,
    "LLMEngine.abort_request": LLMEngine.abort_request,
    "LLMEngine.has_unfinished_requests": LLMEngine.has_unfinished_requests,
    "LLMEngine.get_num_unfinished_requests": LLMEngine.get_num_unfinished_requests,
}


def call(method: str, **keywords: Any) -> Any:
    """This method of ours on a small engine, with keywords beside what it needs."""
    match method:
        case "SamplingParams":
            return SamplingParams(**{"temperature": 0.5} | keywords)
        case "SamplingParams.from_optional":
            return SamplingParams.from_optional(**keywords)
        case "EngineArgs":
            return EngineArgs(MODEL, **{"max_model_len": 40} | keywords)
        case "LLM":
            return LLM(MODEL, **{"max_model_len": 40} | keywords)
        case "LLMEngine.from_engine_args":
            return LLMEngine.from_engine_args(EngineArgs(MODEL), **keywords)
    llm = LLM(MODEL, max_model_len=40)
    engine = llm.llm_engine
    match method:
        case "LLM.generate":
            return llm.generate([[1, 2]], **{"sampling_params": ONE, "use_tqdm": False} | keywords)
        case "LLM.reset_prefix_cache":
            return llm.reset_prefix_cache(**keywords)
        case "LLMEngine.add_request":
            return engine.add_request("a", [1, 2], ONE, **keywords)
        case "LLMEngine.abort_request":
            engine.add_request("a", [1, 2], ONE)
            return engine.abort_request(["a"], **keywords)
    assert method == "LLM.chat"
    told = {"sampling_params": ONE, "use_tqdm": False, "chat_template": TEMPLATE} | keywords
    return LLM().chat([{"role": "user", "content": "One day"}], **told)


def keywords() -> Iterator[tuple[str, str, Any]]:
    """(method, keyword, vLLM's default) of all that have one."""
    for method, parameters in RECORDED.items():
        for name, default in parameters.items():
            if default != REQUIRED and (method, name) != ("EngineArgs", "model"):
                yield method, name, default


EACH = list(keywords())


def test_every_method_of_the_table_is_ours_and_takes_what_is_needed_by_position() -> None:
    assert RECORDED.keys() == OURS.keys() and len(EACH) > 350
    for method, parameters in RECORDED.items():
        wanted = [name for name, default in parameters.items() if default == REQUIRED]
        ours = [name for name in inspect.signature(OURS[method]).parameters if name != "self"]
        assert ours[: len(wanted)] == wanted, method
    theirs = list(RECORDED["LLMEngine.add_request"])[:4]
    assert list(inspect.signature(LLMEngine.add_request).parameters)[1:5] == theirs


@pytest.mark.filterwarnings("ignore:no temperature was given")
def test_what_vllm_takes_when_nothing_is_said_is_taken_when_it_is_written() -> None:
    refused = {}
    for method, name, default in EACH:
        if (method, name) == ("LLM.chat", "chat_template"):
            continue  # the shipped checkpoint has none
        try:
            call(method, **{name: default})
        except Exception as error:
            refused[method, name, str(default)] = repr(error)
    assert not refused


def another(default: Any) -> Any:
    """A value that asks for something."""
    if isinstance(default, bool):
        return not default
    return default + 3 if isinstance(default, int | float) else "something"


def test_another_value_is_refused_with_a_sentence_where_this_engine_has_it_not() -> None:
    tried = 0
    for method, name, default in EACH:
        written = inspect.signature(OURS[method]).parameters
        if method == "LLM":
            written = inspect.signature(EngineArgs).parameters
        elif method == "SamplingParams.from_optional":
            method, written = "SamplingParams", inspect.signature(SamplingParams).parameters
        harmless = HARMLESS.get("EngineArgs" if method == "LLM" else method, ())
        if name in written:
            continue
        if name in harmless:
            call(method, **{name: another(default)})
            continue
        value = another(default)
        with pytest.raises(ValueError, match=rf"{name}={re.escape(repr(value))}: vLLM has this"):
            call(method, **{name: value})
        tried += 1
    assert tried > 250


def test_none_and_empty_values_ask_for_nothing() -> None:
    for method in ("SamplingParams", "EngineArgs", "LLM.generate", "LLMEngine.add_request"):
        for name in takes(method):
            for value in (None, [], {}, ""):
                check_keywords(method, {name: value})


MISSPELT: list[tuple[str, str, str]] = [
    ("SamplingParams", "max_token", "is max_tokens meant"),
    ("SamplingParams", "temprature", "is temperature meant"),
    ("EngineArgs", "max_num_seq", "is max_num_seqs meant"),
    ("LLM", "max_model_length", "is max_model_len meant"),
    ("LLM.generate", "sampling_param", "is sampling_params meant"),
    ("LLM.chat", "template", "is chat_template meant"),
    ("LLM.reset_prefix_cache", "now", "see help"),
    ("LLMEngine.add_request", "arrival", "is arrival_time meant"),
    ("LLMEngine.abort_request", "why", "see help"),
    ("LLMEngine.from_engine_args", "stat_logger", "is stat_loggers meant"),
]


@pytest.mark.parametrize(("method", "name", "hint"), MISSPELT)
def test_a_keyword_that_nobody_has_names_the_near_one(method: str, name: str, hint: str) -> None:
    shown = "EngineArgs" if method == "LLM" else method
    with pytest.raises(
        ValueError, match=rf"{shown} takes no '{name}', here or in vLLM [0-9.]+: {hint}"
    ):
        call(method, **{name: 5})


def test_a_clone_is_equal_and_from_optional_forgets_what_is_none() -> None:
    params = SamplingParams(temperature=0, max_tokens=5, stop=["a"])
    assert params.clone() == params and params.clone() is not params
    assert params.clone().says_temperature and not SamplingParams().clone().says_temperature
    asked = {"temperature": 0, "max_tokens": 5, "stop": ["a"], "presence_penalty": None}
    assert SamplingParams.from_optional(**asked, n=None, top_p=None, seed=None) == params
    assert not SamplingParams.from_optional(temperature=None).says_temperature
    assert SamplingParams.from_optional(max_tokens=None) == SamplingParams(max_tokens=None)  # type: ignore[arg-type]
