"""The same users on the same slots under two maps, as a race: who has how much of the answer when.

It shows two recorded runs on one clock; nothing is run.
"""

from collections.abc import Mapping

from tutorial_engine.trace.events import Trace
from tutorial_engine.trace.pool import PoolHistory, PoolSnapshot
from tutorial_engine.viz.drawing.letters import cut_to
from tutorial_engine.viz.drawing.parts import BOLD, MARGIN, RIGHT, TRACK, WIDTH, Sheet
from tutorial_engine.viz.drawing.pool import draw_key, draw_pool, looks_of, strip_height
from tutorial_engine.viz.drawing.request_look import chip, nice_step, patch
from tutorial_engine.viz.drawing.scene import Scene
from tutorial_engine.viz.explorers.explorer import Explorer
from tutorial_engine.viz.run.run import Run
from tutorial_engine.viz.words import counted

MAX_USERS, MOST_MOMENTS = 12, 60
TOP, LANE, TALL = 88.0, 17.0, 13.0  # the first lane, from lane to lane, the height of its bar
NAME, BAR = 52.0, 310.0  # of a lane: room for its name, the length of its bar
SIDE = (WIDTH - 3 * MARGIN) / 2  # the width of one run's lanes
LINE_OF_SLOTS = 64


class Lap:
    """One run, at any time of its clock: seconds from its start."""

    def __init__(self, trace: Trace) -> None:
        self.run = run = Run.of(trace)
        self.history = PoolHistory.of(trace)
        self.start, self.end = run.start, run.end - run.start
        self.begins = [step.began - run.start for step in run.steps]

    def pool(self, when: float) -> PoolSnapshot:
        """The pool of the step that runs then, or of the last one when all are answered."""
        begun = sum(began <= when for began in self.begins)
        return self.history.snapshots[max(begun - 1, 0)]

    def got(self, name: str, when: float) -> int:
        """The new tokens that a user has by then."""
        return sum(t - self.start <= when for t in self.run.life(name).token_times)

    def answered(self, when: float) -> list[str]:
        """Those who have all of their answer."""
        ends = {name: self.done(name) for name in self.run.names}
        return [name for name, end in ends.items() if end is not None and end <= when]

    def done(self, name: str) -> float | None:
        """When a user's answer ended."""
        finished = self.run.life(name).finished
        return None if finished is None else finished - self.start

    def state(self, when: float) -> str:
        """How many users are answered, run and wait."""
        now, over = self.pool(when), self.answered(when)
        running = [name for name in now.running if name not in over]
        waiting = len(self.run.names) - len(over) - len(running)
        if not running and not waiting:
            return f"all {len(over)} answered after {1000 * self.end:.0f} ms"
        return f"{len(over)} answered, {len(running)} run, {waiting} wait"


class RaceExplorer(Explorer):
    """Two runs of the same requests on pools of one size: a lane for each user, and both pools.

    ValueError for other than two runs, pools of unequal size, and more users than there are lanes.
    """

    title = "Race explorer"
    step_name = "moment"
    zoom = 1.0

    def __init__(self, runs: Mapping[str, Trace]) -> None:
        self.laps = {name: Lap(trace) for name, trace in runs.items()}
        sizes = {lap.history.pool.num_slots for lap in self.laps.values()}
        users = dict.fromkeys(name for lap in self.laps.values() for name in lap.run.names)
        if len(runs) != 2 or len(sizes) > 1 or len(users) > MAX_USERS:
            raise ValueError(
                f"give two runs of at most {MAX_USERS} requests on pools of the same size, "
                f"name -> trace; got {list(runs)} with {len(users)} requests on {sorted(sizes)} "
                "slots"
            )
        self.users, (self.slots,) = list(users), sizes
        super().__init__({})
        self.play.interval = 150

    def rerun(self) -> int:
        """Nothing is run: the moments are those of the longer run."""
        end = 1000 * max(lap.end for lap in self.laps.values())
        self.tick = nice_step(end, MOST_MOMENTS)
        self.looks = looks_of([lap.history for lap in self.laps.values()])
        return -int(-end // self.tick) + 1

    def scene(self, step: int) -> Scene:
        """Both runs at this moment: lanes side by side, the pools below them."""
        when = self.tick * step / 1000
        lanes = TOP + LANE * len(self.users) + 12
        strips = {n: strip_height(lap.history.pool, LINE_OF_SLOTS) for n, lap in self.laps.items()}
        sheet = Sheet(WIDTH, lanes + sum(strips.values()) + 12)
        sheet.hint = "hover over a slot to read whose it is"
        title = f"{self.tick * step:g} ms: the same {self.slots} slots, the same "
        sheet.text("title", MARGIN, 24, title + counted(len(self.users), "user"), 16, **BOLD)
        draw_key(sheet, 24, shared=False)
        for i, (name, lap) in enumerate(self.laps.items()):
            self._lanes(sheet, name, lap, when, MARGIN + i * (SIDE + MARGIN))
        for name, lap in self.laps.items():
            now = lap.pool(when)
            draw_pool(sheet, name, now, self.looks, lanes, LINE_OF_SLOTS)
            words = f"step {now.step}" if when < lap.end else f"done: this was step {now.step}"
            sheet.note(f"{name}.step", WIDTH - MARGIN, lanes + 12, words, 12, **RIGHT)
            lanes += strips[name]
        return sheet

    def _lanes(self, sheet: Sheet, run: str, lap: Lap, when: float, left: float) -> None:
        """A lane for each user: how much of the answer is there, and what the user does."""
        words = cut_to(f"{run}: {lap.state(when)}", SIDE, 13, bold=True, keep=True)
        sheet.text(f"{run}.state", left, 58, words, 13, **BOLD)
        sheet.note(f"{run}.bars", left + NAME, 76, "new tokens that each user has")
        waiting = set(lap.pool(when).waiting)
        for i, name in enumerate(self.users):
            y, lane = TOP + LANE * i, f"{run}.{name}"
            got, all_of_it = lap.got(name, when), len(lap.run.life(name).token_times)
            chip(sheet, lane, left, y + TALL / 2, cut_to(name, NAME - 24, 13), self.looks[name])
            sheet.rect(f"{lane}.track", (left + NAME, y, BAR, TALL), TRACK, rx=2)
            share = got / max(all_of_it, 1)
            if got:
                patch(sheet, f"{lane}.bar", (left + NAME, y, BAR * share, TALL), self.looks[name])
            ended = lap.done(name)
            said = f"{got} of {all_of_it}" + ", waits" * (name in waiting)
            if ended is not None and ended <= when:
                said = f"✔ after {1000 * ended:.0f} ms"
            sheet.note(f"{lane}.said", left + SIDE - 6, y + 11, said, 12, **RIGHT)

    def caption(self, step: int) -> str:
        """What both runs have reached, and when each is done."""
        when = self.tick * step / 1000
        states = [f"{name}: {lap.state(when)}" for name, lap in self.laps.items()]
        ends = " and ".join(f"{1000 * lap.end:.0f} ms in {name}" for name, lap in self.laps.items())
        return f"After {self.tick * step:g} ms: {'; '.join(states)}. The whole run takes {ends}."
