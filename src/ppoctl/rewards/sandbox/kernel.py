"""Linux system calls that a sandbox needs and Python does not provide. Imports only the standard library."""

import ctypes
import errno
import os
import platform
import struct

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
ALL_NAMESPACES = (
    CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
)

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 4, 22, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = 63

_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
# System calls since Linux 5.1 have the same number on every architecture.
_CLOSE_RANGE, _MOUNT_SETATTR = 436, 442
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_VERSION = 1
_LANDLOCK_PATH_BENEATH = 1
_LANDLOCK_EXECUTE, _LANDLOCK_WRITE_FILE, _LANDLOCK_READ_FILE, _LANDLOCK_READ_DIR = 1, 2, 4, 8

_libc = ctypes.CDLL(None, use_errno=True)


def machine() -> str:
    """Return the architecture of this machine. Raises OSError if the system call numbers of the architecture are not
    known."""
    architecture = platform.machine()
    if architecture not in _PIVOT_ROOT:
        raise OSError(errno.ENOSYS, f"the system call numbers of `{architecture}` are not known")
    return architecture


def unshare(flags: int) -> None:
    """Move this process into new namespaces. A new process id namespace applies from the next child on."""
    _ok(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Mount a file system, bind-mount a path, or change the propagation of mounts."""
    names = [None if text is None else text.encode() for text in (source, target, kind)]
    data = None if options is None else options.encode()
    _ok(_libc.mount(*names, ctypes.c_ulong(flags), data), f"mount of {target}")


def make_read_only(path: str, *, recursive: bool) -> None:
    """Make a mount, and with `recursive` all mounts below it, read-only. Setuid bits and device files on these mounts
    have no effect. Requires Linux 5.12."""
    attributes = struct.pack("QQQQ", _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    _syscall("mount_setattr", _MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, attributes, len(attributes))


def pivot_root(new: str, old: str) -> None:
    """Make a mount the root, and move the old root to a folder in it."""
    _syscall("pivot_root", _PIVOT_ROOT[machine()], new.encode(), old.encode())


def unmount(path: str) -> None:
    """Detach a mount and all mounts below it."""
    _ok(_libc.umount2(path.encode(), _MNT_DETACH), f"umount of {path}")


def close_but(first: int, kept: int) -> None:
    """Close all descriptors from `first` on, except `kept`."""
    if kept > first:
        _syscall("close_range", _CLOSE_RANGE, first, kept - 1, 0)
    _syscall("close_range", _CLOSE_RANGE, max(first, kept + 1), 0x7FFFFFFF, 0)


def die_with_parent(number: int) -> None:
    """Let the kernel send this signal when the thread that started this process ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Make this process the parent of all descendants whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def hide_memory() -> None:
    """Hide the memory of this process from all processes without the privilege to trace any process."""
    _prctl(_PR_SET_DUMPABLE, 0)


def drop_privileges() -> None:
    """Drop all capabilities permanently, including those that executing another program could grant."""
    for number in range(_LAST_CAPABILITY + 1):
        if _libc.prctl(_PR_CAPBSET_DROP, *map(ctypes.c_ulong, (number, 0, 0, 0))) != 0:
            break  # the number is above the kernel's last capability, or this process has none to drop
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    header, nothing = struct.pack("Ii", _CAPABILITY_VERSION_3, 0), struct.pack("6I", 0, 0, 0, 0, 0, 0)
    _syscall("capset", _CAPSET[machine()], header, nothing)


def filter_system_calls(program: bytes) -> None:
    """Install a seccomp program for this process, its descendants, and all programs that they execute."""
    code = ctypes.create_string_buffer(program, len(program))
    about = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    _ok(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, about, 0, 0), "seccomp")


def landlock_version() -> int:
    """Return the version of the Landlock interface. Raises OSError if the kernel does not have Landlock."""
    return _syscall("Landlock", _LANDLOCK_CREATE, None, 0, _LANDLOCK_VERSION)


def leave_files(folders: list[str], devices: list[str]) -> None:
    """Restrict this process and its descendants permanently: they can read and execute files in `folders`, read and
    write `devices`, and open no other file."""
    version = landlock_version()
    # Newer versions of Landlock know more rights. A right that is handled and not granted is denied.
    rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    rules = _syscall("Landlock", _LANDLOCK_CREATE, struct.pack("Q", rights), 8, 0)
    try:
        inside = _LANDLOCK_EXECUTE | _LANDLOCK_READ_FILE | _LANDLOCK_READ_DIR
        allowed = {
            **dict.fromkeys(folders, inside),
            **dict.fromkeys(devices, _LANDLOCK_WRITE_FILE | _LANDLOCK_READ_FILE),
        }
        for path, access in allowed.items():
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            beneath = struct.pack("=Qi", access, descriptor)
            _syscall("Landlock", _LANDLOCK_ADD, rules, _LANDLOCK_PATH_BENEATH, beneath, 0)
            os.close(descriptor)
        # Landlock requires this from a process without CAP_SYS_ADMIN.
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        _syscall("Landlock", _LANDLOCK_RESTRICT, rules, 0)
    finally:
        os.close(rules)


def _prctl(option: int, value: int) -> None:
    _ok(_libc.prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))), "prctl")


def _syscall(name: str, number: int, *arguments: object) -> int:
    # `syscall` takes machine words; ctypes would pass Python's numbers as 32-bit integers.
    converted = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return _ok(_libc.syscall(ctypes.c_long(number), *converted), name)


def _ok(result: int, name: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
