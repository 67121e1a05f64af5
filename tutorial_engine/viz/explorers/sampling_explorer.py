"""The sampling explorer: from logits to a draw, one filter a step.

Every number is what the engine's own temperature, filters and sampler make of the model's logits.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.model.batch import Batch
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import (
    FILTERS,
    Filter,
    Sampler,
    apply_temperature,
    filter_logits,
)
from tutorial_engine.viz.drawing.flow import (
    Piece,
    bar,
    cell,
    column,
    framed,
    over,
    row,
    show,
    table,
    words,
)
from tutorial_engine.viz.drawing.letters import cut_to, text_width
from tutorial_engine.viz.drawing.parts import BOLD, DEAF, FAINT, MARGIN, THICK, TRACK, Sheet, Style
from tutorial_engine.viz.drawing.scene import Scene
from tutorial_engine.viz.drawing.style import BLUE, INK, PAPER, QUIET, RULE
from tutorial_engine.viz.explorers.explorer import Explorer, button, decimal, number, slider, text
from tutorial_engine.viz.tokens import token_label
from tutorial_engine.viz.words import counted, percent, share, tokens

SHOWN = 20  # tokens with a line of their own
DRAWS, MOST_DRAWS = 10, 200  # so many at a press of the button; more would not be instant
MOST_K = 50  # of the slider; 0 is off
WIDTH, LABEL, BAR = 960.0, 102.0, 190.0  # of the canvas, the tokens, the longest bar


class Stage(NamedTuple):
    """What one step of the sampler leaves of V tokens.

    `kept` bool [V]; `probs` [V], which add up to 1 over the kept ones; `mass` is what these held
    after temperature. `is_off`: this step changed nothing, and why in `said`.
    """

    name: str
    setting: str
    kept: Tensor
    probs: Tensor
    mass: float
    is_off: bool = False

    @property
    def num_kept(self) -> int:
        """Tokens that can still be drawn."""
        return int(self.kept.sum())


class SamplingExplorer(Explorer):
    """Turn temperature, top-k, top-p and min-p, and see which tokens can still be drawn.

    Step 0 is the model's own distribution, each further step one operation of the sampler in the
    engine's order; the last shows draws. `prompt` should end where many tokens are likely.
    """

    title = "Sampling explorer"
    step_name = "filter"
    zoom = 1.3
    stands = "last"

    def __init__(self, model: CausalLM, tokenizer: Tokenizer, prompt: str) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.ran_prompt: str | None = None
        self.num_draws = DRAWS
        super().__init__(
            {
                "prompt": text("prompt", prompt),
                "seed": number("seed", 0, 0, 9999),
                "temperature": decimal("temperature", 1.0, 0.0, 2.0, 0.05),
                "top_k": slider("top-k (0 = off)", 18, 0, MOST_K),
                "top_p": decimal("top-p (1 = off)", 0.8, 0.05, 1.0, 0.05),
                "min_p": decimal("min-p (0 = off)", 0.0, 0.0, 0.5, 0.01),
            },
            {
                "draw": button(f"draw {DRAWS}", f"draw {DRAWS} more tokens", self._draw_more),
                "clear": button("clear", "forget the draws", partial(self._set_draws, 0)),
            },
        )

    def _draw_more(self) -> None:
        self._set_draws(min(self.num_draws + DRAWS, MOST_DRAWS))

    def _set_draws(self, count: int) -> None:
        self.num_draws = count
        self._rerun()

    @property
    def params(self) -> SamplingParams:
        """What the knobs ask for, as the engine takes it."""
        knobs = {name: self.value(name) for name in ("temperature", "top_k", "top_p", "min_p")}
        return SamplingParams(**knobs, seed=self.value("seed"))

    def rerun(self) -> int:
        """The model on a new prompt; the stages of the sampler and the draws at every change."""
        params, prompt = self.params, self.value("prompt")
        if prompt != self.ran_prompt:
            self.logits, self.ran_prompt = self._logits(prompt), prompt
        self.stages = stages(self.logits, params)
        before = self.stages[0].probs
        order = before.argsort(descending=True, stable=True)
        self.shown_ids = order[:SHOWN].tolist()
        self.labels = [self._label(token) for token in self.shown_ids]
        self._draws: dict[int, list[int]] = {}  # step -> what was drawn there
        self.most = max(float(stage.probs.max()) for stage in self.stages)
        return len(self.stages)

    @torch.inference_mode()
    def _logits(self, prompt: str) -> Tensor:
        """Logits of the token after the prompt, [V]. ValueError for one that cannot be run."""
        ids, room = self.tokenizer.encode(prompt).ids, self.model.config.max_position_embeddings
        if not ids:
            raise ValueError("The prompt is empty: type at least one character.")
        if len(ids) > room:
            raise ValueError(
                f"The prompt has {tokens(len(ids))}, and the model has room for {room}. Shorten it."
            )
        hidden = self.model(Batch.from_sequences([ids], device=self.model.device))
        logits = self.model.compute_logits(hidden[-1:])[0].float().cpu()
        return logits[: self.tokenizer.get_vocab_size()].clone()  # rows without a token: never

    def draws(self, step: int) -> list[int]:
        """Tokens that the engine's sampler draws when no later filter is on; the seed is the same.

        Only the step that is shown is computed.
        """
        if step not in self._draws:
            later: dict[str, Any] = {
                each.__name__: _off(each) for each in FILTERS[max(step - 1, 0) :]
            }
            params = replace(self.params, **later)
            if step == 0:
                params = replace(params, temperature=1.0)
            sampler = Sampler(params)
            self._draws[step] = [
                sampler.sample(self.logits).token_id for _ in range(self.num_draws)
            ]
        return self._draws[step]

    def _label(self, token: int) -> str:
        return token_label(self.tokenizer, token)

    # -- words ------------------------------------------------------------------------------------

    def caption(self, step: int) -> str:
        """What this operation did, and what its place in the order means."""
        return f"{self._did(step)}{self._order(step)}; {self._drawn(step)}."

    def _did(self, step: int) -> str:
        now, first, best = self.stages[step], self.stages[0], self.labels[0]
        if step == 0:
            top = float(first.probs[self.shown_ids].sum())
            return (
                f"The model gives each of {tokens(first.num_kept)} a probability: the likeliest, "
                f"“{best}”, has {percent(float(first.probs.max()))}, and the {len(self.labels)} "
                f"shown have {percent(top)} together"
            )
        if self.params.temperature == 0:
            if step == 1:
                return f"Temperature 0 is greedy: the likeliest token, “{best}”, is always taken"
            return f"Temperature 0 is greedy, so {now.name} is skipped"
        if step == 1:
            if now.is_off:
                return "Temperature 1 divides every logit by 1, which changes nothing"
            a, b = (percent(float(stage.probs.max())) for stage in (first, now))
            return (
                f"Temperature {self.params.temperature:g} divides every logit by "
                f"{self.params.temperature:g}: “{best}” goes from {a} to {b}, and no token is "
                "dropped"
            )
        before = self.stages[step - 1]
        name = f"{now.name[0].upper()}{now.name[1:]}"
        if now.is_off:
            return f"{name} is off: what was left ({tokens(before.num_kept)}) stays"
        asked = f"{name} {getattr(self.params, FILTERS[step - 2].__name__):g}"
        if now.num_kept == before.num_kept:
            return f"{asked} drops nothing of what was left ({tokens(now.num_kept)})"
        return (
            f"{asked} keeps {now.num_kept} of the {before.num_kept} tokens that were left; they "
            f"hold {share(now.mass / before.mass)} of the probability of these {before.num_kept}"
        )

    def _order(self, step: int) -> str:
        """What another order of the filters would have kept."""
        if self.params.temperature == 0 or step < 2:
            return ""
        if step == len(self.stages) - 1 and sum(not stage.is_off for stage in self.stages[2:]) > 1:
            other = self._left(FILTERS[::-1])
            if other == self.stages[step].num_kept:
                return "; the reverse order of the filters would keep as many"
            return f"; the reverse order of the filters would keep {other}"
        here, before = self.stages[step], self.stages[step - 1]
        if FILTERS[step - 2].__name__ != "top_p" or here.is_off or before.is_off:
            return ""
        return (
            f"; top-p comes after top-k, so its {percent(self.params.top_p)} is counted on what "
            f"top-k left; placed before top-k it would have kept {self._left([FILTERS[step - 2]])}"
        )

    def _left(self, filters: Sequence[Filter]) -> int:
        """Tokens that these filters would leave, in their order."""
        return int(filter_logits(self.logits, self.params, filters).isfinite().sum())

    def _drawn(self, step: int) -> str:
        """What is left in all, and what was drawn from it."""
        now, drawn = self.stages[step], self.draws(step)
        said = ""
        if step == len(self.stages) - 1 and self.params.temperature and now.mass < 1:
            said = f"in all {percent(1 - now.mass)} of the probability is lost; "
        if not drawn:
            return f"{said}nothing is drawn"
        different = counted(len(set(drawn)), "different token")
        if len(set(drawn)) == 1:
            different = f"only “{self._label(drawn[0])}”"
        return (
            f"{said}{counted(len(drawn), 'draw')} with seed {self.value('seed')} gave {different}"
        )

    # -- the picture ------------------------------------------------------------------------------

    def scene(self, step: int) -> Scene:
        """The stages on top, the mass that is kept and lost, and a line for each likely token."""
        now = self.stages[step]
        where = f"after {now.name}" if step else "before any filter"
        sheet = Sheet(WIDTH, 0)
        sheet.heading(f"{where}, {now.num_kept} of {tokens(len(self.logits))} can be drawn")
        prompt = cut_to(self.value("prompt"), 700, 12)
        stages = row(*(self._stage(i, step) for i in range(len(self.stages))), gap=2)
        above = column(
            words(f"the token after “{prompt}”", **FAINT).named("prompt"),
            words("in this order", **BOLD),
            stages,
            gap=5,
        )
        body = column(above, self._mass(step), self._lines(step), gap=14)
        return show(sheet, body, 31, "hover over a bar to read its numbers")

    def _stage(self, i: int, step: int) -> Piece:
        """An operation with its setting and how many tokens it leaves; an arrow leads to it."""
        stage, ink, edge = self.stages[i], INK, Style(stroke=QUIET)
        if i >= step:
            ink, edge = (INK, THICK) if i == step else (QUIET, Style(stroke=RULE))
        left = "changes nothing" if stage.is_off else f"{tokens(stage.num_kept)} left"
        said = [[words(stage.setting, fill=ink)], [words(left, 11, **FAINT)]]
        box = framed(
            table(said, between=0, least=(148,), across=[0.5]), 0, 8, fill=PAPER, rx=4, **edge
        )
        arrow = Piece(
            20, 0, lambda sheet, name, x, y: sheet.arrow(name, [(x, y), (x + 19, y)], QUIET)
        )
        return row(*[arrow] * (i > 0), box.named(f"stage{i}"), gap=2)

    def _mass(self, step: int) -> Piece:
        """All the probability as one bar: what is kept, and what each filter has cut off."""
        now, past = self.stages[step], pairwise(self.stages[: step + 1])
        said = f"{share(now.mass)} of the probability is kept"
        if now.mass < 1:
            said += f" and becomes the new 100 %; {percent(1 - now.mass)} is lost"
        parts = [("kept", now.mass)]
        parts += [(f"lost to {stage.name}", before.mass - stage.mass) for before, stage in past]
        boxes = [self._part(*mass).named(f"mass{i}") for i, mass in enumerate(parts) if mass[1] > 0]
        return column(words(said, **BOLD).named("mass"), row(*boxes, gap=0))

    def _part(self, name: str, amount: float) -> Piece:
        """A part of the mass, with as many of its words as it has room for."""
        wide = (WIDTH - 2 * MARGIN) * amount
        tip = f"{name}: {100 * amount:.1f} % of the probability"
        tries = [f"{name}: {share(amount)}", f"{name.removeprefix('lost to ')}: {share(amount)}"]
        tries.append(share(amount))
        fits = [said for said in tries if text_width(said, 11.5, True) + 10 < wide]
        if name == "kept":
            box, look = bar(1, wide, BLUE, tip, 24), Style(fill=PAPER)
        else:
            box = cell(wide, 24, "reserved", tip=tip, rx=0, stroke=QUIET)
            look = Style(stroke=PAPER, stroke_width=5, paint_order="stroke")
        return over(box, words([*fits, ""][0], 11.5, **BOLD, **DEAF, **look))

    def _lines(self, step: int) -> Piece:
        """A line for each of the likeliest tokens: before, after, and how often it was drawn."""
        first, now, shown = self.stages[0], self.stages[step], self.shown_ids
        drawn, count = Counter(self.draws(step)), len(self.draws(step))
        largest = max(3, *drawn.values(), count * float(now.probs.max()))
        head = words(f"{counted(count, 'draw')}, seed {self.value('seed')}", **BOLD).named("draws")
        key = row(bar(1, 2.5, INK, tall=13), words("expected", 11, **FAINT))
        after = f"after {now.name}" if step else "no filter yet"
        high = words("")._replace(tall=30)  # the heads stand apart from the first token's line
        heads = [high, words("the model", **BOLD), words(""), words(after, **BOLD), words("")]
        lines = [[*heads, row(head, *[key] * (count > 0), gap=14)._replace(wide=0)]]
        probs = first.probs[shown].tolist(), now.probs[shown].tolist(), now.kept[shown].tolist()
        for i, (before, left, is_kept) in enumerate(zip(*probs, strict=True)):
            label, n, want, style = self.labels[i], drawn[shown[i]], count * left, Style()
            if is_kept:
                shows = self._bar(left, f"“{label}” after {now.name}")
            else:
                shows, style = self._dropped(i, step), {"text_decoration": "line-through"} | FAINT
            name = words(label, 12, LABEL, **style).named(f"token{i}")
            lines.append([name, *self._bar(before, f"“{label}”"), *shows])
            if count:
                tip = f"“{label}” drawn {n} times, expected {want:.1f}"
                times = bar(n / largest, BAR, BLUE, tip, 12)
                if is_kept:
                    times = over(times, bar(1, 2.5, INK, tip, 16), across=want / largest)
                said = words(f"{n}" * is_kept, 11.5, **({} if n else FAINT))
                lines[-1] += [times, said.named(f"drawn{i}.n")]
        others = list[str]()
        for stage in (first, now):
            kept = stage.num_kept - int(stage.kept[shown].sum())
            together = percent(1 - float(stage.probs[shown].sum()))
            others += ["", f"{kept} others: {together} together" if kept else "no others"]
        if drawn:
            others += ["", f"others: {drawn.total() - sum(drawn[each] for each in shown)}"]
        lines.append([words(each, 11.5) for each in others])
        return table(lines, 8, 0, (LABEL, BAR, 76, BAR, 106, BAR), 18, across=[1])

    def _bar(self, share: float, name: str) -> list[Piece]:
        shown = bar(share / self.most, BAR, BLUE, f"{name}: {100 * share:.2f} %", 12)
        return [shown, words(f"{100 * share:.1f} %", 11.5)]

    def _dropped(self, i: int, step: int) -> list[Piece]:
        """A token that cannot be drawn any more: who dropped it, and the probability it had."""
        token, past = self.shown_ids[i], self.stages[: step + 1]
        by, name = next((at, stage.name) for at, stage in enumerate(past) if not stage.kept[token])
        before = self.stages[min(by - 1, 1)]  # so that lengths of all dropped ones compare
        had = float(before.probs[token])
        tip = f"“{self.labels[i]}” was dropped by {name}; after {before.name} it had "
        track = cell(BAR, 12, "free", tip=f"{tip}{100 * had:.2f} %", rx=0, stroke=TRACK)
        wide = max(BAR * had / self.most, 1.5)
        rest = cell(wide, 12, "reserved", rx=0, stroke=QUIET, **DEAF)
        return [over(track, rest, across=0), words(f"× {name}", 11.5, **FAINT)]


def _off(each: Filter) -> float:
    """What switches a filter off: the default of its parameter."""
    return getattr(SamplingParams, each.__name__)


def stages(logits: Tensor, params: SamplingParams) -> list[Stage]:
    """What is left of logits [V] after the model, the temperature, and each of the filters.

    With temperature 0 the sampler takes the best and skips the filters.
    """
    raw = logits.double().softmax(-1)
    everything = torch.ones_like(raw, dtype=torch.bool)
    found = [Stage("the model", "the model", everything, raw, 1.0)]
    setting = f"temperature {params.temperature:g}"
    names = {each.__name__: each.__name__.replace("_", "-") for each in FILTERS}
    if params.temperature == 0:
        best = torch.zeros_like(everything)
        best[logits.argmax()] = True
        mass = float(raw[best].sum())
        found.append(Stage(setting, f"{setting}: greedy", best, best.double(), mass))
        last = found[-1]
        found += [
            last._replace(name=n, setting=f"{n} skipped", is_off=True) for n in names.values()
        ]
        return found
    scores = apply_temperature(logits.float(), params.temperature)
    warm = scores.double().softmax(-1)
    found.append(
        Stage("temperature", setting, everything, warm, 1.0, is_off=params.temperature == 1)
    )
    for each in FILTERS:
        asked = getattr(params, each.__name__)
        scores = each(scores, asked)
        kept, name = scores.isfinite(), names[each.__name__]
        is_off = asked == _off(each)
        found.append(
            Stage(
                name,
                f"{name} off" if is_off else f"{name} {asked:g}",
                kept,
                scores.double().softmax(-1),
                1.0 if kept.all() else float(warm[kept].sum()),  # a sum of all may miss 1
                is_off,
            )
        )
    return found
