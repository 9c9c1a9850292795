"""Keep a learner's files, the copies that `reset` makes of them, and the progress.

Several commands may run at once, such as `watch` in one terminal and `check` in another. So nothing is held
in memory: a command that changes something locks the folder, reads, and writes.
"""

import fcntl
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from exercises.catalog import EXERCISES, Exercise
from exercises.checker.grade import PASSED, Grade
from exercises.find_the_bug import Bug, bugs
from exercises.generate import generated, solution
from exercises.names import all_exercises

FOLDER = Path(__file__).resolve().parent


def problem_of_submission(folder: Path) -> str | None:
    """Return a sentence if there is no such folder, or if no file in it has an exercise's path."""
    if not folder.is_dir():
        return f"There is no folder {folder}."
    known = {one.file for one in all_exercises().values()}
    files = {file.relative_to(folder) for file in folder.rglob("*.py")}
    if not files or files & known:
        return None
    roots = sorted(file.parent.parent for file in files if Path(*file.parts[-2:]) in known)
    meant = f": did you mean {folder / roots[0]}?" if roots else f", such as {EXERCISES[0].file}."
    return f"There is no exercise's file in {folder}{meant}"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of a `with locked(folder)` block until this one ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a network's file system that has no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@dataclass
class Progress:
    """Hold the last check of one exercise, the number of open hints, and a first wish for the solution."""

    state: str = "not checked"
    passed: int = 0
    hints: int = 0
    asked_for_solution: bool = False
    has_passed: bool = False

    @property
    def shown_state(self) -> str:
        """The state for a reader: a failed check does not take back that the exercise has passed."""
        return "passed earlier" if self.has_passed and self.state != PASSED else self.state


@dataclass
class Workspace:
    """The folder with the learner's files, and the progress in its `.progress.json`."""

    folder: Path = FOLDER

    @property
    def progress(self) -> dict[str, Progress]:
        """Each exercise's progress as it is on disk now."""
        if not self.progress_file.exists():
            return defaultdict(Progress)
        with locked(self.folder):
            return self._read()

    @contextmanager
    def changed(self, exercise: str) -> Iterator[Progress]:
        """Write what the `with` block changes in an exercise's progress, while no other command writes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder):
            everything = self._read()
            yield everything[exercise]
            begun = {name: asdict(p) for name, p in everything.items() if p != Progress()}
            new = self.progress_file.with_suffix(".new")  # an interrupt leaves the old file as it was
            new.write_text(json.dumps(begun, indent=1) + "\n", encoding="utf-8")
            new.replace(self.progress_file)

    @property
    def progress_file(self) -> Path:
        return self.folder / ".progress.json"

    def file(self, exercise: Exercise) -> Path:
        return self.folder / exercise.file

    def open(self, exercise: Exercise) -> Path:
        """Return the learner's file, and make it if there is none yet."""
        if not (file := self.file(exercise)).exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError), file.open("x", encoding="utf-8") as new:
                new.write(generated(exercise))
        return file

    def last(self) -> Exercise | None:
        """Return the exercise or bug whose file has been made or saved last, or None if there is no file."""
        possible = [*EXERCISES, *(bugs() if (self.folder / "bugs").exists() else ())]
        begun = [one for one in possible if self.file(one).exists()]
        return max(begun, key=lambda one: self.file(one).stat().st_mtime_ns, default=None)

    def next_exercise(self) -> Exercise | None:
        """Return the first exercise that has not passed, or None after the last."""
        progress = self.progress
        return next((one for one in EXERCISES if not progress[one.name].has_passed), None)

    def next_bug(self) -> Bug:
        """Return the first bug that the learner has not fixed, or the last one."""
        progress = self.progress
        return next((bug for bug in bugs() if not progress[bug.name].has_passed), bugs()[-1])

    def minutes_left(self) -> int:
        progress = self.progress
        return sum(one.minutes for one in EXERCISES if not progress[one.name].has_passed)

    def record(self, grade: Grade) -> None:
        with self.changed(grade.name) as progress:
            progress.state, progress.passed = grade.state, len(grade.passed)
            progress.has_passed |= grade.state == PASSED

    def hint(self, exercise: Exercise) -> list[str]:
        """Open one more hint, and return all hints that are open."""
        with self.changed(exercise.name) as progress:
            progress.hints = min(progress.hints + 1, len(exercise.hints))
        return list(exercise.hints[: progress.hints])

    def solution(self, exercise: Exercise) -> str | None:
        """Return the lesson's own code after the exercise has passed or at the second wish, else None."""
        with self.changed(exercise.name) as progress:
            is_open = progress.has_passed or progress.asked_for_solution
            progress.asked_for_solution = True
        return solution(exercise) if is_open else None

    def reset(self, exercise: Exercise) -> Path | None:
        """Generate the file again. Return the copy of what the learner wrote, or None if there is none."""
        file, saved = self.file(exercise), None
        with self.changed(exercise.name) as progress:
            if file.exists() and file.read_bytes() != generated(exercise).encode():
                saved = self._free_name(exercise)
                saved.parent.mkdir(parents=True, exist_ok=True)
                file.replace(saved)
            self.open(exercise)
            vars(progress).update(asdict(Progress()))
        return saved

    def _free_name(self, exercise: Exercise) -> Path:
        number = 1
        while (path := self.folder / ".saved" / f"{exercise.name}.{number}.py").exists():
            number += 1
        return path

    def _read(self) -> dict[str, Progress]:
        """Return the progress on disk. A damaged file is set aside with a sentence."""
        found: dict[str, Progress] = defaultdict(Progress)
        try:
            entries = json.loads(self.progress_file.read_text(encoding="utf-8-sig"))
            found.update((name, Progress(**entry)) for name, entry in entries.items())
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, AttributeError):
            aside = self.progress_file.with_suffix(".damaged.json")
            self.progress_file.replace(aside)
            text = f"{self.progress_file} was damaged and is now {aside.name}; check the exercises again."
            print(text, file=sys.stderr)
            return defaultdict(Progress)
        return found
