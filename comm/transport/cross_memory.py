"""Connect two ring neighbours of one machine by memory: the right one reads the left one's memory itself.

      left: "4 MiB lie at this address"    ──►   right: reads them, answers "read"

A socket copies a payload twice: into the kernel and out of it. Cross-memory attach (CMA, Linux's
process_vm_readv) copies it once, from one process's memory into the other's, as the shared-memory transports
of MPI do (Vienne, "Benefits of Cross Memory Attach for MPI libraries on HPC Clusters", 2014). A small payload
still goes through the socket, behind its length. The sender does not change a payload before it is read.

The reader does not trust a process id that arrives as data. The connection is a Unix socket, so the kernel
tells which process is at the other end. Before the first use the reader checks that it can read that memory:

      left                                                         right
                             ◄── 16 random bytes ──
      stores them            ──     address      ──►               reads the 16 bytes at that address
                             ◄──  equal, or not  ──

The kernel also decides who may read. Ranks of one user may, unless the kernel is strict (Yama): then a rank
names the process that may read its memory. Where the kernel refuses (another container, another machine,
another operating system), the connection is a byte stream (transport/connections.py).
"""

import ctypes
import multiprocessing
import os
import secrets
import select
import socket
import struct
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

_INLINE_BYTES = 1 << 16  # up to this size two copies take less time than one copy and the answer
_MOST_UNREAD = 64
_FRAME = struct.Struct("=qq")  # address of a payload, or 0 if the payload follows; its length
_NONCE_BYTES = 16
_ADDRESS = struct.Struct("=q")
_CREDENTIALS = struct.Struct("=iII")  # process, user, group
_PR_SET_PTRACER = 0x59616D61
_READ, _REFUSED = b"\1", b"\0"


class CmaOut:
    """Send to the right neighbour, which reads this rank's memory."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._frames, self._unread = bytearray(), 0

    @property
    def is_busy(self) -> bool:
        """Return whether the neighbour has not read all messages yet."""
        return bool(self._frames or self._unread)

    @property
    def is_leaving(self) -> bool:
        """Return whether the kernel has not taken all frames yet."""
        return bool(self._frames)

    def push(self, queue: deque[memoryview]) -> int:
        """Announce large messages, send small ones, note what was read. Return 0 if nothing moved."""
        while queue and self._unread < _MOST_UNREAD:
            data = queue.popleft()
            if len(data) <= _INLINE_BYTES:
                self._frames += _FRAME.pack(0, len(data)) + data
            else:
                self._frames += _FRAME.pack(address_of(data), len(data))
                self._unread += 1
        moved = 0
        try:
            if self._frames:
                moved += (sent := self.socket.send(self._frames))
                del self._frames[:sent]
            if self._unread:
                moved += (read := len(_received(self.socket, _MOST_UNREAD)))
                self._unread -= read
        except BlockingIOError:
            pass
        return moved

    def waits_for(self) -> int:
        """Return the events for which select.poll should wait."""
        return (select.POLLOUT if self._frames else 0) | (select.POLLIN if self._unread else 0)


class CmaIn:
    """Receive from the left neighbour, by reading the memory of its process."""

    def __init__(self, end: socket.socket, pid: int) -> None:
        self.socket, self._pid = end, pid
        self._head, self._address, self._left = b"", 0, 0
        self._hangup = select.poll()
        self._hangup.register(end, select.POLLRDHUP)

    def receive(self, into: memoryview) -> int:
        """Fill the beginning of `into`; return the number of bytes, 0 if none has arrived."""
        try:
            if not self._left:
                self._head += _received(self.socket, _FRAME.size - len(self._head))
                if len(self._head) < _FRAME.size:
                    return 0
                self._address, self._left = _FRAME.unpack(self._head)
                self._head = b""
            wanted = into[: self._left]
            num_bytes = self._read(wanted) if self._address else self.socket.recv_into(wanted)
        except BlockingIOError:
            return 0
        if not num_bytes:
            raise ConnectionError("it closed the connection")
        self._left -= num_bytes
        if self._address:
            self._address += num_bytes
            if not self._left:
                self.socket.send(_READ)
        return num_bytes

    def waits_for(self, num_bytes: int) -> int:
        """Return the events for which select.poll should wait. `num_bytes` is how many are expected."""
        return select.POLLIN

    def _read(self, into: memoryview) -> int:
        num_bytes = read_memory(self._pid, self._address, into)
        # A neighbour that gives up closes the connection before it uses its memory for something else.
        if self._hangup.poll(0):
            raise ConnectionError("it closed the connection")
        return num_bytes


def is_possible() -> bool:
    """Return whether this system lets one process read another's memory."""
    return _vm_readv is not None


def is_local(end: socket.socket) -> bool:
    """Return whether the process at the other end is on this machine, so that its memory may be readable."""
    return is_possible() and end.family == socket.AF_UNIX


def challenge(left: socket.socket) -> bytes:
    """Send the left neighbour random bytes to store in its memory; return them."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    left.sendall(nonce)
    return nonce


def prove(right: socket.socket) -> ctypes.Array:
    """Store the right neighbour's random bytes, and send it their address.

    Keep the result until `answer` has returned.
    """
    proof = ctypes.create_string_buffer(_exactly(right, _NONCE_BYTES), _NONCE_BYTES)
    allow(peer_of(right))
    right.sendall(_ADDRESS.pack(ctypes.addressof(proof)))
    return proof


def verify(left: socket.socket, nonce: bytes) -> int:
    """Return the left neighbour's process id if its memory can be read, else 0; send it the outcome."""
    (address,) = _ADDRESS.unpack(_exactly(left, _ADDRESS.size))
    pid, seen = peer_of(left), bytearray(len(nonce))
    try:
        read_memory(pid, address, memoryview(seen))
    except OSError:
        pid = 0
    pid = pid if seen == nonce else 0
    left.sendall(_READ if pid else _REFUSED)
    return pid


def answer(right: socket.socket) -> bool:
    """Return whether the right neighbour can read this rank's memory, as it answers."""
    return _exactly(right, 1) == _READ


def peer_of(end: socket.socket) -> int:
    """Return the process id at the other end, from the kernel; 0 if it is in another container."""
    pid, _, _ = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid


_readers: set[int] = set()


def allow(reader: int) -> None:
    """Let the process `reader` read this one's memory where the kernel is strict (Yama).

    A process can name one other process, and the permission includes that one's children. A rank in several
    groups may have several readers. Then it names the launcher, if the launcher has started all of them. It
    never names the shell from which ranks were started by hand: the first reader keeps the permission, and
    further connections are byte streams.
    """
    _readers.add(reader)
    if len(_readers) == 1:
        _name_tracer(reader)
    elif _is_launched() and all(_parent_of(one) == os.getppid() for one in _readers):
        _name_tracer(os.getppid())


def _name_tracer(pid: int) -> None:
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def _is_launched() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ or multiprocessing.parent_process() is not None


def _parent_of(pid: int) -> int | None:
    with suppress(OSError):
        # The name, in brackets, may contain any character. The state and the parent's id follow it.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


class _IoVec(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


_libc: Any = None if sys.platform == "win32" else ctypes.CDLL(None, use_errno=True)
_vm_readv: Any = getattr(_libc, "process_vm_readv", None) if sys.platform == "linux" else None
if _vm_readv is not None:
    _vm_readv.restype = ctypes.c_ssize_t
    _vm_readv.argtypes = (
        ctypes.c_int,
        ctypes.POINTER(_IoVec),
        ctypes.c_ulong,
        ctypes.POINTER(_IoVec),
        ctypes.c_ulong,
        ctypes.c_ulong,
    )


def can_read(pid: int, nonce_address: int, nonce: memoryview) -> bool:
    """Return whether this process may read that of `pid`, and finds the same 16 bytes there."""
    seen = bytearray(len(nonce))
    try:
        read_memory(pid, nonce_address, memoryview(seen))
    except OSError:
        return False
    return seen == nonce


def read_memory(pid: int, address: int, into: memoryview) -> int:
    """Copy the bytes at `address` in the process `pid` to `into`. Return how many. Raise OSError."""
    here, there = _IoVec(address_of(into), len(into)), _IoVec(address, len(into))
    num_bytes = _vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    if num_bytes < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return num_bytes


def address_of(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


def _exactly(end: socket.socket, num_bytes: int) -> bytes:
    """Wait for exactly `num_bytes`, and return them."""
    data = end.recv(num_bytes, socket.MSG_WAITALL)
    if len(data) < num_bytes:
        raise ConnectionError("it closed the connection")
    return data


def _received(end: socket.socket, num_bytes: int) -> bytes:
    data = end.recv(num_bytes)
    if not data:
        raise ConnectionError("it closed the connection")
    return data
