"""Every number of the README is that of the engine, or of the file that it links."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.lab.beside_vllm import read_runs, recorded_decisions
from tutorial_engine.model.checkpoint import load_tokenizer
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BENCH = ROOT / "docs" / "bench"
CORE = ("model", "sampling", "cache", "engine", "trace")


def said(pattern: str) -> list[float]:
    """The numbers that the README has in this place, the only one."""
    (found,) = re.findall(pattern, README)
    each = found if isinstance(found, tuple) else (found,)
    return [float(number.replace(",", "")) for number in each]


def lines_of(*files: Path) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def test_the_engine_is_as_long_as_it_says() -> None:
    package = ROOT / "tutorial_engine"
    core = [file for room in CORE for file in (package / room).rglob("*.py")]
    (told,) = said(r"about ([\d,]+) lines with their docstrings")
    assert lines_of(*core) == pytest.approx(told, rel=0.03)
    ten = re.findall(r"\]\((tutorial_engine/\w+/\w+\.py)\)", README)
    (told,) = said(r"These ten files[^.]*; together they have about ([\d,]+) lines")
    assert len(ten) == 10
    assert lines_of(*(ROOT / file for file in ten)) == pytest.approx(told, rel=0.03)
    (told,) = said(r"vLLM's scheduler has [\d,]+ lines, [^.]*and this one (\d+)")
    assert lines_of(package / "engine" / "scheduler.py") == told


def test_the_runs_of_vllm_are_counted() -> None:
    runs = recorded_decisions() + read_runs(ROOT / "tests" / "vllm_asked_again.json.gz")
    assert said(r"\[(\d+) recorded runs\]") == [len(runs)]
    assert said(r"in all ([\d,]+) steps of") == [sum(len(run["steps"]) for run in runs)]


def test_speed_is_that_of_the_linked_pages() -> None:
    page = (BENCH / "README.md").read_text(encoding="utf-8")
    shape = "".join(re.findall(r"^## qwen3-0.6b,.*?(?=^## |\Z)", page, re.M | re.S))
    tables = re.findall(r"^\| decode at \d+ +\|.*\n((?:\|.*\n)+)", shape, re.M)
    line = re.compile(r"^\| ours +\| [^|]+ \| ([\d.]+) ", re.M)
    ours = [float(line.findall(one)[0]) for one in tables]
    told = said(r"\[([\d.]+) to ([\d.]+) times\]\(docs/bench/README.md\)")
    assert told == [round(min(ours), 1), round(max(ours), 1)]
    page = (BENCH / "vllm.md").read_text(encoding="utf-8")
    compiled = re.findall(r"^\| vLLM compiled +\| [^|]+ \| ([\d.]+) ", page, re.M)
    told = said(r"\[([\d.]+) to ([\d.]+) times\]\(docs/bench/vllm.md\)")
    assert told == [round(float(edge(compiled, key=float)), 1) for edge in (min, max)]
    (table,) = re.findall(r"^\| qwen3-0.6b, 8 requests .*\n((?:\|.*\n)+)", page, re.M)
    same = re.findall(r"^\| vLLM .*\| (\d+) of (\d+) \(", table, re.M)
    assert {tuple(map(float, one)) for one in same} == {tuple(said(r"\[(\d+) of (\d+) tokens\]"))}
    chats = re.findall(r"chats with SmolLM2-135M-Instruct say the same, .* (\d+) tokens", page)
    assert said(r"\[all (\d+) tokens\]") == list(map(float, chats))


def test_the_page_on_vllm_names_every_field_of_sampling_params() -> None:
    page = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| `SamplingParams` takes \|(.*)$", page, re.M)
    asked = [field.name for field in fields(SamplingParams) if field.init]
    assert re.findall(r"`(\w+)`", row) == asked


def test_the_mistake_that_it_shows_is_told_so(model: CausalLM) -> None:
    class LongestFirst(Scheduler):
        def next_waiting(self):  # type: ignore[no-untyped-def]
            max(self.waiting, key=lambda request: request.num_prompt_tokens)

    with pytest.raises(ValueError, match="is a `return` missing") as told:
        LLMEngine(model, load_tokenizer(), scheduler=LongestFirst).generate("Once")
    assert f"ValueError: {told.value}\n" in README


def hours_of(told: str) -> float:
    """Of a time as pages say it, "1¾ + ½"."""
    fractions = {"¼": 0.25, "½": 0.5, "¾": 0.75, "⅔": 2 / 3}
    parts = re.findall(r"(\d*)([¼½¾⅔]?)", told.replace(" ", ""))
    return sum(int(whole or 0) + fractions.get(part, 0) for whole, part in parts)


def test_the_hours_add_up_and_teachers_read_the_same() -> None:
    rows = re.findall(r"^\| \[(\w\w) [^|]*<br>([\d¼½¾⅔ +]+) h\b", README, re.M)
    hours = {code: hours_of(told) for code, told in rows}
    everything, numbered = said(r"about (\d+) hours, the six numbered ones (\d+)")
    assert len(hours) == 9 and round(sum(hours.values())) == everything
    assert round(sum(time for code, time in hours.items() if code[0] == "0")) == numbered
    syllabus = (ROOT / "docs/teaching/syllabus.md").read_text(encoding="utf-8")
    for code in (code for code in hours if code[0] == "0"):
        page = (ROOT / f"docs/teaching/{code}.md").read_text(encoding="utf-8")
        (least, most), *_ = re.findall(r"^Beginners need (\S+) to (\S+) hours", page, re.M)
        assert hours_of(least) == hours[code] < hours_of(most) <= 1.5 * hours[code]
        assert re.search(rf"{code}\s(takes them )?{least} to {most}\b", syllabus), code
