"""List all exercises, in the order in which the lessons teach them."""

from exercises.catalog import comm
from exercises.catalog.exercise import ROOT, Exercise

EXERCISES: tuple[Exercise, ...] = comm.EXERCISES
BY_NAME = {exercise.name: exercise for exercise in EXERCISES}

__all__ = ["BY_NAME", "EXERCISES", "ROOT", "Exercise"]
