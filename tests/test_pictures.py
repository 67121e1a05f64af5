"""One table of views: each is drawn again as it was, can be read, and refuses what has no picture.

`picture_hashes.json` holds, for each view, a short hash of what is drawn and its caption. Where the
drawing changes on purpose, LOOK AT THE NEW PICTURE FIRST (the failed test says where it lies), then

    RENEW_PICTURES=1 python -m pytest tests/test_pictures.py -k "drawn_as_it_was and NAME"

and read the captions in the difference. Plots are hashed by their words. Of views that show numbers
of a model all digits and colours are left out: the last bit differs from machine to machine.
"""

import functools
import hashlib
import io
import json
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from checkpoints import QWEN3_06B
from engines import VOCAB
from explorers import LARGEST, MAKE
from inputs import (
    APART,
    EXACT,
    K,
    Q,
    V,
    bench_figures,
    causal,
    curve,
    dial_point,
    dial_points,
    draw,
    kv_numbers,
    on_meta,
    parallel_report,
    pool_picture,
    recorded_batches,
    recorded_softmax,
)
from matplotlib.figure import Figure
from matplotlib.mathtext import MathTextParser
from PIL import Image
from torch import Tensor
from traces import (
    CASES,
    NASTY,
    OTHER,
    POLICIES,
    PROMPT,
    SVG,
    TWIN,
    Case,
    Paged,
    cells_picture,
    check_phone,
    check_words,
    chunked,
    crowd,
    new_cells,
    plot_words,
    renamed,
    run_cells,
    seven,
    six,
    story,
)

from tools.bench.plots import bench_picture
from tutorial_engine import learn, viz
from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.lab.layouts import layouts
from tutorial_engine.lab.on_gpu import ONE_BY_ONE, REPLAYED, SERVING
from tutorial_engine.lab.patching import patch_heads
from tutorial_engine.lab.two_texts import TwoTexts
from tutorial_engine.lab.vllm import recorded_run
from tutorial_engine.model.attention import causal_mask
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.checkpoint import TINY, load_model, load_tokenizer
from tutorial_engine.model.config import RopeScaling
from tutorial_engine.model.rope import inverse_frequencies, scaled_frequencies
from tutorial_engine.trace.events import Trace
from tutorial_engine.trace.pool import CELLS, ROWS
from tutorial_engine.viz.drawing import style
from tutorial_engine.viz.drawing.letters import text_width
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.scene import Frame, Scene
from tutorial_engine.viz.explorers.block_explorer import BlockExplorer
from tutorial_engine.viz.explorers.cache_explorer import CacheExplorer
from tutorial_engine.viz.explorers.cell_explorer import CellExplorer
from tutorial_engine.viz.explorers.explorer import Explorer
from tutorial_engine.viz.explorers.race_explorer import RaceExplorer
from tutorial_engine.viz.explorers.sampling_explorer import SamplingExplorer
from tutorial_engine.viz.explorers.scheduler_explorer import SchedulerExplorer
from tutorial_engine.viz.run.block_run import BlockRun, without_hashes
from tutorial_engine.viz.run.cell_steps import take_snapshot
from tutorial_engine.viz.views.block_view import MAX_REQUESTS, BlockView, SimpleBlockView
from tutorial_engine.viz.views.jukebox_frames import Take, jukebox_frames
from tutorial_engine.viz.views.running_softmax_picture import softmax_frames
from tutorial_engine.viz.views.transplant_picture import transplant_runs

HASHES = Path(__file__).with_name("picture_hashes.json")
LETTERS = {i: chr(ord("a") + i) for i in range(33)}
LABELS = ["<script>", "$x$", "&amp;", "]]>", "😀", "<s>", "$\\frac{1}{2}$", '"--"']
WORDS = "Once ·upon ·a ·time".split()
View = Picture | Explorer | Sequence[Frame]


# -- the views ------------------------------------------------------------------------------------


@functools.cache
def leaked(blocks: type[BlockManager], num_blocks: int = 9) -> Any:
    """Two users, and the first one again."""
    anna, tom = "One day Anna had an old lamp.", "One day Tom had a yellow coat."
    asked = {"user 1": anna, "user 2": tom, "user 1 again": anna}
    return learn.leak(load_model(), load_tokenizer(), asked, blocks, num_blocks)


def blocks(case: Case, label: Callable[[int], str] = str, simple: bool = False) -> list[Frame]:
    """Every third step of a run on pages."""
    trace = case.live().trace
    trace = without_hashes(trace) if simple else trace
    run = BlockRun.of(trace, {i: label(i) for i in range(VOCAB)})
    view = SimpleBlockView if simple else BlockView
    steps = range(0, len(run.steps), 3)
    return [Frame(view(run, [i]).scene(i), run.caption(i)) for i in steps]


def six_on_pages() -> Trace:
    """As many requests and blocks as can be drawn."""
    live = Paged(64, 1)
    prompts = (PROMPT[:7], TWIN, OTHER, [40, 41, 42], [50] * 5, [60, 61])
    for name, prompt in zip("ABCDEF", prompts, strict=True):
        live.add(name, prompt)
    return live.finish().trace


def crowded_cells() -> Picture:
    live = new_cells(16)
    run_cells(live, list(range(12)))
    for seq in range(1, 9):
        live.seq_cp(0, seq, 0, 13 - seq)
    for seq in (3, 5, 7):
        run_cells(live, [seq], seq)
    live.seq_add(3, 10, -1, 600)
    return cells_picture(take_snapshot(live, dict.fromkeys(range(16), "W" * 20)))


def rope_maps() -> Picture:
    here = causal(5, 5)
    return viz.rope_maps_picture(
        {"0 $x$": here, "400": here + 1e-6, "off": here.flip(0)}, LABELS[:5], "$H$"
    )


TAKES = [Take("no <b>mask</b>", "A kite. " * 9, 7.25, 0.125), Take("K, V", "at" * 24, 21.5, 9.0)]


def heads() -> Picture:
    scores = 0.3 * draw(2, 3)
    scores[0, 2] = 0.87
    return viz.heads_picture(causal(2, 3, 5, 5), scores)


LLAMA_3 = RopeScaling(8.0, 1.0, 4.0, 8192)


def patched(runs: dict[str, Sequence[int]]) -> Picture:
    model, tokenizer, text = load_model(), load_tokenizer(), "Once Rado had a $kite$. One day R"
    others = {name: text.replace("Rado", name) for name in ("Rado", "Rido")}
    patches = {w: patch_heads(model, tokenizer, text, others, 3, h) for w, h in runs.items()}
    return viz.patching_picture(tokenizer, text, patches)


def masks(**pairs: Sequence[int]) -> Picture:
    return viz.mask_picture({name: causal_mask(*pair) for name, pair in pairs.items()})


def latency() -> Picture:
    lines = {"with cache": [(8, 2.0), (32, 2.0)], "no cache": [(8, 1.9), (32, 4.0)]}
    units = {"with cache": [(8, 1.0), (32, 1.0)], "no cache": [(8, 8.0), (32, 32.0)]}
    return viz.latency_picture(lines, units)


def projection(layer: int = 0) -> Picture:
    tokenizer = load_tokenizer()
    ids = tokenizer.encode("Once upon a time <Anna> had a red $kite$.").ids
    return viz.qkv_picture(load_model(), tokenizer, ids, 5, layer=layer)


def ranks(size: int, heads: int, kv_heads: int) -> Picture:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    sizes |= {"vocab_size": QWEN3_06B.vocab_size, "intermediate_size": 24_576}
    return viz.ranks_picture(parallel_report(size, **sizes))


def split_of(features: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, gate, up, down of an MLP that a picture has room for."""
    draw = torch.Generator().manual_seed(0)
    gate, up, down = (torch.randint(-2, 3, (features, 3), generator=draw) for _ in range(3))
    return torch.tensor([1.0, 2.0, -1.0]), gate.float(), up.float(), down.T.float()


def gqa(heads: int, kv_heads: int) -> Picture:
    config = replace(QWEN3_06B, num_attention_heads=heads, num_key_value_heads=kv_heads)
    return viz.gqa_picture(config)


def induction(name: str) -> Picture:
    tokenizer = load_tokenizer()
    ids = tokenizer.encode(f"Once upon a time {name} had an old coat. One day R").ids
    return viz.two_steps_picture(load_model(), tokenizer, ids, (1, (3, 5)), (3, 3))


def lone_batch(*tokens: Any) -> Picture:
    return viz.flat_batch(Batch.from_sequences(*tokens))


def explored(name: str) -> Explorer:
    return MAKE[name](load_model(), load_tokenizer(), "Anna had a red kite. Ben had a hat. Anna")


def largest(name: str) -> list[Frame]:
    explorer = LARGEST[name](load_model(), load_tokenizer(), "Anna had a red kite.")
    steps = range(explorer.num_steps // 2, explorer.num_steps)[:2]
    return [Frame(explorer.scene(step), explorer.caption(step)) for step in steps]


ENDS = (("C", "abort"), ("D", "error"))
MARKUP = dict(zip("ABCD", NASTY, strict=True))
RATES = [("nothing silenced", 0.99), ("L3 <b>H3</b>", 0.1), ("$L1$", 0.9)]
PAGES = [case for case in CASES if case.block_size > 1]
FRIENDS = [f"{name} had an old coat. Tima was a friend of N" for name in ("amo", "edo")]
VIEWS: dict[str, Callable[[], View]] = {
    # runs of the engine
    "timeline": lambda: viz.timeline(story(*ENDS)),
    "timeline stalls": lambda: viz.timeline(crowd("prefill first")),
    "timeline markup": lambda: viz.timeline(renamed(story(*ENDS), MARKUP)),
    "timelines": lambda: viz.timelines({name: six(name) for name in POLICIES}),
    "places": lambda: viz.places({policy: seven(policy) for policy in POLICIES}),
    **{f"request {name}": lambda n=name: viz.one_request(story(*ENDS), n) for name in "ABCD"},
    "batch mixed": lambda: viz.flat_batch(recorded_batches()[1]),
    "batch large": lambda: lone_batch([list(range(36)), [1] * 27, [7]], [0, 10, 40]),
    **{f"blocks seed {case.seed}": lambda c=case: blocks(c) for case in CASES},
    "blocks wide labels": lambda: blocks(CASES[3], lambda _: "W" * 30),
    "blocks 64": lambda: viz.block_view(six_on_pages(), 2),
    **{f"pages seed {case.seed}": lambda c=case: blocks(c, simple=True) for case in PAGES},
    "cells crowded": crowded_cells,
    # measured, or by hand
    "sweep lines": lambda: viz.sweep(
        [5, 10], {"virtual": {"p50": [20, 25], "p95 $x$": [30, None]}}, "rate", "TTFT, ms"
    ),
    "sweep steps": lambda: viz.sweep(
        [0, 68, 136, 204],
        {"TTFT": {"worst": [5, 5, 6, 9], "mean": [4, 3, 2, 2]}},
        "patience in ms",
        "ms",
        at_most={"worst": 6, "mean": 3},
        steps=True,
    ),
    "throughput": lambda: viz.throughput_latency(
        {
            "one rule": [(8, 99.5, 34.0), ("16 $x$", 194.0, 42.0), (32, 317.0, 260.0)],
            "static": [(8, 98.0, 304.0)],
        },
        "TTFT p95",
        "users",
    ),
    "gaps": lambda: viz.itl_over_time({"whole prompt": chunked(64), "chunked": chunked(8)}, "A"),
    "waste": lambda: viz.waste_over_time(
        {"rows": dial_point(ROWS).trace, "pages": dial_point(4).trace}
    ),
    "leak": lambda: viz.leak_picture(leaked(learn.StaleBlocks)),
    "leak of nothing": lambda: viz.leak_picture(leaked(BlockManager, num_blocks=20)),
    "queue": lambda: viz.queue_picture(recorded_run("long_prompt"), [13, 19]),
    "queue, first steps": lambda: viz.queue_picture(recorded_run("long_prompt"), [0, 1]),
    "overlap": lambda: viz.overlap_picture(3, 7, 4),
    "overlap, slow plans": lambda: viz.overlap_picture(9, 4, 3),
    "radix, two forks": lambda: viz.radix_tree(
        [[*range(19), 30, 31], [*range(19), 32], [*range(16), 31]], LETTERS, 4
    ),
    "dial": lambda: viz.dial(dial_points()),
    "shift": lambda: viz.shift_picture({"random": EXACT, "trained": APART}, 10),
    "shift exact": lambda: viz.shift_picture({"1 layer": EXACT}, 1),
    **{f"pool {at}": lambda at=at: pool_picture(dial_point(at), 6) for at in (1, 4, CELLS, ROWS)},
    "layouts": lambda: viz.layouts_picture(layouts(kv_numbers()), layer=1, token=2, num_tokens=4),
    "gpu replayed": lambda: viz.gpu_timeline(ONE_BY_ONE, REPLAYED, floor=0.4e-3),
    "gpu padding": lambda: viz.padding_picture([200] * 63 + [512], [200] * 63 + [513]),
    "gpu end to end": lambda: viz.end_to_end_picture([[2, 0], [3], [5, 1]], [5, 3, 6], 4),
    "gpu memory": lambda: viz.gpu_memory_picture(
        {
            "at the $first$ call": ([3, 5, 0, 1], {"lens": (0, 2), "positions": (2, 2)}),
            "then": ([3, 5, 0, 0], {"lens": (0, 2), "<other>": (2, 2)}),
        },
        {"lens": (0, 2), "positions": (2, 2)},
    ),
    "gpu serving": lambda: viz.serving_picture({"each": 6000, "one $call$": 700}, SERVING),
    "ranks": lambda: viz.ranks_picture(parallel_report()),
    "split": lambda: viz.mlp_split(*split_of(4)),
    "ranks 8": lambda: ranks(8, 48, 48),
    "bench": lambda: bench_picture(bench_figures()),
    "bench serving": lambda: bench_picture(bench_figures(serving=True)),
    # the model
    "layer": lambda: viz.block_picture(load_model()),
    "layer 0.6B": lambda: viz.block_picture(on_meta()),
    "gqa": lambda: gqa(6, 2),
    "gqa many": lambda: gqa(64, 8),
    "three tokens": lambda: viz.three_token_picture(Q, K, V),
    "projection": projection,
    "induction": lambda: induction("Rado"),
    "softmax": lambda: viz.running_softmax_picture(recorded_softmax()),
    "softmax steps": lambda: softmax_frames(recorded_softmax(2, 5, 3)),
    "facts of two texts": lambda: viz.fact_picture(
        TwoTexts.of(load_model(), load_tokenizer(), *("N" + name for name in FRIENDS)),
        load_tokenizer(),
    ),
    "losses": lambda: viz.losses_picture(
        {"all slots": 3.15, "without slot 0": 4.38, "the first and the last 32": 3.24}, 40
    ),
    "first slot": lambda: viz.first_slot_picture(
        [0.01 + 0.02 * i for i in range(30)], [1 - 0.03 * i for i in range(30)]
    ),
    "first tokens": lambda: viz.first_tokens_picture(
        {
            "with the prefix cache": [(37, 0, 0.86), (59, 32, 0.95), (84, 64, 0.98)],
            "without": [(37, 0, 0.85), (59, 0, 1.53), (84, 0, 2.66)],
        }
    ),
    "transplant": lambda: viz.transplant_picture(load_model(), load_tokenizer()),
    "transplant choices": lambda: [
        frame for run in transplant_runs(load_model(), load_tokenizer()) for frame in run
    ],
    "matters": lambda: viz.matters_picture(
        torch.tensor([[0.0, 0.02, -0.01], [0.3, 0.965, 0.0]]), ["<s>", "$am$", "·o"], "$am$"
    ),
    "readers": lambda: viz.readers_picture(["<s>", "$a$", "new"], 3),
    "strips": lambda: viz.strips_picture(
        {"torch.cat": [(0, 3), (3, 1), (4, 1)], "static": [(0, 3), (0, 1), (0, 1)]}, room=8
    ),
    "ablation": lambda: viz.ablation_picture("$chance$", RATES),
    "mask": lambda: masks(prefill=(4, 4), chunk=(3, 7)),
    "mask window": lambda: masks(decode=(1, 5), window=(4, 4, 2)),
    "heads": heads,
    "patched, one run": lambda: patched({"heads $3$": (3, 4, 5)}),
    "patched, and a control": lambda: patched({"<b>3</b>": (3, 4, 5), "L3 H0": (0,)}),
    "reach": lambda: viz.reach_picture(LABELS * 3, [(19, 2), (23, 14)], 8),
    "rope scaling": lambda: viz.rope_scaling_picture(
        inverse_frequencies(128, 5e5),
        scaled_frequencies(inverse_frequencies(128, 5e5), LLAMA_3),
        LLAMA_3,
    ),
    "scores": lambda: viz.scores_picture((1024, 2048, 8192), head_dim=128, itemsize=2),
    "rope maps": rope_maps,
    "jukebox": lambda: jukebox_frames("Once $upon$ a time.", "A <b>kite</b>.", TAKES),
    "clocks": lambda: viz.clocks_picture(inverse_frequencies(32, 10000.0), range(8)),
    "training": lambda: viz.training_picture(curve(3, 1.5)),
    "training shipped": lambda: viz.training_picture(
        json.loads((TINY.parent / "curve.json").read_text()), vocab_size=100
    ),
    "work": lambda: viz.work_picture([10, 11, 12], [10, 1, 1], [1e7, 2e7, 3e7], [1e7, 1e6, 1e6]),
    "bytes": lambda: viz.bytes_picture([("tiny", 2048, 6144), ("$big$", 114688, None)]),
    "positions": lambda: viz.positions_picture([0, 1, 2, 3], [0, 1, 3, 4], WORDS, LABELS[:4]),
    "positions equal": lambda: viz.positions_picture(range(4), range(4), WORDS, WORDS),
    "decode times": latency,
    "roofline": lambda: viz.roofline_picture(
        1e10, 1e11, [("decode", 0.5, 2.5e9), ("$prefill$", 40.0, 8e10)]
    ),
    "draws": lambda: viz.draws_picture(["a", "b", "$a$", "b"], ["<s>", "<s>", "<s>"]),
    "margins": lambda: viz.margins_picture(
        [viz.Lead(["a", "$b$"], [6.24, 6.16]), viz.Lead(["<s>", "·"], [8.83, 8.82])]
    ),
    # explorers: every step, and the largest of each
    **{f"explorer: {name}": lambda n=name: explored(n) for name in MAKE},
    **{f"largest: {name}": lambda n=name: largest(n) for name in LARGEST},
}
# These write numbers of a model: its last bits, and so a colour or a place, differ by the machine.
OF_A_MODEL = re.compile(
    r"facts|cells|projection|induction|softmax|three|transplant"
    r"|.*: (attention|rope|cache|sampling|cells|scheduler)"
)


@functools.cache
def frames(name: str) -> list[tuple[Scene | Picture, str]]:
    """What a view draws, step by step, with its captions; without PNGs, which take longest."""
    real = Figure.savefig

    def only_svg(self: Figure, out: Any, format: str, **more: Any) -> None:
        if format == "svg":
            real(self, out, format=format, **more)

    no_png = {"new": lambda *_: b""}
    with (
        patch.object(Scene, "png", **no_png),
        patch.object(style, "small_png", **no_png),
        patch.object(Figure, "savefig", only_svg),
    ):
        view = VIEWS[name]()
    if isinstance(view, Picture):
        return [(view, view.caption)]
    if isinstance(view, Explorer):
        return [(view.scene(step), view.caption(step)) for step in range(view.num_steps)]
    return list(view)


def svg_of(shown: Scene | Picture) -> str:
    return shown.svg if isinstance(shown, Picture) else shown.svg()


def fingerprint(name: str) -> str:
    """A short hash of all that a view draws, the same on every machine."""
    parts = []
    for shown, caption in frames(name):
        svg = svg_of(shown)
        if "te-scene" not in svg:
            assert isinstance(shown, Picture)
            svg = "\n".join(plot_words(shown))
        elif OF_A_MODEL.match(name):
            svg = re.sub(r' d="[^"]*"|#[0-9a-f]{6}|-?\d+(\.\d+)?', "", svg)
        parts += [svg, caption]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


@pytest.mark.parametrize("name", VIEWS)
def test_it_is_drawn_as_it_was(name: str, tmp_path: Path) -> None:
    stored = json.loads(HASHES.read_text()) if HASHES.is_file() else {}
    found = [fingerprint(name), frames(name)[-1][1]]
    if os.environ.get("RENEW_PICTURES"):
        kept = {key: stored[key] for key in VIEWS if key in stored} | {name: found}
        HASHES.write_text(json.dumps(kept, indent=0, ensure_ascii=False, sort_keys=True) + "\n")
    elif stored[name] != found:
        (tmp_path / "now.svg").write_text(svg_of(frames(name)[-1][0]), encoding="utf-8")
        assert found[1] == stored[name][1]
        pytest.fail(f"{name} is drawn otherwise: look at {tmp_path / 'now.svg'}")


def test_every_view_has_a_hash_and_every_hash_a_view() -> None:
    assert json.loads(HASHES.read_text()).keys() == VIEWS.keys()


# -- what holds for all of them -------------------------------------------------------------------


@pytest.mark.parametrize("name", VIEWS)
def test_it_can_be_read(name: str) -> None:
    """No word is tiny, cut off or over another, nothing jumps, files are light, tags are ours."""
    shown = [one for one, _ in frames(name)]
    if "te-scene" not in svg_of(shown[0]):
        return check_plot(shown[0])
    for one in shown:
        check_words(one)
        root = ET.fromstring(svg_of(one))
        assert {e.tag.removeprefix(SVG) for e in root.iter()} <= TAGS
    if FLOWS.match(name):
        check_phone([one for one in shown if isinstance(one, Scene)])
    heights = {one.height for one in shown if isinstance(one, Scene)}
    assert len(heights) <= 1 or name.startswith(("blocks", "pages")), "nothing jumps"


FLOWS = re.compile(r".*: (attention|rope|cache)|softmax steps")  # made of pieces
TAGS = {"svg", "style", "defs", "pattern", "rect", "g", "use", "text", "line", "path", "circle"}
TAGS |= {"polygon", "polyline"}


def check_plot(picture: Scene | Picture) -> None:
    """Its words are large enough, no formulas, and say the caption."""
    assert isinstance(picture, Picture)
    said = plot_words(picture)
    key = "A mark is a request, the line is p50, the diamond is p95."
    joined = " ".join(" ".join(said).split())
    is_key = key in joined  # the numbers of the caption are labels
    assert is_key or picture.caption.replace("--", "- -") in joined
    assert not [word for word in said if "mathdefault" in word or "\\times" in word]
    # matplotlib draws outlines of 100 units a letter height, in points: 100 dots are 72 points
    scales = [float(s) for s in re.findall(r"scale\(([\d.]+) -", picture.svg)]
    assert scales and min(scales) * 100 * 100 / 72 >= 9


def test_the_checks_see_what_they_are_for() -> None:
    """Words that are too small, cut off or over others, and a formula: each is found."""
    for x, y, size in ((60, 20, 8), (90, 20, 12), (-1, 20, 12), (60, 61, 12), (15, 20, 12)):
        scene = Scene(100, 60)
        scene.text("there", 10, 22, "words")
        scene.text("new", x, y, "words", size)
        with pytest.raises(AssertionError):
            check_words(scene)
    for wide, said in ((380, "cut on a phone"), (500, "Words")):
        scene = Scene(600, 60, parts=[[(0, 0, wide, 60)]])
        scene.text("there", 350, 22, "words of 12")
        scene.text("first", 0, 22, "words", 14)
        with pytest.raises(AssertionError, match=said):
            check_phone([scene])
    assert text_width("日本 a", 12) == 24 + text_width(" a", 12), "an em each"


@pytest.mark.parametrize("name", ["timelines", "queue", "blocks 64", "mask", "bench", "waste"])
def test_drawn_twice_it_is_the_same_light_file(name: str) -> None:
    one, other = VIEWS[name](), VIEWS[name]()
    assert isinstance(one, Picture) and one == other
    with Image.open(io.BytesIO(one.png)) as image:
        assert image.format == "PNG" and image.width <= 1400 and len(one.png) <= 90_000
        assert len(set(image.convert("RGB").getdata())) > 3


# -- text is text ---------------------------------------------------------------------------------


def test_no_text_of_a_prompt_is_read_as_a_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("parsed as a formula")

    before = rope_maps()
    monkeypatch.setattr(MathTextParser, "parse", refuse)
    assert rope_maps() == before


def test_what_nobody_can_see_is_written_out_in_plots() -> None:
    """Names that turn the line round or hide letters; scenes do it for every text."""
    hidden = "\u202eab\u200b\ufeff\x1b[31m"
    picture = viz.itl_over_time({"a": renamed(chunked(8), {"A": hidden})}, hidden)
    assert not set("\u202e\u200b\ufeff\x1b") & set(picture.svg + picture.caption)


# -- what cannot be drawn -------------------------------------------------------------------------


def on_blocks(num_blocks: int, block_size: int = 4, requests: int = 1) -> Trace:
    live = Paged(num_blocks, block_size)
    for number in range(requests):
        live.add(f"r{number}", OTHER[: number + 1])
    return live.finish().trace


def explore(kind: Callable[..., Explorer], *first: Any, **options: Any) -> Explorer:
    return kind(load_model(), load_tokenizer(), *first, **options)


ONE = ["One day"]
REFUSED: list[tuple[str, Callable[[], object]]] = [
    ("no request 'Z'", lambda: viz.one_request(story(), "Z")),
    ("65 tokens that see 65 are too many", lambda: lone_batch([[1] * 65])),
    ("not of an engine on pages", lambda: viz.block_view(story(), 0)),
    (r"steps \[99\] of 0 ", lambda: viz.queue_picture(recorded_run("long_prompt"), [99])),
    (
        r"two runs of at most 12 requests.*\['one'\]",
        lambda: RaceExplorer({"one": dial_point(4).trace}),
    ),
    (r"step 9 is outside 0", lambda: viz.block_view(on_blocks(2, 16), 9)),
    (rf"7 requests, .* {MAX_REQUESTS} requests", lambda: viz.block_view(on_blocks(40, 4, 7), 0)),
    (r"room for .* 32 blocks", lambda: viz.block_view(on_blocks(40), 0, simple=True)),
    (r"room for .* 64 blocks", lambda: viz.block_view(on_blocks(65), 0)),
    ("17 cells are too many.*16", lambda: cells_picture(take_snapshot(new_cells(17)))),
    ("2 texts with 0 common tokens", lambda: viz.radix_tree([[1], [2]], LETTERS, 4)),
    (
        r"layers 0 \.\. 2 .* got layer 3",
        lambda: viz.layouts_picture(layouts(kv_numbers()), 3, 0, 4),
    ),
    ("16 ranks and 16 heads are too many", lambda: ranks(16, 16, 16)),
    ("layer 4 is outside the 4", lambda: projection(4)),
    (r"v must be \[3, 2\].*got \[2, 2\]", lambda: viz.three_token_picture(Q, K, V[:2])),
    ("room for 1 or 2 runs, got 0", lambda: patched({})),
    ("query 3 must stand after key 3", lambda: viz.reach_picture(LABELS, [(3, 3)], 8)),
    ("do not take the two steps", lambda: induction("Mimo")),
    (
        "of 1 places 0 are ties, 1 nearly",
        lambda: viz.margins_picture([viz.Lead("ab", [6.24, 6.16])]),
    ),
    (r"0 .. 3 and heads 0 .. 5; got layer 4, head 0", lambda: recorded_softmax(layer=4)),
    (r"the model has room for \d+. Shorten", lambda: explore(SamplingExplorer, "Anna " * 9999)),
    ("a list of 1 to 3 prompts", lambda: explore(CacheExplorer, ["A"] * 4)),
    ("need 65 slots, .* rows of 64", lambda: explore(SchedulerExplorer, ONE, new_tokens=62)),
    ("blocks must be from 1 to 64", lambda: explore(BlockExplorer, ONE, num_blocks=65)),
    ("5 tokens need a cell each", lambda: explore(CellExplorer, num_cells=3)),
]


@pytest.mark.parametrize(("message", "draw_it"), REFUSED, ids=[words for words, _ in REFUSED])
def test_what_cannot_be_drawn_is_refused_in_words(
    message: str, draw_it: Callable[[], object]
) -> None:
    with pytest.raises(ValueError, match=message):
        draw_it()
