"""What makes a notebook a lesson: verdicts, predictions that are kept, sources, other engines."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learners import forgotten, untouched, with_a_gap

from tutorial_engine.engine.config import EngineConfig
from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.learn.exercises.verdict import (
    Verdict,
    check_close,
    guarded,
    has_gap,
    is_open,
)
from tutorial_engine.learn.parts.holder import yours
from tutorial_engine.learn.predict import UNDECIDED, Predictions
from tutorial_engine.learn.source import num_lines, show_source
from tutorial_engine.learn.stories.dry_runs import Job, dry_run, steps
from tutorial_engine.learn.stories.elsewhere import box
from tutorial_engine.model.attention import naive_attention
from tutorial_engine.model.decoder import CausalLM, DecoderLayer
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.events import Recorder

VIEW = "application/vnd.jupyter.widget-view+json"


def test_what_is_open_is_told_by_the_code_and_not_by_running_it() -> None:
    class Open:
        def update(self, k: object) -> Any:
            """Nothing yet."""

    assert is_open(untouched) and is_open(Open.update) and is_open(Open().update)
    assert not any(map(is_open, (with_a_gap, forgotten, naive_attention, len, Open, None, 3)))
    assert not is_open(lambda x: x) and not is_open(lambda: 0) and not is_open(lambda: "")
    assert has_gap(with_a_gap) and has_gap(untouched) and has_gap(Open) is False
    namespace: dict[str, Any] = {}
    exec("def typed(x):\n    y = x\n    ...", namespace)
    assert not has_gap(namespace["typed"]), "its source cannot be read: then it has none"


# -- verdicts -----------------------------------------------------------------------------------


def test_interrupting_a_check_is_not_swallowed() -> None:
    def interrupted() -> Verdict:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guarded("f", interrupted)


def test_close_numbers_pass_and_a_difference_is_told_with_place_and_size() -> None:
    verdict = check_close(torch.ones(2, 3), torch.ones(2, 3) + 3e-6, 2e-5, "twins")
    said = "twins: max |Δ| < 1e-05 over 6 numbers, tolerance 2e-05"
    assert verdict == Verdict(True, said)
    a = torch.zeros(2, 3, 4)
    b = a.clone()
    b[1, 2, 3], b[0, 1, 0] = -0.25, 0.125
    verdict = check_close(a, b, 1e-5, "twins")
    assert verdict == Verdict(False, "twins: differs most at [1, 2, 3], by 0.25 > 1e-05")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_never_close(bad: float) -> None:
    a = torch.zeros(2, 2)
    b = a.clone()
    b[1, 0] = bad
    for first, second in ((a, b), (b, a)):
        verdict = check_close(first, second, 1e9, "twins")
        assert verdict.ok is False and "[1, 0], by inf" in verdict.message
    nan = torch.tensor([float("nan")])
    assert check_close(nan, nan, 1, "x").ok is False


# -- predictions --------------------------------------------------------------------------------


@pytest.fixture
def predictions() -> Predictions:
    return Predictions()


def test_right_and_wrong_predictions_are_told_and_scored(
    predictions: Predictions, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, choice in (("a", "1"), ("b", "2"), ("c", None)):
        question = predictions.ask(name, "How many?", ["1", "2"])
        assert question.choice is None and question.buttons.value == UNDECIDED
        if choice is not None:
            question.buttons.value = choice
        assert predictions.reveal(name, "1") is (choice is not None)
    assert capsys.readouterr().out.splitlines() == [
        "Answer: 1. ✔ As you predicted.",
        "Answer: 1. ✘ You predicted: 2. Read on to see why.",
        "Choose an answer above, then run this cell again.",
    ]
    assert predictions.score() == "1 of 2 predictions were right; 1 not made."


@pytest.mark.parametrize("choice", ["1", "2", None])
def test_choice_is_kept_when_asked_again_and_says_the_same(
    predictions: Predictions, capsys: pytest.CaptureFixture[str], choice: str | None
) -> None:
    predictions.ask("a", "?", ["1", "2"]).buttons.value = choice or UNDECIDED
    assert predictions.score() == "0 of 0 predictions were right; 0 not made."
    told = []
    for _ in range(2):
        assert predictions.ask("a", "?", ["1", "2"]).choice == choice
        told.append((predictions.reveal("a", 1), capsys.readouterr().out, predictions.score()))
    assert told[0] == told[1]
    assert predictions.questions["a"].buttons.disabled is (choice is not None)
    assert predictions.ask("a", "?", ["3", "4"]).choice is None, "its option is gone"
    assert len(predictions.questions) == 1


def test_revealed_question_cannot_be_changed_any_more(predictions: Predictions) -> None:
    with pytest.raises(ValueError, match="no question 'a' was asked; run its cell first"):
        predictions.reveal("a", "1")
    question = predictions.ask("a", "?", ["1", "2"])
    assert predictions.reveal("a", "2") is False
    assert not question.buttons.disabled  # nothing was chosen: it waits
    question.buttons.value = "1"
    predictions.reveal("a", "2")
    assert question.buttons.disabled and question.truth == "2"
    assert predictions.ask("a", "?", ["1", "2"]).buttons.disabled, "nor by asking again"


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        *[("22", "22"), (22, "22"), (np.int64(22), "22"), (torch.tensor(22), "22")],
        *[(1, "1"), (0, "22"), (2, "half"), (3, "True"), (True, "True"), ("half", "half")],
    ],
)
def test_truth_is_an_option_its_index_or_its_value(
    predictions: Predictions, truth: object, answer: str
) -> None:
    predictions.ask("a", "?", ["22", "1", "half", "True"]).buttons.value = "1"
    assert predictions.reveal("a", truth) is True
    assert predictions.questions["a"].truth == answer


@pytest.mark.parametrize("truth", [4, -1, "none", False, 1.5, None, torch.tensor(9)])
def test_truth_that_is_no_option_is_refused(predictions: Predictions, truth: object) -> None:
    question = predictions.ask("a", "?", ["22", "1", "half", "True"])
    with pytest.raises(ValueError, match=r"is none of the options .* nor the index of one"):
        predictions.reveal("a", truth)
    assert question.truth is None


def test_choices_are_there_after_a_restart_until_their_file_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TE_REVEAL")
    monkeypatch.chdir(tmp_path)
    before, file = Predictions("03"), tmp_path / "my_predictions_03.json"
    for name, choice in (("a", "1"), ("b", "2"), ("c", "1"), ("d", "2")):
        before.ask(name, "?", ["1", "2"]).buttons.value = choice
    before.questions["b"].buttons.value = UNDECIDED
    before.reveal("a", "2")
    after = Predictions("03")
    asked = [after.ask(name, "?", ["1", "2"]) for name in "abc"]
    assert [question.choice for question in asked] == ["1", None, "1"]
    assert after.reveal("a", "2") is True and after.reveal("b", "1") is False
    assert after.ask("d", "?", ["3", "4"]).choice is None, "the question has other options now"
    asked[2].buttons.value = "2"
    assert Predictions("03").ask("c", "?", ["1", "2"]).choice == "2"
    assert Predictions("04").ask("c", "?", ["1", "2"]).choice is None, "another notebook"
    for text in ("[1, 2]", "{", "\x00", '{"c": [1]}'):
        file.write_text(text, encoding="utf-8")
        assert Predictions("03").ask("c", "?", ["1", "2"]).choice is None, "no file of ours"
    file.unlink()
    file.mkdir()  # nobody can write there
    deaf = Predictions("03").ask("c", "?", ["1", "2"])
    deaf.buttons.value = "1"
    assert deaf.choice == "1"


@pytest.mark.parametrize("reveal", ["0", "1", None])
def test_choices_are_kept_for_a_learner_in_a_notebook_only(
    reveal: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build and a copy with solutions read and write no file, nor does who names no notebook."""
    monkeypatch.delenv("TE_REVEAL")
    monkeypatch.chdir(tmp_path)
    if reveal is not None:
        (tmp_path / "my_predictions_03.json").write_text('{"a": "1"}', encoding="utf-8")
        monkeypatch.setenv("TE_REVEAL", reveal)
    mine = Predictions("03" if reveal else None)
    assert mine.ask("a", "?", ["1", "2"]).choice is None
    mine.questions["a"].buttons.value = "2"
    kept = [file.read_text(encoding="utf-8") for file in tmp_path.iterdir()]
    assert kept == ['{"a": "1"}'] * (reveal is not None)


def test_question_is_shown_live_and_as_text(predictions: Predictions) -> None:
    question = predictions.ask("a", "Is 1 < 2 & so on?", ["yes", "<script>"])
    data = question._repr_mimebundle_()
    assert data[VIEW]["model_id"] == question.view.model_id
    assert data["text/plain"] == "Predict: Is 1 < 2 & so on?\n  ( ) yes\n  ( ) <script>"
    title = question.view.children[0].value
    assert title == "<b>Predict:</b> Is 1 &lt; 2 &amp; so on?"
    assert question.buttons in question.view.children


# -- sources ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "thing",
    [naive_attention, DecoderLayer.forward, DecoderLayer, Verdict, Predictions.reveal],
)
def test_source_is_the_installed_code_without_its_docstring(
    thing: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert thing.__doc__
    show_source(thing)
    said = capsys.readouterr().out.splitlines()
    real = inspect.getsource(thing).rstrip().splitlines()
    left_out = [line for line in real if line not in said]
    quotes = [i for i, line in enumerate(real) if '"""' in line]
    size = 1 if real[quotes[0]].count('"""') == 2 else quotes[1] - quotes[0] + 1
    assert said == real[: quotes[0]] + real[quotes[0] + size :]
    assert '"""' in left_out[0] and thing.__doc__.split("\n")[0].strip() in left_out[0]


def test_lines_of_a_file_are_counted_in_the_installed_code() -> None:
    for thing in (Predictions, Predictions.reveal):
        assert num_lines(thing) == len(Path(inspect.getfile(Predictions)).read_text().splitlines())


# -- a learner's number, used -----------------------------------------------------------------


def fails(x: float) -> Any:
    raise KeyError("moth")


@pytest.mark.parametrize(
    ("function", "package", "used", "said"),
    [
        (lambda x: [0, 1, 16], [0, 1, 16], [0, 1, 16], "✔ your <lambda>: "),
        (lambda x: torch.tensor([0, 1, 16]), [0, 1, 16], [0, 1, 16], "✔ your <lambda>: "),
        (lambda x: (float(i) for i in range(2)), [0, 1], [0, 1], "✔ your <lambda>: [0, 1]"),
        (lambda x: x * (1 + 1e-7), 3, 3 * (1 + 1e-7), "✔ your <lambda>: "),
        (lambda x: [0, 1], [0, 1, 16], [0, 1, 16], "✘ your <lambda> gives "),
        (lambda x: 4, 3, 3, "✘ your <lambda> gives "),
        (lambda x: 0.003306017257273197, 0.95, 0.95, "gives 0.00330602; the package's: 0.95"),
        (lambda x: None, 3, 3, "the package's <lambda>: 3"),
        (untouched, [5], [5], "the package's untouched: [5]"),
        (fails, [5], [5], "✘ your fails gives KeyError: 'moth'; the package's: [5]"),
    ],
)
def test_right_answer_is_used_and_any_other_is_told_and_replaced(
    function: Callable[..., Any],
    package: Any,
    used: Any,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert yours(function, package, 3) == used
    assert said in capsys.readouterr().out


# -- a scheduler without a model ----------------------------------------------------------------


def test_dry_run_is_the_real_scheduler_without_the_model(model: CausalLM) -> None:
    jobs = [Job("A", 10, 6), Job("B", 7, 3), Job("C", 3, 5)]
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 8}
    dry = dry_run(Scheduler, jobs, EngineConfig(**limits))
    recorder = Recorder()
    engine = LLMEngine(model, config=EngineConfig(**limits, max_model_len=64), trace=recorder)
    for job in jobs:
        params = SamplingParams(max_tokens=job.new_tokens, ignore_eos=True)
        engine.add_request(job.name, [65] * job.prompt_len, params)
    engine.run()
    assert steps(dry) == steps(recorder.trace())
    assert dry.num_steps == engine.num_steps == len(steps(dry))


# -- other engines ------------------------------------------------------------------------------


def test_an_unknown_topic_is_told_which_there_are() -> None:
    with pytest.raises(ValueError, match="there is no box 'beam'; there are fork, admission, "):
        box("beam")
