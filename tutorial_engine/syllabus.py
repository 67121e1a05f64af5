"""Introduced in notebook 01. The one table of rooms and modules, and which notebook opens each.

The README's tree, the package's docstring and the layout test are all made from it.
"""

from typing import NamedTuple


class Module(NamedTuple):
    """A file of a room, the number of the notebook that introduces it, and what it is."""

    name: str
    notebook: int
    what: str


class Room(NamedTuple):
    """A package: what it is for, and its modules in reading order (none listed: look inside)."""

    name: str
    what: str
    modules: tuple[Module, ...] = ()


class Lesson(NamedTuple):
    """A notebook, with its folder if it is an appendix, and what it is about."""

    notebook: str
    title: str

    @property
    def code(self) -> str:
        """ "01" for `01_attention_rope`, "A1" for `appendix/A1_two_ranks`."""
        return self.notebook.rpartition("/")[2][:2]

    @property
    def number(self) -> int:
        """Its place in the order of reading, from 1."""
        return LESSONS.index(self) + 1

    @property
    def is_appendix(self) -> bool:
        """Is it beside the series? Then it is short."""
        return "/" in self.notebook


LESSONS = (
    Lesson("01_attention_rope", "one sequence, no cache"),
    Lesson("02_kv_cache", "prefill and decode"),
    Lesson("03_scheduler", "many requests"),
    Lesson("04_paged_cells", "memory"),
    Lesson("appendix/A1_two_ranks", "one model on two processes; names in other engines"),
)

# In reading order: a room imports only from rooms above it in this list. The engine ends with
# `engine`; what follows measures, draws and teaches it.
ROOMS = (
    Room(
        "model",
        "token ids to logits",
        (
            Module("config", 1, "the numbers of a config.json that fix every shape"),
            Module("batch", 1, "the tokens of one forward, end to end, no padding"),
            Module("rope", 1, "positions turn pairs of a head"),
            Module("layers", 1, "Linear, RMSNorm, SiluAndMul"),
            Module("fast", 1, "faster twins of layers, swapped into a loaded model"),
            Module("attention", 1, "the causal rule, the textbook attention, its fast twins"),
            Module("qwen3", 1, "the decoder"),
            Module("checkpoint", 1, "Hugging Face files to a running model"),
        ),
    ),
    Room(
        "sampling",
        "logits to a token, and when to stop",
        (
            Module("params", 2, "what a request asks for"),
            Module("sampler", 2, "temperature, top-k, top-p, min-p, seeds, logprobs"),
            Module("stopping", 2, "stop tokens, stop strings across tokens, length"),
        ),
    ),
    Room(
        "trace",
        "what an engine did",
        (
            Module("events", 3, "frozen events, the recorder, JSON"),
            Module("history", 3, "each step: the state before, planned, and after"),
            Module("chrome", 3, "the same for Perfetto and chrome://tracing"),
            Module("pool", 4, "each step's slots: used, reserved, free"),
        ),
    ),
    Room(
        "cache",
        "one KV storage, three maps from positions to slots",
        (
            Module("config", 2, "what a token costs, how long a cache is"),
            Module("storage", 2, "K and V per layer, addressed by slot"),
            Module("memory", 2, "the one protocol: allocate, commit, fork, free"),
            Module("rows", 2, "a row per sequence; the torch.cat twin"),
            Module("blocks", 4, "who holds which block, what can be found again"),
            Module("paged", 4, "block tables to slots"),
            Module("paged_attention", 4, "K and V read in their blocks, by a running softmax"),
            Module("many_blocks", 4, "the same, many blocks at a time"),
            Module("cell_table", 4, "one cell per token: position, owners, shift"),
            Module("cells", 4, "any token in any cell; K-shift in every layer"),
        ),
    ),
    Room(
        "engine",
        "requests, and the two ways to serve them",
        (
            Module("metrics", 2, "queue time, TTFT, TPOT, ITL, throughput"),
            Module("request", 2, "one sequence, where it stands, what became of it"),
            Module("intake", 2, "what is handed in becomes requests, or an error"),
            Module("runner", 2, "new tokens in, logits out: prefill, decode, a step"),
            Module("generate", 2, "the loop without a scheduler"),
            Module("clock", 3, "the machine's time, or a made one with stated prices"),
            Module("delivery", 3, "who gets what a step brought, once"),
            Module("scheduler", 3, "who runs how many tokens: one rule, no phases"),
            Module("policies", 3, "three older ways, for comparison"),
            Module("engine", 3, "add_request, step, generate, stream, abort"),
        ),
    ),
    Room("tiny", "the trained tiny model: stories, training, checkpoint"),
    Room(
        "lab",
        "instruments: equality, workloads, layouts, the dial",
        (
            Module("doctor", 1, "is this machine set up, and what to fix"),
            Module("chat", 2, "messages to a prompt, by the checkpoint's own template"),
            Module("hf", 2, "transformers under our loop, our cache under transformers"),
            Module("ledger", 2, "every path against every other, number by number"),
            Module("workload", 3, "requests that come over time"),
            Module("static_batch", 3, "answers when the whole batch is over, as it was"),
            Module("pool_log", 4, "vLLM's two log lines, of our memories"),
            Module("hit_rate", 4, "five runs that find nothing in the cache, and why"),
            Module("when_full", 4, "a preempted request: recompute or swap, the prices"),
            Module("layouts", 4, "the same bytes by token and by layer"),
            Module("shift", 4, "a context shift against a fresh run, number by number"),
            Module("dial", 4, "block size from one cell to a whole row, measured"),
            Module("block_size", 4, "why 16: bookkeeping against waste"),
        ),
    ),
    Room(
        "parallel",
        "one model on several processes",
        (
            Module("tensor_parallel", 5, "a rank's part of the weights, and what it adds up"),
            Module("report", 5, "what ranks did: tokens, bytes, who agreed"),
            Module("job", 5, "one rank: the same engine on its part of the model"),
            Module("ranks", 5, "processes on this machine; one that dies"),
        ),
    ),
    Room("bench", "speed as a ratio to others', and the machine's roofline"),
    Room("viz", "pictures: scenes, parts, plots, explorers"),
    Room("learn", "predictions, checks, exercises; how notebooks are built"),
)

# Beside the rooms, below all of them.
BESIDE = (
    Module("checks", 1, "one wording for sizes that are wrong"),
    Module("syllabus", 1, "this table"),
)


def tree() -> str:
    """The annotated package tree, as the README and the package docstring show it."""
    lines = ["tutorial_engine/"]
    for room in ROOMS:
        lines.append(f"  {room.name + '/':<21}{room.what}")
        lines += [_line(module, 4) for module in room.modules]
    return "\n".join(lines + [_line(module, 2) for module in BESIDE])


def _line(module: Module, indent: int) -> str:
    name = " " * indent + module.name
    return f"{name:<20}{LESSONS[module.notebook - 1].code} {module.what}"
