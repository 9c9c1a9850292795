"""Write what the pages say of notebooks, exercises and bugs: numbers of the map, routes, plans of courses.

    python -m exercises.pages

README.md's map says which notebooks belong to which lesson; notebooks/README.md has their minutes.
"""

import math
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from exercises.catalog import EXERCISES, ROOT, Exercise
from exercises.find_the_bug import Bug, bugs
from lab.what_changed import steps_of

MAP, COURSE = ROOT / "README.md", ROOT / "docs" / "course.md"
READING = 30  # minutes for the files of one notebook
BOOKS = {  # 04_naive_data_parallel: ("04 Naive data parallel", 40)
    file: (title, int(minutes))
    for title, file, minutes in re.findall(
        r"^\| \[(.+?)\]\((\w+)\.ipynb\) \| (\d+) \|", (ROOT / "notebooks/README.md").read_text("utf-8"), re.M
    )
}
HOW = """Work section by section: predict, write and read what a section of this page names, then go on to
the next one. After the last section, break. These are the four steps, with the totals of all sections:
"""
ROW = re.compile(r"^\| .*\(notebooks/.*$", re.M)


def pages() -> dict[Path, str]:
    """Return the text that each of the pages should have."""
    top, course = MAP.read_text("utf-8"), COURSE.read_text("utf-8")
    texts = {MAP: ROW.sub(lambda row: with_numbers(row[0]), top)}
    for row in ROW.findall(top):
        if folder := lesson_of(row):
            page = ROOT / folder / "README.md"
            texts[page] = between_marks("route", route(folder, books_of(row)), page.read_text("utf-8"))
    texts[COURSE] = between_marks("plans", "\n\n".join(map(plan, PLANS)), course)
    return texts


def between_marks(name: str, text: str, page: str) -> str:
    """Return the page with this text between its marks of that name."""
    pattern = re.compile(rf"(<!-- {name}: begin -->\n).*(<!-- {name}: end -->)", re.DOTALL)
    changed, number = pattern.subn(lambda marks: f"{marks[1]}{text}\n{marks[2]}", page)
    assert number == 1, f"the page must have the marks of `{name}` once"
    return changed


def lesson_of(row: str) -> str | None:
    found = re.search(r"\((\w+)/README\.md\)", row)
    return found and found[1]


def books_of(row: str) -> list[str]:
    return re.findall(r"\(notebooks/(\w+)\.ipynb\)", row)


def exercises_of(folder: str) -> list[Exercise]:
    return [each for each in EXERCISES if each.file.parts[0] == folder]


def minutes_of(books: Iterable[str]) -> int:
    return sum(BOOKS[book][1] for book in books)


def with_numbers(row: str) -> str:
    """Return a row of the map with the minutes of its notebooks, and number and minutes of its exercises."""
    books = books_of(row)
    row = re.sub(r"(\.ipynb\)): \d+ minutes", rf"\1: {minutes_of(books)} minutes", row)
    there = exercises_of(lesson_of(row) or "")
    said = f"{len(there)} exercises: {sum(each.minutes for each in there)} minutes"
    return re.sub(r"\d+ exercises: \d+ minutes", said, row)


def route(folder: str, books: list[str]) -> str:
    """Return the four steps of a lesson."""
    there = exercises_of(folder)
    minutes = sum(each.minutes for each in there)
    names = ", ".join(f"`{each.name}`{' (open)' * bool(each.stub)}" for each in there)
    if "(open)" in names:
        names += ". An open exercise is a specification alone"
    notebooks = ", ".join(f"[{BOOKS[book][0]}](../notebooks/{book}.ipynb)" for book in books)
    files = dict.fromkeys(each.lesson.relative_to(ROOT / folder).as_posix() for each in reversed(there))
    links = ", ".join(f"[{Path(file).name}]({file})" for file in reversed(files))
    changes = [
        f" `make diff FROM={old} TO={new}` shows the difference, which gives away the solutions."
        for old, new in steps_of(folder)
    ]
    bug = next(each for each in bugs() if each.module in {one.module for one in there})
    steps = (
        f"**Predict**, {minutes_of(books)} minutes: `make notebooks`, and open {notebooks}.",
        f"**Write**, {minutes} minutes: `make exercises ARGS='watch {there[0].name}'` makes the first file, "
        f"and grades it on each save. The {len(there)} exercises: {names}.",
        f"**Read** the files of which you wrote parts: {links}. They contain the "
        f"solutions, so open one when all of its exercises are solved.{''.join(changes[:1])}",
        f"**Break**, {bug.minutes} minutes and more: `make exercises ARGS='bug {bug.name}'` makes a wrong "
        "version of one of these files, in which you find the mistake. `make exercises ARGS=bugs` lists all.",
    )
    return "\n".join([HOW, *(filled(f"{i}. {step}") for i, step in enumerate(steps, start=1))])


def names_of(exercises: Iterable[Exercise]) -> str:
    return ", ".join(f"`{each.name}`" for each in exercises)


def filled(step: str) -> str:
    """Return a step in lines of 120 characters, which do not break a command."""
    joined = re.sub(r"`[^`]+`", lambda command: command[0].replace(" ", "\0"), step)
    return textwrap.fill(joined, 120, subsequent_indent="   ", break_on_hyphens=False).replace("\0", " ")


@dataclass(frozen=True)
class Plan:
    """A course: the most hours of a week, and for each week its title and the numbers of its notebooks.

    A notebook that several weeks name is new in the first of them. Its exercises are divided among them.
    """

    title: str
    text: str
    hours: int
    weeks: tuple[tuple[str, str], ...]


PLANS = (
    Plan(
        "Four weeks",
        "An intensive course, with at most {hours} hours a week at home.",
        11,
        (
            ("Messages", "00 01 02 03"),
            ("Data parallel", "04 05"),
            ("Shards", "06 07"),
            ("Pipelines, and all together", "08 09 10 11 12 13"),
        ),
    ),
    Plan(
        "Eight weeks",
        "A course of one lecture and one session a week, with at most {hours} hours at home.",
        6,
        (
            ("Ranks", "00 01"),
            ("Collectives and their cost", "02 03"),
            ("Replicas and overlap", "04 05"),
            ("ZeRO", "06"),
            ("Tensor parallel", "07"),
            ("Pipelines", "08"),
            ("All together, failures, long sequences", "09 10 11"),
            ("Many experts, sending less", "12 13"),
        ),
    ),
    Plan(
        "Fourteen weeks",
        "A term with all exercises, and at most {hours} hours a week. In weeks without a new notebook\n"
        "students also read the papers that the lesson's files name.",
        24 * 7,
        (
            ("Set-up, ranks and messages", "00 01"),
            ("Collectives", "02"),
            ("Cost", "03"),
            ("Replicas", "04"),
            ("Overlap and buckets", "05"),
            ("Memory, ZeRO 1", "06"),
            ("ZeRO 2 and 3", "06"),
            ("Tensor parallel", "07"),
            ("Pipelines", "08"),
            ("Running a schedule", "08"),
            ("All together, and when it breaks", "09 10"),
            ("Long sequences", "11"),
            ("Many experts", "12"),
            ("Sending less", "13"),
        ),
    ),
)


def plan(course: Plan) -> str:
    """Return a course's heading, its table of weeks, and the commands that grade them."""
    grading = ["", "To grade a week, with `--submission` and `--exercise-report` as above:", "", "```bash"]
    lines = ["| week | notebooks | exercises | bugs | minutes | closed |", "|---|---|---|---|---:|---|"]
    seen: list[str] = []  # the numbers of notebooks in all weeks so far
    chosen: list[Exercise] = []
    longest = 0
    for week, (title, taught) in enumerate(course.weeks, start=1):
        books = [book for book in BOOKS if book[:2] in taught.split()]
        new = [book for book in books if book[:2] not in seen]
        shares = [each for book in books for each in share(book, seen.count(book[:2]), course)]
        pool = sorted(shares, key=EXERCISES.index)
        left = course.hours * 60 - minutes_of(new) - READING * len(new)
        for of_a_bug in range(0, 35, 5):  # the minutes that exercises leave for each: as few as are enough
            written = those_that_fit(pool, left - of_a_bug * len(books))
            broken = list(bugs_for(books, written, chosen))
            minutes = sum(each.minutes for each in (*written, *broken))
            if minutes <= left:
                break
        seen, chosen = [*seen, *taught.split()], [*chosen, *written, *broken]
        cells = [f"{week} {title}", ", ".join(book[:2] for book in new)]
        cells += [names_of(written), names_of(broken)]
        minutes += minutes_of(new) + READING * len(new)
        files = dict.fromkeys(f"`{each.lesson.relative_to(ROOT)}`" for each in (*written, *broken))
        longest = max(longest, minutes)
        lines.append(f"| {' | '.join([*cells, str(minutes), ', '.join(files)])} |")
        if asked := " or ".join(each.name for each in (*written, *broken)):
            grading.append(f'pytest exercises -m "{asked}"  # week {week}')
    text = course.text.format(hours=math.ceil(longest / 60))
    return "\n".join([f"### {course.title}", "", text, "", *lines, *grading, "```"])


def share(book: str, earlier: int, course: Plan) -> list[Exercise]:
    """Return the exercises of a notebook for the week before which `earlier` weeks have named it."""
    there = [each for each in EXERCISES if each.notebook == book]
    weeks = sum(book[:2] in taught.split() for _, taught in course.weeks)
    total, before, found = sum(each.minutes for each in there), 0, []
    for each in there:
        if int((before + each.minutes / 2) * weeks / total) == earlier:
            found.append(each)
        before += each.minutes
    return found


def those_that_fit(pool: list[Exercise], minutes: int) -> list[Exercise]:
    """Return the easiest exercises that fit into so many minutes, each with what it needs of the pool."""
    missing, taken, left = {each.name for each in pool}, [], minutes
    while ready := [
        each
        for each in pool
        if each.name in missing and each.minutes <= left and not missing.intersection(each.needs)
    ]:
        taken.append(min(ready, key=lambda each: each.difficulty))
        missing.remove(taken[-1].name)
        left -= taken[-1].minutes
    return [each for each in pool if each in taken]


def bugs_for(books: list[str], written: list[Exercise], before: list[Exercise]) -> Iterator[Bug]:
    """Yield for each notebook a bug in a file of its exercises; for notebook 10, one in training/.

    A bug shows all of its function, so one that shows nothing of an exercise's solution comes first. Among
    equals come first the bugs that the notebook names, and then the easiest.
    """
    solutions = tuple(f"{target}." for each in EXERCISES for target in each.targets)
    for book in books:
        page = (ROOT / "notebooks" / f"{book}.ipynb").read_text("utf-8")
        files = {each.module for each in written if each.notebook == book}
        found = [one for one in bugs() if one not in before and one.module in files]
        if book[:2] == "10":
            found = [one for one in bugs() if one.target.startswith("training.")]
        yield from sorted(
            found, key=lambda one: (f"{one.target}.".startswith(solutions), one.name not in page)
        )[:1]


def main() -> None:
    for path, text in pages().items():
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
