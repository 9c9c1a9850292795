"""List all exercises, in the order of the notebooks that teach them."""

from exercises.catalog import (
    comm,
    context_parallel,
    data_parallel,
    expert_parallel,
    hybrid_parallel,
    pipeline_parallel,
    tensor_parallel,
    zero,
)
from exercises.catalog.exercise import ROOT, Exercise, name_of

LESSONS = (
    comm,
    data_parallel,
    zero,
    tensor_parallel,
    pipeline_parallel,
    hybrid_parallel,
    context_parallel,
    expert_parallel,
)
# Exercises of a notebook keep the order of LESSONS. So `sampler` comes first.
EXERCISES: tuple[Exercise, ...] = tuple(
    sorted((one for lesson in LESSONS for one in lesson.EXERCISES), key=lambda one: one.notebook)
)
BY_NAME = {exercise.name: exercise for exercise in EXERCISES}

__all__ = ["BY_NAME", "EXERCISES", "ROOT", "Exercise", "name_of"]
