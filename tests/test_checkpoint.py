"""Checkpoint files: every way to say the same loads the same, every damage is named."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
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

from tutorial_engine.model import checkpoint as loader
from tutorial_engine.model.checkpoint import MERGED, load_model, load_tokenizer, resolve_checkpoint
from tutorial_engine.model.layers import can_prepack

IDS = random_sequences([9, 4], 97)
QKV = "model.layers.1.self_attn.{}_proj.weight"


def logits_of(folder: Path) -> Tensor:
    return our_logits(load_model(folder), IDS)


def refuse(folder: Path, named: str) -> None:
    """Loading raises a ValueError with these words."""
    with pytest.raises(ValueError, match=named):
        load_model(folder)


def test_sharded_files_give_the_same_weights(make_checkpoint: MakeCheckpoint) -> None:
    single, sharded = make_checkpoint(), make_checkpoint(max_shard_size="20KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    ours = dict(load_model(single, prepack=False).named_parameters())
    for name, parameter in load_model(sharded, prepack=False).named_parameters():
        assert torch.equal(parameter, ours[name]), name


def test_merged_rows_are_q_then_k_then_v_and_gate_then_up(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(attention_bias=True)
    file = load_file(folder / "model.safetensors")
    ours = dict(load_model(folder, prepack=False).named_parameters())
    for merged in ("qkv_proj", "gate_up_proj"):
        parts = [part for part, (name, _) in MERGED.items() if name == merged]
        names = [name for name in ours if merged in name]
        assert names
        for name in names:
            pieces = [file[name.replace(merged, part)] for part in parts]
            assert torch.equal(ours[name], torch.cat(pieces)), name


def test_old_style_config_loads_the_same(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(rope_theta=1e6, tie_word_embeddings=True)
    before = logits_of(folder)
    edit_config(
        folder,
        remove=("rope_parameters", "dtype", "layer_types"),
        rope_theta=1e6,
        rope_scaling=None,
        torch_dtype="float32",
        use_sliding_window=False,
        sliding_window=None,
    )
    assert torch.equal(logits_of(folder), before)
    theirs = reference_logits(load_reference(folder), IDS)
    assert largest_difference(before, theirs) <= fp32_tolerance(theirs)


def test_rope_theta_of_the_config_is_used(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(rope_theta=1e6)
    before = logits_of(folder)
    edit_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    assert largest_difference(logits_of(folder), before) > 0.1


def test_bf16_file_loads_exactly_into_fp32(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint()
    edit_tensors(folder, lambda t: t.update({n: x.bfloat16() for n, x in t.items()}))
    table = load_model(folder).model.embed_tokens.weight
    assert table.dtype == torch.float32
    assert torch.equal(table, load_file(folder / "model.safetensors")["model.embed_tokens.weight"])
    theirs = reference_logits(load_reference(folder), IDS)
    assert largest_difference(logits_of(folder), theirs) <= fp32_tolerance(theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_is_ready_for_inference(checkpoint: Path, dtype: torch.dtype) -> None:
    ours = load_model(checkpoint, dtype=dtype)
    assert ours.dtype == dtype and ours.device == torch.device("cpu")
    assert not ours.training and not any(p.requires_grad for p in ours.parameters())
    assert not any(p.is_meta for p in ours.parameters())
    assert load_model(checkpoint, dtype=dtype, prepack=True).lm_head.is_packed == can_prepack(
        ours.device, dtype
    )
    assert ours.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("prepack", [True, False])
def test_tied_head_is_the_embedding(make_checkpoint: MakeCheckpoint, prepack: bool) -> None:
    ours = load_model(make_checkpoint(tie_word_embeddings=True), prepack=prepack)
    assert torch.equal(ours.lm_head.plain_weight(), ours.model.embed_tokens.weight)


def test_tied_file_may_hold_an_equal_head_but_no_other(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(tie_word_embeddings=True)
    before = logits_of(folder)
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": table.clone()}))
    assert torch.equal(logits_of(folder), before)
    edit_tensors(folder, lambda t: t["lm_head.weight"][3].add_(1))
    refuse(folder, r"lm_head\.weight differs from model\.embed_tokens\.weight")


@pytest.mark.parametrize(
    "name",
    [
        QKV.format("k"),
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.2.self_attn.q_norm.weight",
        "model.norm.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.1.self_attn.v_proj.bias",
    ],
)
def test_missing_tensor_is_named(make_checkpoint: MakeCheckpoint, name: str) -> None:
    folder = make_checkpoint(attention_bias=True)
    edit_tensors(folder, lambda t: t.pop(name))
    refuse(folder, f"1 missing: {name}")


def test_bias_that_the_config_does_not_announce_is_named(make_checkpoint: MakeCheckpoint) -> None:
    folder = edit_config(make_checkpoint(attention_bias=True), attention_bias=False)
    refuse(folder, r"12 not known: model\.layers\.0\.self_attn\.k_proj\.bias, .*\.\.\.")


@pytest.mark.parametrize("name", [QKV.format("q"), "model.norm.weight", "lm_head.weight"])
def test_misshaped_tensor_is_named(make_checkpoint: MakeCheckpoint, name: str) -> None:
    folder = make_checkpoint()
    shape = list(load_file(folder / "model.safetensors")[name].shape)
    edit_tensors(folder, lambda t: t.update({name: t[name][1:].contiguous()}))
    shorter = [shape[0] - 1, *shape[1:]]
    refuse(folder, rf"mis-shaped: {name} is \[{str(shorter)[1:-1]}\].*\[{str(shape)[1:-1]}\]")


def test_k_as_long_as_q_is_refused_though_the_sum_would_fit(
    make_checkpoint: MakeCheckpoint,
) -> None:
    # 64 + 32 + 32 rows and 32 + 64 + 32 rows fill the same merged matrix
    def swap(tensors: dict[str, Tensor]) -> None:
        q, k = QKV.format("q"), QKV.format("k")
        tensors[q], tensors[k] = tensors[k], tensors[q]

    refuse(edit_tensors(make_checkpoint(), swap), "2 mis-shaped")


def test_all_problems_are_told_at_once(make_checkpoint: MakeCheckpoint) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors["odd"] = tensors.pop("model.norm.weight")
        tensors["lm_head.weight"] = torch.zeros(3)

    refuse(edit_tensors(make_checkpoint(), damage), "1 missing.*1 not known: odd.*1 mis-shaped")


def test_missing_shard_is_named(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(max_shard_size="20KB")
    lost = sorted(folder.glob("model-*.safetensors"))[1]
    lost.unlink()
    refuse(folder, lost.name)


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_file_is_named(make_checkpoint: MakeCheckpoint, keep: int) -> None:
    folder = make_checkpoint()
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refuse(folder, r"model\.safetensors.*damaged")


@pytest.mark.parametrize(
    "text",
    ["{broken", "{}", "[]", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}', "[" * 10**5],
    ids=range(6),
)
def test_broken_index_is_named(make_checkpoint: MakeCheckpoint, text: str) -> None:
    folder = make_checkpoint(max_shard_size="20KB")
    (folder / "model.safetensors.index.json").write_text(text)
    refuse(folder, r"model\.safetensors\.index\.json is not a safetensors index")


def test_tensor_in_two_shards_is_named(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    one = sorted(set(raw["weight_map"].values()))[0]
    (folder / "again.safetensors").write_bytes((folder / one).read_bytes())
    raw["weight_map"]["copy"] = "again.safetensors"
    index.write_text(json.dumps(raw))
    refuse(folder, rf"is in both again\.safetensors and {one}")


def test_pickles_are_never_opened(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refuse(folder, r"no model\.safetensors.*pytorch_model\.bin.*pickles")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda f: (f / "config.json").unlink(), r"no config\.json"),
        (lambda f: edit_config(f, model_type="llama"), "unsupported architecture.*llama"),
        (lambda f: edit_config(f, num_hidden_layers=4), r"11 missing: model\.layers\.3\."),
        (lambda f: edit_config(f, num_hidden_layers=2), r"11 not known: model\.layers\.2\."),
    ],
)
def test_config_that_does_not_fit_the_files_is_refused(
    make_checkpoint: MakeCheckpoint, damage: Callable[[Path], Any], named: str
) -> None:
    folder = make_checkpoint()
    damage(folder)
    refuse(folder, named)


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "num_attention_heads")


@pytest.mark.parametrize("name", [*SIZES, "num_hidden_layers"])
def test_absurd_sizes_are_refused_before_a_model_is_built(
    make_checkpoint: MakeCheckpoint, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With head_dim 10**9 or 10**4 layers building it, even without memory, takes a minute."""

    def build(config: object) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr(loader, "without_weights", build)
    folder = edit_config(make_checkpoint(), **{name: 10**9})
    refuse(folder, r"do not fit its config\.json.*00000000")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool])
def test_weights_that_are_no_floats_are_named(
    make_checkpoint: MakeCheckpoint, dtype: torch.dtype
) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    folder = make_checkpoint()
    edit_tensors(folder, lambda t: t.update({name: t[name].to(dtype)}))
    refuse(folder, f"1 of no type of .*quantised.*: {name} is [IUB]")


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/hosts", "sub/a.safetensors"])
def test_an_index_reads_its_own_folder_only(make_checkpoint: MakeCheckpoint, name: str) -> None:
    folder = make_checkpoint(max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"]["more"] = name
    index.write_text(json.dumps(raw))
    refuse(folder, "names files that are not in its folder")


@pytest.mark.parametrize(
    ("dtype", "named"),
    [
        (torch.float16, "float16.*bfloat16 or float32"),
        (torch.float64, "dtype torch.float64 is not supported"),
        (torch.int8, "dtype torch.int8 is not supported"),
        ("float32", "dtype float32 is not supported"),
    ],
)
def test_other_dtypes_are_refused(checkpoint: Path, dtype: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        load_model(checkpoint, dtype=dtype)


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "nowhere", "a/b/c", "~/x"])
def test_unknown_folder_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"no folder '{name}'.*Qwen/Qwen3-0.6B"):
        load_model(name)


def test_hub_id_out_of_reach_and_file_for_a_folder_are_named(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"'nobody/has-this' from the hub.*checkpoint\.TINY"):
        load_model("nobody/has-this")
    with pytest.raises(ValueError, match=r"config\.json' is a file"):
        load_model(checkpoint / "config.json")
    assert resolve_checkpoint(str(checkpoint)) == resolve_checkpoint(checkpoint) == checkpoint


def test_tokenizer_gives_any_text_back(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    for text in ("A red kite.", '<script>"é"</script>', "🦆 ünïcode\n\ttabs", ""):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_missing_and_broken_tokenizers_are_named(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint()
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_tokenizer(folder)


def test_loading_draws_nothing_and_leaves_the_compiler_alone() -> None:
    """Importing torch._dynamo takes longer than all else in a fresh process."""
    script = (
        "import sys, torch; from tutorial_engine.model.checkpoint import load_model; "
        "before = torch.get_rng_state(); load_model(); "
        "assert 'torch._dynamo' not in sys.modules; "
        "assert torch.equal(before, torch.get_rng_state())"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


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
