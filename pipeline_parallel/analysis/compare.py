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

import dataclasses
from pathlib import Path

import tyro

from lab.trace.gantt import draw_panels
from lab.trace.makespan import bubble, makespan
from lab.units import show_seconds
from pipeline_parallel.actions import num_microbatches, placement
from pipeline_parallel.analysis import theory
from pipeline_parallel.analysis.from_events import costs, median_step, name_of, steps_of_trace, table_from
from pipeline_parallel.analysis.page import write_page
from pipeline_parallel.analysis.simulate import simulate
from pipeline_parallel.schedules import stages_per_rank


@dataclasses.dataclass(frozen=True)
class Args:
    """Compare a run of a pipeline with its simulation and with the formula."""

    folder: tyro.conf.Positional[Path]
    """Folder of the trace: the run's --trace."""


def main(args: Args) -> None:
    if not (args.folder / "trace.json").is_file():
        raise SystemExit(f"{args.folder} has no trace.json: give the folder that the run's --trace named.")
    steps = steps_of_trace(args.folder / "trace.json")
    if not steps:
        raise SystemExit(f"{args.folder / 'trace.json'} has no actions of a pipeline.")
    step = median_step(steps)
    table = table_from(step)
    name, ranks, stages = name_of(table), len(table), len(placement(table))
    measured_costs = costs([event for each in steps for event in each], stages)
    simulation = simulate(table, measured_costs)
    of_rank = [
        sum(each) / ranks
        for each in (measured_costs.forward, measured_costs.input_gradient, measured_costs.weight_gradient)
    ]
    if name is not None and theory.idle(name, ranks, 1, 1, *of_rank) is None:  # ZB-V: for f = i = w alone
        of_rank = [sum(of_rank) / 3] * 3
    regular = (
        name or "",
        ranks,
        num_microbatches(table),
        stages_per_rank(name, stages // ranks) if name else 1,
    )
    print(f"{name or 'another schedule'}, {ranks} ranks, {num_microbatches(table)} microbatches")
    print("             makespan   bubble")
    print(f"measured     {show_seconds(makespan(step)):>8}   {bubble(step, ranks):6.3f}")
    print(f"simulated    {show_seconds(simulation.makespan):>8}   {simulation.bubble:6.3f}")
    if name is not None:
        seconds, share = theory.makespan(*regular, *of_rank), theory.bubble(*regular, *of_rank)
        print(f"formula      {show_seconds(seconds or 0):>8}   {share or 0:6.3f}")
    panels = {"measured": step, "simulated": simulation.events()}
    draw_panels(panels, args.folder / "compared.png", f"{name}, {ranks} ranks")
    write_page(args.folder / "schedules.html", measured={name or "measured": step})
    print(f"{args.folder}: compared.png and schedules.html")


if __name__ == "__main__":
    main(tyro.cli(Args))
