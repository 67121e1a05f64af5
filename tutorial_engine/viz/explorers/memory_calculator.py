"""The memory calculator: a config.json, any machine, batch by batch.

Draws what lab.sizing counts; measures nothing.
"""

import json
from functools import partial

from tutorial_engine.lab.roofline import Roofline
from tutorial_engine.lab.sizing import DTYPES, PAGE, QWEN3_06B, Plan, Seconds, Sizes
from tutorial_engine.viz.drawing.letters import text_width
from tutorial_engine.viz.drawing.parts import BOLD, DEAF, MARGIN, RIGHT, Mark, Sheet
from tutorial_engine.viz.drawing.request_look import Box, look, patch
from tutorial_engine.viz.drawing.scene import Scene
from tutorial_engine.viz.drawing.style import PAPER, QUIET, RED
from tutorial_engine.viz.explorers.explorer import Explorer, amount, button, choice, lines, number
from tutorial_engine.viz.words import counted, ms, num_bytes, si

AS_FILE = "as in config.json"
MOST_BATCH = 256  # steps of the slider; more requests are drawn alike
WIDTH, WIDE = 960.0, 940.0  # the canvas and its bars
TIMES, TIME = 190.0, 640.0  # left end and width of the bars of times
LEAST = 325.0  # where it says how long at least
GIB, GIGA, TERA = 2**30, 1e9, 1e12
WEIGHTS, KV = look(1), look(0)
BOUND = "an upper bound: vLLM also subtracts the activations that it measures at start"
# the sizes that these models' own config.json files state
PRESETS = {
    "Qwen3-0.6B": {"model_type": "qwen3", "torch_dtype": "bfloat16"} | QWEN3_06B,
    "Llama-2-7B": {
        "model_type": "llama",
        "torch_dtype": "float16",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "Llama-3.1-8B": {
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
}


class MemoryCalculator(Explorer):
    """Paste a config.json: bytes of weights and cache, how many requests fit, the least times.

    A step of the slider is a batch: so many requests with a full context each. The machine is what
    the knobs say. ValueError for a first config.json that cannot be counted.
    """

    title = "Memory and speed calculator"
    step_name = "batch"
    zoom = 1.3
    stands = "same"

    def __init__(self, config_json: str) -> None:
        super().__init__(
            {
                "config_json": lines("config.json", config_json),
                "dtype": choice("dtype", [AS_FILE, *DTYPES], AS_FILE),
                "context": number("context (tokens)", 4096, 1, 1 << 20, "210px"),
                "memory": amount("memory (GiB)", 24.0, 0.001, 100_000),
                "fraction": amount("share of the engine", 0.9, 0.01, 1, "260px"),
                "bandwidth": amount("bandwidth (GB/s)", 1000.0, 0.001, 1e6, "220px"),
                "peak": amount("peak (TFLOP/s)", 150.0, 0.001, 1e6, "210px"),
            },
            {
                name: button(name, f"the sizes of {name}", partial(self._take, name))
                for name in PRESETS
            },
        )
        self.slider.value = min(8, self.num_steps - 1)

    def _take(self, name: str) -> None:
        self.parameters["config_json"].value = preset(name)

    def rerun(self) -> int:
        """Count anew. One step for each batch that fits, and one for none."""
        sizes = Sizes.from_json(self.value("config_json"))
        dtype = sizes.dtype if self.value("dtype") == AS_FILE else DTYPES[self.value("dtype")]
        if dtype is None:
            raise ValueError("This config.json does not say its dtype: choose one.")
        self.plan = Plan(
            sizes,
            dtype,
            self.value("context"),
            round(self.value("memory") * GIB),
            self.value("fraction"),
            Roofline(self.value("bandwidth") * GIGA, self.value("peak") * TERA),
        )
        return min(self.plan.num_requests, MOST_BATCH) + 1

    # -- words ------------------------------------------------------------------------------------

    def caption(self, step: int) -> str:
        """What fits, and what a step takes at the least."""
        plan = self.plan
        if not plan.kv_bytes:
            return (
                f"The weights need {num_bytes(plan.weight_bytes)} and the machine gives "
                f"{num_bytes(plan.usable_bytes)}: they do not fit. Choose a smaller dtype, more "
                "memory or another model."
            )
        fit = (
            f"A token needs {num_bytes(plan.kv_bytes_per_token)} of cache, a request of "
            f"{_tokens(plan)} {num_bytes(plan.kv_bytes_per_request)}; "
        )
        if not plan.num_requests:
            return (
                f"{fit}the weights leave {num_bytes(plan.kv_bytes)}, so that not even one fits. "
                "Choose a shorter context, a smaller dtype or more memory."
            )
        fit += (
            f"{plan.num_requests:,} such request{'s' * (plan.num_requests != 1)} "
            f"fit{'s' * (plan.num_requests == 1)} beside the weights"
        )
        if not step:
            return f"{fit}; none runs now: move “{self.step_name}”."
        time = plan.decode(step)
        return (
            f"{fit}; with {step} of them a decode step takes at least {ms(time.least)}, "
            f"limited by {time.bound}, so that at most {step / time.least:,.0f} tokens a second "
            "come out."
        )

    def _sums(self) -> list[tuple[str, str]]:
        """Each quantity, and how it is computed."""
        plan, c = self.plan, self.plan.sizes.config
        item, name = plan.dtype.itemsize, str(plan.dtype).removeprefix("torch.")
        each = num_bytes(plan.kv_bytes_per_token)
        mha = ""
        if c.group_size > 1:
            many = num_bytes(c.group_size * plan.kv_bytes_per_token)
            mha = f" ({many} with {c.num_attention_heads} K/V heads)"
        return [
            (
                "weights",
                f"{plan.sizes.num_parameters:,} parameters × {counted(item, 'byte')} ({name}) = "
                f"{num_bytes(plan.weight_bytes)}",
            ),
            (
                "K and V of a token",
                f"2 × {counted(c.num_hidden_layers, 'layer')} × "
                f"{counted(c.num_key_value_heads, 'K/V head')} × head_dim {c.head_dim} × "
                f"{counted(item, 'byte')} = {plan.kv_bytes_per_token:,} bytes = {each}{mha}",
            ),
            (
                "K and V of a request",
                f"{_tokens(plan)} × {each} = {num_bytes(plan.kv_bytes_per_request)}",
            ),
            (
                "room for K and V",
                f"{plan.fraction:g} × {num_bytes(plan.memory_bytes)} − "
                f"{num_bytes(plan.weight_bytes)} of weights = {num_bytes(plan.kv_bytes)}",
            ),
            ("", BOUND),
            (
                "as vLLM logs it",
                f"GPU KV cache size: {plan.num_tokens:,} tokens, Maximum concurrency for "
                f"{plan.context_len:,} tokens per request: {plan.concurrency:.2f}x",
            ),
            ("", f"vLLM gives a request its room in portions of {PAGE} tokens"),
        ]

    # -- the picture ------------------------------------------------------------------------------

    def scene(self, step: int) -> Scene:
        """The memory as a bar, how each number is computed, and the least times as bars."""
        sheet = Sheet(WIDTH, 491, (MARGIN, 481))
        sheet.hint = "hover over a bar to read its numbers"
        plan = self.plan
        model = f"{plan.sizes.model_type}, {si(plan.sizes.num_parameters).strip()} parameters"
        count = plan.num_requests
        fit = f"{count:,} request{'s' * (count != 1)} of {_tokens(plan)} fit{'s' * (count == 1)}"
        sheet.heading(f"{model}: {fit if plan.kv_bytes else 'the weights do not fit'}")
        self._memory(sheet, step)
        for i, (name, said) in enumerate(self._sums()):
            y = 162.0 + 21 * i
            sheet.text(f"sum{i}.name", MARGIN, y, name, 12, **BOLD)
            sheet.text(f"sum{i}", 172, y, said, 12.5)
        self._times(sheet, step)
        return sheet

    def _memory(self, sheet: Sheet, batch: int) -> None:
        """Weights, a box for each request, what is free, what the engine may not have."""
        plan, top, tall = self.plan, 56.0, 40.0
        total = max(plan.memory_bytes, plan.weight_bytes)
        scale = WIDE / total
        words = f"memory: {num_bytes(plan.memory_bytes)}"
        sheet.text("memory", MARGIN, top - 8, words, 12, **BOLD)
        box = (MARGIN, top, scale * plan.weight_bytes, tall)
        tip = f"weights: {num_bytes(plan.weight_bytes)}"
        patch(sheet, "weights", box, WEIGHTS, tip)
        x, each = box[0] + box[2], scale * plan.kv_bytes_per_request
        for i in range(batch):
            if each < 3 and i:  # too thin to be told apart
                break
            wide = each if each >= 3 else each * batch
            tip = f"K and V of request {i + 1} of {batch}: {num_bytes(plan.kv_bytes_per_request)}"
            if each < 3:
                tip = f"K and V of {batch} requests: {num_bytes(batch * plan.kv_bytes_per_request)}"
            place = (x + i * each, top, wide, tall)
            sheet.rect(f"kv{i}", place, KV.dark, tip, stroke=PAPER if each > 6 else "none")
        x += batch * each
        free = plan.kv_bytes - batch * plan.kv_bytes_per_request
        if free > 0:
            tip = f"free for more requests: {num_bytes(free)}"
            sheet.cell("free", (x, top, scale * free, tall), "free", tip=tip, rx=0)
            x += scale * free
        others = plan.memory_bytes - max(plan.usable_bytes, plan.weight_bytes)
        if others > 0:
            tip = f"not given to the engine: {num_bytes(others)}"
            sheet.cell("others", (x, top, scale * others, tall), "reserved", tip=tip, rx=0)
        sheet.outline("memory.all", (MARGIN, top, WIDE, tall), stroke_width=1.2)
        if plan.weight_bytes > plan.usable_bytes:
            at = MARGIN + scale * plan.usable_bytes
            sheet.rect("limit", (at - 1.5, top - 5, 3, tall + 10), RED)
            said = f"no more than {num_bytes(plan.usable_bytes)} may be used"
            left = MARGIN + text_width(words, 12) + 24  # beside the other label
            right = max(at + 4, left + text_width(said, 12))
            sheet.note("limit.words", right, top - 8, said, 12, **RIGHT)
        marks: dict[str, Mark] = {
            f"weights {num_bytes(plan.weight_bytes)}": lambda n, b: patch(sheet, n, b, WEIGHTS),
            f"K and V of {counted(batch, 'request')} "
            f"{num_bytes(batch * plan.kv_bytes_per_request)}": lambda n, b: sheet.rect(
                n, b, KV.dark
            ),
        }
        if free > 0:
            marks[f"free {num_bytes(free)}"] = sheet.sample("free", stroke=QUIET)
        if others > 0:
            marks[f"not given to the engine {num_bytes(others)}"] = sheet.sample("reserved")
        sheet.legend(MARGIN, top + tall + 22, marks)

    def _times(self, sheet: Sheet, batch: int) -> None:
        """Decode and prefill: the bytes' time above the arithmetic's; the longer one decides."""
        plan, top = self.plan, 341.0
        cases = [(f"decode, {_one_each(batch)}", plan.decode(batch))]
        cases.append((f"prefill, {_tokens(plan)} of 1 request", plan.prefill()))
        scale = TIME / (max(time.least for _, time in cases) or 1.0)  # one for both
        sheet.text("times", MARGIN, top - 22, "least time of a forward", 12, **BOLD)
        limits = (
            f"reading at {si(plan.roofline.bandwidth)}B/s, computing at "
            f"{si(plan.roofline.peak_flops)}FLOP/s"
        )
        sheet.note("times.limits", TIMES, top - 22, limits)
        for i, (name, time) in enumerate(cases):
            y = top + 66 * i
            sheet.text(f"case{i}", MARGIN, y + 4, name, 12.5, **BOLD)
            if not time.least or not plan.kv_bytes:
                sheet.note(f"case{i}.least", LEAST, y + 4, "nothing runs", 12.5)
                continue
            words = f"at least {ms(time.least)}, limited by {time.bound}"
            sheet.text(f"case{i}.least", LEAST, y + 4, words, 12.5, **BOLD)
            self._time(sheet, f"case{i}", y + 10, time, scale)

    def _time(self, sheet: Sheet, name: str, top: float, time: Seconds, scale: float) -> None:
        """Two bars of `scale` units a second: read the weights, then K and V; and compute."""
        parts = {"weights": time.weights, "K and V": time.kv}
        x = TIMES
        sheet.note(f"{name}.memory", TIMES - 8, top + 13, "memory traffic", **RIGHT)
        for what, seconds in parts.items():
            box: Box = (x, top, scale * seconds, 17.0)
            tip = f"{what}: {ms(seconds)}"
            if what == "weights":
                patch(sheet, f"{name}.{what}", box, WEIGHTS, tip)
            else:
                sheet.rect(f"{name}.{what}", box, KV.dark, tip)
            if text_width(what, 11) + 8 < box[2]:
                sheet.text(f"{name}.{what}.said", x + 6, top + 12.5, what, 11, **DEAF)
            x += box[2]
        sheet.text(f"{name}.memory.n", x + 8, top + 13, ms(time.memory), 11.5)
        sheet.note(f"{name}.compute", TIMES - 8, top + 35, "compute", **RIGHT)
        wide = scale * time.arithmetic
        tip = f"arithmetic: {ms(time.arithmetic)}"
        sheet.rect(f"{name}.flops", (TIMES, top + 22, max(wide, 0.5), 17.0), QUIET, tip)
        sheet.text(f"{name}.compute.n", TIMES + wide + 8, top + 35, ms(time.arithmetic), 11.5)


def _one_each(batch: int) -> str:
    return "1 token of 1 request" if batch == 1 else f"1 token of each of {batch:,} requests"


def _tokens(plan: Plan) -> str:
    return f"{plan.context_len:,} token{'s' * (plan.context_len > 1)}"


def preset(name: str) -> str:
    """The config.json of a preset. ValueError for a name that is none."""
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
    return json.dumps(PRESETS[name], indent=2)
