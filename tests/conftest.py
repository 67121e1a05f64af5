"""What all tests share. Sets the environment before anything imports the hub client.

Property tests draw the same examples in every run; others with HYPOTHESIS_PROFILE=random, or
with --hypothesis-seed.
"""

import os
import signal

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here may need the network
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TE_REVEAL"] = "0"  # a question waits for a choice, and none is kept in a file

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from tokenizers import Tokenizer

from tutorial_engine.lab.real import NOT_HERE, needs_real, where_it_is
from tutorial_engine.model.checkpoint import load_model, load_tokenizer
from tutorial_engine.model.decoder import CausalLM

MakeCheckpoint = Callable[..., Path]
RUN_ONCE = ("count_flips()", "run_ranks(")  # no cell behind theirs changes what they read
torch.set_num_threads(1)  # with matrices this small, more threads only wait for each other


settings.register_profile("fixed", derandomize=True)
settings.register_profile("random", derandomize=False)


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell began it in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    seeded = config.getoption("--hypothesis-seed", None) is not None
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "random" if seeded else "fixed"))


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """What takes long is begun first, or one worker would be alone with it in the end.

    After all cells of a notebook those that reveal an answer run once more, and say the same; two
    that take long do not. A notebook that needs the real model is left out where that is not: what
    it would say is stored.
    """

    def is_quick(item: pytest.Item) -> bool:
        is_long = item.get_closest_marker("browser") or item.get_closest_marker("slow")
        return item.path.suffix != ".ipynb" and is_long is None

    def source(item: Any) -> str:
        """Of a notebook's cell whose output nbval compares."""
        return item.cell.source if hasattr(item, "cell") and item.options["check"] else ""

    items.sort(key=is_quick)
    for cell in [item for item in items if "predictions.reveal(" in source(item)]:
        if any(call in source(cell) for call in RUN_ONCE):
            continue
        last = max(i for i, item in enumerate(items) if item.parent is cell.parent)
        place = {"cell_num": cell.cell_num, "cell": cell.cell, "options": cell.options}
        again = type(cell).from_parent(cell.parent, name=f"{cell.name} again", **place)
        items.insert(last + 1, again)
    if not (where_it_is().is_dir() or os.environ.get("REQUIRE_REAL")):
        is_left_out = cache(needs_real)
        for cell in [item for item in items if hasattr(item, "cell") and is_left_out(item.path)]:
            cell.add_marker(pytest.mark.skip(reason=NOT_HERE))


def need_real() -> Path:
    """The real model's folder. Without it: a skip for a learner, a failure if it must be (CI)."""
    found = where_it_is()
    if not found.is_dir():
        if os.environ.get("REQUIRE_REAL"):
            pytest.fail("the real model is not here, and REQUIRE_REAL is set: make real")
        pytest.skip(NOT_HERE)
    return found


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same random numbers, alone or among others."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """Nothing here trains."""
    with torch.no_grad():
        yield


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> MakeCheckpoint:
    """A function that saves a random checkpoint into a folder of its own; see save_random."""
    from checkpoints import save_random  # which imports transformers: seconds

    made = 0

    def make(**changes: object) -> Path:
        nonlocal made
        made += 1
        return save_random(tmp_path / f"checkpoint{made}", **changes)

    return make


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One random checkpoint with a tokenizer, shared by all tests: read it, never write to it."""
    from checkpoints import save_random, save_tokenizer

    folder = save_random(tmp_path_factory.mktemp("shared") / "checkpoint", vocab_size=300)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def model() -> CausalLM:
    """The tiny model that ships, shared by all tests: look at it, never change it."""
    return load_model()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The tiny model's tokenizer."""
    return load_tokenizer()
