"""Launches counted without a GPU, a profiler's events, and the figures that are told."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from tools.bench.record import FOLDER, gpu_page
from tutorial_engine.lab.on_gpu import (
    ONE_BY_ONE,
    Operations,
    count_launches,
    launches_and_work,
    launches_of_layer,
    profile_step,
)
from tutorial_engine.learn.exercises.lesson_a2 import GpuMemory

SHAPE = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    "max_position_embeddings": 512,
}


def test_launches_follow_from_layers_and_calls_alone() -> None:
    """A call for each: K, V and attention of each sequence, in each layer, and once their sum."""
    alone, many = (count_launches(n, one_call=False, shape=SHAPE, context=8) for n in (1, 6))
    assert many - alone == 5 * (5 * 3 + 1), "the outputs are put together where there are several"
    for changes in ({"hidden_size": 64}, {"vocab_size": 99}, {"intermediate_size": 96}):
        assert count_launches(1, one_call=False, shape=SHAPE | changes, context=8) == alone
    one, all_of_them = (count_launches(n, one_call=True, shape=SHAPE, context=8) for n in (2, 60))
    assert one == all_of_them < many
    twice = count_launches(2, one_call=True, shape=SHAPE | {"num_hidden_layers": 10}, context=16)
    assert 1.8 * one < twice < 2 * one


def test_what_was_measured_is_what_is_counted() -> None:
    """The H100 was launched at about as often: its contexts were neighbours, and not gathered."""
    assert ONE_BY_ONE.launches is not None
    alone = count_launches(1, one_call=False, context=8)
    gathers = 28 * launches_of_layer(1, one_call=False, context=8)["index_select"]
    assert abs(alone - gathers - ONE_BY_ONE.launches) < 0.05 * alone


def test_views_and_memory_that_nobody_fills_need_no_kernel() -> None:
    x = torch.ones(3)
    with torch.inference_mode(), Operations() as seen:  # a cast needs one
        x.view(-1).to(x.dtype).add_(x.half()).new_empty(3)
    assert seen.kernels == {"to": 1, "add": 1}


def event(name: str, on_gpu: bool, start: float, end: float) -> Any:
    times = SimpleNamespace(start=start, end=end)
    device = DeviceType.CUDA if on_gpu else DeviceType.CPU
    return SimpleNamespace(name=name, device_type=device, time_range=times)


def test_work_is_counted_once_where_kernels_overlap() -> None:
    events = [
        event("aten::mm", False, 0, 50),
        event("cudaLaunchKernel", False, 1, 3),
        event("cudaGraphLaunch", False, 4, 5),
        event("cudaMemcpyAsync", False, 6, 7),
        event("gemm", True, 10, 20),
        event("norm", True, 15, 30),
        event("inside", True, 16, 18),
        event("later", True, 40, 41),
    ]
    launches, busy = launches_and_work(events)
    assert launches == 2 and busy == pytest.approx(21e-6)
    assert launches_and_work([]) == (0, 0)


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no GPU here"):
        profile_step(lambda: None)


def test_the_page_is_made_from_the_figures() -> None:
    assert gpu_page() == (FOLDER / "gpu.md").read_text(encoding="utf-8")


def test_a_place_is_given_away_when_nobody_knows_its_tensor() -> None:
    gpu = GpuMemory(8)
    first, second = gpu.tensor([1, 2]), gpu.tensor([3, 4, 5])
    place = gpu.place_of(first)
    del first
    assert gpu.place_of(gpu.tensor([7, 7, 7])) == 5, "it is too small for three"
    third = gpu.tensor([8, 9])
    assert gpu.place_of(third) == place and second.tolist() == [3, 4, 5]
    assert gpu.record(lambda x: x + 1, third)().tolist() == [9, 10] and gpu.num_replays == 1
    view = third[1:]
    del third
    fourth = gpu.tensor([6, 6])
    assert gpu.place_of(fourth) == 5 and view.tolist() == [9], "a view holds the place, too"
    with pytest.raises(ValueError, match="does not lie in the GPU"):
        gpu.record(lambda x: x, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="no place for 4 numbers"):
        gpu.tensor(range(4))
