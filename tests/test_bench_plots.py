"""The benchmark's picture: the bars are the figures, the caption says them, files are the same."""

import copy
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from tools.bench import plots as bench_plots
from tools.bench.plots import bench_picture, main
from tutorial_engine.viz.picture import Picture

SECONDS = {  # (phase, context) -> seconds
    ("prefill", 128): {"transformers": 0.8, "llama.cpp": 0.4, "ours": 0.32},
    ("decode", 128): {"transformers": 0.14, "llama.cpp": 0.06, "ours": 0.04},
    ("prefill", 512): {"transformers": 3.2, "llama.cpp": 2.0, "ours": 1.6},
    ("decode", 512): {"transformers": 0.15, "llama.cpp": 0.05, "ours": 0.05},
}
FLOOR = {"prefill": 0.25, "decode": 0.032}


def figures(floors: bool = True) -> dict[str, Any]:
    rows, limits = [], []
    for (phase, context), seconds in SECONDS.items():
        tokens = context if phase == "prefill" else 1
        speed = {name: tokens / took for name, took in seconds.items()}
        row = {"phase": phase, "context": context, "seconds": dict(seconds)}
        rows.append({**row, "tokens_per_second": speed})
        least = FLOOR[phase] * (context / 128 if phase == "prefill" else 1)
        times = {name: took / least for name, took in seconds.items()}
        limits.append({"phase": phase, "context": context, "seconds": least, "times": times})
    return {
        "machine": {"dtype": "float32", "threads": 2, "processor": "Some Processor"},
        "settings": {"shape": "tiny", "rounds": 9, "ours": "ours", "peer": "transformers"},
        "rows": rows,
        "floors": limits if floors else [],
    }


def with_serving() -> dict[str, Any]:
    speeds = {
        **{"transformers": 15.0, "transformers continuous": 9.0, "llama.cpp": 20.0},
        **{"ours, slots first": 63.0, "ours": 60.0},
    }
    made = figures()
    made["settings"]["serving_rounds"] = 3
    return {**made, "serving": {"num_requests": 16, "wanted_per_second": speeds}}


@pytest.fixture
def axes(monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """The panels, caught before they become bytes."""
    caught: list[Axes] = []
    real = bench_plots.finish

    def catch(figure: Figure, caption: str) -> Picture:
        caught.extend(figure.axes)
        return real(figure, caption)

    monkeypatch.setattr(bench_plots, "finish", catch)
    return caught


def test_bars_are_as_high_as_the_figures(axes: list[Axes]) -> None:
    bench_picture(figures())
    for ax, phase in zip(axes, ("decode", "prefill"), strict=True):
        drawn = {bars.get_label(): [bar.get_height() for bar in bars] for bars in ax.containers}
        for name, heights in drawn.items():
            took = [SECONDS[phase, context][name] for context in (128, 512)]
            want = [1000 * s for s in took]
            if phase == "prefill":
                want = [128 / took[0], 512 / took[1]]
            assert heights == pytest.approx(want)
        assert list(drawn) == ["transformers", "llama.cpp", "ours"]
        said = [text.get_text() for text in ax.texts]
        assert ("140" in said and "40" in said) if phase == "decode" else "400" in said


def test_floor_is_a_line_across_each_group(axes: list[Axes]) -> None:
    bench_picture(figures())
    heights = [[line.get_ydata()[0] for line in ax.get_lines()] for ax in axes]
    assert heights[0] == pytest.approx([32.0, 32.0])  # ms
    assert heights[1] == pytest.approx([512.0, 512.0])  # tokens per second
    axes.clear()
    bench_picture(figures(floors=False))
    assert not [line for ax in axes for line in ax.get_lines()]


def test_bars_differ_by_more_than_colour(axes: list[Axes]) -> None:
    bench_picture(figures())
    looks = [bars.patches[0] for bars in axes[0].containers]
    assert len({bar.get_hatch() for bar in looks}) == len(looks)
    assert len({to_hex(bar.get_edgecolor()) for bar in looks}) == len(looks)
    assert looks[-1].get_hatch() is None, "ours is the solid one"


def test_bars_do_not_cover_each_other(axes: list[Axes]) -> None:
    bench_picture(figures())
    for ax in axes:
        sides = sorted(
            (bar.get_x(), bar.get_x() + bar.get_width()) for bars in ax.containers for bar in bars
        )
        assert all(one[1] <= two[0] for one, two in pairwise(sides))


def test_caption_is_computed_from_the_figures() -> None:
    caption = bench_picture(figures()).caption
    assert "tiny in float32 on 2 threads of Some Processor, medians of 9 rounds" in caption
    assert "after a prompt of 128 and 512 tokens each new one takes us 40 and 50 ms" in caption
    assert "3.50 and 3.00× as fast as transformers, 1.50 and 1.00× as fast as llama.cpp" in caption
    assert "1.25 and 1.56× the limit set by memory" in caption
    assert "runs at 400 and 320 tokens/s, 2.50 and 2.00× as fast as transformers" in caption
    assert "limit" not in bench_picture(figures(floors=False)).caption


def test_whoever_did_not_run_has_no_bar(axes: list[Axes]) -> None:
    fewer = copy.deepcopy(figures())
    for row in fewer["rows"][:2]:
        del row["seconds"]["llama.cpp"]
    caption = bench_picture(fewer).caption
    assert "llama.cpp" not in caption
    assert [len(bars.patches) for bars in axes[0].containers] == [2, 1, 2]


def test_servers_have_a_panel_of_their_own(axes: list[Axes]) -> None:
    made = with_serving()
    caption = bench_picture(made).caption
    assert len(axes) == 3
    speeds = made["serving"]["wanted_per_second"]
    assert [bars.patches[0].get_height() for bars in axes[2].containers] == list(speeds.values())
    named = [label.get_text().replace("\n", " ") for label in axes[2].get_xticklabels()]
    assert named == list(speeds)
    looks = [bars.patches[0] for bars in axes[2].containers]
    assert len({bar.get_hatch() for bar in looks}) == len(looks)
    assert looks[-1].get_hatch() is None, "ours is the solid one"
    decode = {bars.get_label(): bars.patches[0].get_hatch() for bars in axes[0].containers}
    assert [decode[name] for name in ("transformers", "llama.cpp", "ours")] == [
        looks[i].get_hatch() for i in (0, 2, 4)
    ], "who is in several panels looks the same in all"
    assert "; 16 ragged requests at once get 60 wanted tokens/s (medians of 3 rounds)" in caption
    assert "4.00× as many as from transformers, 3.00× as many as from llama.cpp." in caption
    axes.clear()
    assert "ragged" not in bench_picture(figures()).caption and len(axes) == 2


def test_picture_is_deterministic_and_as_wide_as_a_readme(tmp_path: Path) -> None:
    one, two = bench_picture(figures()), bench_picture(figures())
    assert (one.png, one.svg) == (two.png, two.svg)
    one.save(tmp_path, "bench")
    assert Image.open(tmp_path / "bench.png").width == 900


def test_command_writes_what_the_suffix_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "bench.json"
    source.write_text(json.dumps(figures()))
    picture = bench_picture(figures())
    assert main([str(source), str(tmp_path / "a.png")]) == 0
    assert main([str(source), str(tmp_path / "a.svg")]) == 0
    assert (tmp_path / "a.png").read_bytes() == picture.png
    assert (tmp_path / "a.svg").read_text(encoding="utf-8") == picture.svg
    assert picture.caption in capsys.readouterr().out


def test_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "bench.json"
    with pytest.raises(SystemExit):
        main([str(source), "bench.jpg"])
    assert "must end in .png or .svg, got 'bench.jpg'" in capsys.readouterr().err
    assert main([str(source), str(tmp_path / "a.png")]) == 1
    assert "bench.json" in capsys.readouterr().err
    source.write_text(json.dumps({**figures(), "rows": []}))
    assert main([str(source), str(tmp_path / "a.png")]) == 1
    assert "no rows" in capsys.readouterr().err
    assert not (tmp_path / "a.png").exists()
