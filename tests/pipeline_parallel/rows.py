"""Tables as people write them: a row is a text such as F0 F1 B0, or 2F0 2B0 for actions of stage 2."""

import re

from pipeline_parallel.actions import Action, Table


def parse_row(text: str, stage: int = 0) -> list[Action]:
    """Return the actions of a text. Those without a number in front are in stage `stage`."""
    found = (re.fullmatch(r"(\d+)?([FBIW])(\d+)", word) for word in text.split())
    return [Action(word[2], int(word[3]), int(word[1] or stage)) for word in found]


def written(*rows: str) -> Table:
    """Return the table of these rows, of which each is of the stage with the rank's number."""
    return [parse_row(row, stage) for stage, row in enumerate(rows)]
