"""Keep gradients of microbatches on this rank: the context that every data-parallel wrapper offers."""

import contextlib
from collections.abc import Iterator


class NoSync:
    """Knows in `is_synchronising` whether a backward may send gradients: False inside `no_sync()`."""

    is_synchronising = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Run all backwards inside but the last one of a step."""
        self.is_synchronising = False
        try:
            yield
        finally:
            self.is_synchronising = True
