"""Take the sentence with which something is refused, on one rank or on all of them."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from lab.launch.errors import WorkbookError


def refusal(action: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return the sentence with which an action refuses."""
    with pytest.raises(WorkbookError) as caught:
        action(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def the_one_sentence(texts: Iterable[str]) -> str:
    """Return what every rank says."""
    [text] = set(texts)
    assert text and "\n" not in text
    return text
