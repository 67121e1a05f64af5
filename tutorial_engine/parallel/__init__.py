"""Introduced in notebook A1. One model on several processes: `python -m tutorial_engine.parallel`.

`tensor_parallel` splits the weights by heads and columns and adds up what the ranks computed; `job`
is what each rank does, `ranks` starts them as processes, `report` says what came of it. Each rank
runs the same engine on its part of the model: the scheduler does not know that there are others.
"""

from tutorial_engine.parallel.ranks import parallel_paths, run_ranks
from tutorial_engine.parallel.report import ParallelReport
from tutorial_engine.parallel.tensor_parallel import RowParallelLinear

__all__ = ["ParallelReport", "RowParallelLinear", "parallel_paths", "run_ranks"]
