"""Do the exercises: `python -m exercises` shows the next one, and `python -m exercises check` grades it."""

import argparse
import difflib
import json
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table

from exercises.catalog import EXERCISES, ROOT, Exercise, name_of
from exercises.checker.explain import Explanation
from exercises.checker.explain import name_of as words_of
from exercises.checker.grade import PASSED, UNSOLVED, Grade, grade, report
from exercises.checker.inspect_file import problem_of, shown
from exercises.checker.process import warm_up
from exercises.find_the_bug import ORDER, Bug, bugs, lesson_of
from exercises.names import all_exercises, exercise_named, typed
from exercises.workspace import Progress, Workspace, problem_of_submission

POLL_SECONDS = 0.3
MAX_PRINTED, MAX_WIDTH = 40, 400  # lines, and characters of a line
console = Console(highlight=False, soft_wrap=True)


def show(space: Workspace, options: argparse.Namespace) -> int:
    exercise = space.next_exercise()
    if exercise is None:
        console.print("[green]All exercises have passed.[/]")
        return 0
    present(space, exercise)
    problem = problem_of(exercise, space.open(exercise))
    everything = space.progress
    state = everything[exercise.name].state
    console.print(escape(problem[1] if problem else f"The file is changed; its last check: {state}."))
    if unmet := [name for name in exercise.needs if not everything[name].has_passed]:
        console.print(f"It builds on {', '.join(unmet)}.")
    console.print("Check your code each time you save:")
    console.print(f"    {typed(f'watch {exercise.name}')}")
    console.print(f"`{typed(f'hint {exercise.name}')}` opens a hint, which costs nothing.")
    console.print(f"For an exercise that a notebook names, add its name: {typed('watch NAME')}")
    return 0


def present(space: Workspace, exercise: Exercise) -> None:
    """Tell what to write, and what to read before."""
    effort = f"{exercise.minutes} minutes, difficulty {exercise.difficulty} of 5"
    console.print(f"[bold]{exercise.title}[/], {effort}")
    names = ", ".join(f"`{name_of(target)}`" for target in exercise.targets)
    console.print(f"First read notebooks/{exercise.notebook}.ipynb.")
    console.print(f"Write {names} in {shown(space.open(exercise))}.")


def show_list(space: Workspace, options: argparse.Namespace) -> int:
    table = table_of("  exercise", "difficulty", "minutes", "state", "hints", "notebook")
    for number in (1, 2, 4, 5):
        table.columns[number].justify = "right"
    following, everything = space.next_exercise(), space.progress
    lesson = ""
    for e in EXERCISES:
        if (folder := e.target.partition(".")[0]) != lesson:
            lesson = folder
            table.add_row(f"[bold]{lesson}/[/]")
        progress, mark = everything[e.name], "> " if e is following else "  "
        hints = f"{progress.hints} of {len(e.hints)}"
        numbers = str(e.difficulty), str(e.minutes), coloured(progress), hints
        table.add_row(mark + e.name, *numbers, e.notebook.partition("_")[0])
    console.print(table)
    done = sum(everything[e.name].has_passed for e in EXERCISES)
    left = f"about {space.minutes_left()} minutes are left. Difficulty is 1 to 5."
    console.print(f"{done} of {len(EXERCISES)} have passed; {left}")
    console.print(f"{fixed(space)} bugs are fixed; `{typed('bugs')}` lists them.")
    return 0


def table_of(*headings: str) -> Table:
    """Return an empty table without lines, which has room in 80 columns."""
    return Table(*headings, box=None, pad_edge=False, collapse_padding=True)


def coloured(progress: Progress) -> str:
    return f"[green]{progress.shown_state}[/]" if progress.has_passed else progress.shown_state


def fixed(space: Workspace) -> str:
    progress = space.progress
    return f"{sum(progress[one.name].has_passed for one in bugs())} of {len(bugs())}"


def check(space: Workspace, options: argparse.Namespace) -> int:
    exercises = EXERCISES if options.all else [chosen(space, options.name)]
    handed_in = Path(options.submission) if options.submission else None
    if handed_in is not None and (problem := problem_of_submission(handed_in)):
        print(problem, file=sys.stderr)
        return 2
    grades = []
    for exercise in exercises:
        begin = space.file if options.all else space.open
        file = handed_in / exercise.file if handed_in else begin(exercise)
        grades.append(grade(exercise, file) if options.json else grade_aloud(exercise, file))
        if not handed_in:
            space.record(grades[-1])
            if not options.json and not options.all:
                tell_next(space, exercise, grades[-1])
    if options.json:
        print(json.dumps(report(grades)))
    return max(g.exit_code for g in grades)


def grade_aloud(exercise: Exercise, file: Path) -> Grade:
    """Print what each test says as soon as it has ended, and then the grade.

    The first test that fails is explained in full, and of the others it is said what differs.
    """
    reasons: list[str] = []  # for each test, what differs, or ""

    def tell(test: str, found: Explanation | None) -> None:
        number = f"test {len(reasons) + 1} of {len(exercise.tests)}"
        verdict = "[red]wrong[/]" if found else "[green]right[/]"
        console.print(f"{number} {verdict}: {escape(words_of(test))}")
        if found and not any(reasons):
            explain(found.sentence, found.drawing)
        elif found:
            explain("", "for the same reason" if found.reason in reasons else found.reason)
        reasons.append(found.reason if found else "")

    result = grade(exercise, file, tell)
    colour = "green" if result.state == PASSED else "red"
    told = f"{len(result.passed)} of {len(exercise.tests)} tests pass." if any(reasons) else result.sentence
    console.print(f"[{colour}]{result.name}: {result.state}[/]  {escape(told)}")
    if result.printed:
        explain("Your code printed:", cut(result.printed))
    return result


def tell_next(space: Workspace, exercise: Exercise, result: Grade, goes_on: bool = False) -> None:
    """Say where to write or, after a pass, what may be opened and, unless `watch` goes on, what is next."""
    if result.state == UNSOLVED and not isinstance(exercise, Bug):
        console.print(
            f"First read notebooks/{exercise.notebook}.ipynb. Write in {shown(space.file(exercise))}."
        )
    if result.state != PASSED:
        return
    lesson = exercise.lesson.relative_to(ROOT)
    progress = space.progress
    left = [one.name for one in EXERCISES if one.module == exercise.module]
    left = [name for name in left if not progress[name].has_passed]
    opens = f"Open {lesson} after {', '.join(left)}." if left else f"You may open {lesson} now."
    console.print(f"`{typed(f'solution {exercise.name}')}` shows the lesson's code. {opens}")
    following = space.next_bug() if isinstance(exercise, Bug) else space.next_exercise()
    if following is None or progress[following.name].has_passed:
        console.print("[green]It was the last one: all have passed.[/]")
    elif not goes_on:
        command = "bug" if isinstance(following, Bug) else "watch"
        console.print(f"Next: {typed(f'{command} {following.name}')}")


def explain(sentence: str, drawing: str) -> None:
    if sentence:
        console.print(escape(sentence))
    if drawing:
        console.print(escape(textwrap.indent(drawing, "    ")))


def cut(printed: str) -> str:
    """Return the first lines of what was printed."""
    lines = [line if len(line) <= MAX_WIDTH else f"{line[:MAX_WIDTH]} ..." for line in printed.splitlines()]
    more = [f"... and {len(lines) - MAX_PRINTED} more lines"] if len(lines) > MAX_PRINTED else []
    return "\n".join(lines[:MAX_PRINTED] + more)


def hint(space: Workspace, options: argparse.Namespace) -> int:
    exercise = chosen(space, options.name or last_name(space))
    hints = space.hint(exercise)
    console.print(f"[bold]{exercise.name}[/]: {exercise.title}, in {shown(space.file(exercise))}")
    for number, text in enumerate(hints, start=1):
        console.print(f"Hint {number} of {len(exercise.hints)}: {escape(text)}")
    if len(hints) == len(exercise.hints):
        console.print(f"These are all hints. `{typed(f'solution {exercise.name}')}` shows the solution.")
    else:
        console.print(f"`{typed(f'hint {exercise.name}')}` opens the next one.")
    return 0


def reset(space: Workspace, options: argparse.Namespace) -> int:
    exercise = chosen(space, options.name)
    saved = space.reset(exercise)
    kept = f" Your code is kept in {shown(saved)}." if saved else ""
    console.print(f"{shown(space.file(exercise))} is as it was at the beginning.{kept}")
    return 0


def show_bugs(space: Workspace, options: argparse.Namespace) -> int:
    table = table_of("bug", "state", "symptom")
    table.columns[0].no_wrap = True
    group, progress = None, space.progress
    for one in bugs():
        if group != (group := f"{ORDER[lesson_of(one)]}, difficulty {one.difficulty} of 5"):
            table.add_row("")
            table.add_row(f"[bold]{group}[/]", "", f"{one.minutes} minutes each")
        table.add_row(one.name, coloured(progress[one.name]), escape(one.symptom))
    console.print(table)
    console.print(f"{fixed(space)} are fixed. `{typed('bug NAME')}` makes the file of one.")
    return 0


def bug(space: Workspace, options: argparse.Namespace) -> int:
    """Make the file of a bug if there is none yet, and tell its symptom."""
    one = space.next_bug() if options.name is None else chosen(space, options.name)
    if not isinstance(one, Bug):
        print(
            f"{one.name} asks you to write a function; `{typed('bugs')}` lists bugs.",
            file=sys.stderr,
        )
        return 2
    file = shown(space.open(one))
    console.print(f"[bold]{one.name}[/], {one.minutes} minutes, difficulty {one.difficulty} of 5")
    console.print(escape(one.symptom))
    if space.progress[one.name].has_passed:
        console.print(f"You have fixed this bug in {file}.")
        console.print(f"To begin again: {typed(f'reset {one.name}')}")
        return 0
    console.print(f"It runs, and it is wrong. Find the mistake in {file}, and fix it.")
    console.print(f"Then: {typed(f'check {one.name}')}, or hint, or watch")
    return 0


def solution(space: Workspace, options: argparse.Namespace) -> int:
    exercise = chosen(space, options.name or last_name(space))
    text = space.solution(exercise)
    if text is None:
        console.print(f"{exercise.name} has not passed yet. Ask again to see the lesson's code all the same.")
        return 1
    console.print(Syntax(text, "python", background_color="default"))
    return 0


def watch(space: Workspace, options: argparse.Namespace) -> int:
    """Grade the file each time it is saved, until Ctrl-C or until all that is watched has passed."""
    try:
        return grade_each_save(space, options)
    except KeyboardInterrupt:
        console.print("\nStopped watching.")
        return 0


def grade_each_save(space: Workspace, options: argparse.Namespace) -> int:
    """Grade the file each time it is saved, and go on to the next exercise after it has passed."""
    exercise: Exercise | None = chosen(space, options.name)
    seen = None
    console.print(f"Watching {shown(space.open(exercise))}.")
    warm_up(exercise)  # while the learner writes
    while exercise is not None:
        file = space.file(exercise)
        stamp = (file, file.stat().st_mtime_ns if file.exists() else None)
        if stamp != seen:
            seen = stamp
            console.print("Grading ...")
            result = grade_aloud(exercise, file)
            space.record(result)
            if result.state == PASSED:
                tell_next(space, exercise, result, goes_on=not options.name)
                exercise = None if options.name else space.next_exercise()
                if exercise is not None:
                    console.print("\nThe next exercise:")
                    present(space, exercise)
                    warm_up(exercise)
                continue
            console.print("Waiting for the next save; Ctrl-C ends.")
        time.sleep(POLL_SECONDS)
    return 0


def last_name(space: Workspace) -> str | None:
    last = space.last()
    return last.name if last else None


def chosen(space: Workspace, name: str | None) -> Exercise:
    """Return the exercise of that name.

    Without a name it is the one that was worked on last or, if that has passed, the next one. After the last
    exercise it is the last.
    """
    if name is None:
        last = space.last()
        is_open = last is not None and not space.progress[last.name].has_passed
        return last if last and is_open else space.next_exercise() or EXERCISES[-1]
    try:
        return exercise_named(name)
    except LookupError as error:
        print(error.args[0], file=sys.stderr)
        raise SystemExit(2) from None


COMMANDS: dict[str, tuple[Callable[[Workspace, argparse.Namespace], int], str]] = {
    "list": (show_list, "List all exercises, with progress and the minutes left."),
    "check": (check, "Grade one exercise with the tests of its lesson."),
    "hint": (hint, "Open one more of the three hints."),
    "reset": (reset, "Put the file back to how it was at first; your code is kept in exercises/.saved."),
    "solution": (solution, "Show the lesson's code, after passing or when asked twice."),
    "bugs": (show_bugs, "List the wrong implementations, by their symptoms."),
    "bug": (bug, "Make the file of one of them, which you fix; without a name, of the next one."),
    "watch": (watch, "Grade each time the file is saved, until it passes."),
}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m exercises", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (_, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name == "reset":
            command.add_argument("name", help="The exercise's name.")
        elif name not in ("list", "bugs"):
            command.add_argument(
                "name", nargs="?", help="The exercise's name; without it, the one you worked on last."
            )
        if name == "check":
            command.add_argument("--json", action="store_true", help="Print one line of JSON.")
            command.add_argument("--all", action="store_true", help="Grade all exercises.")
            command.add_argument("--submission", metavar="FOLDER", help="Grade the files in this folder.")
    return parser


def main(arguments: list[str] | None = None, space: Workspace | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] not in COMMANDS and not arguments[0].startswith("-"):
        near = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
        near += [f"watch {name}" for name in all_exercises() if name == arguments[0]]
        meant = f": did you mean {near[0]}?" if near else "."
        print(
            f"There is no command {arguments[0]!r}{meant} There are {', '.join(COMMANDS)}.", file=sys.stderr
        )
        return 2
    options = parser().parse_args(arguments)
    command = COMMANDS[options.command][0] if options.command else show
    try:
        return command(space or Workspace(), options)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
