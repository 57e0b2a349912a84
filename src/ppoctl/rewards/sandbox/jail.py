"""What a program is locked into, told from the inside: the steps of a process on its way to become it.

    namespaces   enter_namespaces, make_root, become_program(files = the new root's)
    user         become_program(as a user of its own, files closed by Landlock)

Every step is taken in a process that ends with it: nothing here is undone, and the first error ends it. Standard
library only.
"""

import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from ppoctl.rewards.sandbox import kernel, seccomp
from ppoctl.rewards.sandbox.job import Limits

INSIDE_ID = 1000
"""User and group of the program, as it sees itself."""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_INSTALLED = ("site-packages", "dist-packages")
"""Folders of packages beside the standard library, which a program does not get."""
_PROGRAM_FD = 3
_NOT_OPEN_FROM = 4
_FILES = 64
_STACK_BYTES = 64 << 20
_ROOT_OPTIONS = "size=1m,nr_inodes=1k,mode=755"
_RUN = (
    f"import os\nwith open({_PROGRAM_FD}, encoding='utf-8') as _file: _text = _file.read()\n"
    "del os, _file\nexec(compile(globals().pop('_text'), 'program.py', 'exec'))"
)
"""The program comes over a descriptor and is run as `__main__`; no file has it."""
_PYTHON = Path(sys.executable).resolve()
_COMMAND = [str(_PYTHON), "-s", "-S", "-P", "-B", "-X", "utf8", "-c", _RUN]
"""This very Python, alone with its standard library: no site, no user's folder, no bytecode, UTF-8. Found now: in the
new root links of the old one lead nowhere."""


def folders() -> list[str]:
    """Folders that a program may read: the system's, and those of this Python where it lies elsewhere."""
    base = Path(sys.base_prefix).resolve()
    own = [base / name for name in ("bin", "lib", "lib64") if (base / name).is_dir()]
    own += [_PYTHON.parent, Path(os.__file__).resolve().parent]
    found = [path for path in _SYSTEM if Path(path).is_dir()]
    for path in map(str, own):
        if not any(_is_below(path, other) for other in found):
            found.append(path)
    return found


def devices() -> list[str]:
    """Device files that a program may use."""
    return [path for path in _DEVICES if Path(path).exists()]


def enter_namespaces(channel: socket.socket) -> None:
    """Leave this machine's users, processes, mounts, network, names and shared memory. The launcher is told over the
    channel, and says users of the new namespace which of the old one they are."""
    kernel.unshare(kernel.ALL_NAMESPACES)
    channel.send(b"unshared")
    if channel.recv(16) != b"mapped":
        os._exit(1)  # the launcher is gone


def make_root(limits: Limits) -> None:
    """Build a root in memory of system folders, read-only, and a small writable `/tmp`, and let go of the old one."""
    shown, covered = folders(), _packages()
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, _ROOT_OPTIONS)
    os.chdir("/tmp")
    Path("old").mkdir()
    kernel.pivot_root(".", "old")
    os.chdir("/")
    for path in shown:
        _show(path)
    for path in covered:
        kernel.mount("tmpfs", path, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_RDONLY, "size=4k")
    for path in _DEVICES:
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).touch()
        kernel.mount(f"/old{path}", path, None, kernel.MS_BIND)
    Path("/tmp").mkdir()
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    kernel.mount("tmpfs", "/tmp", "tmpfs", flags, f"size={limits.files_mib}m,nr_inodes=1k,mode=1777")
    Path("/dev/shm").symlink_to("/tmp")
    kernel.unmount("/old")
    Path("/old").rmdir()
    kernel.make_read_only("/", recursive=False)
    socket.sethostname("sandbox")


def become_program(
    given: tuple[int, int, int], channel: int, limits: Limits, prepare: Callable[[], None]
) -> NoReturn:
    """Execute the program with the limits, no variable but the seed of hashes, and the descriptors `given` (its
    input, its output, its text) and no other. `prepare` changes user and closes files, before the last privileges go.

    `channel`: descriptor that an error is to be told over, and that closes with the execution.
    """
    stdin, stdout, program = given
    os.setsid()  # no terminal, and no process group to signal but its own
    nothing = os.open("/dev/null", os.O_WRONLY)
    for theirs, ours in enumerate((stdin, stdout, nothing, program)):
        os.dup2(ours, theirs)
        os.set_inheritable(theirs, True)  # noqa: FBT003 - Python's own
    kernel.close_but(_NOT_OPEN_FROM, channel)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    _set_limits(limits)
    prepare()
    kernel.drop_privileges()
    kernel.filter_system_calls(seccomp.filter_program())
    os.execve(_COMMAND[0], _COMMAND, {"PYTHONHASHSEED": "0"})


def _set_limits(limits: Limits) -> None:
    memory = limits.memory_mib << 20
    cpu_s = int(limits.timeout_s) + 2
    # Without root the two processes that watch over it are of the same user.
    processes = limits.processes + (0 if os.geteuid() == 0 else 2)
    for which, bound in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_FSIZE, limits.files_mib << 20),
        (resource.RLIMIT_NOFILE, _FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_RTPRIO, 0),
        (resource.RLIMIT_NICE, 0),
    ):
        _, most = resource.getrlimit(which)
        bound = bound if most == resource.RLIM_INFINITY else min(bound, most)
        resource.setrlimit(which, (bound, bound))
    resource.setrlimit(resource.RLIMIT_STACK, (min(_STACK_BYTES, memory), memory))


def _show(path: str) -> None:
    """Give the new root a folder of the old one, read-only; a link stays a link."""
    old = Path(f"/old{path}")
    if old.is_symlink():
        Path(path).symlink_to(old.readlink())
        return
    Path(path).mkdir(parents=True, exist_ok=True)
    kernel.mount(f"/old{path}", path, None, kernel.MS_BIND | kernel.MS_REC)
    kernel.make_read_only(path, recursive=True)


def _packages() -> list[str]:
    """Folders of what is installed beside this Python's standard library."""
    library = Path(os.__file__).resolve().parent
    return [str(library / name) for name in _INSTALLED if (library / name).is_dir()]


def _is_below(path: str, folder: str) -> bool:
    real = str(Path(folder).resolve())
    return path == real or path.startswith(f"{real}/")
