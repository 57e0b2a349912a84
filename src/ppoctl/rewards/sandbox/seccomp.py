"""Seccomp filter: the system calls that a program in the sandbox must not use.

The filter is a deny list, like the filters of container engines. Namespaces and Landlock isolate the program; the
filter keeps the program from kernel code that may have bugs (sockets, tracing, mounts, new namespaces, keys, kernel
memory). A denied call fails with EPERM, like any other error; a call with the numbers of another architecture kills
the program.
"""

import errno
import struct

from ppoctl.rewards.sandbox import kernel

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_CALLS = 0x40000000
"""First system call number of the x32 ABI, a second numbering of the same calls on x86-64."""

_REFUSED = {
    # name: number on x86-64, on AArch64 (None: does not exist)
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "mbind": (237, 235),
    "memfd_create": (319, 279),  # its memory is not counted by any limit of the process
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "modify_ldt": (154, None),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "seccomp": (317, 277),
    "semget": (64, 190),
    "set_mempolicy": (238, 237),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "shmget": (29, 194),
    "socket": (41, 198),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
    "vmsplice": (278, 75),
}
_CLONE = (56, 220)
_CLONE3 = 435
"""Number of the system call `clone3`. Its flags are in memory, which a filter cannot read. The call fails with
ENOSYS, so that libc uses `clone` instead."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_CALL_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def filter_program() -> bytes:
    """Return the filter as a classic BPF program. Raises OSError if the architecture's numbers are not known."""
    column = {"x86_64": 0, "aarch64": 1}[kernel.machine()]
    refuse = _ERRNO | errno.EPERM
    lines = [_line(_LOAD, _ARCH_AT), *_unless(_EQUAL, _AUDIT_ARCH[kernel.machine()], _KILL), _line(_LOAD, _CALL_AT)]
    if column == 0:
        lines += _if(_AT_LEAST, _X32_CALLS, _KILL)
    lines += _if(_EQUAL, _CLONE3, _ERRNO | errno.ENOSYS)
    for numbers in _REFUSED.values():
        if (number := numbers[column]) is not None:
            lines += _if(_EQUAL, number, refuse)
    lines += [
        _line(_EQUAL, _CLONE[column], 0, 3),
        _line(_LOAD, _FIRST_ARGUMENT_AT),
        *_if(_ANY_BIT, kernel.ALL_NAMESPACES, refuse),
        _line(_RETURN, _ALLOW),
    ]
    return b"".join(lines)


def _if(test: int, value: int, action: int) -> list[bytes]:
    return [_line(test, value, 0, 1), _line(_RETURN, action)]


def _unless(test: int, value: int, action: int) -> list[bytes]:
    return [_line(test, value, 1, 0), _line(_RETURN, action)]


def _line(code: int, value: int, if_so: int = 0, if_not: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_so, if_not, value)
