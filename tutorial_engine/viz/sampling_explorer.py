"""The sampling explorer: from logits to a draw, one filter a step.

Every number is what the engine's own temperature, filters and sampler make of the model's logits.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.model.batch import Batch
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import (
    FILTERS,
    Filter,
    Sampler,
    apply_temperature,
    filter_logits,
)
from tutorial_engine.viz.explorer import Explorer, button, decimal, number, slider, text
from tutorial_engine.viz.parts import BOLD, CENTRE, DEAF, MARGIN, RIGHT, TRACK, Sheet
from tutorial_engine.viz.request_look import cut_to, text_width
from tutorial_engine.viz.scene import HATCHED, Scene
from tutorial_engine.viz.style import BLUE, INK, PAPER, QUIET, RULE
from tutorial_engine.viz.tokens import token_label
from tutorial_engine.viz.words import counted, percent, share, tokens

SHOWN = 20  # tokens with a line of their own
DRAWS, MOST_DRAWS = 10, 200  # so many at a press of the button; more would not be instant
MOST_K = 50  # of the slider; 0 is off
WIDTH, LABEL, BAR = 960.0, 112.0, 190.0  # the canvas, where labels end, the longest bar
COLUMNS = (LABEL + 8, LABEL + 290, LABEL + 602)  # left ends of: before, after, drawn
STAGES, MASS, TOP, LINE = 74.0, 128.0, 226.0, 18.0  # tops of the parts; height of a line


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

    def __init__(self, model: Qwen3ForCausalLM, tokenizer: Tokenizer, prompt: str) -> None:
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
                "clear": button("clear", "forget the draws", self._clear),
            },
        )

    def _draw_more(self) -> None:
        self._set_draws(min(self.num_draws + DRAWS, MOST_DRAWS))

    def _clear(self) -> None:
        self._set_draws(0)

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
            return f"{name} is off: all {tokens(before.num_kept)} stay"
        asked = f"{name} {getattr(self.params, FILTERS[step - 2].__name__):g}"
        if now.num_kept == before.num_kept:
            return f"{asked} drops none of the {tokens(before.num_kept)} that were left"
        return (
            f"{asked} keeps {now.num_kept} of the {tokens(before.num_kept)} that were left, which "
            f"held {share(now.mass / before.mass)} of their probability"
        )

    def _order(self, step: int) -> str:
        """What another order of the filters would have kept."""
        if self.params.temperature == 0 or step < 2:
            return ""
        if step == len(self.stages) - 1 and sum(not one.is_off for one in self.stages[2:]) > 1:
            other = self._left(FILTERS[::-1])
            if other == self.stages[step].num_kept:
                return "; the reverse order of the filters would keep as many"
            return f"; the reverse order of the filters would keep {other}"
        here, before = self.stages[step], self.stages[step - 1]
        if FILTERS[step - 2].__name__ != "top_p" or here.is_off or before.is_off:
            return ""
        return (
            f"; top-p comes after top-k, so its {percent(self.params.top_p)} is counted on what "
            f"top-k left, and before top-k it would have kept {self._left([FILTERS[step - 2]])}"
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
        bottom = TOP + LINE * (len(self.labels) + 1)
        sheet = Sheet(WIDTH, bottom + 34, (MARGIN, bottom + 26))
        sheet.hint = "hover over a bar to read its numbers"
        now = self.stages[step]
        where = f"after {now.name}" if step else "before any filter"
        sheet.heading(f"{where}, {now.num_kept} of {tokens(len(self.logits))} can be drawn")
        prompt = cut_to(self.value("prompt"), 700, 12)
        sheet.note("prompt", MARGIN, 44, f"the token after “{prompt}”", 12)
        self._stages(sheet, step)
        self._mass(sheet, step)
        self._lines(sheet, step)
        return sheet

    def _stages(self, sheet: Sheet, step: int) -> None:
        """The operations from left to right, with their settings and how many tokens they leave."""
        sheet.text("order", MARGIN, STAGES - 10, "in this order", 12, **BOLD)
        pitch = (WIDTH - 2 * MARGIN) / len(self.stages)
        for i, stage in enumerate(self.stages):
            x = MARGIN + i * pitch
            box = (x, STAGES, pitch - 24, 40.0)
            ink, edge = (INK, QUIET) if i <= step else (QUIET, RULE)
            sheet.rect(f"stage{i}", box, PAPER, stroke=edge, rx=4)
            if i == step:
                sheet.outline(f"stage{i}.now", box, rx=4)
            where = x + (pitch - 24) / 2
            sheet.text(f"stage{i}.name", where, STAGES + 17, stage.setting, 12, **CENTRE, fill=ink)
            left = "changes nothing" if stage.is_off else f"{tokens(stage.num_kept)} left"
            sheet.note(f"stage{i}.left", where, STAGES + 33, left, 11, **CENTRE)
            if i:
                sheet.arrow(f"stage{i}.arrow", [(x - 22, STAGES + 20), (x - 3, STAGES + 20)], QUIET)

    def _mass(self, sheet: Sheet, step: int) -> None:
        """All the probability as one bar: what is kept, and what each filter has cut off."""
        now = self.stages[step]
        said = f"{share(now.mass)} of the probability is kept"
        if now.mass < 1:
            said += f" and becomes the new 100 %; {percent(1 - now.mass)} is lost"
        sheet.text("mass", MARGIN, MASS + 12, said, 12, **BOLD)
        x, y, wide = MARGIN, MASS + 20, WIDTH - 2 * MARGIN
        parts = [("kept", now.mass)]
        for before, stage in zip(self.stages[: step + 1], self.stages[1 : step + 1], strict=False):
            parts.append((f"lost to {stage.name}", before.mass - stage.mass))
        for i, (name, part) in enumerate(parts):
            if part <= 0:
                continue
            box = (x, y, wide * part, 24.0)
            tip = f"{name}: {100 * part:.1f} % of the probability"
            if i:
                sheet.cell(f"mass{i}", box, "reserved", tip=tip, rx=0, stroke=QUIET)
            else:
                sheet.rect(f"mass{i}", box, BLUE, tip)
            tries = [f"{name}: {share(part)}"]
            tries += [tries[0].removeprefix("lost to "), share(part)]
            fits = [words for words in tries if text_width(words, 11.5, bold=True) + 10 < box[2]]
            if fits:
                words = fits[0]
                if i:
                    half = text_width(words, 11.5, bold=True) / 2 + 3
                    paper = (x + box[2] / 2 - half, y + 4, 2 * half, 16.0)
                    sheet.rect(f"mass{i}.paper", paper, PAPER, **DEAF)
                sheet.inside(f"mass{i}.said", box, words, 11.5, fill=INK if i else PAPER, **BOLD)
            x += box[2]

    def _lines(self, sheet: Sheet, step: int) -> None:
        """A line for each of the likeliest tokens: before, after, and how often it was drawn."""
        first, now, count = self.stages[0], self.stages[step], len(self.draws(step))
        drawn, expected = Counter(self.draws(step)), count * now.probs
        most_drawn = max([3.0, *map(float, drawn.values()), float(expected.max())])
        heads = ["the model", f"after {now.name}" if step else "no filter yet"]
        heads.append(f"{counted(count, 'draw')}, seed {self.value('seed')}")
        for i, (x, head) in enumerate(zip(COLUMNS, heads, strict=True)):
            sheet.text(f"head{i}", x, TOP - 12, head, 12, **BOLD)
        if count:
            x = COLUMNS[2] + text_width(heads[2], 12, bold=True) + 14
            sheet.rect("expected", (x, TOP - 22, 2.5, 13), INK)
            sheet.note("expected.words", x + 8, TOP - 12, "expected")
        for i, (token, label) in enumerate(zip(self.shown_ids, self.labels, strict=True)):
            y = TOP + i * LINE
            a, b, is_kept = (
                float(first.probs[token]),
                float(now.probs[token]),
                bool(now.kept[token]),
            )
            style = {} if is_kept else {"text_decoration": "line-through", "fill": QUIET}
            words = cut_to(label, LABEL - MARGIN, 12, keep=True)
            sheet.text(f"token{i}", LABEL, y + 13, words, 12, **RIGHT, **style)
            self._bar(sheet, f"before{i}", (COLUMNS[0], y), a, f"“{label}”: {100 * a:.2f} %")
            if is_kept:
                tip = f"“{label}” after {now.name}: {100 * b:.2f} %"
                self._bar(sheet, f"after{i}", (COLUMNS[1], y), b, tip)
            else:
                self._dropped(sheet, f"after{i}", (COLUMNS[1], y), token, label, step)
            if count:
                n, want = drawn[token], float(expected[token])
                x, tip = COLUMNS[2], f"“{label}” drawn {n} times, expected {want:.1f}"
                sheet.bar(f"drawn{i}", (x, y + 3, BAR, 12), n / most_drawn, BLUE, tip)
                if is_kept:
                    at = x + BAR * want / most_drawn
                    sheet.rect(f"want{i}", (at - 1, y + 1, 2.5, 16), INK, **DEAF)
                if n:
                    sheet.text(f"drawn{i}.n", x + BAR + 8, y + 13, str(n), 11.5)
        self._others(sheet, step, drawn)

    def _bar(self, sheet: Sheet, name: str, at: tuple[float, float], part: float, tip: str) -> None:
        x, y = at
        sheet.bar(name, (x, y + 3, BAR, 12), part / self.most, BLUE, tip)
        sheet.text(f"{name}.n", x + BAR + 8, y + 13, f"{100 * part:.1f} %", 11.5)

    def _dropped(
        self,
        sheet: Sheet,
        name: str,
        at: tuple[float, float],
        token: int,
        label: str,
        step: int,
    ) -> None:
        """A token that cannot be drawn any more: who dropped it, and the probability it had."""
        x, y = at
        by = next(i for i in range(1, step + 1) if not self.stages[i].kept[token])
        before = self.stages[min(by - 1, 1)]  # so that lengths of all dropped ones compare
        had = float(before.probs[token])
        tip = (
            f"“{label}” was dropped by {self.stages[by].name}; after {before.name} it had "
            f"{100 * had:.2f} %"
        )
        sheet.rect(f"{name}.track", (x, y + 3, BAR, 12), PAPER, tip, stroke=TRACK)
        wide = max(BAR * had / self.most, 1.5)
        sheet.rect(name, (x, y + 3, wide, 12), HATCHED, stroke=QUIET, **DEAF)
        sheet.note(f"{name}.n", x + BAR + 8, y + 13, f"× {self.stages[by].name}", 11.5)

    def _others(self, sheet: Sheet, step: int, drawn: Counter[int]) -> None:
        """All the tokens that have no line, together."""
        count = len(self.logits) - len(self.shown_ids)
        if not count:
            return
        first, now = self.stages[0], self.stages[step]
        y = TOP + LINE * len(self.shown_ids) + 14
        p = 1 - float(first.probs[self.shown_ids].sum())
        sheet.text("others", COLUMNS[0], y, f"{count} others: {percent(p)} together", 11.5)
        kept = now.num_kept - int(now.kept[self.shown_ids].sum())
        p = 1 - float(now.probs[self.shown_ids].sum())
        said = f"{kept} others: {percent(p)} together" if kept else "no others"
        sheet.text("others.after", COLUMNS[1], y, said, 11.5)
        if drawn:
            n = drawn.total() - sum(drawn[token] for token in self.shown_ids)
            sheet.text("others.drawn", COLUMNS[2], y, f"others: {n}", 11.5)


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
