"""Checkpoint files and config.json: every way to say the same loads the same, damage is named."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from checkpoints import (
    BASE,
    edit_config,
    edit_tensors,
    fp32_tolerance,
    largest_difference,
    load_reference,
    our_logits,
    random_sequences,
    reference_logits,
)
from conftest import MakeCheckpoint
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from tutorial_engine.model.checkpoint import load_model, load_tokenizer, resolve_checkpoint
from tutorial_engine.model.config import ModelConfig

IDS = random_sequences([9, 4], 97)
QKV = "model.layers.1.self_attn.{}_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def logits_of(folder: Path) -> Tensor:
    return our_logits(load_model(folder), IDS)


# -- what loads, and as what ----------------------------------------------------------------------


def test_sharded_files_give_the_same_weights(make_checkpoint: MakeCheckpoint) -> None:
    single, sharded = make_checkpoint(), make_checkpoint(max_shard_size="20KB")
    files = sorted(sharded.glob("model-*.safetensors"))
    assert len(files) > 2
    files[0].rename(sharded / "elsewhere")
    files[0].symlink_to(sharded / "elsewhere")  # as in the hub's cache
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    del weight_map[QKV.format("q")]  # the file has it, and that is what counts
    index.write_text(json.dumps({"weight_map": weight_map}))
    ours = dict(load_model(single, fast=False).named_parameters())
    for name, parameter in load_model(sharded, fast=False).named_parameters():
        assert torch.equal(parameter, ours[name]), name


def test_bf16_file_loads_exactly_into_fp32(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint()
    edit_tensors(folder, lambda t: t.update({n: x.bfloat16() for n, x in t.items()}))
    table = load_model(folder).model.embed_tokens.weight
    assert table.dtype == torch.float32
    assert torch.equal(table, load_file(folder / "model.safetensors")[TABLE])
    theirs = reference_logits(load_reference(folder), IDS)
    assert largest_difference(logits_of(folder), theirs) <= fp32_tolerance(theirs)
    assert load_model(folder, dtype="auto").dtype == torch.bfloat16


def test_tied_file_may_hold_an_equal_head_but_no_other(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(tie_word_embeddings=True)
    model, before = load_model(folder, fast=False), logits_of(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    table = load_file(folder / "model.safetensors")[TABLE]
    edit_tensors(folder, lambda t: t.update({HEAD: table.clone()}))
    assert torch.equal(logits_of(folder), before)
    edit_tensors(folder, lambda t: t[HEAD][3].add_(1))
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        load_model(folder)


# -- what is refused: (how to break a checkpoint, what is said) -----------------------------------

Edit = Callable[[Path], Any]


def tensors(edit: Callable[[dict[str, Tensor]], object]) -> Edit:
    return lambda folder: edit_tensors(folder, edit)


def config(**changes: Any) -> Edit:
    return lambda folder: edit_config(folder, **changes)


def swap_q_and_k(t: dict[str, Tensor]) -> None:
    """64 + 32 + 32 rows and 32 + 64 + 32 rows fill the same merged matrix."""
    q, k = QKV.format("q"), QKV.format("k")
    t[q], t[k] = t[k], t[q]


def cut(keep: int) -> Edit:
    def truncate(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:keep])

    return truncate


ONE_FILE: list[tuple[Edit, str]] = [
    (tensors(lambda t: t.pop(TABLE)), f"1 missing: {TABLE}"),
    (tensors(lambda t: t.pop(QKV.format("k"))), f"1 missing: {QKV.format('k')}"),
    (config(attention_bias=False), r"12 not known: model\.layers\.0.*k_proj\.bias, .*\.\.\."),
    (
        tensors(lambda t: t.update({HEAD: t[HEAD][1:].contiguous()})),
        rf"mis-shaped: {HEAD} is \[96, 48\].*\[97, 48\]",
    ),
    (tensors(swap_q_and_k), "2 mis-shaped"),
    (
        tensors(lambda t: t.update({DOWN: t[DOWN].to(torch.int8)})),
        f"1 of no type .*quantised.*: {DOWN} is I8",
    ),
    *(
        (tensors(lambda t, x=x: t[DOWN][2, 3].fill_(x)), f"{DOWN} in '.*' holds NaN or infinite")
        for x in (torch.nan, torch.inf, -torch.inf)
    ),
    *((cut(keep), r"model\.safetensors.*damaged") for keep in (0, 5, 200, -1)),
    (
        lambda f: (f / "model.safetensors").rename(f / "a.bin"),
        r"no model\.safetensors.*a\.bin.*pickles",
    ),
    (lambda f: (f / "config.json").unlink(), r"no config\.json"),
    *(
        (config(**{n: 10**9}), rf"do not fit its config.*{n} 10{{9}}")
        for n in ("head_dim", "num_hidden_layers")
    ),
]


@pytest.mark.parametrize(("damage", "words"), ONE_FILE)
def test_broken_checkpoint_is_refused(
    make_checkpoint: MakeCheckpoint, damage: Edit, words: str
) -> None:
    folder = make_checkpoint(attention_bias=True)
    damage(folder)
    with pytest.raises(ValueError, match=words):
        load_model(folder)


def index(text: str) -> Edit:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(text)


def more(name: str, file: str) -> Edit:
    def add(folder: Path) -> None:
        raw = json.loads((folder / "model.safetensors.index.json").read_text())
        raw["weight_map"][name] = file
        index(json.dumps(raw))(folder)

    return add


def shard_twice(folder: Path) -> None:
    shutil.copy(min(folder.glob("model-*.safetensors")), folder / "again.safetensors")
    more("copy", "again.safetensors")(folder)


NO_INDEX = ("{broken", "[]", '{"weight_map": {"a": 1}}')
SHARDED: list[tuple[Edit, str]] = [
    (lambda f: sorted(f.glob("model-*"))[1].unlink(), "files that are not there: .*model-00002"),
    (shard_twice, r"is in both again\.safetensors and model-00001"),
    *((index(text), r"index\.json is not a safetensors index") for text in NO_INDEX),
    *(
        (more("more", file), "names files that are not in its folder")
        for file in ("../model.safetensors", "/etc/hosts", "sub/a.safetensors")
    ),
]


@pytest.mark.parametrize(("damage", "words"), SHARDED, ids=range(len(SHARDED)))
def test_broken_index_is_refused(make_checkpoint: MakeCheckpoint, damage: Edit, words: str) -> None:
    folder = make_checkpoint(max_shard_size="20KB")
    damage(folder)
    with pytest.raises(ValueError, match=words):
        load_model(folder)


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
SIZES += ("num_attention_heads",)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": torch.float16}, "float16.*bfloat16 or float32"),
        ({"dtype": "int8"}, "dtype 'int8' is not supported; use 'auto' or"),
        ({"device": "gpu"}, "device 'gpu' is none of PyTorch's; use 'cpu' or 'cuda'"),
        *(
            ({"path_or_id": name}, f"no folder '{name}'.*Qwen/Qwen3-0.6B")
            for name in ("/nowhere/at/all", "nowhere", "~/x")
        ),
        ({"path_or_id": "nobody/has-this"}, r"'nobody/has-this' from the hub.*checkpoint\.TINY"),
        ({"path_or_id": __file__}, "is a file; give the folder"),
        ({"path_or_id": None}, "a checkpoint is a folder or a hub id, got None"),
    ],
)
def test_what_is_typed_wrong_is_answered(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_model(**options)
    if "path_or_id" in options:
        with pytest.raises(ValueError, match=words):
            load_tokenizer(options["path_or_id"])


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"'cuda:1': PyTorch finds no GPU here; use device='cpu'"):
        load_model(device="cuda:1")


# -- tokenizers and the hub -----------------------------------------------------------------------


def test_tokenizer_gives_any_text_back_and_a_broken_one_is_named(
    checkpoint: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(checkpoint)
    for text in ("A red kite.", '<script>"é"</script>', "🦆 ünïcode\n\ttabs", ""):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged"):
        load_tokenizer(tmp_path)


# -- config.json ----------------------------------------------------------------------------------

# the released checkpoint's file, written by transformers 4
QWEN3_06B: dict[str, Any] = json.loads("""{
  "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
  "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
  "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
  "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
  "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
  "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_cache": true,
  "use_sliding_window": false, "vocab_size": 151936
}""")
REQUIRED = ("model_type", *SIZES, "num_key_value_heads")


@pytest.mark.parametrize("raw", [QWEN3_06B, {name: QWEN3_06B[name] for name in REQUIRED}])
def test_old_config_is_read_as_transformers_reads_it(raw: dict[str, Any], tmp_path: Path) -> None:
    """Written by transformers 4, or with nothing but what must be there."""
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ours, theirs = ModelConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)
    for name in {*BASE, "rms_norm_eps"} - {"rope_theta"}:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert (ours == checkpoints.QWEN3_06B) == (raw is QWEN3_06B)
    assert ModelConfig.from_pretrained(str(tmp_path / "config.json")) == ours


YARN = {"rope_type": "yarn", "factor": 4.0}
NO_IDS = ("</s>", True, -1, [3, "4"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "'llama'"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window=True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window layers"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling 'linear'"),
        ({"rope_parameters": {**YARN, "rope_theta": 1e6}}, "rope scaling 'yarn'"),
        ({"rope_parameters": {"full_attention": YARN}}, "one table for all layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"head_dim": 25}, "head_dim.*25"),
        ({"num_key_value_heads": 5}, r"\(16\).*num_key_value_heads \(5\)"),
        ({"hidden_size": "1024"}, "hidden_size.*'1024'"),
        ({"head_dim": 10**30}, f"head_dim {10**30} is more than any model has"),
        *(({"rope_theta": x}, "rope_theta must be") for x in (-1.0, 10**400, float("inf"))),
        *(({"rms_norm_eps": x}, "rms_norm_eps must be") for x in (0.0, float("nan"), True)),
        *(({name: None}, f"no '{name}'") for name in SIZES),
        *(
            ({name: "false"}, f"{name} .* true or false, got 'false'")
            for name in ("tie_word_embeddings", "attention_bias", "use_sliding_window")
        ),
        *(({"eos_token_id": eos}, "eos_token_id must be") for eos in NO_IDS),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelConfig.from_dict({**QWEN3_06B, **changes})
    with pytest.raises(ValueError, match="no 'num_key_value_heads'"):
        ModelConfig.from_dict({name: QWEN3_06B[name] for name in REQUIRED[:-1]})


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_file_that_is_no_config_is_named(tmp_path: Path, file: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_06B))
    for text in ("{not json", "[1, 2]", "[" * 10**5, '{"eos_token_id": "</s>"}'):
        (tmp_path / file).write_text(text)
        with pytest.raises(ValueError, match=r"JSON|eos_token_id must be|unsupported"):
            ModelConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("eos", "for_generation", "ends"),
    [
        ([3, 5], {}, (3, 5)),
        (7, {"eos_token_id": [9, 4]}, (9, 4)),
        (None, {"eos_token_id": 0}, (0,)),
        (7, {"eos_token_id": []}, (7,)),
    ],
)
def test_ends_are_those_of_the_generation_config_before_the_configs(
    tmp_path: Path, eos: Any, for_generation: dict[str, Any], ends: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_06B, "eos_token_id": eos}))
    (tmp_path / "generation_config.json").write_text(json.dumps(for_generation))
    assert ModelConfig.from_pretrained(tmp_path).eos_token_ids == ends


SILENT_HUB = """
import os, socket, sys
hub = socket.socket()
hub.bind(("127.0.0.1", 0))
hub.listen()  # it takes calls, and never answers
os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{hub.getsockname()[1]}"
os.environ["HF_HOME"], os.environ["HF_HUB_OFFLINE"] = sys.argv[1], "0"
from tutorial_engine.model import checkpoint
checkpoint.HUB_TIMEOUT = 0.3
print(checkpoint.load_model("some/model").config.vocab_size)
try:
    checkpoint.load_model("nobody/has-this")
except ValueError as error:
    print(error)
"""


def test_a_hub_that_never_answers_does_not_hang(checkpoint: Path, tmp_path: Path) -> None:
    """What is in its cache loads; what is not is refused with a clear word."""
    commit = "0123456789" * 4
    folder = tmp_path / "hub" / "models--some--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    shutil.copytree(checkpoint, folder / "snapshots" / commit)
    command = [sys.executable, "-c", SILENT_HUB, str(tmp_path)]
    told = subprocess.run(command, check=True, timeout=100, capture_output=True, text=True).stdout
    assert told.startswith("300\ncould not get 'nobody/has-this' from the hub (ReadTimeout")
    assert "Use a local folder" in told
    assert resolve_checkpoint(str(checkpoint)) == resolve_checkpoint(checkpoint) == checkpoint
