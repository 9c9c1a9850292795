"""Mark the backwards of all microbatches but the last: the context that data-parallel wrappers offer."""

import contextlib
from collections.abc import Iterator


class NoSync:
    """Has `is_synchronising`, which is False inside `no_sync()`: there most wrappers send no gradients."""

    is_synchronising = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Run all backwards of a step but the last one inside."""
        self.is_synchronising = False
        try:
            yield
        finally:
            self.is_synchronising = True
