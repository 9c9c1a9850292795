"""A step fails on all ranks or on none: the error of one rank reaches the others with its messages.

      rank 0   F0 F1 F2 F3 ................ b0 b1 b2 b3      lower case: nothing is computed any more
      rank 1      F0 F1 f2 f3 ........ b0 b1 b2 b3           F2 failed here
      rank 2         F0 F1 f2 f3 b0 b1 b2 b3

If a rank that fails left at once, the others would wait for its messages. So it goes on to the end of its row
without computing, and each message that it still has to send is a *failure mark*: a NaN that arithmetic does
not make. A rank that receives a failure mark does the same. The marks take the place of the usual messages;
no message is added. A step that succeeds pays for one look at a few bytes of each message. On a GPU a look
makes the host wait, so the last activation and the last gradient are looked at when the step ends. The
sentence about the error goes through the store of the group. Gradients that were added before the error
stay: call `zero_grad()`.

An error after the last message of a rank is raised on that rank alone. When that rank then exits, the others
lose the connection to it, and their error names it (comm.membership.liveness).
"""

import ctypes
import json
from collections.abc import Callable
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from comm.collectives import all_reduce, chosen_pattern
from comm.errors import CommError, Mismatch
from comm.wire.wire import Group, group_of
from lab.launch.errors import WorkbookError, reason
from pipeline_parallel.actions import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action

# A NaN if read as 16, 32 or 64 bits, and not the NaN that processors make.
FAILURE_BITS = 0x7FFD
CHECKED_BYTES = 16  # of each message, from its start
FLAG = torch.int32  # dtype of the all-reduce that says, after a step without gradients, if a rank failed
_SECONDS = timedelta(seconds=5)  # limit of the wait for the sentence, which is stored before marks are sent
_NAMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT_GRADIENT: "input gradient",
    WEIGHT_GRADIENT: "weight gradient",
}

_steps: "WeakKeyDictionary[dist.ProcessGroup, int]" = WeakKeyDictionary()


class SharedFailure:
    """Shares an error of one rank with all ranks of `group`, whose messages are on `device`."""

    def __init__(self, group: Group = None, device: torch.device | str = "cpu") -> None:
        self._group, self._device = group_of(group), device
        self.has_failed = False  # on this rank, or on another one as far as this rank knows
        self._own: Exception | None = None
        self._last_bytes: dict[str, Tensor] = {}

    def begin_step(self) -> None:
        """Forget the step before. All ranks of the group count their steps in the same way."""
        _steps[self._group] = _steps.get(self._group, 0) + 1
        self.has_failed, self._own = False, None
        self._last_bytes.clear()

    def check_message(self, message: Tensor, kind: str) -> None:
        """Notice whether the sender has failed; on a GPU, keep the first bytes for the end of the step."""
        if message.device.type == "cpu":
            self.has_failed = self.has_failed or is_failure_mark(message)
        else:  # only marks follow a first mark, so the last message is enough
            self._last_bytes[kind] = _first_bytes(message).clone()

    def compute_unless_failed(
        self, action: Action | None, compute: Callable[[], Tensor | None], like: Tensor | None = None
    ) -> Tensor | None:
        """Return what `compute` returns; after a failure, a failure mark in its place.

        The result must have the shape and dtype of `like`, which is None if no other stage gets the result.
        `action` is None before the first action.
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
        """Return the error that this rank has to raise, or None.

        That is the rank's own error, if there is one and it is no WorkbookError. Otherwise it is a
        WorkbookError with the sentence of the first rank that failed: a CommError if that rank lost a peer.
        """
        if any(map(is_failure_mark, self._last_bytes.values())):
            self.has_failed = True
        if not self.has_failed:
            return None
        own, self._own = self._own, None
        if own is not None and not isinstance(own, WorkbookError):
            return own
        return self._first_failure()

    def end_step_on_all(self) -> Exception | None:
        """Return what `end_step` does, after messages that went one way only. All ranks call it together.

        No message comes back from a later stage that has failed, so an all-reduce tells every rank.
        """
        if any(map(is_failure_mark, self._last_bytes.values())):
            self.has_failed = True
        failed = torch.tensor([self.has_failed], dtype=FLAG, device=self._device)
        all_reduce(failed, "max", self._group, pattern=chosen_pattern("all_reduce", self._group))
        self.has_failed = bool(failed)
        return self.end_step()

    def record(self, error: Exception, action: Action | None) -> None:
        """Keep `error` as the failure of `action`, and write a sentence about it for the other ranks."""
        self.has_failed, self._own = True, error
        sentence = str(error)
        if not isinstance(error, WorkbookError):
            what = f"{type(error).__name__}: {reason(error)}".removesuffix(".")
            sentence = f"Rank {dist.get_rank()} failed in {_described(action)}: {what}."
        store, key = self._group.get_group_store(), self._key()
        if store.add(f"{key}/claimed", 1) == 1:  # if several ranks fail, all raise the same sentence
            lost_a_peer = isinstance(error, CommError) and not isinstance(error, Mismatch)
            store.set(key, json.dumps([sentence, lost_a_peer]))

    def _first_failure(self) -> WorkbookError:
        store = self._group.get_group_store()
        try:
            store.wait([self._key()], _SECONDS)
            sentence, lost_a_peer = json.loads(store.get(self._key()))
        except RuntimeError:
            return WorkbookError("Another rank failed in this step; look for the first error in its log.")
        return CommError(sentence) if lost_a_peer else WorkbookError(sentence)

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
    """Refuse a result that does not fit into the buffer of the rank that receives it."""
    if made is None:
        raise WorkbookError(
            f"T{_described(action)[1:]} has no gradient to send: the output does not depend on the input."
        )
    if (made.shape, made.dtype) != (like.shape, like.dtype):
        raise WorkbookError(
            f"The result of {_described(action)} is {list(made.shape)} of {made.dtype}, but the pipeline was "
            f"made for {list(like.shape)} of {like.dtype}: make a new one after a change of the model."
        )


def _described(action: Action | None) -> str:
    if action is None:
        return "the division of its batch"
    return f"the {_NAMES[action.kind]} of microbatch {action.microbatch} in stage {action.stage}"
