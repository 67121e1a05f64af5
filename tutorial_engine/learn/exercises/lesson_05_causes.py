"""The check of the detective exercise: why is the hit rate 0 %?"""

from collections.abc import Mapping, Sequence

from tutorial_engine.lab import hit_rate
from tutorial_engine.lab.hit_rate import CAUSES, Case, cases, cure_table
from tutorial_engine.learn.exercises.verdict import Verdict
from tutorial_engine.model.checkpoint import load_model, load_tokenizer


def check_causes(answers: Mapping[str, object], runs: Sequence[Case] | None = None) -> Verdict:
    """Check {"run 1": one of CAUSES, ...}: a wrong one is answered by a fact that rules it out.

    `runs` are the cases, if they are there already.
    """
    runs = cases(load_model(), load_tokenizer()) if runs is None else runs
    if not isinstance(answers, Mapping):
        return Verdict(False, f"the answers are a dict, {{'run 1': a cause, ...}}; got {answers!r}")
    open_ones = [run.name for run in runs if answers.get(run.name) in (None, ..., "")]
    if answers and not any(run.name in answers for run in runs):
        got = ", ".join(map(repr, answers))
        return Verdict(False, f"the keys are 'run 1' to 'run {len(runs)}'; got {got}")
    if len(open_ones) == len(runs):
        return Verdict(None, "not done yet: name the cause of each run")
    given = {name: _cause(answer) for name, answer in answers.items()}
    for name, answer in given.items():
        if name not in {run.name for run in runs}:
            return Verdict(False, f"there is no {name!r}: the runs are run 1 to run {len(runs)}")
        if answer not in CAUSES and name not in open_ones:
            names = "SHORT, BEGINS, SALT, EVICTED, NOT_YET or RUNNING"
            return Verdict(False, f"{name}: {answer!r} is no cause: give {names}")
    right = [run.name for run in runs if given.get(run.name) == run.cause]
    for run in runs:
        if run.name not in [*right, *open_ones]:
            said = f"{len(right)} of {len(runs)} are right. {run.name} is not {given[run.name]!r}"
            return Verdict(False, f"{said}: {run.why_not(str(given[run.name]))}")
    if open_ones:
        return Verdict(None, f"right so far; still to name: {', '.join(open_ones)}")
    return Verdict(True, f"all {len(runs)} causes\n{cure_table(runs)}")


def _cause(answer: object) -> object:
    """A cause by its text or by its name, however it is written, or as it is."""
    if not isinstance(answer, str):
        return answer
    said = answer.strip()
    said = getattr(hit_rate, said.upper(), said)
    return next((c for c in CAUSES if c.casefold() == str(said).casefold()), answer)
