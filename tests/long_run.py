"""The properties of the tests on as many random workloads, or operations, as you like.

    python tests/long_run.py --workloads 20000 --memory pages
    python tests/long_run.py --operations 100000
    python tests/long_run.py --interrupts

Workloads go through an engine on rows, pages or cells: every request must come out as if it were
alone (workloads.py, memory_runs.py). Operations go to a BlockManager and to a CellTable: both must
do what a slow, obvious model does (test_blocks.py, test_cells.py). Interrupts come before every
line that a story of the engine runs (interrupt_runs.py). Prints what happened so far; a failure is
made small and shown.
"""

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable

import interrupt_runs
import memory_runs
import test_blocks
import test_cells
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from workloads import Workload, check, counted, workloads

Run = Callable[[int, int], Counter[str]]  # (seed, how many) -> what happened


def on_rows(number: int, many: int) -> Counter[str]:
    """`many` workloads on rows, others for each number."""
    counts: Counter[str] = Counter()

    @seed(number)
    @settings(
        max_examples=many,
        phases=[Phase.generate, Phase.shrink],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(workloads(faults=True))
    def property_(workload: Workload) -> None:
        counts.update(check(workload))

    property_()
    return counts


def on_blocks(number: int, many: int) -> Counter[str]:
    """`many` operations on BlockManagers, 250 on each."""
    counts: Counter[str] = Counter()
    for index, done in enumerate(range(0, many, 250)):
        draw = random.Random(10_000 * number + index)
        counts += test_blocks.drive(draw, min(250, many - done))
    return counts


def on_cell_tables(number: int, many: int) -> Counter[str]:
    """`many` operations on CellTables, 500 on each."""
    return Counter(operations=many) + test_cells.run_random(many, number)


RUNS: dict[str, Run] = {
    "rows": on_rows,
    "pages": lambda number, many: memory_runs.run_random(number, many, "pages"),
    "cells": lambda number, many: memory_runs.run_random(number, many, "cells"),
}


def run(what: str, one: Run, unit: str, total: int, first: int, batch: int) -> None:
    """Batch after batch, each with a seed of its own; then the counts of all."""
    counts: Counter[str] = Counter()
    began, number = time.perf_counter(), first
    while (left := total - counts[unit]) > 0:
        before = counts[unit]
        counts += one(number, min(batch, left))
        assert counts[unit] > before, "nothing ran"
        number += 1
        seconds = time.perf_counter() - began
        print(f"{what}: {counts[unit]:,} of {total:,} {unit} in {seconds:.0f} s", flush=True)
    print(*counted(counts), sep="\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", type=int, help="20,000 if nothing else is asked for")
    parser.add_argument("--memory", choices=[*RUNS, "all"], default="all", help="so many on each")
    parser.add_argument("--operations", type=int, default=0, help="on blocks, and on cells")
    parser.add_argument("--interrupts", action="store_true", help="Ctrl-C at every line")
    parser.add_argument("--seed", type=int, default=1_000, help="the tests use small ones")
    parser.add_argument("--batch", type=int, default=500, help="workloads per seed")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    if asked.operations:
        for what, one in (("blocks", on_blocks), ("cell tables", on_cell_tables)):
            run(what, one, "operations", asked.operations, asked.seed, 10_000)
        print("all as the slow models say", flush=True)
    if asked.interrupts:
        print(*counted(interrupt_runs.run(one_in=1)), sep="\n", flush=True)
    many = asked.workloads
    if many is None:
        many = 0 if asked.operations or asked.interrupts else 20_000
    if many:
        for what in RUNS if asked.memory == "all" else [asked.memory]:
            run(what, RUNS[what], "workloads", many, asked.seed, asked.batch)
        print("every request came out as if it were alone")


if __name__ == "__main__":
    main()
