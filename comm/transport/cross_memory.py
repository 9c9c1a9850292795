"""Let a rank read the memory of another one on the same machine (cross-memory attach, process_vm_readv).

The reader does not trust a process id that arrives as data. The connection is a Unix socket, so the kernel
tells which process is at the other end. Before the first use the reader checks that it can read that process,
and that it is the right one. The sender has put 16 random bytes into the segment that both share
(segment.py), and it says where the segment lies in its own memory:

      sender  ── the segment, and its address ──►  reader   reads 16 bytes there: are they the segment's?

The kernel decides who may read. Ranks of one user may, unless the kernel is strict (Yama): then a rank names
the process that may read its memory. Where the kernel refuses, as between containers, large messages go
through the ring buffer.
"""

import ctypes
import multiprocessing
import os
import socket
import struct
import sys
from typing import Any

_CREDENTIALS = struct.Struct("=iII")  # process, user, group
_PR_SET_PTRACER = 0x59616D61


def is_possible() -> bool:
    """Return whether this system lets one process read another's memory."""
    return _vm_readv is not None


def peer_of(end: socket.socket) -> int:
    """Return the process id at the other end, from the kernel; 0 if it is in another container."""
    pid, _, _ = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid


_has_named_a_reader = False


def allow(reader: int) -> None:
    """Let the process `reader` read this one's memory where the kernel is strict (Yama).

    A process can name one other process, and the permission includes that one's children. So a rank names
    the launcher, if one has started the ranks, because it may have several readers. It never names the shell
    from which ranks were started by hand: then only the first reader can read, and the messages to others go
    through ring buffers.
    """
    global _has_named_a_reader
    if not _has_named_a_reader:
        is_launched = "TORCHELASTIC_RUN_ID" in os.environ or multiprocessing.parent_process() is not None
        _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid() if is_launched else reader), 0, 0, 0)
        _has_named_a_reader = True


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
    if not is_possible():
        return False
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
