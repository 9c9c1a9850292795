"""The command that writes the page refuses wrong arguments in a sentence."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline_parallel.analysis.page import PageArgs, main


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ranks": (0,)}, "at least 1, not 0"),
        ({"ranks": ()}, "The page would be empty: give at least one number"),
        ({"chunks": 0}, "--chunks 0: there must be at least one"),
        ({"forward": 0.0}, "--forward: give a time above 0"),
        ({"weight_gradient": float("nan")}, "--weight-gradient: give a time above 0"),
        ({"messages": (-1.0,)}, "--messages: give times of 0 or more"),
        ({"out": Path("/no/such/folder/page.html")}, "cannot write there"),
    ],
)
def test_what_makes_no_page_is_refused_in_a_sentence(changes: dict[str, Any], sentence: str, tmp_path: Path):
    small = PageArgs(out=tmp_path / "page.html", ranks=(2,), microbatches_per_rank=(1,))
    with pytest.raises(SystemExit, match=sentence):
        main(replace(small, **changes))
