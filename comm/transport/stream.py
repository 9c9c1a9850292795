"""A stream of segments from one rank: received ahead, handed out in order."""

from collections.abc import Callable, Iterator

import torch

from comm.transport.wire import Transfer, Wire

AHEAD = 8


class Stream:
    """The next `len(sizes)` segments that `src` sends, `sizes` in elements.

    Receives are posted ahead, for a payload moves only once its receive is posted, but only a few, so that
    the memory they arrive in stays small and in the cache. The first ones are posted at once. When the
    last one is, `when_posted` may post what comes from `src` after this stream.
    """

    def __init__(
        self,
        wire: Wire,
        src: int,
        sizes: list[int],
        dtype: torch.dtype,
        when_posted: Callable[[], None] = lambda: None,
    ) -> None:
        self._wire, self._src, self._sizes, self._when_posted = wire, src, sizes, when_posted
        self._slots = torch.empty(min(AHEAD, len(sizes)), max(sizes, default=0), dtype=dtype)
        self._posted: list[Transfer] = []
        self._post(AHEAD)

    def _post(self, up_to: int) -> None:
        for size in self._sizes[len(self._posted) : up_to]:
            slot = self._slots[len(self._posted) % AHEAD]
            self._posted.append(self._wire.irecv(slot[:size], self._src))
        if len(self._posted) == len(self._sizes):
            then, self._when_posted = self._when_posted, lambda: None
            then()

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Each segment may be used until the next one is asked for."""
        for position in range(len(self._sizes)):
            self._posted[position].wait()
            yield self._posted[position].tensor
            self._post(position + 1 + AHEAD)
