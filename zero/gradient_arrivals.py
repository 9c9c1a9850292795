"""Track which gradients have arrived, and launch complete buckets in the same order on all ranks.

      gradients    bucket 0 [■■■]   bucket 1 [■□■]   bucket 2 [■■]
      launched     bucket 0                                         bucket 2 follows bucket 1

A backward may compute the gradients in another order on another rank. Ranks pair their collectives by the
order of the calls, so a complete bucket waits for those before it (ordered_launcher.py).
"""

from collections.abc import Callable

from torch import Tensor

from data_parallel.flat import ParameterBucket
from data_parallel.ordered_launcher import OrderedLauncher


class GradientArrivals:
    """The parameters whose gradients have arrived: `parameter in arrivals`.

    `launch(bucket)` is called for each bucket in turn, when the bucket and all before it have all their
    gradients.
    """

    def __init__(self, launch: Callable[[ParameterBucket], None]) -> None:
        self._launch = launch
        self._buckets: list[ParameterBucket] = []
        self._number: dict[Tensor, int] = {}  # of the bucket that has the parameter
        self.reset()

    def add_bucket(self, bucket: ParameterBucket) -> None:
        """Expect the gradients of this bucket, too; it is launched after those that are known."""
        self._number |= dict.fromkeys(bucket.flat.parameters, len(self._buckets))
        self._buckets.append(bucket)
        self.reset()

    def add(self, parameter: Tensor) -> None:
        """Note that a gradient has arrived, and launch the buckets that are complete with it."""
        missing = self._missing[self._number[parameter]]
        missing.discard(parameter)
        self._arrived.add(parameter)
        if not missing:
            self._launcher.ready(self._number[parameter])

    def missing(self) -> list[Tensor]:
        """Return the parameters whose gradients have not arrived, bucket by bucket."""
        return [parameter for parameter in self._number if parameter not in self._arrived]

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._arrived

    def __bool__(self) -> bool:
        return bool(self._arrived)

    def reset(self) -> None:
        """Expect the gradients of another backward."""
        self._arrived: set[Tensor] = set()
        self._missing = [set(bucket.flat.parameters) for bucket in self._buckets]
        self._launcher = OrderedLauncher(len(self._buckets), lambda k: self._launch(self._buckets[k]))
