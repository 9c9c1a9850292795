"""List all exercises, in the order in which the lessons teach them."""

from exercises.catalog import (
    buckets,
    comm_around,
    comm_patterns,
    data_parallel,
    pipeline_parallel,
    pipeline_steps,
    tensor_parallel,
    zero,
)
from exercises.catalog.exercise import ROOT, Exercise, name_of

LESSONS = (
    comm_patterns,
    comm_around,
    data_parallel,
    buckets,
    zero,
    tensor_parallel,
    pipeline_parallel,
    pipeline_steps,
)
EXERCISES: tuple[Exercise, ...] = tuple(exercise for lesson in LESSONS for exercise in lesson.EXERCISES)
BY_NAME = {exercise.name: exercise for exercise in EXERCISES}

__all__ = ["BY_NAME", "EXERCISES", "ROOT", "Exercise", "name_of"]
