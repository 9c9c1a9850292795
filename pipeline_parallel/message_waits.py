"""Wait for a pipeline's messages: add up the seconds, and name a message that fails."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from comm.errors import CommError
from comm.transport.messages import AnyTransfer
from lab.trace import timeline
from pipeline_parallel.actions import FORWARD
from pipeline_parallel.failure import SharedFailure
from pipeline_parallel.messages import Message


class MessageWaits:
    """Adds up in `seconds` how long this rank has waited for messages since the last action."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wait(self, message: Message, transfer: AnyTransfer) -> None:
        """Wait until a message has been sent or received."""
        with self._counted(), naming(message), timeline.span("wait", "wait"):
            transfer.wait()

    def check(self, message: Message, received: Tensor, failure: SharedFailure) -> None:
        """Notice whether the sender has failed (SharedFailure.check_message)."""
        with self._counted():
            failure.check_message(received, message.kind)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        start = timeline.now()
        yield
        self.seconds += (timeline.now() - start) / 1e9


@contextmanager
def naming(message: Message) -> Iterator[None]:
    """Make an error of communication say which message it is about, and between which stages."""
    try:
        yield
    except CommError as error:
        what = "activation" if message.kind == FORWARD else "gradient"
        raise CommError(
            f"The {what} of microbatch {message.microbatch} did not get from stage {message.stage} "
            f"to stage {message.receiver}. {error}"
        ) from error
