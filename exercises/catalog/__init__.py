"""List all exercises: lesson by lesson, and in a lesson in the order of the notebooks that teach them."""

from exercises.catalog import (
    comm,
    context_parallel,
    data_parallel,
    expert_parallel,
    hybrid_parallel,
    open,
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
)
# Open exercises come last in their notebook.
EXERCISES: tuple[Exercise, ...] = tuple(
    one
    for lesson in LESSONS
    for one in sorted(
        lesson.EXERCISES + tuple(one for one in open.EXERCISES if one.folder == lesson.EXERCISES[0].folder),
        key=lambda one: one.notebook,
    )
)
BY_NAME = {exercise.name: exercise for exercise in EXERCISES}

__all__ = ["BY_NAME", "EXERCISES", "PICKLE", "ROOT", "Exercise", "name_of"]
