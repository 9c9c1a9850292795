"""Add to training.run the predicted step time of a run whose gradients are all-reduced (predict.py)."""

import training.run
from comm import cost
from comm.collectives import pattern_for
from data_parallel.predict import median_step_seconds
from lab.trace.gantt import Event
from training.calibrate import LARGE_BYTES


class Run(training.run.Run):
    """One rank's side of a data parallel run."""

    def _predicted_seconds(self, by_step: list[list[Event]]) -> float | None:
        pattern = cost.model_of("all_reduce", pattern_for("all_reduce", self.pattern, LARGE_BYTES))
        ranks = self._cluster.world_size
        return median_step_seconds(
            by_step, lambda num_bytes: cost.seconds("all_reduce", pattern, num_bytes, ranks, self._link)
        )
