"""Let a test's body be what each rank does."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from lab.ranks import run_ranks


def on_ranks(*world_sizes: int | str, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on so many ranks, or on each of several numbers of ranks. `options` are those of run_ranks.

    A string in place of a number names the test's argument that holds the number of ranks. The test's first
    argument is the rank's cluster:

        @on_ranks(2, timeout=20)
        def test_there_are_two_ranks(cluster: Cluster):
            assert cluster.world_size == 2
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        full = inspect.signature(test)
        _, *others = full.parameters.values()
        signature = full.replace(parameters=others)

        @functools.wraps(test)
        def run(*given: Any, **named: Any) -> None:
            arguments = signature.bind(*given, **named).arguments
            for size in world_sizes:
                world_size = arguments[size] if isinstance(size, str) else size
                run_ranks(functools.partial(test, **arguments), world_size, **options)

        run.__signature__ = signature  # type: ignore[attr-defined]
        return run

    return decorate
