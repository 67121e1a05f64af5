"""The learner's functions run in the real model; a wrong one is told, and the package's runs."""

import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from learners import Spy, named, passes, raises_at
from nbformat import NotebookNode
from tokenizers import Tokenizer
from torch import Tensor

from tools.publish.build import make_notebook, sources
from tutorial_engine.lab.ledger import ledger, loop_path, our_paths
from tutorial_engine.learn import OwnServer
from tutorial_engine.learn.exercises.verdict import Verdict
from tutorial_engine.learn.parts import cache as own_cache
from tutorial_engine.learn.parts import model as own
from tutorial_engine.learn.parts.cache import CACHES
from tutorial_engine.learn.parts.earlier import CHECKS as EARLIER
from tutorial_engine.learn.parts.earlier import bring
from tutorial_engine.learn.parts.engine import IN_01, OwnEngine
from tutorial_engine.learn.parts.holder import PartFailed
from tutorial_engine.learn.parts.model import PARTS, LayerWeights
from tutorial_engine.learn.stories.jukebox import (
    BROKEN,
    exchanged,
    jukebox_film,
    jukebox_table,
    play,
)
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.events import BlockCopied, Preempted
from tutorial_engine.viz.views.jukebox_frames import Take

PROMPT = "Once upon a time Anna had a red kite."
Parts = dict[str, Callable[..., Any]]


class Doubles(own_cache.MyCache):
    def update(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> Any:
        return super().update(layer, k.double(), v.double(), batch)


CHECKS: dict[str, Callable[..., Verdict]] = {**EARLIER["01"], **EARLIER["02"]}
RIGHT: Parts = PARTS


@pytest.fixture
def mine(model: CausalLM, tokenizer: Tokenizer) -> OwnEngine:
    return OwnEngine(model, tokenizer)


@pytest.fixture
def cached(model: CausalLM, tokenizer: Tokenizer) -> OwnEngine:
    return OwnEngine(model, tokenizer, cached=True)


def told(mine: OwnEngine, capsys: pytest.CaptureFixture[str], *args: Any, **more: Any) -> str:
    capsys.readouterr()
    mine.tell(*args, **more)
    return capsys.readouterr().out


# -- the package's parts are the model -----------------------------------------------------------


def test_model_made_of_parts_is_the_model(mine: OwnEngine, model: CausalLM) -> None:
    batch = Batch.from_sequences([[40, 7, 99, 250, 7, 13], [5, 6]], [0, 3])
    want = model.compute_logits(model(batch))
    assert torch.allclose(mine.model.compute_logits(mine.model(batch)), want, atol=1e-4)
    assert set(mine.parts.calls) == set(IN_01) and not mine.parts.own


# -- the learner's are called --------------------------------------------------------------------


def test_a_story_names_the_part_that_a_layer_calls_and_that_was_spoiled_later(
    mine: OwnEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = """def layer(x, w, angles, attend):
    return by_steps(x, w, angles, attend, project, rope)"""
    scope: Parts = {"by_steps": own._layer, "project": own.project, "rope": own.rope}
    exec(cell, scope)
    assert mine.use(scope["layer"], CHECKS["layer"]).verdict.ok
    scope["project"] = exchanged
    said = told(mine, capsys, PROMPT)
    why = "✘ layer: it calls your project, which is not ✔ yet:\nyour project: "
    assert f"With your layer the tokens are not the package's.\n  {why}" in said
    assert "k and v swapped" in said and "\n  The package's layer runs in its place." in said


def test_all_of_the_learners_parts_run_in_a_model_of_another_size(
    cached: OwnEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    config = replace(cached.package.config, num_hidden_layers=2, **sizes)
    other = CausalLM(config).draw_weights().requires_grad_(False).eval()
    drawn = SamplingParams(max_tokens=8, temperature=1.0, top_p=0.9, seed=3)
    big = OwnEngine(other, cached.tokenizer, cached=True)
    assert "yours: none yet" in told(big, capsys, PROMPT, drawn)
    for name, part in RIGHT.items():
        big.use(part, CHECKS[name])
    said = told(big, capsys, PROMPT, drawn)
    line = said.split("yours: ")[1].splitlines()[0]
    assert all(f"{name} (" in line for name in {*PARTS} - {"MyCache"})
    assert "the package's" not in line and "MyCache" not in line, "the later cache runs"
    big.parts.own["kv_head"] = lambda h, num_heads, num_kv_heads: h // 3  # 6 to 2 heads only
    said = told(big, capsys, PROMPT, drawn)
    assert "The package's kv_head runs in its place." in said


def test_learners_top_p_decides(cached: OwnEngine) -> None:
    params = SamplingParams(temperature=1.2, top_p=0.9, seed=7, max_tokens=24)
    drawn = cached.generate(PROMPT, params).output_token_ids
    cached.use(named("keep_top_p", lambda probs, p: probs >= probs.max()), passes)
    best = cached.generate(PROMPT, params).output_token_ids
    assert best == cached.generate(PROMPT).output_token_ids != drawn


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=24, stop=("kite.", "coat.")),
        SamplingParams(max_tokens=5),
        SamplingParams(max_tokens=8, stop_token_ids=(300,)),
        SamplingParams(max_tokens=60, ignore_eos=True),
    ],
)
def test_learners_why_finished_is_asked_of_each_token_and_ends_where_the_package_ends(
    cached: OwnEngine, params: SamplingParams
) -> None:
    spy = Spy(own.why_finished)
    cached.use(spy, passes)
    request = cached.generate("Once upon a time Rado had an old", params)
    ids, finish = request.output_token_ids, request.checker.finish
    assert [len(call[0]) for call in spy.calls] == list(range(1, len(ids) + 1))
    assert finish and spy.answers == [None] * (len(ids) - 1) + [finish.reason]


def test_a_window_is_the_learners_mask(mine: OwnEngine) -> None:
    spy = Spy(own.window_mask)
    mine.use(spy, CHECKS["window_mask"])
    whole = mine.story(PROMPT)
    spy.calls.clear()
    assert mine.story(PROMPT, window=3) != whole and {call[2] for call in spy.calls} == {3}
    assert mine.story(PROMPT, window=1000) == whole


def test_a_row_of_the_ledger_is_the_learners(cached: OwnEngine, tokenizer: Tokenizer) -> None:
    paths = {
        "no cache": our_paths(cached.package)["no cache"],
        "together": loop_path(lambda n: cached.runner(), together=True),
    }
    prompts = [tokenizer.encode(text).ids for text in (PROMPT, "Ben had a blue ball.")]
    assert all(row.ok and row.steps == 16 for row in ledger(paths, prompts, num_tokens=8))
    cached.use(named("layer", lambda x, w, a, attend: own.layer(x, w, 1.1 * a, attend)), passes)
    assert not ledger(paths, prompts, num_tokens=8)[1].ok


def test_bytes_that_a_cache_copies_are_counted_of_the_one_that_runs(cached: OwnEngine) -> None:
    c = cached.package.config
    per_token = 2 * 4 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim
    by_cat = per_token * sum(range(20))
    assert cached.bytes_copied(20) == by_cat, "the package's"
    for cache, copied in ((own_cache.MyStaticCache, 0), (own_cache.MyCache, by_cat)):
        cached.use(cache, CHECKS[cache.__name__])
        assert cached.bytes_copied(20) == copied and {*cached.parts.own} == {cache.__name__}
    cached.use(named("MyStaticCache", RaisingCache), passes)
    with pytest.raises(PartFailed, match="moth"):
        cached.bytes_copied(20)
    cached.use(named("MyStaticCache", lambda *_: None), CHECKS["MyStaticCache"])
    assert cached.bytes_copied(20) == 0, "the package's"


def test_a_story_told_live_comes_token_by_token_and_is_the_same(
    cached: OwnEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cached.use(own.run_new, CHECKS["run_new"])
    pieces: list[str] = []

    def keep(words: str, end: str = "\n", flush: bool = False) -> None:
        pieces.append(words + end)

    for params in (SamplingParams(max_tokens=8), SamplingParams(max_tokens=24, stop="coat.")):
        whole = told(cached, capsys, PROMPT, params)
        pieces.clear()
        monkeypatch.setattr("builtins.print", keep)
        cached.tell(PROMPT, params, live=True)
        monkeypatch.undo()
        assert "".join(pieces) == whole
        assert len(pieces) > 8 and pieces[0] == PROMPT


# -- unusual right parts -------------------------------------------------------------------------


def in_place(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k /= math.sqrt(k.shape[-1])
    scores = q @ k.T
    mask.logical_not_()
    scores[mask] = -1e9
    return scores.softmax(-1) @ v


def double_layer(x: Tensor, w: LayerWeights, angles: Tensor, attend: Any) -> Tensor:
    doubles = LayerWeights(*(one.double() for one in w))
    return own.layer(x.double(), doubles, angles, lambda q, k, v: attend(q, k, v).double())


UNUSUAL: list[tuple[str, Callable[..., Any]]] = [
    ("attention", in_place),
    (
        "attention",
        lambda q, k, v, mask: own.attention(q.double(), k.double(), v.double(), mask),
    ),
    ("rope", lambda x, angles: own.rope(x.double(), angles.double())),
    ("project", lambda x, *w: [part.double() for part in own.project(x, *w)]),
    ("layer", double_layer),
    ("MyCache", Doubles),
    ("run_new", lambda *args: own.run_new(*args).double()),
    ("keep_top_p", lambda probs, p: own.keep_top_p(probs.mul_(1.0), p)),
]


@pytest.mark.parametrize(("name", "part"), UNUSUAL)
def test_unusual_right_part_runs_in_the_model_too(
    cached: OwnEngine, capsys: pytest.CaptureFixture[str], name: str, part: Callable[..., Any]
) -> None:
    part.__name__ = name
    assert cached.use(part, CHECKS[name]).verdict.ok is True
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=1, max_tokens=8)
    said = told(cached, capsys, PROMPT, params)
    assert "✘" not in said and f"yours: {name} (" in said
    assert said.endswith("✔ 8 of 8 tokens are those of the package's engine.\n")


# -- what is wrong is told and replaced ----------------------------------------------------------


def test_function_of_another_name_is_no_part(mine: OwnEngine) -> None:
    with pytest.raises(
        ValueError, match="'my_rope' is no part of the engine: the parts are project, "
    ):
        mine.use(named("my_rope", lambda x, angles: x), passes)
    with pytest.raises(ValueError, match="'my_rope' is no part of the engine: name it `rope`"):
        mine.use(named("my_rope", lambda x, angles: x), CHECKS["rope"])


class RaisingCache(own_cache.MyCache):
    def __init__(self, *sizes: Any) -> None:
        super().__init__()

    def update(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> Any:
        if len(k) == 1:
            raise KeyError("moth")
        return super().update(layer, k, v, batch)


@pytest.mark.parametrize("name", CHECKS)
def test_part_that_raises_in_the_model_is_told_and_taken_out(
    cached: OwnEngine, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for other, part in RIGHT.items():
        if (other, name) not in (("layer", "rope"), ("layer", "project")):
            cached.use(part, passes)
    broken = RaisingCache if name in CACHES else raises_at(1, RIGHT[name])
    cached.use(named(name, broken), passes)
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=1, max_tokens=4)
    said = told(cached, capsys, PROMPT, params)
    assert said.startswith(f"✘ your {name} raised KeyError in the model: 'moth'\n")
    assert f"  The package's {name} runs in its place.\n" in said and said.count("✘") == 1
    assert said.endswith("4 of 4 tokens are those of the package's engine.\n")
    assert name not in cached.parts.own
    assert len(cached.parts.own) == (8 if name in ("rope", "project") else 9)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("rope", lambda x, angles: x),  # others of 01 are heard below
        ("MyCache", None),
        ("MyStaticCache", None),
        (
            "run_new",
            lambda model, attention, ids, n: own.run_new(model, attention, ids, 0)[:7],
        ),
        (
            "run_new",
            lambda model, attention, ids, n: own.run_new(model, attention, ids[:-1], 0) * 0,
        ),
        ("keep_top_p", lambda probs, p: probs >= probs.max()),
        ("why_finished", lambda *state: None),
    ],
)
def test_part_that_a_check_let_through_is_found_by_its_tokens(
    cached: OwnEngine, capsys: pytest.CaptureFixture[str], name: str, part: Any
) -> None:
    class OnlyNew:
        def __init__(self, *sizes: Any) -> None: ...

        def update(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> Any:
            return [(k, v)]

    for one in (own.attention, own.run_new, named(name, part or OnlyNew)):
        cached.use(one, passes)
    params = SamplingParams(temperature=1.3, top_p=0.95, seed=1, max_tokens=6)
    said = told(cached, capsys, "One day", params)
    assert said.startswith("✘ ") and said.count("✘") == 1
    assert f"  The package's {name} runs in its place.\n" in said
    assert said.endswith("✔ 6 of 6 tokens are those of the package's engine.\n")
    left = {"attention", "run_new"} - {name}
    assert set(cached.parts.own) == left, "and only this one was taken out"


@pytest.mark.parametrize("name", IN_01)
def test_a_wrong_part_can_be_heard_and_does_not_stay(
    mine: OwnEngine, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    mine.use(own.layer, passes)
    wrong = {"attention": lambda q, k, v, mask: v[: len(q)], "layer": lambda x, *_: x}
    wrong |= {"project": lambda *args: [own.project(*args)[i] for i in (0, 2, 1)]}
    wrong |= {"kv_head": lambda h, *_: h % 2, "rope": lambda x, angles: x}
    wrong |= {"window_mask": lambda q, kv, _: own.window_mask(q, kv, 2)}
    for part in (RIGHT[name], wrong[name], raises_at(1, RIGHT[name])):
        mine.hear(PROMPT, **{name: part})
    mine.hear(PROMPT, **{name: lambda *_: ...})
    mine.hear(PROMPT, SamplingParams(max_tokens=2), **{name: RIGHT[name]})
    right, other, raised, untouched, short = capsys.readouterr().out.splitlines()
    assert right == PROMPT + mine.generate(PROMPT).checker.text
    assert len(PROMPT) < len(short) < len(right) and right.startswith(short)
    assert other.startswith(PROMPT) and other != right
    assert raised.startswith(f"✘ your {name} raised KeyError")
    assert untouched == f"☐ not done yet: the body of {name} is still `...`"
    assert mine.parts.own == {"layer": own.layer}
    with pytest.raises(ValueError, match="no parts of the engine"):
        mine.hear(PROMPT, my_rope=own.rope)


def test_a_wrong_cache_is_heard_whichever_cache_runs(
    cached: OwnEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    right = PROMPT + cached.generate(PROMPT).checker.text
    cached.use(RIGHT["MyStaticCache"], passes)
    forgets = type("MyCache", (), {"update": lambda self, layer, k, v, batch: [(k, v)]})
    cached.hear(PROMPT, MyCache=forgets)
    cached.hear(PROMPT)
    heard, after = capsys.readouterr().out.splitlines()
    assert heard.startswith(PROMPT) and heard != right == after
    assert cached.cache_part == "MyStaticCache" and "MyCache" not in cached.parts.own


# -- what was written in an earlier notebook -----------------------------------------------------

NOTEBOOKS = {name[:2]: name for name in sources()}


def saved(folder: Path, solved: bool, edit: Callable[[str], str] = str, of: str = "01") -> str:
    """A notebook as a learner's file, each code cell edited."""
    notebook: NotebookNode = make_notebook(sources()[NOTEBOOKS[of]], solved)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = edit(cell.source)
    nbformat.write(notebook, folder / f"my_{of}.ipynb")
    return str(folder / f"my_{of}.ipynb")


def test_open_exercises_and_a_missing_file_leave_the_package_in_place(
    cached: OwnEngine, tmp_path: Path
) -> None:
    missing = str(tmp_path / "01_none.ipynb")
    open_ones = f"☐ these are still the package's: {', '.join(IN_01)}"
    why = f"there is no file {missing}, and no my_01.ipynb beside it"
    assert repr(bring(cached, missing)) == f"{open_ones} ({why})"
    why = "no exercise is done in my_01.ipynb; was it saved?"
    assert repr(bring(cached, saved(tmp_path, solved=False))) == f"{open_ones} ({why})"
    assert not cached.parts.own
    (tmp_path / "my_01.ipynb").rename(tmp_path / "01_attention_rope.ipynb")
    said = repr(bring(cached, str(tmp_path / "01_attention_rope.ipynb")))
    asked = "no exercise is done in 01_attention_rope.ipynb; is yours called my_01.ipynb, in the"
    assert asked in said


def test_the_learners_copy_is_read_in_place_of_the_notebook_beside_it(
    cached: OwnEngine, tmp_path: Path
) -> None:
    Path(saved(tmp_path, solved=False)).rename(tmp_path / "01_attention_rope.ipynb")
    Path(saved(tmp_path, solved=True)).rename(tmp_path / "my_01_again.ipynb")
    found = bring(cached, str(tmp_path / "01_attention_rope.ipynb"))
    assert repr(found) == f"✔ yours from my_01_again.ipynb: {', '.join(IN_01)}"
    saved(tmp_path, solved=False)  # a newer one, where nothing is done
    os.utime(tmp_path / "my_01_again.ipynb", (0, 0))
    assert "is done in my_01.ipynb" in repr(
        bring(cached, str(tmp_path / "01_attention_rope.ipynb"))
    )


def test_what_the_exercises_read_of_other_cells_comes_along(
    cached: OwnEngine, tmp_path: Path
) -> None:
    """A number, a helper of a helper; what is only an argument's name does not."""

    def edit(source: str) -> str:
        if source.startswith("def rms_norm"):
            return (
                "SMALL = c.rms_norm_eps\n"
                "def root(x): return (x.square().mean(-1, keepdim=True) + SMALL).sqrt()\n"
                "def rms_norm(x, weight): return x / root(x) * weight\n"
                "q = undefined"
            )
        return source

    found = bring(cached, saved(tmp_path, True, edit))
    assert repr(found) == f"✔ yours from my_01.ipynb: {', '.join(IN_01)}"


def test_what_is_wrong_or_cannot_run_is_told_and_stays_out(
    cached: OwnEngine, tmp_path: Path
) -> None:
    def spoil(source: str) -> str:
        if source.startswith("def rope"):
            return source.replace("a * cos - b * sin", "a * cos + b * sin")
        return "this is no Python" if source.startswith("def project") else source

    said = repr(bring(cached, saved(tmp_path, True, spoil)))
    assert "✘ your rope" in said and "'this is no Python' of my_01.ipynb raised SyntaxError" in said
    assert said.endswith("☐ these are still the package's: project, rope, layer")
    assert set(cached.parts.own) == {"window_mask", "attention", "kv_head"}


def test_allocate_of_notebook_04_runs_with_shared_evicted_and_copied_blocks(
    model: CausalLM,
    tokenizer: Tokenizer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = OwnServer(model, tokenizer, memory="pages", num_blocks=12, block_size=4)
    found = bring(server, saved(tmp_path, True, of="04"))
    names = "num_blocks, slots, allocate, block_attention"
    assert repr(found) == f"✔ yours from my_04.ipynb: {names}"
    start = "Once upon a time Anna had a red kite."
    for prompts, params in (
        ([start, f"{start} Ben", "One day"], SamplingParams(max_tokens=12, ignore_eos=True)),
        ([start], SamplingParams(max_tokens=6, n=2, temperature=1.0, seed=1)),
    ):
        run = server.serve(prompts, params)
        said = capsys.readouterr().out
        assert re.search(r"allocate \(\d\d+ calls\)", said) and said.count("✔") == 1, said
        kind = Preempted if len(prompts) > 1 else BlockCopied
        assert any(isinstance(event, kind) for event in run.trace.events)
    assert "203 of 203 steps are vLLM's" in repr(server.beside_vllm())


def test_a_file_without_a_number_is_refused(cached: OwnEngine) -> None:
    with pytest.raises(
        ValueError, match=r"must have one of \['01', '02', '03', '04', '05'\] in its name"
    ):
        bring(cached, "none.ipynb")


# -- the jukebox ---------------------------------------------------------------------------------


def test_each_broken_part_is_off_and_leaves_the_engine_as_it_was(mine: OwnEngine) -> None:
    mine.parts.own["layer"] = own.layer
    right = mine.story(PROMPT)
    takes = {take.part: take for take in play(mine, PROMPT)}
    assert set(takes) == set(BROKEN) and len({take.story for take in takes.values()}) == len(takes)
    assert all(take.anywhere >= take.last > 1e-2 for take in takes.values())
    assert mine.parts.own == {"layer": own.layer} and mine.story(PROMPT) == right
    unheard = takes["no mask"]
    assert min(takes.values(), key=lambda take: take.last) == unheard and unheard.anywhere > 1
    assert "Rado had a" in unheard.story


@pytest.mark.parametrize(
    ("guess", "marks", "right"),
    [
        *(("", "", None), ("......", "", None), ("21", "✔✔", "2 of 2"), ("1.", "✘", "0 of 2")),
        *(("2 1", "✔✔", "2 of 2"), ("A=2, B=1", "✔✔", "2 of 2"), (21, "✔✔", "2 of 2")),
    ],
)
def test_guesses_of_the_jukebox_are_marked(guess: object, marks: str, right: str | None) -> None:
    takes = [Take("no mask", "A kite.", 7.2, 0.1), Take("no RoPE", "Rado", 3.4, 0.6)]
    _, first, *lines = jukebox_table(takes, ["no RoPE", "no mask"], guess).splitlines()
    assert first.startswith("A     no mask") and first.split()[3:5] == ["7.2", "0.1"]
    assert "".join(re.findall("[✔✘]", first + lines[0])) == marks
    assert ("✘ you: no RoPE" in first) == ("✘" in marks)
    assert lines[1:] == ([f"{right} guesses are right"] if right else [])


@pytest.mark.parametrize("guess", ["A=2", 212, "1.9", "abc", "13", None])
def test_a_guess_without_a_digit_for_each_story_is_refused(guess: object) -> None:
    takes = [Take("no mask", "A kite.", 7.2, 0.1), Take("no RoPE", "Rado", 3.4, 0.6)]
    *lines, last = jukebox_table(takes, ["no RoPE", "no mask"], guess).splitlines()
    assert re.match(r"Your guess is '.+'; it needs 2 digits from 1 to 2, one for each story", last)
    assert not re.search("[✔✘]", "".join(lines))


def test_a_player_of_the_jukebox_asks_before_it_tells(
    model: CausalLM, tokenizer: Tokenizer
) -> None:
    frames = jukebox_film(model, tokenizer, PROMPT)
    assert len(frames) == 1 + 2 * len(BROKEN)
    for step, frame in enumerate(frames):
        items = frame.scene.items
        marks = sorted(item.text for name, item in items.items() if name.startswith("mark."))
        told = step // 2
        assert marks == sorted("?" * (len(BROKEN) - told) + "ABCDEF"[:told])
        newest = list(BROKEN)[max(0, (step + 1) // 2 - 1)]
        assert (newest in frame.caption) == (step > 0 and step % 2 == 0)
