"""A Python that simulates a machine with restrictions: `python forbidding.py WHAT WORD ...` becomes Python with these
arguments, under a system call filter like those of container engines."""

import errno
import os
import struct
import sys

from ppoctl.rewards.sandbox import kernel

NUMBERS = {
    "namespaces": {"x86_64": 272, "aarch64": 97},
    "mounts": {"x86_64": 165, "aarch64": 40},
    "landlock": {"x86_64": 444, "aarch64": 444},
    "users": {"x86_64": 117, "aarch64": 147},
    "filters": {"x86_64": 157, "aarch64": 167},
}
_PR_SET_SECCOMP = 22


def program(what: str) -> bytes:
    """Return a filter program that refuses a call. For `filters`, installing a filter reports success but does
    nothing."""
    number = NUMBERS[what][os.uname().machine]
    lines = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50000 | errno.EPERM)]
    if what == "filters":
        lines = [(0x20, 0, 0, 0), (0x15, 0, 3, number), (0x20, 0, 0, 16), (0x15, 0, 1, _PR_SET_SECCOMP)]
        lines += [(0x06, 0, 0, 0x50000)]
    return b"".join(struct.pack("HBBI", *line) for line in [*lines, (0x06, 0, 0, 0x7FFF0000)])


if __name__ == "__main__":
    kernel._prctl(kernel._PR_SET_NO_NEW_PRIVS, 1)
    kernel.filter_system_calls(program(sys.argv[1]))
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
