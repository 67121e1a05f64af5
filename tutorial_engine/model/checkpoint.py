"""From a Hugging Face checkpoint, folder or hub id, to a running model.

Knows folders, hub ids, safetensors and parameter names; knows no arithmetic. A tensor that is
missing, left over or of another shape raises. No pickle and no remote code is ever opened.
"""

import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import Tensor, nn

from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.model.fast import use_fast_layers
from tutorial_engine.model.tokenizer import end_ids, eos_token_id, read_tokenizer

TINY = Path(__file__).parent.parent / "tiny" / "checkpoint"  # trained by us, ships with the package

HUB_TIMEOUT = 10.0  # seconds for the hub to answer
TEXTS = ("*.json", "*.jinja")  # files of kilobytes, which say what the weights are

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# What safetensors calls a type that weights can have, and what dtype="auto" makes of it. Anything
# else is no weight, or needs a scale with it.
FLOATS = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

# "Where did q_proj go?": name in our model -> names in the file, whose rows follow one another.
MERGED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


class StoredTensor(NamedTuple):
    """A tensor in an open file, as the file's header describes it; nothing of it is read yet."""

    file: Path
    tensors: Any  # safetensors' handle of the file
    shape: list[int]
    dtype: str


def load_model(
    path_or_id: str | Path = TINY,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = torch.float32,
    fast: bool = True,
    config: ModelConfig | None = None,
) -> CausalLM:
    """Load a dense checkpoint of the Llama family for inference.

    Every name and shape is checked before a weight is read. dtype "auto" is the files' own. With
    fast=False all layers are those of `layers.py`; else those of `fast.py` take the place of some.
    The `config` is the folder's, with the eos_token of its tokenizer as the first end, unless one
    is given. ValueError, with the names, for what does not fit.
    """
    device = _device(device)
    if dtype not in ("auto", *DTYPES, *DTYPES.values()):
        raise ValueError(f"dtype {dtype!r} is not supported; use 'auto' or one of {list(DTYPES)}")
    folder = resolve_checkpoint(path_or_id)
    if config is None:
        config = _with_ends(ModelConfig.from_pretrained(folder), folder)
    stored = stored_tensors(folder)
    model = _model_for(config, stored, folder)
    name = FLOATS[stored["model.embed_tokens.weight"].dtype] if dtype == "auto" else dtype
    wanted = DTYPES[name] if isinstance(name, str) else name
    if device.type == "cpu" and wanted == torch.float16:
        raise ValueError(
            "float16 matmul on the CPU is too slow to be of use; take bfloat16 or float32"
        )
    _read(model, stored, device, wanted)
    del stored  # closes the files
    model.to(device).requires_grad_(False).eval()
    if fast:
        use_fast_layers(model)
    return model


def without_weights(config: ModelConfig) -> CausalLM:
    """A model with names and shapes on the meta device, and no memory: for weights to come."""
    with torch.device("meta"):
        return CausalLM(config)


def split_merged(config: ModelConfig, name: str, weight: Tensor) -> dict[str, Tensor]:
    """A parameter of our model under its names in a file: q, k and v, gate and up apart again.

    The tensors are views: to fill them is to fill the parameter.
    """
    q, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    rows = {"qkv_proj": (q, kv, kv), "gate_up_proj": (config.intermediate_size,) * 2}
    module = name.split(".")[-2]
    if module not in MERGED:
        return {name: weight}
    parts = zip(MERGED[module], weight.split(rows[module]), strict=True)
    return {name.replace(module, merged): view for merged, view in parts}


def _model_for(config: ModelConfig, stored: dict[str, StoredTensor], folder: Path) -> CausalLM:
    """A model without weights that has a place for every stored tensor, or every misfit's name."""
    mismatch = f"the tensors in {str(folder)!r} do not fit its config.json"
    largest = max((size for tensor in stored.values() for size in tensor.shape), default=0)
    for name, limit in (  # before anything of these sizes is built
        ("num_hidden_layers", len(stored)),
        ("num_attention_heads", largest),
        ("head_dim", largest),
        ("hidden_size", largest),
        ("intermediate_size", largest),
        ("vocab_size", largest),
    ):
        if getattr(config, name) > limit:
            raise ValueError(
                f"{mismatch}: {name} {getattr(config, name)} is too large for them; there are "
                f"{len(stored)}, with up to {largest} rows or columns"
            )
    model = without_weights(config)
    expected = {
        stored_name: list(view.shape)
        for name, parameter in model.named_parameters()
        for stored_name, view in split_merged(config, name, parameter).items()
    }
    spare = {"lm_head.weight"} if config.tie_word_embeddings else set()
    spare |= {name for name in stored if name.endswith(".rotary_emb.inv_freq")}  # Llama 2's
    problems = [
        f"{len(names)} {what}: {', '.join(names[:5])}{', ...' * (len(names) > 5)}"
        for what, names in _misfits(expected, stored, spare).items()
        if names
    ]
    if problems:
        raise ValueError(f"{mismatch}: {'; '.join(problems)}")
    return model


def _misfits(
    expected: dict[str, list[int]], stored: dict[str, StoredTensor], spare: set[str]
) -> dict[str, list[str]]:
    """What can be wrong with stored tensors, and of which it is. `spare` ones may be there."""
    return {
        "missing": sorted(expected.keys() - stored.keys()),
        "not known": sorted(stored.keys() - expected.keys() - spare),
        "mis-shaped": [
            f"{name} is {stored[name].shape}, config.json asks for {expected[name]}"
            for name in sorted(expected.keys() & stored.keys())
            if stored[name].shape != expected[name]
        ],
        f"of no type of {tuple(FLOATS)} (quantised? use the fp32 or bf16 checkpoint)": [
            f"{name} is {x.dtype}" for name, x in sorted(stored.items()) if x.dtype not in FLOATS
        ],
    }


def _read(
    model: CausalLM,
    stored: dict[str, StoredTensor],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Give the model its weights, one parameter after the other; NaN and infinity are refused."""
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        weight = torch.empty(parameter.shape, dtype=dtype, device=device)
        for tensor, view in split_merged(model.config, name, weight).items():
            view.copy_(stored[tensor].tensors.get_tensor(tensor))
            if not view.sum(dtype=torch.float32).isfinite():
                raise ValueError(
                    f"{tensor} in {str(stored[tensor].file)!r} holds NaN or infinite numbers "
                    f"(as {dtype}): the file is damaged, or comes from a training that diverged"
                )
        state[name] = nn.Parameter(weight, requires_grad=False)
    if model.config.tie_word_embeddings:
        state["lm_head.weight"] = table = state["model.embed_tokens.weight"]
        if "lm_head.weight" in stored:
            head = stored["lm_head.weight"].tensors.get_tensor("lm_head.weight")
            if not torch.equal(head.to(device, dtype), table):
                raise ValueError(
                    "config.json ties the head to the embedding, but the file's lm_head.weight "
                    "differs from model.embed_tokens.weight: set tie_word_embeddings to false to "
                    "use both"
                )
    model.load_state_dict(state, strict=True, assign=True)


def _with_ends(config: ModelConfig, folder: Path) -> ModelConfig:
    """The config with the end of text that the folder's tokenizer names, where it has one."""
    if not (folder / "tokenizer.json").is_file():
        return config
    eos = eos_token_id(folder, read_tokenizer(folder))
    return replace(config, eos_token_ids=end_ids(eos, config.eos_token_ids, config.vocab_size))


def _device(device: torch.device | str) -> torch.device:
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device {device!r} is none of PyTorch's; use 'cpu' or 'cuda'") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {str(device)!r}: this engine runs on 'cpu' and 'cuda' only")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {str(device)!r}: PyTorch finds no GPU here; use device='cpu'")
    return device


def load_tokenizer(path_or_id: str | Path = TINY) -> Tokenizer:
    """The checkpoint's tokenizer as a `tokenizers.Tokenizer`: encode(text).ids, decode(ids).

    It has the tokens that tokenizer_config.json adds to those of tokenizer.json. ValueError for a
    folder without one.
    """
    return read_tokenizer(resolve_checkpoint(path_or_id, weights=False))


# -- the files: where they are, what tensors they hold ---------------------------------------------


def resolve_checkpoint(path_or_id: str | Path, weights: bool = True) -> Path:
    """The folder of a checkpoint: a local one, or a hub id downloaded (or found in the hub cache).

    The small files come first, so that a model which cannot run is refused before its weights come;
    without `weights` there is no more. ValueError, saying how to go on, when it is neither.
    """
    if not isinstance(path_or_id, str | os.PathLike):
        raise ValueError(f"a checkpoint is a folder or a hub id, got {path_or_id!r}")
    folder = Path(os.path.expanduser(path_or_id))
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"{str(folder)!r} is a file; give the folder that holds config.json")
    name = str(path_or_id)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(
            f"no folder {name!r}, and hub ids look like owner/name, as in 'Qwen/Qwen3-0.6B'"
        )
    return _from_hub(name, weights)


def _from_hub(name: str, weights: bool) -> Path:
    """The folder of a hub id: downloaded, or as it is in the cache when the hub does not answer."""
    from huggingface_hub import HfApi, snapshot_download  # 0.3 s, and only hub ids need it

    problem: Exception | None = None
    try:
        # snapshot_download waits for ever for a hub that takes the call and does not answer
        HfApi().repo_info(name, timeout=HUB_TIMEOUT)
    except Exception as error:  # the hub client raises many kinds, all meaning "could not get it"
        problem = error

    def get(*patterns: str) -> Path:
        options: Any = {"allow_patterns": [*patterns], "ignore_patterns": ["*/*"]}
        try:
            return Path(snapshot_download(name, local_files_only=problem is not None, **options))
        except Exception as error:
            why = problem or error
            raise ValueError(
                f"could not get {name!r} from the hub ({type(why).__name__}: {why}), and the cache "
                "has it not. Offline? Use a local folder, or checkpoint.TINY, which ships with the "
                "package"
            ) from why

    folder = get(*TEXTS)
    if weights:
        ModelConfig.from_pretrained(folder)
        folder = get(*TEXTS, "*.safetensors")
    return folder


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor in the safetensors files of a folder, from their headers.

    The index of a sharded checkpoint says which files there are; what they hold counts, whether the
    index lists it or not. A file may be a symbolic link to anywhere: the hub's cache is made so.
    ValueError, with both names, for a folder with two checkpoints.
    """
    files = _tensor_files(folder)
    stored: dict[str, StoredTensor] = {}
    for file in files:
        try:
            tensors = safe_open(str(file), framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{str(file)!r} is damaged or no safetensors file: {error}") from error
        for name in tensors.keys():
            _check_once(name, stored, file)
            header = tensors.get_slice(name)
            stored[name] = StoredTensor(file, tensors, header.get_shape(), header.get_dtype())
    for file in sorted({*folder.glob("*.safetensors")} - {*files}):
        # consolidated.safetensors holds the same weights in Mistral's own format
        if file.is_file() and not file.name.startswith("consolidated"):
            with suppress(SafetensorError), safe_open(str(file), framework="pt") as other:
                for name in other.keys():
                    _check_once(name, stored, file)
    return stored


def _check_once(name: str, stored: dict[str, StoredTensor], file: Path) -> None:
    if name in stored:
        raise ValueError(
            f"{name!r} is in both {stored[name].file.name} and {file.name}, and nothing says which "
            f"is meant: move one of them out of {str(file.parent)!r}"
        )


def _tensor_files(folder: Path) -> list[Path]:
    """The safetensors files of a single or a sharded checkpoint."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.is_file():
        if single.is_file():
            _check_alone(single, [])
            return [single]
        other = sorted(p.name for p in folder.glob("*.bin"))
        hint = f"; {other} are pickles, which this loader never opens" if other else ""
        raise ValueError(f"no model.safetensors (or its index) in {str(folder)!r}{hint}")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        outside = [name for name in names if Path(name).name != name]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is not a safetensors index ({error!r})") from None
    if outside:
        raise ValueError(f"{index} names files that are not in its folder: {outside}")
    _check_alone(index, names)
    if lost := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(f"the index of {str(folder)!r} names files that are not there: {lost}")
    return [folder / name for name in names]


def _check_alone(main: Path, parts: list[str]) -> None:
    """ValueError, with both names, if weights lie beside a checkpoint that are no part of it."""
    folder = main.parent
    named = {*folder.glob("model*.safetensors"), *folder.glob("model*.safetensors.index*.json")}
    others = {file.name for file in named if file.is_file()} - {main.name, *parts}
    if others:
        raise ValueError(
            f"two checkpoints lie in {str(folder)!r}: {main.name}, and beside it {min(others)} "
            f"({len(others)} such files), which is no part of it; move one of them away"
        )
