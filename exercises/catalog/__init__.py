"""List all exercises: lesson by lesson, and in a lesson in the order of its page's sections."""

from exercises.catalog import (
    comm,
    context_parallel,
    data_parallel,
    expert_parallel,
    hybrid_parallel,
    low_communication,
    pipeline_parallel,
    tensor_parallel,
    zero,
)
from exercises.catalog.exercise import PICKLE, ROOT, Exercise, name_of

LESSONS = (
    comm,
    data_parallel,
    zero,
    tensor_parallel,
    pipeline_parallel,
    hybrid_parallel,
    context_parallel,
    expert_parallel,
    low_communication,
)
EXERCISES: tuple[Exercise, ...] = tuple(one for lesson in LESSONS for one in lesson.EXERCISES)
BY_NAME = {exercise.name: exercise for exercise in EXERCISES}

__all__ = ["BY_NAME", "EXERCISES", "PICKLE", "ROOT", "Exercise", "name_of"]
