"""Checkpoint files and config.json: every way to say the same loads the same, damage is named."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from checkpoints import (
    BASE,
    edit_config,
    edit_json,
    edit_tensors,
    fp32_tolerance,
    largest_difference,
    load_reference,
    our_logits,
    random_sequences,
    randomise,
    reference_logits,
    save_tokenizer,
)
from conftest import MakeCheckpoint
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, processors
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.engine.generate import generate
from tutorial_engine.engine.llm import LLM
from tutorial_engine.engine.request import RequestOutput
from tutorial_engine.model.checkpoint import TINY, load_model, load_tokenizer, resolve_checkpoint
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.tokenizer import eos_token_id, read_text_settings
from tutorial_engine.sampling.params import SamplingParams

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


def beside(name: str) -> Edit:
    """One more file of weights, which are those that are there."""
    return lambda folder: shutil.copy(min(folder.glob("model*.safetensors")), folder / name)


def unnamed(folder: Path) -> None:
    """A shard that the index has forgotten."""
    raw = json.loads((folder / "model.safetensors.index.json").read_text())
    last = max(raw["weight_map"].values())
    kept = {name: file for name, file in raw["weight_map"].items() if file != last}
    index(json.dumps({"weight_map": kept}))(folder)


def without_shards(folder: Path) -> None:
    beside("model.safetensors")(folder)
    for shard in folder.glob("model-*"):
        shard.unlink()


SHARDS, ONE = {"max_shard_size": "20KB"}, dict[str, Any]()
TWO: list[tuple[dict[str, Any], Edit, str]] = [
    (SHARDS, beside("model.safetensors"), r"index\.json, and beside it model\.safetensors"),
    (SHARDS, without_shards, r"index\.json, and beside it model\.safetensors"),
    (
        SHARDS,
        beside("model-00009-of-00009.safetensors"),
        "index.json, and beside it model-00009-of",
    ),
    (SHARDS, unnamed, "index.json, and beside it model-000"),
    (SHARDS, beside("model.fp16.safetensors"), r"index.json, and beside it model\.fp16"),
    (
        SHARDS,
        lambda f: (f / "model.safetensors.index.fp16.json").write_text("{}"),
        r"index.json, and beside it model\.safetensors\.index\.fp16\.json",
    ),
    (SHARDS, beside("backup.safetensors"), r"in both model-00001-.* and backup\.safetensors"),
    (ONE, beside("model-00001-of-00002.safetensors"), r"model\.safetensors, and beside it model-0"),
    (ONE, beside("model_old.safetensors"), r"model\.safetensors, and beside it model_old"),
    (ONE, beside("backup.safetensors"), r"in both model\.safetensors and backup\.safetensors"),
]


@pytest.mark.parametrize(("shape", "add", "words"), TWO, ids=range(len(TWO)))
def test_two_checkpoints_in_one_folder_are_refused_with_both_names(
    make_checkpoint: MakeCheckpoint, shape: dict[str, Any], add: Edit, words: str
) -> None:
    folder = make_checkpoint(**shape)
    add(folder)
    with pytest.raises(ValueError, match=words) as told:
        load_model(folder)
    assert str(folder) in str(told.value) and "move one" in str(told.value)


@pytest.mark.parametrize("shape", [ONE, SHARDS], ids=["one file", "shards"])
def test_what_is_no_second_checkpoint_may_lie_beside(
    make_checkpoint: MakeCheckpoint, shape: dict[str, Any]
) -> None:
    folder = make_checkpoint(**shape)
    before = logits_of(folder)
    beside("consolidated.safetensors")(folder)  # the same in Mistral's format, as in its releases
    save_file({"lora_A": torch.ones(2, 2)}, folder / "adapter_model.safetensors")
    (folder / "optimizer.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    (folder / "lost.safetensors").symlink_to(folder / "nowhere")
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.safetensors.bak"):
        (folder / name).write_text("{}")
    (folder / "old").mkdir()
    beside("old/model.safetensors")(folder)
    if shape is ONE:
        names = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
        index(json.dumps({"weight_map": names}))(folder)  # an index of one file
    assert torch.equal(logits_of(folder), before)


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


def test_a_device_without_kernels_here_is_refused() -> None:
    """A Mac's GPU is one: PyTorch knows it, and a machine without it says so in forty lines."""
    with pytest.raises(ValueError, match=r"'mps': this engine runs on 'cpu' and 'cuda' only"):
        load_model(device="mps")


def test_a_folder_may_begin_with_the_users_home(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path
) -> None:
    monkeypatch.setenv("HOME", str(checkpoint.parent))
    monkeypatch.setenv("USERPROFILE", str(checkpoint.parent))
    assert resolve_checkpoint(f"~/{checkpoint.name}") == checkpoint


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


# How tokenizer.json is changed, after training or by it
Change = Callable[[Tokenizer], object]
BOS_AND_EOS = processors.TemplateProcessing(
    single="A:0 $A:0 B:0", special_tokens=[("A", 32), ("B", 33)]
)
TRAINED: dict[str, Change] = {
    "truncation": lambda t: t.enable_truncation(8, stride=2, strategy="only_first"),
    "truncation on the left": lambda t: t.enable_truncation(3, direction="left"),
    "padding": lambda t: t.enable_padding(pad_id=5, pad_token="A", length=16),
    "padding to a multiple": lambda t: t.enable_padding(
        direction="left", pad_id=5, pad_token="A", pad_to_multiple_of=7
    ),
    "both": lambda t: (t.enable_truncation(8), t.enable_padding(length=30, pad_token="A")),
    "special tokens": lambda t: setattr(t, "post_processor", BOS_AND_EOS),
    "added tokens": lambda t: t.add_special_tokens(["<s>", "<|im_end|>"]),
}
TEXT_OF_TOKENS = "A red  kite.<|im_end|> <s>\n<think>AB <tool>  B</think>é"


def their_tokenizer(folder: Path) -> Any:
    """Beside a config.json of Qwen3, and told to take tokenizer.json as it is."""
    edit_json(folder, "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    (folder / "config.json").write_text(json.dumps(QWEN3_06B))
    return AutoTokenizer.from_pretrained(folder)


def assert_the_same_tokens(folder: Path) -> None:
    """As transformers: ids with and without special tokens, added tokens with their flags."""
    theirs, ours = their_tokenizer(folder), load_tokenizer(folder)
    for special in (True, False):
        ids = theirs.encode(TEXT_OF_TOKENS, add_special_tokens=special)
        assert ours.encode(TEXT_OF_TOKENS, add_special_tokens=special).ids == ids
    added = ours.get_added_tokens_decoder()
    assert repr(sorted(added.items())) == repr(sorted(theirs.added_tokens_decoder.items()))
    assert eos_token_id(folder, ours) == theirs.eos_token_id
    assert read_text_settings(folder).special_tokens == theirs.special_tokens_map


def save_changed_tokenizer(folder: Path, *changes: Change) -> Tokenizer:
    save_tokenizer(folder)
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    for change in changes:
        change(tokenizer)
    tokenizer.save(file)
    return tokenizer


@pytest.mark.parametrize("change", TRAINED)
def test_a_prompt_is_neither_cut_nor_padded(tmp_path: Path, change: str) -> None:
    save_changed_tokenizer(tmp_path, TRAINED[change])
    edit_json(tmp_path, "tokenizer_config.json", pad_token="A")
    assert_the_same_tokens(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.truncation is tokenizer.padding is None
    as_it_lies = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    if as_it_lies.truncation or as_it_lies.padding:
        for run in (partial(LLMEngine, load_model()), partial(LLM, load_model())):
            with pytest.raises(ValueError, match=r"prompts by its .* call tokenizer\.no_"):
                run(tokenizer=as_it_lies)
    batch = tokenizer.encode_batch([TEXT_OF_TOKENS, "é"])
    alone = [tokenizer.encode(text) for text in (TEXT_OF_TOKENS, "é")]
    assert [one.ids for one in batch] == [one.ids for one in alone]


def test_a_text_is_the_same_tokens_each_time(tmp_path: Path) -> None:
    """Dropout of merges is for training."""
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    edit_json(tmp_path, "tokenizer.json", model={**raw["model"], "dropout": 0.5})
    text, tokenizer = "Once upon a time there was a little girl", load_tokenizer(tmp_path)
    ids = load_tokenizer().encode(text).ids
    assert all(tokenizer.encode(text).ids == ids for _ in range(5))


def flagged(content: str, **flags: bool) -> dict[str, Any]:
    """A token as tokenizer_config.json writes it."""
    off = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word", "special"), False)
    return {"content": content, **off, **flags}


def typed(content: str, **flags: bool) -> dict[str, Any]:
    return {**flagged(content, **flags), "__type": "AddedToken"}


END = flagged("<|im_end|>", special=True)
# File by file what is said beside a tokenizer.json of 256 bytes.
SAID: dict[str, dict[str, Any]] = {
    "an end that is no token yet": {"tokenizer_config": {"eos_token": "<|im_end|>"}},
    "an end that is a byte": {"tokenizer_config": {"eos_token": "B"}},
    "an end with flags": {"tokenizer_config": {"eos_token": typed("<|im_end|>", lstrip=True)}},
    "no end": {"tokenizer_config": {"eos_token": None, "pad_token": "<s>"}},
    "all names": {
        "tokenizer_config": {
            "tool_token": typed("<tool>", rstrip=True),
            "image_token": "<think>",
            **{f"{name}_token": f"<{name}>" for name in ("mask", "cls", "s", "unk", "eos", "bos")},
        }
    },
    "added tokens": {
        "tokenizer_config": {
            "eos_token": "<|im_end|>",
            "added_tokens_decoder": {
                "257": flagged("<think>"),
                "256": END,
                "258": flagged("</think>", lstrip=True, normalized=True),
                "32": flagged("A", single_word=True, rstrip=True),
            },
        },
        "special_tokens_map": {"eos_token": "<s>"},  # an older file, which does not count then
        "added_tokens": {"<tool>": 259},
    },
    "a named token without the flag": {
        "tokenizer_config": {
            "eos_token": "<|im_end|>",
            "added_tokens_decoder": {"256": {**END, "special": False}},
        }
    },
    "additional": {"tokenizer_config": {"additional_special_tokens": ["<s>", typed("<tool>")]}},
    "extra": {"tokenizer_config": {"extra_special_tokens": ["<tool>", "<s>"], "eos_token": "<s>"}},
    "extra with names": {"tokenizer_config": {"extra_special_tokens": {"tool": "<tool>"}}},
    "an empty list": {"tokenizer_config": {"additional_special_tokens": []}},
    "a map alone": {
        "special_tokens_map": {
            "eos_token": flagged("<|im_end|>"),
            "pad_token": "<s>",
            "additional_special_tokens": ["<tool>", "<think>"],
        }
    },
    "a map beside a config": {
        "tokenizer_config": {"eos_token": "<s>", "unk_token": "A", "bos_token": "<s>"},
        "special_tokens_map": {"eos_token": "<|im_end|>", "bos_token": None},
    },
    "old added tokens": {
        "special_tokens_map": {"eos_token": "<|im_end|>"},
        "added_tokens": {"<think>": 257, "<|im_end|>": 256, "B": 33},
    },
    "special tokens as text": {
        "tokenizer_config": {"eos_token": "<|im_end|>", "split_special_tokens": True}
    },
    "what changes nothing here": {
        "tokenizer_config": {
            "bos_token": "<s>",
            "eos_token": "B",
            "add_bos_token": True,
            "add_eos_token": True,
            "add_prefix_space": True,
            "clean_up_tokenization_spaces": True,
            "model_max_length": 4,
            "padding_side": "left",
        }
    },
}


# with and without tokens that tokenizer.json has added already, unless that would move an id
SAYINGS = [(said, False) for said in SAID]
SAYINGS += [(said, True) for said in SAID if "added_tokens" not in str(SAID[said])]


@pytest.mark.parametrize(("said", "has_some"), SAYINGS)
def test_settings_of_a_tokenizer_mean_what_they_mean_to_transformers(
    tmp_path: Path, said: str, has_some: bool
) -> None:
    save_changed_tokenizer(tmp_path, *[TRAINED["added tokens"]] * has_some)
    for name, content in SAID[said].items():
        edit_json(tmp_path, f"{name}.json", **content)
    assert_the_same_tokens(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config", {"added_tokens_decoder": {"300": END}}),
        ("tokenizer_config", {"added_tokens_decoder": {"0": END}}),
        ("tokenizer_config", {"added_tokens_decoder": {"256": flagged("A")}}),
        ("tokenizer_config", {"added_tokens_decoder": {"256": END, "257": END}}),
        ("added_tokens", {"<think>": 300}),
    ],
)
def test_a_token_with_two_ids_is_refused(
    tmp_path: Path, name: str, content: dict[str, Any]
) -> None:
    edit_json(tmp_path, f"{name}.json", **content)
    save_tokenizer(tmp_path)
    with pytest.raises(
        ValueError, match=r"give '.*' the id \d+, but with its tokenizer\.json it gets"
    ):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer_config", "[1]"),
        ("tokenizer_config", '{"added_tokens_decoder": {"one": {"content": "x"}}}'),
        ("tokenizer_config", '{"added_tokens_decoder": {"256": {"id": 7}}}'),
        ("tokenizer_config", '{"added_tokens_decoder": {"256": {"content": "x", "lstrip": 7}}}'),
        ("tokenizer_config", '{"additional_special_tokens": [7]}'),
        ("tokenizer_config", '{"eos_token": 7}'),
        ("special_tokens_map", "{broken"),
        ("special_tokens_map", '{"eos_token": ["x"]}'),
        ("added_tokens", '{"x": "one"}'),
        ("added_tokens", "[" * 10**5),
    ],
)
def test_damaged_settings_of_a_tokenizer_are_named(tmp_path: Path, name: str, text: str) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / f"{name}.json").write_text(text)
    with pytest.raises(ValueError, match=rf"{name}\.json is damaged"):
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
    assert ours.qkv_bias == ours.o_bias == theirs.attention_bias
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert (ours == checkpoints.QWEN3_06B) == (raw is QWEN3_06B)
    assert ModelConfig.from_pretrained(str(tmp_path / "config.json")) == ours


# From the config.json of released models: what differs, and what it means for the decoder.
SMALL = {"vocab_size": 320, "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4}
LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192, "rope_type": "llama3"}
RELEASED: dict[str, dict[str, Any]] = {
    "Llama 1": {"model_type": "llama", "max_sequence_length": 2048},
    "Llama 2": {"model_type": "llama", "rope_scaling": None, "num_key_value_heads": 4},
    "TinyLlama": {"model_type": "llama", "num_key_value_heads": 1, "rope_theta": 10000.0},
    "Llama 3.2": {"model_type": "llama", "rope_scaling": LLAMA3, "head_dim": 20, "mlp_bias": False},
    "SmolLM2": {"model_type": "llama", "num_key_value_heads": 2, "rope_theta": 130000},
    "Qwen2.5": {"model_type": "qwen2", "num_key_value_heads": 2, "sliding_window": 32768},
    "Mistral 0.3": {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": None},
    "Qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "attention_bias": True},
}


@pytest.mark.parametrize("raw", RELEASED.values(), ids=RELEASED)
def test_a_config_of_the_family_means_what_transformers_makes_of_it(
    raw: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL | raw))
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    randomise(theirs)
    ours = ModelConfig.from_pretrained(tmp_path)
    assert ours.max_position_embeddings == theirs.config.max_position_embeddings
    theirs.save_pretrained(tmp_path)
    assert ModelConfig.from_pretrained(tmp_path) == replace(
        ours, eos_token_ids=ModelConfig.from_pretrained(tmp_path).eos_token_ids
    )
    reference = reference_logits(theirs.eval(), IDS)
    assert largest_difference(logits_of(tmp_path), reference) <= fp32_tolerance(reference)


def test_the_frequencies_of_an_older_file_are_no_weights(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(model_type="llama")
    before = logits_of(folder)
    name = "model.layers.{}.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder, lambda t: t.update({name.format(i): torch.ones(8) for i in range(3)}))
    assert torch.equal(logits_of(folder), before)


MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}


def test_a_mistral_that_says_nothing_of_its_window_has_one_as_in_transformers() -> None:
    with pytest.raises(ValueError, match="'sliding_window': 4096, 'where it is absent'"):
        ModelConfig.from_dict(SMALL | MISTRAL | {"num_key_value_heads": 2})


YARN = {"rope_type": "yarn", "factor": 4.0}
NO_IDS = ("</s>", True, -1, [3, "4"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(
            ({"model_type": name, "architectures": [f"{name}LM"]}, f"'{name}'.*runs Llama 2 and 3")
            for name in ("gemma3_text", "phi3", "mixtral", "qwen3_moe", "smollm3", "gpt2")
        ),
        ({"model_type": None}, "model_type None"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "Qwen3ForSequenceClassification"),
        ({"model_type": "llama"}, r"'llama' is a LlamaForCausalLM here, .*\['Qwen3ForCausalLM'\]"),
        (
            {"model_type": "llama", "architectures": None, "sliding_window": 128},
            "'sliding_window': 128",
        ),
        ({"mlp_bias": True}, "mlp_bias is not implemented"),
        (MISTRAL | {"sliding_window": 4096}, "'sliding_window': 4096.*Mistral without a sliding"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"use_sliding_window": True, "sliding_window": 64}, "'use_sliding_window': True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window layers"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling 'linear'"),
        ({"rope_parameters": {**YARN, "rope_theta": 1e6}}, "rope scaling 'yarn'"),
        ({"rope_parameters": {"full_attention": YARN}}, "one table for all layers"),
        ({"rope_scaling": checkpoints.LLAMA3 | {"factor": None}}, "factor .* must be positive"),
        ({"rope_scaling": checkpoints.LLAMA3 | {"low_freq_factor": 4.0}}, "must be below"),
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
        ([3, 5], None, (3, 5)),
        (7, {"eos_token_id": [9, 4]}, (9, 4)),
        (None, {"eos_token_id": 0}, (0,)),
        (7, {"eos_token_id": []}, ()),
        (7, {"max_new_tokens": 100}, ()),
        (7, None, (7,)),
    ],
)
def test_ends_are_those_of_the_generation_config_where_there_is_one(
    tmp_path: Path, eos: Any, for_generation: dict[str, Any] | None, ends: tuple[int, ...]
) -> None:
    """As transformers and vLLM 0.32 read them."""
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_06B, "eos_token_id": eos}))
    if for_generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(for_generation))
    assert ModelConfig.from_pretrained(tmp_path).eos_token_ids == ends


def said_by(folder: Path, **options: Any) -> list[int]:
    return tokens_of(LLM(folder, **options).generate([[1, 2, 3]], LONG, use_tqdm=False))


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return list(outputs[0].outputs[0].token_ids)


LONG = SamplingParams(temperature=0, max_tokens=20)


def test_the_eos_token_of_the_tokenizer_ends_a_text(make_checkpoint: MakeCheckpoint) -> None:
    """As in vLLM: of the tokenizer that is used, wherever it is from; then the model's ends."""
    folder, other = make_checkpoint(vocab_size=256), make_checkpoint(vocab_size=256)
    for one in (folder, other):
        save_tokenizer(one)
    edit_config(folder, eos_token_id=None)
    edit_json(folder, "generation_config.json", eos_token_id=None)
    free = said_by(folder)
    first, second, third = list(dict.fromkeys(free))[2:5]  # each is met for the first time
    tokenizer = load_tokenizer(folder)
    edit_json(folder, "generation_config.json", eos_token_id=[third])
    edit_json(folder, "tokenizer_config.json", eos_token=tokenizer.id_to_token(second))
    edit_json(other, "tokenizer_config.json", eos_token=tokenizer.id_to_token(first))

    def up_to(end: int) -> list[int]:
        return free[: free.index(end) + 1]

    assert said_by(folder) == up_to(second)
    assert (
        said_by(folder, tokenizer=folder) == said_by(folder, tokenizer=tokenizer) == up_to(second)
    )
    assert said_by(folder, tokenizer=other) == said_by(folder, tokenizer=str(other)) == up_to(first)
    assert said_by(folder, skip_tokenizer_init=True) == up_to(third)
    model = load_model(folder)
    assert model.config.eos_token_ids == (second, third)
    assert said_by(model, tokenizer=other) == up_to(first)  # type: ignore[arg-type]
    assert LLM(folder, tokenizer=other).llm_engine.model.config.eos_token_ids == (first, third)
    edit_json(folder, "tokenizer_config.json", eos_token=7)  # and now it is damaged, but not asked
    assert said_by(folder, tokenizer=other) == up_to(first)
    assert said_by(folder, skip_tokenizer_init=True) == up_to(third)
    for run in (LLMEngine(model, tokenizer).generate, partial(generate, model)):
        assert tokens_of(run([[1, 2, 3]], LONG)) == up_to(second)


def test_an_end_that_the_model_cannot_say_is_none_of_its_ends(
    make_checkpoint: MakeCheckpoint,
) -> None:
    folder = make_checkpoint(vocab_size=256, eos_token_id=7)
    save_tokenizer(folder)
    edit_json(folder, "tokenizer_config.json", eos_token="<|im_end|>")
    assert load_tokenizer(folder).token_to_id("<|im_end|>") == 256
    assert load_model(folder).config.eos_token_ids == (7,)
    edit_json(folder, "tokenizer_config.json", eos_token="!")
    assert load_model(folder).config.eos_token_ids == (0, 7)


def test_a_model_of_the_hub_that_cannot_run_is_refused_before_its_weights_come(
    monkeypatch: pytest.MonkeyPatch, make_checkpoint: MakeCheckpoint
) -> None:
    folder = make_checkpoint(model_type="llama")
    asked: list[str] = []

    def download(name: str, allow_patterns: list[str], **_: Any) -> str:
        asked.extend(allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_checkpoint("somebody/runs") == folder and "*.safetensors" in asked
    asked.clear()
    edit_config(folder, model_type="phi3")
    with pytest.raises(ValueError, match=r"'phi3'.*runs Llama 2 and 3"):
        resolve_checkpoint("somebody/something")
    assert asked == ["*.json", "*.jinja"]


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
