"""A step fails on all ranks or on none: what goes wrong on one of them reaches the others with its messages.

      rank 0   F0 F1 F2 F3 ................ b0 b1 b2 b3      lower case: nothing is computed any more
      rank 1      F0 F1 f2 f3 ........ b0 b1 b2 b3           F2 failed here
      rank 2         F0 F1 f2 f3 b0 b1 b2 b3

A rank that raised alone would leave the others waiting for its messages. So it goes on to the end of its row
without computing, and each message that it still owes holds a NaN that arithmetic does not make. A rank that
receives one does the same. Nothing else is sent, and a step that succeeds pays for one look at a few bytes of
each message; on a GPU, where a look would make the host wait, for one look at the end of the step. The
sentence travels over the group's store. Gradients that were added before the failure stay: `zero_grad()`.

A failure that comes after a rank's last message is that rank's own. When it leaves because of it, the others
lose a connection, and name it (comm.membership.liveness).
"""

import ctypes
from collections.abc import Callable
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from comm.collectives import all_reduce
from comm.transport.wire import Group, group_of
from lab.errors import WorkbookError, reason
from pipeline_parallel.actions import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action

# As 16, 32 and 64 bits this is a NaN, and not the one that processors make.
FAILURE_BITS = 0x7FFD
CHECKED_BYTES = 16  # bytes of each message
FLAG = torch.int32  # what ranks exchange after a step without gradients: whether one has failed
_SECONDS = timedelta(seconds=5)  # for a sentence that was written before the message that led to it
_NAMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT_GRADIENT: "input gradient",
    WEIGHT_GRADIENT: "weight gradient",
}

_steps: "WeakKeyDictionary[dist.ProcessGroup, int]" = WeakKeyDictionary()


class SharedFailure:
    """Shares what went wrong in a step among the ranks of `group`, whose messages are on `device`."""

    def __init__(self, group: Group = None, device: torch.device | str = "cpu") -> None:
        self._group, self._device = group_of(group), device
        self.has_failed = False  # as far as this rank knows
        self._own: Exception | None = None
        self._last_bytes: dict[str, Tensor] = {}

    def begin_step(self) -> None:
        """Forget the last step. All ranks of the group count their steps alike."""
        _steps[self._group] = _steps.get(self._group, 0) + 1
        self.has_failed, self._own = False, None
        self._last_bytes.clear()

    def check_message(self, message: Tensor, kind: str) -> None:
        """Notice whether the sender of an activation or a gradient has failed."""
        if message.device.type == "cpu":
            self.has_failed = self.has_failed or is_failure_mark(message)
        else:  # after a rank's first mark only marks follow, so it is enough to ask the last message
            self._last_bytes[kind] = _first_bytes(message).clone()

    def compute_unless_failed(
        self, action: Action | None, compute: Callable[[], Tensor | None], like: Tensor | None = None
    ) -> Tensor | None:
        """Return what `compute` returns, of the shape and dtype of `like`; after a failure a mark of these.

        `like` is None where no other stage gets the result, `action` before the first one.
        """
        if not self.has_failed:
            try:
                made = compute()
                if like is not None:
                    validate_result(made, like, action)
                return made
            except Exception as error:
                self.record(error, action)
        return None if like is None else failure_mark(like, self._device)

    def end_step(self) -> Exception | None:
        """Return what this rank has to raise: its own error, or the sentence of the first that failed."""
        if any(map(is_failure_mark, self._last_bytes.values())):
            self.has_failed = True
        if not self.has_failed:
            return None
        own, self._own = self._own, None
        if own is not None and not isinstance(own, WorkbookError):
            return own
        return WorkbookError(self._sentence())

    def end_step_on_all(self) -> Exception | None:
        """Return what `end_step` does, after messages that went one way only. All ranks call it together.

        No message comes back from a later stage that has failed, so an all-reduce tells every rank.
        """
        if any(map(is_failure_mark, self._last_bytes.values())):
            self.has_failed = True
        failed = torch.tensor([self.has_failed], dtype=FLAG, device=self._device)
        all_reduce(failed, "max", self._group)
        self.has_failed = bool(failed)
        return self.end_step()

    def record(self, error: Exception, action: Action | None) -> None:
        """Take `error` for what went wrong in `action`, and tell the other ranks a sentence about it."""
        self.has_failed, self._own = True, error
        sentence = str(error)
        if not isinstance(error, WorkbookError):
            what = f"{type(error).__name__}: {reason(error)}".removesuffix(".")
            sentence = f"Rank {dist.get_rank()} failed in {_described(action)}: {what}."
        store, key = self._group.get_group_store(), self._key()
        if store.add(f"{key}/claimed", 1) == 1:  # where several fail, all raise one sentence
            store.set(key, sentence)

    def _sentence(self) -> str:
        store = self._group.get_group_store()
        try:
            store.wait([self._key()], _SECONDS)
            return store.get(self._key()).decode()
        except RuntimeError:
            return "Another rank failed in this step; look for the first error in its log."

    def _key(self) -> str:
        return f"pipeline_parallel.failure/{_steps[self._group]}"


def failure_mark(like: Tensor, device: torch.device | str) -> Tensor:
    """Return a message that says that its sender has failed."""
    words = torch.full((like.nbytes // 2 + 1,), FAILURE_BITS, dtype=torch.int16, device=device)
    return words.view(torch.uint8)[: like.nbytes].view(like.dtype).view(like.shape)


def is_failure_mark(message: Tensor) -> bool:
    """Return whether the sender of a message has failed."""
    size = min(CHECKED_BYTES, message.nbytes)
    if message.device.type != "cpu":
        message = _first_bytes(message).cpu()
    found = ctypes.string_at(message.data_ptr(), size)
    return size > 0 and found == (FAILURE_BITS.to_bytes(2, "little") * CHECKED_BYTES)[:size]


def _first_bytes(message: Tensor) -> Tensor:
    return message.detach().reshape(-1).view(torch.uint8)[:CHECKED_BYTES]


def validate_result(made: Tensor | None, like: Tensor, action: Action | None) -> None:
    """Refuse a result that would not fit into the buffer that waits for it."""
    if made is None:
        raise WorkbookError(
            f"T{_described(action)[1:]} has no gradient to send: the output does not depend on the input."
        )
    if (made.shape, made.dtype) != (like.shape, like.dtype):
        raise WorkbookError(
            f"The result of {_described(action)} is {list(made.shape)} of {made.dtype}, but the pipeline was "
            f"made for {list(like.shape)} of {like.dtype}: make it again after a change of the model."
        )


def _described(action: Action | None) -> str:
    if action is None:
        return "the division of its batch"
    return f"the {_NAMES[action.kind]} of microbatch {action.microbatch} in stage {action.stage}"
