"""The picture of the ranks: every head is drawn where it is, every number is the run's."""

import functools
from dataclasses import replace

import pytest
from checkpoints import QWEN3_06B
from traces import check_words, items

from tutorial_engine.parallel.report import ParallelReport
from tutorial_engine.parallel.tensor_parallel import Traffic
from tutorial_engine.viz.parallel_plots import ranks_picture
from tutorial_engine.viz.picture import Picture

REPORT = ParallelReport(  # the tiny model on two ranks: 10 forwards of 20 tokens together
    tp_size=2,
    backend="gloo",
    dtype="float32",
    sizes={
        "num_hidden_layers": 4,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
    prompt_token_ids=(),
    token_ids=(),
    texts=(),
    weight_bytes=(3_546_880, 3_546_880),
    weight_bytes_alone=6_692_608,
    replicated_bytes=401_152,
    kv_bytes=(65_536, 65_536),
    kv_bytes_alone=131_072,
    num_forwards=10,
    num_tokens=20,
    traffic=Traffic(2 * 4 * 10, 20 * 2 * 4 * 192 * 4),
    digests=("a", "a"),
    seconds=1.0,
)


@functools.cache
def drawn() -> Picture:
    return ranks_picture(REPORT)


def other(size: int, **sizes: int) -> ParallelReport:
    """The report with another number of ranks and other sizes."""
    return replace(
        REPORT,
        tp_size=size,
        sizes={**REPORT.sizes, **sizes},
        weight_bytes=(10**9,) * size,
        kv_bytes=(2 * 10**8,) * size,
    )


def own(picture: Picture, kind: str, rank: int) -> list[int]:
    """The parts of a row that are filled as this rank's own."""
    found = items(picture)
    names = [name for name in found if name.startswith(f"{kind}.{rank}.") and name.count(".") == 2]
    return [int(name.split(".")[2]) for name in names if f"{name}.hatch" in found]


def test_every_head_is_on_one_rank_with_the_group_that_reads_it() -> None:
    assert [own(drawn(), "q", rank) for rank in range(2)] == [[0, 1, 2], [3, 4, 5]]
    assert [own(drawn(), "k, v", rank) for rank in range(2)] == [[0], [1]]
    assert [own(drawn(), "mlp", rank) for rank in range(2)] == [[0], [1]]
    four = ranks_picture(other(4, num_attention_heads=16, num_key_value_heads=8))
    assert [own(four, "k, v", rank) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_key_head_is_as_wide_as_its_query_heads() -> None:
    found = items(drawn())
    first, last, group = (found[name].attrib for name in ("q.0.0", "q.0.2", "k, v.0.0"))
    assert float(first["x"]) == float(group["x"])
    end = float(last["x"]) + float(last["width"])
    assert end == pytest.approx(float(group["x"]) + float(group["width"]))


def test_caption_and_labels_have_the_numbers_of_the_run() -> None:
    found = items(drawn())
    for number in (1, 2):
        assert found[f"sum.{number}.line.1"].text == "40 in this run"
        assert found[f"sum.{number}.line.2"].text == "61,440 bytes"
    assert drawn().caption == (
        "Each of 2 ranks has 3 of 6 query heads, 1 of 2 K/V heads and 256 of 512 MLP columns of "
        "every layer, 3,546,880 of 6,692,608 bytes of weights and 65,536 of 131,072 of K/V; 20 "
        "tokens in 10 forwards took 80 all-reduces (2 a layer and forward) of 122,880 bytes "
        "together, 6,144 a token."
    )


def test_embedding_and_head_are_on_every_rank() -> None:
    found = items(drawn())
    looks = {found[f"{part}.{rank}"].attrib["fill"] for part in ("embedding", "head")
             for rank in range(2)}  # fmt: skip
    assert len(looks) == 1
    assert found["legend.2"].text == (
        f"on every rank, with the norms: {REPORT.replicated_bytes:,} bytes of weights"
    )


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("heads", [(8, 8), (16, 8), (64, 8), (48, 48)])
def test_any_split_is_readable(size: int, heads: tuple[int, int]) -> None:
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    sizes |= {"vocab_size": QWEN3_06B.vocab_size, "intermediate_size": 24_576}
    check_words(ranks_picture(other(size, **sizes)))


def test_the_picture_is_readable_small_and_the_same_every_time() -> None:
    check_words(drawn())
    assert len(drawn().png) <= 60_000
    assert ranks_picture(REPORT) == drawn()


def test_what_could_not_be_told_apart_is_refused() -> None:
    for size, heads in ((16, 16), (2, 128)):
        with pytest.raises(ValueError, match=f"{size} ranks and {heads} heads are too many"):
            ranks_picture(other(size, num_attention_heads=heads))
