"""A stale block in a picture: whose tokens a request reads as its own.

A recorder of requests that run one after the other on pages, and what it saw of the blocks that the
last of them found. Knows pages and traces; draws scenes.
"""

from collections.abc import Mapping
from typing import NamedTuple

from tokenizers import Tokenizer

from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.events import Admitted, Scheduled
from tutorial_engine.viz.drawing.flow import words
from tutorial_engine.viz.drawing.letters import cut_to
from tutorial_engine.viz.drawing.parts import BOLD, MARGIN, WIDTH, Sheet
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.request_look import chip, look
from tutorial_engine.viz.drawing.style import RED, RULE
from tutorial_engine.viz.tokens import token_labels
from tutorial_engine.viz.words import counted, listed, numbered

RIGHT_PART, LINE, TOP = 520.0, 108.0, 50.0  # where blocks begin; from request to request
SLOT, BETWEEN, TALL = 56.0, 18.0, 30.0
MAX_BLOCKS, MAX_REQUESTS = 2, 6


class Held(NamedTuple):
    """What lies in a slot: the token of which request, and at which position of its text."""

    who: int
    position: int
    label: str


class Leak(NamedTuple):
    """Requests one after the other, and the blocks that the last one found in the prefix cache.

    `held`: after each request but the last, and block by block, what lies in these blocks; the last
    one reads what lay there then. `wanted`: block by block, its own tokens at these places.
    """

    names: tuple[str, ...]
    prompts: tuple[str, ...]
    answers: tuple[str, ...]
    blocks: tuple[int, ...]
    held: tuple[tuple[tuple[Held, ...], ...], ...]
    wanted: tuple[tuple[str, ...], ...]

    @property
    def stale(self) -> list[int]:
        """The blocks that do not hold the tokens which the last request looked for."""
        there = self.held[-1] if self.held else ()
        return [
            block
            for block, slots, wanted in zip(self.blocks, there, self.wanted, strict=True)
            if tuple(slot.label for slot in slots) != wanted
        ]

    def __repr__(self) -> str:
        requests = zip(self.names, self.prompts, self.answers, strict=True)
        return "\n".join(f"{who}: {prompt!r}\n  → {answer!r}" for who, prompt, answer in requests)


def record_leak(
    model: CausalLM,
    tokenizer: Tokenizer,
    memory: PagedKVCache,
    asked: Mapping[str, str],
    max_tokens: int,
) -> Leak:
    """Serve name → prompt one after the other, greedy, on a traced memory; what lay where."""
    engine = LLMEngine(
        model, tokenizer, EngineConfig(max_num_seqs=1), memory=memory, clock=VirtualClock()
    )
    names = list(asked)
    for name, prompt in asked.items():
        engine.add_request(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    outputs = {output.request_id: output for output in engine.run()}
    labels = {
        name: token_labels(tokenizer, [*out.prompt_token_ids, *out.outputs[0].token_ids])
        for name, out in outputs.items()
    }
    assert memory.trace is not None, "what lies where is read from it"
    lies: dict[int, Held] = {}
    after: dict[str, dict[int, Held]] = {}
    found: tuple[int, ...] = ()
    for event in memory.trace.events:
        if isinstance(event, Admitted) and event.request_id == names[-1]:
            found = event.cached_slots
        elif isinstance(event, Scheduled):
            name = event.request_id
            for position, slot in enumerate(event.slots, event.first_position):
                lies[slot] = Held(names.index(name), position, labels[name][position])
            after[name] = dict(lies)
    size = memory.block_size
    pieces = [found[i : i + size] for i in range(0, len(found), size)]
    return Leak(
        tuple(names),
        tuple(asked.values()),
        tuple(outputs[name].outputs[0].text for name in names),
        tuple(piece[0] // size for piece in pieces),
        tuple(
            tuple(tuple(after[name][slot] for slot in piece) for piece in pieces)
            for name in names[:-1]
        ),
        tuple(tuple(labels[names[-1]][i * size : (i + 1) * size]) for i in range(len(pieces))),
    )


def leak_picture(leak: Leak) -> Picture:
    """A line for each request: what it asked and got, and what lies in the blocks in question.

    ValueError where the last request found no block, or for more than can be drawn.
    """
    if not leak.blocks:
        raise ValueError(f"{leak.names[-1]} found no block: there is nothing to read in one")
    if len(leak.blocks) > MAX_BLOCKS or len(leak.names) > MAX_REQUESTS:
        room = "{blocks} blocks, {names} requests: this picture has room for {most} and {many}"
        asked = {"blocks": len(leak.blocks), "names": len(leak.names)}
        raise ValueError(room.format(**asked, most=MAX_BLOCKS, many=MAX_REQUESTS))
    sheet = Sheet(WIDTH, TOP + LINE * len(leak.names) + 22)
    where = numbered(leak.blocks, "block")
    in_blocks = f"K and V in {where}"
    sheet.heading("Whose text lies in the blocks that are found?", in_blocks)
    for i in range(len(leak.names)):
        _request(sheet, leak, i)
    return sheet.picture(_caption(leak), zoom=1.0)


def _user(leak: Leak, i: int) -> int:
    """Requests with the same prompt are the same user's."""
    return leak.prompts.index(leak.prompts[i])


def _request(sheet: Sheet, leak: Leak, i: int) -> None:
    y, is_last = TOP + LINE * i, i == len(leak.names) - 1
    sheet.add(f"rule.{i}", "line", x1=MARGIN, x2=WIDTH - MARGIN, y1=y - 8, y2=y - 8, stroke=RULE)
    chip(sheet, f"user.{i}", MARGIN, y + 10, leak.names[i], look(_user(leak, i)))
    room = RIGHT_PART - 50
    asks = f"asks: “{leak.prompts[i]}”"
    prompt = cut_to(asks, room, 13, keep=True)
    sheet.text(f"prompt.{i}", MARGIN + 20, y + 34, prompt, 13)
    ink = {"fill": RED, **BOLD} if is_last and leak.stale else {}
    gets = "gets: “{answer}…”".format(answer=" ".join(leak.answers[i].split()))
    words(gets, 13, room, 2, **ink).draw(sheet, f"answer.{i}", MARGIN + 20, y + 41)
    held = leak.held[-1] if is_last else leak.held[i]
    for number, (block, slots) in enumerate(zip(leak.blocks, held, strict=True)):
        x = RIGHT_PART + number * (4 * SLOT + BETWEEN)
        _block(sheet, leak, i, f"{i}.{number}", x, y, block, slots, leak.wanted[number])


def _block(
    sheet: Sheet,
    leak: Leak,
    i: int,
    name: str,
    x: float,
    y: float,
    block: int,
    slots: tuple[Held, ...],
    wanted: tuple[str, ...],
) -> None:
    """A block after a request; for the last one, what it looked for above what it reads."""
    is_last, wide = i == len(leak.names) - 1, 4 * SLOT / len(slots)
    text = "".join(wanted).replace("·", " ").strip()
    head = "block {block}, found as “{text}”" if is_last else "block {block}"
    head = head.format(block=block, text=text)
    sheet.text(f"{name}.head", x, y + 14, cut_to(head, 4 * SLOT, 11.5, True, True), 11.5, **BOLD)
    for place, slot in enumerate(slots):
        box = (x + place * wide, y + 22, wide - 3, TALL)
        name_of, at = leak.names[slot.who], slot.position
        tip = f"{name_of}, position {at}"
        user = look(_user(leak, slot.who))
        sheet.cell(f"{name}.{place}", box, "solid", user, tip, slot.label, 12)
    facts = _whose(leak, slots)
    if is_last:
        begin = leak.blocks.index(block) * len(slots)
        holds = "but it holds {tokens}" if block in leak.stale else "it holds {tokens}"
        positions = numbered(range(begin, begin + len(slots)), "token")
        facts = [holds.format(tokens=facts[0]), f"and is read as {positions}"]
    if is_last and block in leak.stale:
        sheet.outline(f"{name}.stale", (x, y + 22, 4 * SLOT - 3, TALL), 2, stroke=RED)
    for row, said in enumerate(facts):
        room = 4 * SLOT + BETWEEN - 4
        sheet.note(f"{name}.told.{row}", x, y + 69 + 16 * row, cut_to(said, room, 11, keep=True))


def _whose(leak: Leak, slots: tuple[Held, ...]) -> list[str]:
    """Of whom most of it is, and from where in the text; and below, of whom the rest still is."""
    owners = [slot.who for slot in slots]
    owner = max(owners, key=lambda who: (owners.count(who), who))
    positions = [slot.position for slot in slots if slot.who == owner]
    mine = numbered(positions, "token")
    facts = [f"{mine} of {leak.names[owner]}"]
    others = [leak.names[who] for who in owners if who != owner]
    if others:
        names = listed(dict.fromkeys(others))
        facts.append(f"and {len(others)} still of {names}")
    return facts


def _caption(leak: Leak) -> str:
    last, first = leak.names[-1], leak.names[_user(leak, len(leak.names) - 1)]
    again = "The prompt of {who} comes again" if first != last else "The prompt of {who} comes"
    there = [slot for slots in leak.held[-1] for slot in slots]
    comes, blocks = again.format(who=first), numbered(leak.blocks, "block")
    begin = f"{comes} and finds {blocks} by the right hashes"
    others = [slot for slot in there if leak.names[slot.who] != first]
    if not leak.stale:
        right = "{begin}: all {tokens} in them are those of this prompt."
        return right.format(begin=begin, tokens=counted(len(there), "token"))
    owners = listed(dict.fromkeys(leak.names[slot.who] for slot in others))
    return (
        f"{begin}, but in the meantime {owners} has taken them: of the "
        f"{len(there)} tokens that it reads there, {len(others)} are {owners}'s."
    )
