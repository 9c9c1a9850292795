"""Make the site's first page: the player runs, and lessons and pages to play with are cards.

The cards are the rows of README.md's map, and of the list in site/README.md.
"""

import posixpath
import re

PAGE = """# The Distributed Training Workbook

You write distributed training yourself, from the first message between two processes to a GPT on a mesh of
ranks. Every technique is a short file that runs for real on a laptop without a GPU.

[Start: notebook 00, {first}](notebooks/00_setup.ipynb)
[Lesson 1](comm/README.md)
[Puzzles](site/puzzles/page.html)

The notebooks and lessons can be read here. You run them [on your machine](#on-your-machine).

```{{raw}} html
{player}
```

Eight ranks add up their tensors. In a ring each rank sends a part to the next one, and all links work at the
same time. Choose other algorithms, ranks and links on [the player's page](site/all_reduce/page.html).

## On your machine

You need Python 3.11 or newer and make. `make run` also sets up everything, in a minute or two.

```bash
{clone}
make run         # 1. two ranks on this machine train a small GPT
make notebooks   # 2. the guided tour: open 00_setup.ipynb
make exercises   # 3. the first part of a lesson that you write yourself
```

[Set-up](docs/setup.md) has other ways to install, [running](docs/running.md) all ways to run a script, and
[results](docs/results.md) what each technique gains, measured.

## The map

Each lesson has one route. Section by section of its page you predict with a notebook, write exercises, and
read files. After the last section you find the bugs in wrong versions of these files.

{lessons}

## Pages to play with

They need no installation, and run in any browser.

{pages}
"""


def rows_of(text: str, head: str) -> list[list[str]]:
    """Return the cells of each row of the table that begins with this head."""
    _, found, after = text.partition(f"| {head} |")
    lines = after.splitlines()[2:] if found else []
    ends = next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[:ends]]


def lessons_of(readme: str) -> list[str]:
    """Return the folders of the lessons in the order of README.md's map."""
    return [name for row in rows_of(readme, "lesson") for name in re.findall(r"\((\w+)/README\.md\)", row[0])]


def clone_of(readme: str) -> str:
    """Return README.md's command that fetches the workbook."""
    return next(line for line in readme.splitlines() if line.startswith("git clone "))


def first_page(readme: str, list_of_pages: str) -> str:
    """Return the first page's text, from README.md and site/README.md."""
    rows = rows_of(readme, "lesson")
    first = re.search(r"\(notebooks/00_setup\.ipynb\): (\d+ minutes)", str(rows))
    assert first is not None, "the map in README.md says how long notebook 00 takes"
    lessons = [
        f"- **{lesson}**\n\n  {after[:1].upper()}{after[1:]}.\n\n  Predict: notebook"
        + re.sub(r"(.*): (.*)", rf"{'s' * (predict.count('](') > 1)} \1 (\2)", predict)
        + (f"\n\n  Write: {write}" if write else "")
        for lesson, after, predict, write in rows
    ]
    pages = [
        f"- **[{title}]({posixpath.normpath(f'site/{path}')})**\n\n  {what[:1].upper()}{what[1:]}."
        for link, what in rows_of(list_of_pages, "page")
        for title, path in re.findall(r"\[(.+)\]\((.+)\)", link)
    ]
    player = frame("site/all_reduce.html#embed=playing&show=ring", "All-reduce in a ring, played")
    return PAGE.format(
        first=first[1],
        player=player,
        clone=clone_of(readme),
        lessons="\n".join(lessons),
        pages="\n".join(pages),
    )


def frame(address: str, title: str) -> str:
    """Return a page to play with as a part of another page; static/embed.js gives it the right height."""
    return f'<iframe class="play" src="{address}" title="{title}" loading="lazy"></iframe>'
