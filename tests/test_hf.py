"""Our cache under transformers' own generate(). (Under our loop: test_ledger.py.)"""

from typing import Any

import pytest
import torch
from checkpoints import (
    load_reference,
    random_sequences,
    save_random,
)
from engines import VOCAB, poison
from torch import Tensor

from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.lab.hf import OurCache
from tutorial_engine.model.config import ModelConfig

NEW = 10
PROMPTS = random_sequences([7, 3, 12], VOCAB)


@pytest.fixture(scope="module", params=[{}, {"num_key_value_heads": 1}, {"head_dim": 24}])
def peer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("peer")
    return load_reference(save_random(folder, seed=3, **request.param))


@pytest.fixture(scope="module")
def one_peer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_reference(save_random(tmp_path_factory.mktemp("peer"), seed=4))


def our_cache(peer: Any, rows: int = 1, max_len: int = 32) -> OurCache:
    config = ModelConfig.from_dict(peer.config.to_dict())
    cache = StaticKVCache.from_config(config, max_seqs=rows, max_len=max_len)
    poison(cache)
    return OurCache(cache)


def free_run(peer: Any, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """transformers' own greedy generate() → the new tokens [B, NEW]."""
    mask = torch.ones_like(ids) if mask is None else mask
    made = peer.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW, pad_token_id=0, **options
    )
    return made[:, ids.shape[1] :]


def memory(storage: KVStorage) -> bytes:
    """Every byte: NaN equals itself here."""
    parts = (x.contiguous().view(torch.uint8) for x in (storage.k, storage.v))
    return b"".join(part.numpy().tobytes() for part in parts)


def two_rows() -> Tensor:
    return torch.tensor(random_sequences([8, 8], VOCAB, seed=5))


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_generate_of_transformers_gives_the_same_with_our_cache(
    peer: Any, prompt: list[int]
) -> None:
    ids = torch.tensor([prompt])
    want = free_run(peer, ids)
    cache = our_cache(peer)
    assert torch.equal(free_run(peer, ids, past_key_values=cache), want)
    assert cache.get_seq_length() == len(prompt) + NEW - 1, "the last token was never run"
    assert want.unique().numel() >= 4


@pytest.mark.parametrize("padded", [0, 3])
def test_two_rows_one_padded_on_the_left_give_the_same(peer: Any, padded: int) -> None:
    ids = two_rows()
    mask = torch.ones_like(ids)
    mask[1, :padded] = 0
    want = free_run(peer, ids, mask)
    assert torch.equal(free_run(peer, ids, mask, past_key_values=our_cache(peer, 2)), want)
    assert not torch.equal(want[0], want[1])


@pytest.mark.parametrize(("have", "given"), [(1, 2), (2, 1)])
def test_other_number_of_rows_is_refused_and_nothing_written(
    one_peer: Any, have: int, given: int
) -> None:
    cache = our_cache(one_peer, have)
    before = memory(cache.cache.storage)
    with pytest.raises(ValueError, match=f"{have} rows.*{given}"):
        free_run(one_peer, two_rows()[:given], past_key_values=cache)
    assert memory(cache.cache.storage) == before and cache.num_tokens == 0
    ids = two_rows()[:have]
    assert torch.equal(free_run(one_peer, ids, past_key_values=cache), free_run(one_peer, ids))


def test_overflow_is_refused_and_the_cache_works_after_a_reset(one_peer: Any) -> None:
    cache = our_cache(one_peer, max_len=16)  # 7 + 10 − 1 tokens just fit, 12 + 10 − 1 do not
    long, short = torch.tensor([PROMPTS[2]]), torch.tensor([PROMPTS[0]])
    with pytest.raises(ValueError, match="row 0 would have 17 tokens, a row has room for 16"):
        free_run(one_peer, long, past_key_values=cache)
    assert cache.num_tokens == 16
    before = memory(cache.cache.storage)
    with pytest.raises(ValueError, match="row 0 would have 28 tokens, a row has room for 16"):
        one_peer(long, past_key_values=cache)
    assert memory(cache.cache.storage) == before and cache.num_tokens == 16, "nothing is written"
    cache.reset()
    assert torch.equal(free_run(one_peer, short, past_key_values=cache), free_run(one_peer, short))
    assert cache.num_tokens == 16
