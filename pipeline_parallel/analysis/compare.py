"""Compare a run with its simulation and with the formula, from the trace that the run has written.

    make run RUN_MODE=pipeline_1f1b WORLD_SIZE=4 ARGS='--metronome 20ms --trace traces'
    .venv/bin/python pipeline_parallel/analysis/compare.py traces

      measured     from the actions of all ranks, on one clock: the drawn step of median makespan
      simulated    the same table, with the median seconds of each stage, and messages that take no time
      formula      theory.py, for stages that take equally long

If the three differ, something was less regular than the theory: stages of different lengths, messages that
take time, or ranks that share a core. `compared.png` has the measured step above the simulated one, and
`schedules.html` plays it beside all schedules (page.py).
"""

from pathlib import Path

import tyro

from lab.trace.gantt import Event, draw_panels
from lab.trace.makespan import makespan, steps_of
from lab.trace.timeline import read_chrome_trace
from lab.units import show_seconds
from pipeline_parallel.actions import Table, num_microbatches, placement
from pipeline_parallel.analysis import theory
from pipeline_parallel.analysis.page import write_page
from pipeline_parallel.analysis.simulate import Costs, Simulation, simulate
from pipeline_parallel.schedules import SCHEDULES, table_of


def name_of(table: Table) -> str | None:
    """Return the name of the schedule that makes this table; None if there is none."""
    ranks, microbatches = len(table), num_microbatches(table)
    chunks = len(placement(table)) // ranks
    return next((name for name in SCHEDULES if table_of(name, ranks, microbatches, chunks) == table), None)


def steps_of_trace(path: Path) -> list[list[Event]]:
    """Return the actions of each step of a trace, the fastest first; times are those of the trace."""
    return sorted(steps_of(e for e in read_chrome_trace(path) if "action" in e.args), key=makespan)


def main(folder: tyro.conf.Positional[Path]) -> None:
    """Compare a run of a pipeline with its simulation and with the formula.

    Args:
        folder: Folder of the trace: the run's --trace. The newest trace in it is taken.
    """
    traces = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    if not traces:
        raise SystemExit(f"{folder} has no trace: give the folder that the run's --trace named.")
    steps = steps_of_trace(traces[-1])
    if not steps:
        raise SystemExit(f"{traces[-1]} has no actions of a pipeline.")
    step = steps[(len(steps) - 1) // 2]
    run = Simulation.measured(step)
    name = name_of(run.table)
    ranks, stages = len(run.table), len(placement(run.table))
    costs = Costs.measured([event for each in steps for event in each], stages)
    simulation = simulate(run.table, costs)
    of_rank = [sum(each) / ranks for each in (costs.forward, costs.input_gradient, costs.weight_gradient)]
    if name is not None and theory.idle(name, ranks, 1, 1, *of_rank) is None:  # a V: for f = i = w alone
        of_rank = [sum(of_rank) / 3] * 3
    print(f"{name or 'another schedule'}, {ranks} ranks, {num_microbatches(run.table)} microbatches")
    print("             makespan   bubble")
    print(f"measured     {show_seconds(run.makespan):>8}   {run.bubble:6.3f}")
    print(f"simulated    {show_seconds(simulation.makespan):>8}   {simulation.bubble:6.3f}")
    if name is not None:
        regular = name, ranks, num_microbatches(run.table), stages // ranks
        seconds, share = theory.makespan(*regular, *of_rank), theory.bubble(*regular, *of_rank)
        print(f"formula      {show_seconds(seconds or 0):>8}   {share or 0:6.3f}")
    panels = {"measured": step, "simulated": simulation.events()}
    draw_panels(panels, folder / "compared.png", f"{name}, {ranks} ranks")
    write_page(folder / "schedules.html", measured={name or "measured": step})
    print(f"{folder}: compared.png and schedules.html")


if __name__ == "__main__":
    tyro.cli(main)
