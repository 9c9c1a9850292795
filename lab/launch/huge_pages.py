"""Make forks faster by huge pages: a fork then copies one page-table entry for 2 MiB instead of 512."""

import ctypes
import re
import sys

HUGE = 1 << 21  # bytes
_MADV_COLLAPSE = 25  # Linux 6.1
_ANONYMOUS = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 +(?:\[heap\])?\n")


def collapse_memory() -> int:
    """Move anonymous memory to huge pages, if the kernel can, and return the number of moved bytes.

    A process with torch has about 300 MiB of such memory. Afterwards a fork and the end of its child take 4
    ms instead of 17. When the child writes to memory, pages of 4 KiB are copied, as before.
    """
    if sys.platform != "linux":
        return 0
    madvise, moved = ctypes.CDLL(None).madvise, 0
    with open("/proc/self/maps") as file:
        maps = file.readlines()
    for line in maps:
        if match := _ANONYMOUS.match(line):
            start, end = (int(address, 16) for address in match.groups())
            for at in range(-(-start // HUGE) * HUGE, end - HUGE + 1, HUGE):
                is_moved = madvise(ctypes.c_void_p(at), ctypes.c_size_t(HUGE), _MADV_COLLAPSE) == 0
                moved += HUGE * is_moved
    return moved
