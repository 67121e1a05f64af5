"""Introduced in notebook 01. From a Hugging Face checkpoint, folder or hub id, to a running model.

Knows folders, hub ids, safetensors and parameter names; knows no arithmetic. A tensor that is
missing, left over or of another shape raises. No pickle and no remote code is ever opened.
"""

import json
from collections import Counter
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

HUB_TIMEOUT = 10.0  # seconds for the hub to answer

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# "Where did q_proj go?": name in the file -> (name in our model, which part of its rows).
MERGED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "q_norm": ("qk_norm", 0),
    "k_norm": ("qk_norm", 1),
}


# What is in a file as safetensors calls it; anything else is no weight, or needs a scale with it.
FLOATS = ("F64", "F32", "F16", "BF16")


class _Stored(NamedTuple):
    """What the header of a file says of one of its tensors."""

    shape: list[int]
    dtype: str


class _Target(NamedTuple):
    """Where a tensor of the file goes: rows [start, stop) of one of our parameters."""

    parameter: str
    start: int
    stop: int
    shape: list[int]


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
    files = tensor_files(folder)
    targets = _match(config, _stored(files), folder)
    model = without_weights(config)  # its sizes are those of files that are there
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


def _expected(config: ModelConfig) -> dict[str, _Target]:
    """Every tensor name that the file must have -> its shape, and the rows of ours that it fills.

    From the config alone, before a model is built: no size in it is trusted yet.
    """
    hidden, mlp, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    layer = {
        "input_layernorm": [hidden],
        "self_attn.q_proj": [q_rows, hidden],
        "self_attn.k_proj": [kv_rows, hidden],
        "self_attn.v_proj": [kv_rows, hidden],
        "self_attn.q_norm": [head_dim],
        "self_attn.k_norm": [head_dim],
        "self_attn.o_proj": [hidden, q_rows],
        "post_attention_layernorm": [hidden],
        "mlp.gate_proj": [mlp, hidden],
        "mlp.up_proj": [mlp, hidden],
        "mlp.down_proj": [hidden, mlp],
    }
    shapes = {"model.embed_tokens.weight": [config.vocab_size, hidden]}
    for number in range(config.num_hidden_layers):
        for module, shape in layer.items():
            name = f"model.layers.{number}.{module}"
            shapes[f"{name}.weight"] = shape
            if config.attention_bias and "self_attn" in module and len(shape) == 2:
                shapes[f"{name}.bias"] = shape[:1]
    shapes["model.norm.weight"] = [hidden]
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = [config.vocab_size, hidden]
    expected: dict[str, _Target] = {}
    filled = Counter[str]()  # rows of our parameters
    for name, shape in shapes.items():
        module = name.split(".")[-2]
        parameter = name.replace(module, MERGED[module][0]) if module in MERGED else name
        start = filled[parameter]
        filled[parameter] += shape[0]
        expected[name] = _Target(parameter, start, start + shape[0], shape)
    return expected


def _match(config: ModelConfig, stored: dict[str, _Stored], folder: Path) -> dict[str, _Target]:
    """Pair the file's tensors with ours, or raise with every name that does not fit."""
    if config.num_hidden_layers > len(stored):
        raise ValueError(
            f"the tensors in {str(folder)!r} do not fit its config.json: it has num_hidden_layers "
            f"{config.num_hidden_layers}, and there are {len(stored)} tensors in all"
        )
    expected = _expected(config)
    tied_copy = {"lm_head.weight"} if config.tie_word_embeddings else set()
    missing = sorted(expected.keys() - stored.keys())
    extra = sorted(stored.keys() - expected.keys() - tied_copy)
    wrong = [
        f"{name} is {stored[name].shape}, config.json asks for {expected[name].shape}"
        for name in sorted(expected.keys() & stored.keys())
        if stored[name].shape != expected[name].shape
    ]
    no_floats = [f"{n} is {x.dtype}" for n, x in sorted(stored.items()) if x.dtype not in FLOATS]
    problems = [
        f"{len(names)} {what}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
        for what, names in (
            ("missing", missing),
            ("not known", extra),
            ("mis-shaped", wrong),
            (f"of no type of {FLOATS} (quantised? use the fp32 or bf16 checkpoint)", no_floats),
        )
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
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    """The folder of a hub id: downloaded, or as it is in the cache when the hub does not answer."""
    from huggingface_hub import HfApi, snapshot_download  # 0.3 s, and only hub ids need it

    problem = None
    try:
        # snapshot_download waits for ever for a hub that takes the call and does not answer
        HfApi().repo_info(name, timeout=HUB_TIMEOUT)
    except Exception as error:  # the hub client raises many kinds, all meaning "could not get it"
        problem = error
    try:
        return Path(
            snapshot_download(
                name,
                allow_patterns=["*.json", "*.jinja", "*.safetensors"],
                ignore_patterns=["*/*"],
                local_files_only=problem is not None,
            )
        )
    except Exception as error:
        problem = problem or error
        raise ValueError(
            f"could not get {name!r} from the hub ({type(problem).__name__}: {problem}), and the "
            "cache has it not. Offline? Use a local folder, or checkpoint.TINY, which ships with "
            "the package"
        ) from problem


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
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is not a safetensors index ({error!r})") from None
    outside = sorted({name for name in weight_map.values() if Path(name).name != name})
    if outside:
        raise ValueError(f"{index} names files that are not in its folder: {outside}")
    return weight_map


@contextmanager
def open_tensors(file: Path) -> Iterator:
    """A safetensors file, open inside the block. ValueError when it is damaged."""
    try:
        with safe_open(str(file), framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise ValueError(f"{str(file)!r} is damaged or no safetensors file: {error}") from error


def _stored(files: dict[str, Path]) -> dict[str, _Stored]:
    """Shape and type of every tensor, from the headers alone."""
    found: dict[str, _Stored] = {}
    for file in sorted(set(files.values())):
        with open_tensors(file) as tensors:
            for name in tensors.keys():
                tensor = tensors.get_slice(name)
                found[name] = _Stored(tensor.get_shape(), tensor.get_dtype())
    return found
