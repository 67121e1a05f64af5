"""Introduced in notebook 01. The one table of which notebook introduces which module.

The README tree, the package docstring and the layout test are all made from it.
"""

from typing import NamedTuple


class Module(NamedTuple):
    """A module (or package) of the engine, by its name below `tutorial_engine`, and what it is."""

    name: str
    what: str


class Lesson(NamedTuple):
    """A notebook, what it is about, and the modules that it introduces, in import order."""

    notebook: str
    title: str
    modules: tuple[Module, ...]

    @property
    def number(self) -> int:
        """1 for `01_attention_rope`."""
        return int(self.notebook[:2])


LESSONS = (
    Lesson(
        "01_attention_rope",
        "one sequence, no cache",
        (
            Module("config", "the numbers of a config.json that fix every shape"),
            Module("batch", "the tokens of one forward, end to end, no padding"),
            Module("rope", "positions turn pairs of a head"),
            Module("layers", "Linear (prepacked), RMSNorm, SiluAndMul"),
            Module("attention", "the causal rule, the textbook attention, its fast twin"),
            Module("model", "the Qwen3 decoder"),
            Module("checkpoint_files", "where the files are, what tensors they hold"),
            Module("checkpoint", "Hugging Face files to a running model"),
            Module("tiny", "the trained tiny model: stories, training, checkpoint"),
            Module("doctor", "is this machine set up, and what to fix"),
        ),
    ),
    Lesson(
        "02_kv_cache",
        "prefill and decode",
        (
            Module("cache_config", "what a token costs, how long a cache is"),
            Module("kv_storage", "the shelves: K and V per layer, by slot"),
            Module("kv_cache", "the address book: a row per sequence; the torch.cat twin"),
            Module("blocked_attention", "prefill attention in blocks, for CPUs"),
            Module("prompts", "texts and token ids that may be handed in, checked"),
            Module("runner", "prefill and decode: new tokens in, logits out"),
            Module("sampling_params", "what a request asks for"),
            Module("sampling", "temperature, top-k, top-p, min-p, seeds, logprobs"),
            Module("stopping", "stop tokens, stop strings across tokens, length"),
            Module("generate", "prompts in, text out: the loop"),
            Module("chat", "messages to a prompt, by the checkpoint's own template"),
            Module("peers", "transformers under our loop, our cache under transformers"),
            Module("ledger", "every path against every other, number by number"),
            Module("bench", "our speed as a ratio to others', and the machine's roofline"),
        ),
    ),
    Lesson(
        "03_scheduler",
        "many requests",
        (
            Module("clock", "the machine's time, or a made one with stated prices"),
            Module("metrics", "queue time, TTFT, TPOT, ITL, throughput"),
            Module("trace", "what the engine did, event by event; JSON"),
            Module("replay", "from a trace back to the state at any step"),
            Module("request", "one request and where it stands"),
            Module("kv_manager", "what a scheduler asks of memory; a row per request"),
            Module("step_plan", "the limits of a step, and who got what"),
            Module("scheduler", "who runs how many tokens: one rule, no phases"),
            Module("policies", "three older ways, for comparison"),
            Module("model_runner", "a plan to logits: one forward per step"),
            Module("intake", "what is handed in becomes a request, or an error"),
            Module("delivery", "who gets what a step brought, once"),
            Module("interrupts", "Ctrl-C never in the middle of bookkeeping"),
            Module("engine", "add_request, step, generate, stream, abort"),
            Module("workload", "requests that come over time"),
            Module("engine_paths", "the engine's rows of the equality ledger"),
        ),
    ),
    Lesson(
        "04_paged_cells",
        "memory",
        (
            Module("blocks", "who holds which block, what can be found again"),
            Module("paged", "pages: block tables to slots, under the same engine"),
            Module("cell_table", "one cell per token: position, owners, shift"),
            Module("cell_cache", "cells by hand, with shelves; K-shift in every layer"),
            Module("cells", "cells under the same engine"),
            Module("layouts", "the same bytes by token and by layer"),
            Module("memory_paths", "pages and cells in the equality ledger"),
            Module("pool", "a trace as slots: whose, reserved, free, step by step"),
            Module("dial", "one storage, three maps: block size from 1 to a row"),
            Module("parallel_model", "a rank's share of a model, and what it adds up"),
            Module("parallel_report", "what ranks did: tokens, bytes, who agreed"),
            Module("parallel_run", "one rank: the same engine on a share of the model"),
            Module("parallel", "two ranks on this machine; a rank that dies"),
        ),
    ),
)

# Beside the lessons: what draws and what teaches. The engine never imports these.
AROUND = (
    Module("syllabus", "this table"),
    Module("viz", "pictures: style, plots, scenes, explorers"),
    Module("learn", "predictions, checks, exercises; how notebooks are built"),
)


def tree() -> str:
    """The annotated package tree, as the README and the package docstring show it."""
    lines = ["tutorial_engine/"]
    for lesson in LESSONS:
        lines.append(f"  -- {lesson.notebook}: {lesson.title}")
        lines += [_line(module) for module in lesson.modules]
    lines.append("  -- seeing and doing")
    return "\n".join(lines + [_line(module) for module in AROUND])


def _line(module: Module) -> str:
    return f"  {module.name:<19}{module.what}"
