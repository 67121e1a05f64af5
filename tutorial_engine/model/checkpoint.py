"""Introduced in notebook 01. From a Hugging Face checkpoint, folder or hub id, to a running model.

Knows folders, hub ids, safetensors and parameter names; knows no arithmetic. A tensor that is
missing, left over or of another shape raises. No pickle and no remote code is ever opened.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import Tensor, nn

from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM

TINY = Path(__file__).parent.parent / "tiny" / "checkpoint"  # trained by us, ships with the package

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# "Where did q_proj go?": name in the file -> (name in our model, which part of its rows).
MERGED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


class _Target(NamedTuple):
    """Rows [start, stop) of one of our parameters: where a tensor of the file goes."""

    parameter: str
    start: int
    stop: int


def load_model(
    path_or_id: str | Path = TINY,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    prepack: bool | None = None,
) -> Qwen3ForCausalLM:
    """Load a dense Qwen3 checkpoint for inference.

    Every name and shape is checked before a weight is read. Linear weights are reordered for oneDNN
    where that is possible (CPU, fp32 and bf16) and, as was measured once, faster on this machine;
    `prepack` True or False is for all or for none. Raises ValueError with the names.
    """
    device = torch.device(device)
    if dtype not in SUPPORTED_DTYPES:
        raise ValueError(f"dtype {dtype} is not supported; use one of {SUPPORTED_DTYPES}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {str(device)!r}: PyTorch finds no GPU here; use device='cpu'")
    if device.type == "cpu" and dtype == torch.float16:
        raise ValueError(
            "float16 matmul on the CPU is too slow to be of use; take bfloat16 or float32"
        )
    folder = resolve_checkpoint(path_or_id)
    config = ModelConfig.from_pretrained(folder)
    model = without_weights(config)
    files = tensor_files(folder)
    targets = _match(model, tensor_shapes(files), folder)
    state = _read(model, files, targets, device, dtype)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    model.to(device).requires_grad_(False).eval()
    if prepack is not False:
        model.prepack(where_faster=prepack is None)
    _keep_freed_memory()
    return model


def without_weights(config: ModelConfig) -> Qwen3ForCausalLM:
    """A model with names and shapes on the meta device, and no memory: for weights to come."""
    with torch.device("meta"):
        return Qwen3ForCausalLM(config)


def _keep_freed_memory() -> None:
    """Let glibc keep what tensors free; or each long prefill waits for zeroed pages anew.

    Freeing a block of almost 32 MiB raises its threshold for giving memory back to twice that (see
    M_TRIM_THRESHOLD in mallopt(3)). Other allocators do not mind. Measured: 10 % of a prefill.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)


def load_tokenizer(path_or_id: str | Path = TINY) -> Tokenizer:
    """The checkpoint's tokenizer.json as a `tokenizers.Tokenizer`: encode(text).ids, decode(ids).

    ValueError when the folder has none.
    """
    file = resolve_checkpoint(path_or_id) / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"no tokenizer.json in {str(file.parent)!r}")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{file} is damaged or no tokenizer: {error}") from error


def _expected(model: Qwen3ForCausalLM) -> dict[str, _Target]:
    """Every tensor name that the file must have -> the rows of ours that it fills."""
    expected: dict[str, _Target] = {}
    parts = {ours: [k for k, (o, _) in MERGED.items() if o == ours] for ours, _ in MERGED.values()}
    config = model.config
    q_rows, kv_rows = (
        heads * config.head_dim
        for heads in (config.num_attention_heads, config.num_key_value_heads)
    )
    part_rows = {
        "qkv_proj": (q_rows, kv_rows, kv_rows),
        "gate_up_proj": (config.intermediate_size, config.intermediate_size),
    }
    for name, parameter in model.named_parameters():  # a tied head is not listed twice
        module = name.split(".")[-2] if "." in name else name
        if module not in parts:
            expected[name] = _Target(name, 0, parameter.shape[0])
            continue
        start = 0
        for part, rows in zip(parts[module], part_rows[module], strict=True):
            expected[name.replace(module, part)] = _Target(name, start, start + rows)
            start += rows
    return expected


def _match(
    model: Qwen3ForCausalLM, shapes: dict[str, list[int]], folder: Path
) -> dict[str, _Target]:
    """Pair the file's tensors with ours, or raise with every name that does not fit."""
    expected = _expected(model)
    parameters = dict(model.named_parameters())
    tied_copy = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    missing = sorted(expected.keys() - shapes.keys())
    extra = sorted(shapes.keys() - expected.keys() - tied_copy)
    wrong = []
    for name in sorted(expected.keys() & shapes.keys()):
        target = expected[name]
        want = [target.stop - target.start, *parameters[target.parameter].shape[1:]]
        if shapes[name] != want:
            wrong.append(f"{name} is {shapes[name]}, config.json asks for {want}")
    problems = [
        f"{len(names)} {what}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
        for what, names in (("missing", missing), ("not known", extra), ("mis-shaped", wrong))
        if names
    ]
    if problems:
        raise ValueError(
            f"the tensors in {str(folder)!r} do not fit its config.json: " + "; ".join(problems)
        )
    return expected


def _read(
    model: Qwen3ForCausalLM,
    files: dict[str, Path],
    targets: dict[str, _Target],
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Our parameters, filled. Files are read one after the other, a tensor at a time."""
    state: dict[str, Tensor] = {
        name: nn.Parameter(torch.empty(p.shape, dtype=dtype, device=device), requires_grad=False)
        for name, p in model.named_parameters()
    }
    for file in sorted(set(files.values())):
        with open_tensors(file) as tensors:
            for name in tensors.keys():
                if name in targets:
                    target = targets[name]
                    state[target.parameter][target.start : target.stop] = tensors.get_tensor(name)
    if "lm_head.weight" in files and model.config.tie_word_embeddings:
        with open_tensors(files["lm_head.weight"]) as tensors:
            head = tensors.get_tensor("lm_head.weight").to(device, dtype)
        if not torch.equal(head, state["model.embed_tokens.weight"]):
            raise ValueError(
                "config.json ties the head to the embedding, but the file's lm_head.weight differs "
                "from model.embed_tokens.weight: set tie_word_embeddings to false to use both"
            )
    return state


# -- the files: where they are, what tensors they hold ---------------------------------------------


def resolve_checkpoint(path_or_id: str | Path) -> Path:
    """The folder of a checkpoint: a local one, or a hub id downloaded (or found in the hub cache).

    ValueError, saying how to go on, when it is neither.
    """
    folder = Path(path_or_id)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"{str(folder)!r} is a file; give the folder that holds config.json")
    name = str(path_or_id)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(
            f"no folder {name!r}, and hub ids look like owner/name, as in 'Qwen/Qwen3-0.6B'"
        )
    from huggingface_hub import snapshot_download  # 0.3 s, and only hub ids need it

    try:
        return Path(
            snapshot_download(
                name, allow_patterns=["*.json", "*.jinja", "*.safetensors"], ignore_patterns=["*/*"]
            )
        )
    except Exception as error:  # the hub client raises many kinds, all meaning "could not get it"
        raise ValueError(
            f"could not get {name!r} from the hub ({type(error).__name__}: {error}). Offline? Use "
            "a local folder, or checkpoint.TINY, which ships with the package"
        ) from error


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it, for a single or a sharded checkpoint."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        weight_map = _weight_map(index)
        lost = sorted({name for name in weight_map.values() if not (folder / name).is_file()})
        if lost:
            raise ValueError(f"the index of {str(folder)!r} names files that are not there: {lost}")
        files = sorted({folder / name for name in weight_map.values()})
    elif single.is_file():
        files = [single]
    else:
        other = sorted(p.name for p in folder.glob("*.bin"))
        hint = f"; {other} are pickles, which this loader never opens" if other else ""
        raise ValueError(f"no model.safetensors (or its index) in {str(folder)!r}{hint}")
    found: dict[str, Path] = {}
    for file in files:
        with open_tensors(file) as tensors:
            for name in tensors.keys():
                if name in found:
                    raise ValueError(f"{name!r} is in both {found[name].name} and {file.name}")
                found[name] = file
    return found


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name, as the index of a sharded checkpoint says."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(name, str) for name in weight_map.values()):
            raise TypeError("weight_map must map names to file names")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not a safetensors index ({error!r})") from None
    return weight_map


@contextmanager
def open_tensors(file: Path) -> Iterator:
    """A safetensors file, open inside the block. ValueError when it is damaged."""
    try:
        with safe_open(str(file), framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise ValueError(f"{str(file)!r} is damaged or no safetensors file: {error}") from error


def tensor_shapes(files: dict[str, Path]) -> dict[str, list[int]]:
    """Shape of every tensor, from the headers alone."""
    shapes: dict[str, list[int]] = {}
    for file in sorted(set(files.values())):
        with open_tensors(file) as tensors:
            for name in tensors.keys():
                shapes[name] = tensors.get_slice(name).get_shape()
    return shapes
