"""A stream of segments from one rank: received ahead, handed out in order."""

from collections.abc import Iterator, Sequence

import torch

from comm.transport.wire import Transfer, Wire

AHEAD = 8


class SegmentReceiver:
    """The next `len(sizes)` segments that `src` sends, `sizes` in elements, and behind them those for `then`.

    Receives are posted ahead, for a payload moves only once its receive is posted, but only a few, so that
    the memory they arrive in stays small and in the cache. The tensors of `then` are the places where the
    last segments shall arrive; `last` has their transfers once the others are under way.
    """

    def __init__(
        self, wire: Wire, src: int, sizes: list[int], dtype: torch.dtype, then: Sequence[torch.Tensor] = ()
    ) -> None:
        self._wire, self._src, self._sizes, self._then = wire, src, sizes, then
        self._slots = torch.empty(min(AHEAD, len(sizes)), max(sizes, default=0), dtype=dtype)
        self._posted: list[Transfer] = []
        self.last: list[Transfer] = []
        self._post(AHEAD)

    def _post(self, up_to: int) -> None:
        for size in self._sizes[len(self._posted) : up_to]:
            slot = self._slots[len(self._posted) % AHEAD]
            self._posted.append(self._wire.irecv(slot[:size], self._src))
        if len(self._posted) == len(self._sizes) and not self.last:
            self.last = [self._wire.irecv(place, self._src) for place in self._then]

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Each segment may be used until the next one is asked for."""
        for position in range(len(self._sizes)):
            self._posted[position].wait()
            yield self._posted[position].tensor
            self._post(position + 1 + AHEAD)
