"""What the methods of vLLM take that this engine has, too, with their defaults, as JSON.

    .venv-vllm/bin/python -P tools/vllm/record_signatures.py OUT.json

Runs inside vLLM's environment and imports nothing of this repository. tutorial_engine/as_vllm.py
reads the file: a keyword of vLLM's that this engine has not is taken with vLLM's own default.
"""

import dataclasses
import enum
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import vllm
from vllm import LLM, EngineArgs, LLMEngine, SamplingParams

# By the names under which this engine's checks know them.
METHODS: dict[str, Callable[..., Any]] = {
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
REQUIRED = "(required)"


def default_of(method: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """A default as JSON has it: a name of an enum, and {} for an object of settings."""
    value = parameter.default
    if value is inspect.Parameter.empty:
        return REQUIRED
    if dataclasses.is_dataclass(method):
        field = method.__dataclass_fields__[parameter.name]
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, tuple | list | set | frozenset):
        return list(value)
    return value if isinstance(value, bool | int | float | str | dict | None) else {}


def takes(method: Callable[..., Any]) -> dict[str, Any]:
    """Its parameters in their order, and what each is where nobody states it."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {
        name: default_of(method, parameter)
        for name, parameter in inspect.signature(method).parameters.items()
        if name != "self" and not name.startswith("_") and parameter.kind not in kinds
    }


def main() -> None:
    """Write all of them."""
    told = {name: takes(method) for name, method in METHODS.items()}
    text = json.dumps({"vllm": vllm.__version__, "takes": told}, indent=1)
    Path(sys.argv[1]).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
