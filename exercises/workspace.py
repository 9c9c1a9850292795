"""Keep a learner's files, the copies that `reset` makes of them, and the progress."""

import json
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass, field
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
    """The folder with the learner's files. Every change is written to `.progress.json` at once."""

    folder: Path = FOLDER
    progress: dict[str, Progress] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.progress = defaultdict(Progress, self._read())

    @property
    def progress_file(self) -> Path:
        return self.folder / ".progress.json"

    def file(self, exercise: Exercise) -> Path:
        return self.folder / exercise.file

    def open(self, exercise: Exercise) -> Path:
        """Return the learner's file, and make it if there is none yet."""
        if not (file := self.file(exercise)).exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(generated(exercise), encoding="utf-8")
        return file

    def last(self) -> Exercise | None:
        """Return the exercise or bug whose file has been made or saved last, or None if there is no file."""
        possible = [*EXERCISES, *(bugs() if (self.folder / "bugs").exists() else ())]
        begun = [one for one in possible if self.file(one).exists()]
        return max(begun, key=lambda one: self.file(one).stat().st_mtime_ns, default=None)

    def next_exercise(self) -> Exercise | None:
        """Return the first exercise that has not passed, or None after the last."""
        open_ones = (e for e in EXERCISES if not self.progress[e.name].has_passed)
        return next(open_ones, None)

    def next_bug(self) -> Bug:
        """Return the first bug that the learner has not fixed, or the last one."""
        return next((bug for bug in bugs() if not self.progress[bug.name].has_passed), bugs()[-1])

    def minutes_left(self) -> int:
        return sum(e.minutes for e in EXERCISES if not self.progress[e.name].has_passed)

    def record(self, grade: Grade) -> None:
        progress = self.progress[grade.name]
        progress.state, progress.passed = grade.state, len(grade.passed)
        progress.has_passed |= grade.state == PASSED
        self.save()

    def hint(self, exercise: Exercise) -> list[str]:
        """Open one more hint, and return all hints that are open."""
        progress = self.progress[exercise.name]
        progress.hints = min(progress.hints + 1, len(exercise.hints))
        self.save()
        return list(exercise.hints[: progress.hints])

    def solution(self, exercise: Exercise) -> str | None:
        """Return the lesson's own code after the exercise has passed or at the second wish, else None."""
        progress = self.progress[exercise.name]
        if progress.has_passed or progress.asked_for_solution:
            return solution(exercise)
        progress.asked_for_solution = True
        self.save()
        return None

    def reset(self, exercise: Exercise) -> Path | None:
        """Generate the file again. Return the copy of what the learner wrote, or None if there is none."""
        file, saved = self.file(exercise), None
        if file.exists() and file.read_bytes() != generated(exercise).encode():
            saved = self._free_name(exercise)
            saved.parent.mkdir(parents=True, exist_ok=True)
            file.replace(saved)
        self.open(exercise)
        self.progress[exercise.name] = Progress()
        self.save()
        return saved

    def save(self) -> None:
        """Write the progress to a new file, and rename it: an interrupt leaves the old one as it was."""
        new = self.progress_file.with_suffix(".new")
        begun = {name: asdict(p) for name, p in self.progress.items() if p != Progress()}
        new.write_text(json.dumps(begun, indent=1) + "\n", encoding="utf-8")
        new.replace(self.progress_file)

    def _free_name(self, exercise: Exercise) -> Path:
        number = 1
        while (path := self.folder / ".saved" / f"{exercise.name}.{number}.py").exists():
            number += 1
        return path

    def _read(self) -> dict[str, Progress]:
        """Return the progress on disk. A damaged file is set aside with a sentence."""
        try:
            entries = json.loads(self.progress_file.read_text(encoding="utf-8"))
            return {name: Progress(**entry) for name, entry in entries.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError):
            aside = self.progress_file.with_suffix(".damaged.json")
            self.progress_file.replace(aside)
            text = f"{self.progress_file} was damaged and is now {aside.name}; check the exercises again."
            print(text, file=sys.stderr)
            return {}
