"""Make results as benchmarks/table.py stores them, without measuring."""

from typing import Any

from benchmarks.table import row_of
from benchmarks.table_runs import LINKS, TECHNIQUES, WORKERS, jobs_of

AXES = {"axis_pipeline": 1, "axis_data": 2, "axis_tensor": 1, "axis_zero": 3, "axis_sequence_parallel": False}
AXES |= {"axis_schedule": "1f1b", "axis_microbatches": 1, "axis_recompute": False}

BASELINES = {one: 500.0 if one.is_other_model else 1000.0 for one in TECHNIQUES}


def made_up(cores: int = 2, load: float = 0.1, runs: int = 5) -> dict[str, Any]:
    """Return results with a row for each cell; a cell's number is in its figures."""
    rows = []
    for number, job in enumerate(jobs_of(TECHNIQUES, WORKERS, LINKS), start=1):
        figures = [
            {
                "tokens_per_second": 1000.0 + 20 * number + run,
                "step_seconds": 0.1 + number / 1e3,
                "memory_bytes": 50_000_000 + 1_000_000 * number,
                "peak_memory_bytes": 450_000_000,
                "bytes_per_step": 1000 * number,
                "plan": AXES | {"axis_zero": min(run, 3)},
            }
            for run in range(runs)
        ]
        rows.append(row_of(job, figures, BASELINES, steps=5))
    machine = {
        "cpu": "A processor",
        "cores": cores,
        "memory_gb": 16,
        "system": "Linux 6.1",
        "python": "3.11.2",
    }
    machine |= {"torch": "2.13.0", "date": "2026-01-01", "load": load}
    setting = {"size": "8layers", "parameters": 3_600_000, "batch_size": 16, "block_size": 48, "steps": 5}
    setting |= {
        "timed_steps": 3,
        "runs": runs,
        "experts": {"number": 8, "top_k": 2, "parameters": 14_100_000},
    }
    return {"benchmark": "table", "machine": machine, "setting": setting, "rows": rows}
