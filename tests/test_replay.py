"""One attention call for all, and decode steps that are replayed: sizes, filling, fixed tensors.

That every answer is as without is in test_as_if_alone.py and test_ledger.py; that a GPU can record
it in test_devices.py; test_gpu.py runs where a GPU is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from engines import fill_with_nan, poison, random_model
from torch import Tensor

from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.engine.args import EngineArgs
from tutorial_engine.engine.config import EngineConfig
from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.engine.replay import (
    MOST_SLOTS,
    CudaGraphs,
    RecordedStep,
    ReplayRunner,
    Size,
)
from tutorial_engine.engine.runner import ModelRunner
from tutorial_engine.learn.stories.bugs import Zoo, edited, planted
from tutorial_engine.model.attention import BlockedAttention, SdpaAttention
from tutorial_engine.model.batch import Allocation, Batch
from tutorial_engine.model.batched_attention import (
    FEW,
    AlikeTogether,
    BatchedAttention,
    Varlen,
    alike,
    fast_attention,
    varlen_by_sequence,
    varlen_kernel,
)
from tutorial_engine.sampling.params import SamplingParams

MODEL = random_model()
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [2, 7], [1] * 11, [8, 8]]
VARLEN: dict[str, Varlen | None] = {"end to end": varlen_by_sequence, "padded": None}
every_way = pytest.mark.parametrize("how", VARLEN)


def engine(how: str, budget: int = 512, **limits: Any) -> LLMEngine:
    memory = poison(PagedKVCache.from_config(MODEL.config, block_size=4, num_blocks=64))
    runner = ReplayRunner(MODEL, memory.storage, BatchedAttention(memory.storage, VARLEN[how]))
    config = EngineConfig(max_model_len=48, max_num_batched_tokens=budget, **limits)
    return LLMEngine(MODEL, config=config, memory=memory, runner=runner)


def params(*lengths: int) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]


def tokens(one: LLMEngine, *lengths: int) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in one.generate(PROMPTS, params(*lengths))]


def test_a_size_is_the_smallest_power_of_two_with_room() -> None:
    assert [Size.of(n, 1).num_seqs for n in (1, 2, 3, 4, 5, 16, 17)] == [1, 2, 4, 4, 8, 16, 32]
    assert [Size.of(1, n).longest for n in (1, 64, 65, 128, 1000)] == [64, 64, 128, 128, 1024]
    assert Size.of(3, 100).num_slots == 4 * 128


@every_way
def test_a_batch_says_what_all_read(how: str) -> None:
    """Queries of three sequences, whose slots are a slice, scattered, and one."""
    contexts = [slice(4, 9), torch.tensor([20, 3, 11]), slice(30, 31)]
    new = [[7, 8], [11], [30]]
    firsts = (3, 2, 0)
    allocations = [Allocation(*one) for one in zip(firsts, new, contexts, strict=True)]
    batch = Batch.from_allocations([[1, 2], [3], [4]], allocations, ["a", "b", "c"])
    if how == "end to end":
        slots, query_starts, starts, longest_query, longest = batch.end_to_end
        assert slots.tolist() == [4, 5, 6, 7, 8, 20, 3, 11, 30]
        assert query_starts.tolist() == [0, 2, 3, 4] and starts.tolist() == [0, 5, 8, 9]
        assert query_starts.dtype == starts.dtype == torch.int32
        assert (longest_query, longest) == (2, 5)
    else:
        table, counts = batch.padded
        rows = [[4, 5, 6, 7, 8], [20, 3, 11, 11, 11], [30] * 5]
        assert table.tolist() == rows and counts.sum(1).tolist() == [5, 3, 1]


@every_way
def test_decode_steps_are_replayed_and_all_others_run_as_they_come(how: str) -> None:
    one = engine(how)
    alone = tokens(LLMEngine(MODEL), 9, 9, 9, 9)
    assert tokens(one, 9, 9, 9, 9) == alone
    assert isinstance(one.runner, ReplayRunner)
    assert (one.runner.num_forwards, one.runner.num_replays) == (9, 8), "prefill is not"
    assert {*one.runner.recorded} == {Size(4, 64)}
    assert tokens(one, 1, 3, 5, 9)[3] == alone[3], "fewer and fewer run along"
    assert {*one.runner.recorded} == {Size(4, 64), Size(2, 64), Size(1, 64)}


@every_way
def test_a_step_that_reads_too_much_is_not_recorded(how: str) -> None:
    one = engine(how)
    with patch("tutorial_engine.engine.replay.MOST_SLOTS", 4 * 64 - 1):
        wanted = tokens(one, 4, 4, 4, 2)
    assert isinstance(one.runner, ReplayRunner) and {*one.runner.recorded} == set()
    assert tokens(engine(how), 4, 4, 4, 2) == wanted and MOST_SLOTS >= 16 * 2048


@every_way
def test_a_half_read_prompt_of_one_token_gets_no_token(how: str) -> None:
    """A step whose rows all run one token, and not all are to be sampled."""
    one, plain = engine(how, budget=4), LLMEngine(MODEL, config=EngineConfig(max_model_len=48))
    assert tokens(one, 6, 6, 6, 6) == tokens(plain, 6, 6, 6, 6)


@every_way
def test_warming_up_records_every_size_and_changes_no_key(how: str) -> None:
    one = engine(how, max_num_seqs=3)
    before = tokens(one, 5, 5, 5, 5)
    storage = one.memory.storage
    kept = [x.clone() for x in (storage.k, storage.v)]  # type: ignore[attr-defined]
    one.warm_up()
    assert isinstance(one.runner, ReplayRunner)
    assert {*one.runner.recorded} == {Size(n, 64) for n in (1, 2, 4)}
    for a, b in zip(kept, (storage.k, storage.v), strict=True):  # type: ignore[attr-defined]
        assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    assert tokens(one, 5, 5, 5, 5) == before
    assert one.runner.num_replays > 0
    LLMEngine(MODEL).warm_up()  # nothing to record


def test_what_is_played_is_what_was_recorded() -> None:
    """A recording fills the tensor that it had at first; the logits that are handed out stay."""
    one = engine("end to end")
    runs: list[Tensor] = []

    def record(compute: Any) -> Any:
        out = compute()  # the warm-up
        runs.append(out)

        def play() -> Tensor:
            out.copy_(compute())  # a graph fills the tensor that it had when it was recorded
            return out

        return play

    assert isinstance(one.runner, ReplayRunner)
    one.runner._record = record
    seen: list[Tensor] = []
    run = one.runner.run
    with patch.object(one.runner, "run", lambda plan: seen.append(run(plan)) or seen[-1]):
        kept = tokens(one, 6, 6, 6, 6)
    assert kept == tokens(engine("padded"), 6, 6, 6, 6) and len(runs) == 1
    assert [[*step] for step in zip(*kept, strict=True)] == [x.argmax(-1).tolist() for x in seen]


def test_each_device_records_on_a_stream_of_its_own() -> None:
    """PyTorch's default stream for it belongs to one device: another one would record nothing."""
    with patch.object(torch, "cuda", MagicMock()) as cuda:
        cuda.Stream.side_effect = lambda device: MagicMock(device=device)
        current: list[Any] = ["default"]
        cuda.stream.side_effect = lambda stream: entered(current, stream)
        cuda.graph.side_effect = lambda graph, pool, stream: entered(current, ("graph", stream))
        for index in (0, 1):
            ran: list[Any] = []
            record = CudaGraphs(torch.device("cuda", index))
            play = record(lambda ran=ran: ran.append(current[-1]) or torch.zeros(1))  # type: ignore[misc]
            warm, (graph, recorded) = ran
            assert graph == "graph" and warm is recorded and warm.device.index == index
            play()
            assert len(ran) == 2, "what is played is the recording, not the function"


@contextmanager
def entered(current: list[Any], stream: Any) -> Iterator[None]:
    current.append(stream)
    yield
    current.pop()


def test_rows_that_are_too_many_repeat_the_shortest_context() -> None:
    one = engine("padded")
    tokens(one, 2, 3, 3, 3)  # then three rows run, in a step of four
    assert isinstance(one.runner, ReplayRunner)
    (step,) = one.runner.recorded.values()
    positions, lens = (step.numbers.split(step.parts)[i].tolist() for i in (1, 3))
    assert positions == [3, 12, 3, 3], "the prompts of 2, 11 and 2 tokens, and the one of 2 again"
    assert lens == [4, 13, 4, 4]


BUGS: Zoo = {
    "not filled again": edited(
        RecordedStep, "_fill", ("lens = [", "if self.numbers.any(): return\n    lens = [")
    ),
    "rows that are too many are others": edited(
        RecordedStep,
        "_fill",
        ("lens = [", "new_slots = [*new_slots[:-1], new_slots[0] + 1]; lens = ["),
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_caught(name: str) -> None:
    lengths = (9, 9, 9, 1)  # three rows in a step of four
    right = tokens(LLMEngine(MODEL), *lengths)
    with planted(name, BUGS):
        assert tokens(engine("end to end"), *lengths) != right


def test_where_there_is_no_gpu_nothing_is_replayed_and_the_reason_is_said() -> None:
    one = LLMEngine(MODEL)
    assert type(one.runner) is ModelRunner and isinstance(one.runner.attention, AlikeTogether)
    assert type(fast_attention(torch.device("cpu"))) is BlockedAttention, "no cache, no slots"
    assert varlen_kernel(torch.device("cpu"), torch.float32) == (None, "a CPU needs no such kernel")
    kernel, why = varlen_kernel(torch.device("cuda"), torch.float32)
    assert kernel is None and "for fp16 and bf16, the weights are torch.float32" in why
    with patch.object(torch.cuda, "get_device_capability", lambda device: (7, 5)):
        assert varlen_kernel(torch.device("cuda"), torch.float16)[0] is None
    assert EngineArgs(MODEL, enforce_eager=True).config.cuda_graphs is False
    with pytest.raises(ValueError, match="cuda_graphs is True or False, got 'no'"):
        EngineConfig(cuda_graphs="no")  # type: ignore[arg-type]


def decode_step(lens: list[int], num_slots: int = 400) -> Batch:
    """One new token of each; contexts lie scattered, the first one in one piece."""
    scattered = torch.randperm(num_slots - lens[0], generator=torch.Generator().manual_seed(3))
    own = (scattered + lens[0])[: sum(lens[1:])].split(lens[1:])
    contexts = [slice(0, lens[0]), *own]
    numbers = [torch.arange(num_slots)[slots] for slots in contexts]
    allocations = [
        Allocation(n - 1, [int(own[-1])], slots)
        for n, own, slots in zip(lens, numbers, contexts, strict=True)
    ]
    return Batch.from_allocations(
        [[1]] * len(lens), allocations, [f"{s}" for s in range(len(lens))]
    )


@pytest.mark.parametrize(
    ("most", "copied", "groups"),
    [
        (100, 90, [[0, 1, 2, 3, 4, 5]]),
        (100, 89, [[3], [0, 1, 5, 4, 2]]),
        (100, 25, [[3], [0], [1], [5, 4, 2]]),
        (100, 7, [[3], [0], [1], [5], [4], [2]]),
        (100, 6, []),
        (30, 90, [[3, 0], [1, 5, 4, 2]]),
        (5, 90, [[3], [0], [1, 5], [4, 2]]),
        (0, 90, [[3], [0], [1], [5], [4], [2]]),
    ],
)
def test_sequences_of_about_one_length_are_alike(
    most: int, copied: int, groups: list[list[int]]
) -> None:
    batch = decode_step([60, 30, 7, 90, 12, 25])
    found = alike(batch, most, copied)
    rows = [torch.arange(6)[one.rows].tolist() for one in found]
    assert rows == groups
    for group, (_, slots, mask) in zip(groups, found, strict=True):
        table = torch.arange(400)[slots].view(mask.shape)
        for s, own, counts in zip(group, table, mask, strict=True):
            context = batch.context_slots[s]
            context = torch.arange(400)[context] if isinstance(context, slice) else context
            assert own[counts].equal(context) and {*own.tolist()} == {*context.tolist()}


@pytest.mark.parametrize("lens", [[60, 30, 7, 90, 12, 25], [9] * 5, [1, 2, 3, 4, 5, 6, 300]])
@pytest.mark.parametrize("padding", [0, 20, 400])
@pytest.mark.parametrize("copied", [9, 400])
def test_alike_sequences_together_give_what_each_gives_alone(
    lens: list[int], padding: int, copied: int
) -> None:
    spec = KVCacheSpec(num_layers=2, num_kv_heads=2, k_head_dim=8, v_head_dim=4)
    storage, batch = fill_with_nan(KVStorage(spec, 400)), decode_step(lens)
    draw = torch.Generator().manual_seed(1)
    for slots in batch.context_slots:
        n = len(torch.arange(400)[slots])
        storage.k[:, slots] = torch.randn(2, n, 2, 8, generator=draw)
        storage.v[:, slots] = torch.randn(2, n, 2, 4, generator=draw)
    q = torch.randn(len(lens), 6, 8, generator=draw)
    k, v = (torch.randn(len(lens), 2, d, generator=draw) for d in (8, 4))
    slot = 96  # its bytes in this layer
    attention = AlikeTogether(storage, most_padding=padding * slot, most_copied=copied * slot)
    with (
        torch.inference_mode(),
        patch.object(KVStorage, "read", side_effect=AssertionError("a call for one alone")),
    ):
        together = attention.attend(1, q, k, v, batch)
    torch.testing.assert_close(together, SdpaAttention(storage).attend(1, q, k, v, batch))


@pytest.mark.parametrize(("num", "is_together"), [(FEW, False), (FEW + 1, True)])
@pytest.mark.parametrize("memory", [PagedKVCache, StaticKVCache])
def test_more_than_a_few_decode_together_where_their_context_is_copied(
    num: int, is_together: bool, memory: type
) -> None:
    sizes = (
        {"block_size": 1, "num_blocks": 200}
        if memory is PagedKVCache
        else {"max_seqs": 8, "max_len": 24}
    )
    made = poison(memory.from_config(MODEL.config, **sizes))
    one = LLMEngine(MODEL, config=EngineConfig(max_model_len=24, max_num_seqs=8), memory=made)
    prompts = [PROMPTS[s % 4] for s in range(num)]
    with patch.object(KVStorage, "read", autospec=True, side_effect=KVStorage.read) as read:
        outputs = one.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True))
    layers = MODEL.config.num_hidden_layers
    alone = num * layers * (1 if is_together and memory is PagedKVCache else 6)
    assert read.call_count == alone, "prefill, and decode steps where each has its own call"
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == generate_alone(prompt)


def generate_alone(prompt: list[int]) -> list[int]:
    """The tokens of a request that nobody shares the engine with."""
    [output] = LLMEngine(MODEL).generate([prompt], SamplingParams(max_tokens=6, ignore_eos=True))
    return [*output.outputs[0].token_ids]
