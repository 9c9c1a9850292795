"""Exercises of lesson 8: sending less."""

from exercises.catalog.exercise import Exercise

EXERCISES: tuple[Exercise, ...] = ()
