"""From a row of logits to a token: filters, one draw, logprobs.

Knows scores over a vocabulary and the parameters of one request; knows no text, model or queue.
Shapes: S sequences, V vocabulary. Probabilities are computed in fp32 or finer.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tutorial_engine.sampling.params import SamplingParams, check_params

# fp32 logits give probabilities to about 1e-7: closer to a limit than this counts as on it, or
# 0.5 + 0.3 would reach 0.8 on some machines only.
SLACK = 5e-7


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """logits / temperature, of any shape: below 1 sharpens, above 1 flattens. ValueError for 0."""
    if temperature <= 0:
        raise ValueError(f"cannot divide by temperature {temperature}; greedy takes the argmax")
    return logits / temperature


def top_k(logits: Tensor, k: int) -> Tensor:
    """The k best of [..., V]; values below the k-th largest become −inf, ties with it stay.

    k ≤ 0 or ≥ V is off (Fan et al., 2018).
    """
    if k <= 0 or k >= logits.shape[-1]:
        return logits
    kth = logits.topk(k).values[..., -1:]  # [..., 1]
    return logits.masked_fill(logits < kth, -math.inf)


def top_p(logits: Tensor, p: float) -> Tensor:
    """The nucleus of [..., V]: the fewest best that together hold p (Holtzman et al., 2019).

    A token becomes −inf iff the strictly better ones already hold ≥ p: equal tokens stay or go
    together, and the best always stays. p ≥ 1 is off.
    """
    if p >= 1:
        return logits
    ranked = logits.sort(dim=-1, descending=True).values
    probs = ranked.double().softmax(-1)
    stays = probs.cumsum(-1) - probs < p - SLACK  # [..., V] by rank: the mass before this one
    stays[..., 0] = True
    worst = ranked.masked_fill(~stays, math.inf).amin(-1, keepdim=True)  # [..., 1]
    return logits.masked_fill(logits < worst, -math.inf)


def min_p(logits: Tensor, p: float) -> Tensor:
    """Those of [..., V] at least p times as likely as the best; others become −inf. 0 is off.

    prob < p · max is logit − best < log p: no softmax needed (Nguyen et al., 2024).
    """
    if p <= 0:
        return logits
    behind = logits - logits.amax(-1, keepdim=True)  # [..., V], best 0
    return logits.masked_fill(behind < math.log(p) - SLACK, -math.inf)


# In this order; each is asked with the field of SamplingParams that has its name.
Filter = Callable[[Tensor, Any], Tensor]
FILTERS: tuple[Filter, ...] = (top_k, top_p, min_p)


def filter_logits(
    logits: Tensor, params: SamplingParams, filters: Sequence[Filter] = FILTERS
) -> Tensor:
    """Temperature, then each of the filters: fp32 [..., V], dropped entries −inf.

    ValueError, naming the filter, for one that gives anything but as many scores.
    """
    logits = apply_temperature(logits.float(), params.temperature)
    shape = logits.shape
    for keep_some in filters:
        logits = keep_some(logits, getattr(params, keep_some.__name__))
        if not isinstance(logits, Tensor) or logits.shape != shape:
            raise _no_logits(keep_some.__name__, logits, list(shape))
    return logits


def _no_logits(name: str, got: object, wanted: list[int]) -> ValueError:
    got = list(got.shape) if isinstance(got, Tensor) else got
    hint = ": is a `return` missing?" if got is None else ""
    return ValueError(f"the filter {name} gave {got!r}, logits {wanted} are wanted{hint}")


class SampledToken(NamedTuple):
    """A token and, when logprobs are wanted, how likely the model itself found it.

    Logprobs are natural logs of the raw softmax, before temperature, filters and masks; rank 1 is
    the likeliest (equals share a rank); top_logprobs holds (token id, logprob), best first.
    """

    token_id: int
    logprob: float | None = None
    rank: int | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Chooses the tokens of ONE request; its CPU generator is seeded once, here.

    A sampled token takes one draw, a greedy one none, so neither the neighbours in a batch nor a
    preemption change the text. EOS and stop ids cannot be chosen before min_tokens are sampled, EOS
    not even with ignore_eos, as in vLLM. `filters` may be exchanged.
    """

    def __init__(self, params: SamplingParams, eos_token_ids: Sequence[int] = ()) -> None:
        check_params(params)
        self.params = params
        self.num_sampled = 0
        self.filters = FILTERS
        self._enders = {*params.stop_token_ids, *eos_token_ids}
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    @property
    def takes_best(self) -> bool:
        """Is its next token just the best one, and nothing asked about it?

        Never for a subclass with a `sample` of its own: that is to be asked.
        """
        is_overridden = type(self).sample is not Sampler.sample
        masked = self.num_sampled < self.params.min_tokens
        return not (
            is_overridden or masked or self.params.temperature or self.params.logprobs is not None
        )

    def sample(self, logits: Tensor) -> SampledToken:
        """The next token from logits [V]. ValueError, and nothing drawn, when they are no scores.

        Greedy: the best, the lowest id among equals.
        """
        if logits.ndim != 1 or not len(logits):
            raise ValueError(f"one request takes logits [V], got shape {list(logits.shape)}")
        if not math.isfinite(largest := float(logits.max())):
            raise _no_scores(largest)
        logits = logits.float().cpu()  # where the generator is, and some devices know no float64
        scores = self._masked(logits)
        token_id = self._draw(scores) if self.params.temperature else int(scores.argmax())
        self.num_sampled += 1
        n = self.params.logprobs
        if n is None:
            return SampledToken(token_id)
        logprobs = logits.log_softmax(-1)  # [V], raw
        logprob = float(logprobs[token_id])
        best, ids = logprobs.sort(descending=True, stable=True)  # lowest id first among equals
        pairs = zip(ids[:n].tolist(), best[:n].tolist(), strict=True)
        return SampledToken(token_id, logprob, 1 + int((best > logprob).sum()), tuple(pairs))

    def _masked(self, logits: Tensor) -> Tensor:
        """logits [V]; before min_tokens without what would end it."""
        if self.num_sampled >= self.params.min_tokens:
            return logits
        scores = logits.clone()
        scores[[i for i in self._enders if i < len(scores)]] = -math.inf
        if scores.max() == -math.inf:
            raise ValueError(f"min_tokens={self.params.min_tokens} masks every possible token")
        return scores

    def _draw(self, scores: Tensor) -> int:
        """A token id by temperature and filters, from one number of the generator."""
        cumulated = filter_logits(scores, self.params, self.filters).double().softmax(-1).cumsum(-1)
        if cumulated[-1].isnan():
            if apply_temperature(scores, self.params.temperature).max().isfinite():
                names = ", ".join(keep_some.__name__ for keep_some in self.filters)
                raise ValueError(f"no token is left after the filters {names}: keep one at least")
            raise ValueError(
                f"logits up to {float(scores.max())} overflow fp32 when divided by "
                f"temperature {self.params.temperature}; raise it"
            )
        u = torch.rand((), dtype=torch.float64, generator=self._generator).item()  # [0, 1)
        return int(torch.searchsorted(cumulated, u * cumulated[-1], right=True))


def best_of_each(logits: Tensor) -> list[tuple[float, int]]:
    """The largest score of each row of logits [S, V], and its token: one call for all rows.

    The lowest id among equals. Both come to the CPU in one copy: fp32 holds ids up to 2^24.
    """
    scores, token_ids = torch.stack([x.float() for x in logits.max(-1)]).tolist()
    return list(zip(scores, map(int, token_ids), strict=True))


def next_token(sampler: Sampler, logits: Tensor, row: int, best: tuple[float, int]) -> SampledToken:
    """The token of one request from its row of logits [S, V]; `best` is that row's best_of_each.

    ValueError for logits that are no numbers, and for a sampler of one's own whose answer is no
    token.
    """
    largest, token_id = best
    if not math.isfinite(largest):
        raise _no_scores(largest)
    if sampler.takes_best:
        sampler.num_sampled += 1
        return SampledToken(token_id)
    token: object = sampler.sample(logits[row])
    if not isinstance(token, SampledToken) or not isinstance(token.token_id, int):
        hint = ": is a `return` missing?" if token is None else ", with an int as its token_id"
        wanted = f"a SampledToken is wanted{hint}"
    elif not 0 <= token.token_id < logits.shape[1]:
        wanted = f"token ids run from 0 to {logits.shape[1] - 1}"
    else:
        return token
    raise ValueError(f"{type(sampler).__name__}.sample gave {token!r}; {wanted}")


def _no_scores(largest: float) -> ValueError:
    """For logits with NaN or +inf, which win every max, or −inf: then all of them are."""
    return ValueError(
        f"these logits are not numbers, the largest is {largest}; look at what made them: NaN in "
        "weights, fp16 overflow, a fully masked row, an unwritten slot"
    )
