"""The steps by which a forked process isolates itself and becomes the program.

    namespaces   enter_namespaces, make_root, become_program (with the files of the new root)
    user         become_program (as a separate user, with files restricted by Landlock)

The process never leaves the sandbox: no step is undone, and the first error ends the process. Imports only the
standard library.
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
"""User and group id of the program inside the sandbox."""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_INSTALLED = ("site-packages", "dist-packages")
"""Names of folders for installed packages. In the folder of the standard library, these folders are hidden from a
program."""
_PROGRAM_FD = 3
_NOT_OPEN_FROM = 4
_FILES = 64
_STACK_BYTES = 64 << 20
_ROOT_OPTIONS = "size=1m,nr_inodes=1k,mode=755"
_RUN = (
    f"import os\nwith open({_PROGRAM_FD}, encoding='utf-8') as _file: _text = _file.read()\n"
    "del os, _file\nexec(compile(globals().pop('_text'), 'program.py', 'exec'))"
)
"""Code that reads the program from a descriptor and runs it as `__main__`; the program is never in a file."""
_PYTHON = Path(sys.executable).resolve()
_COMMAND = [str(_PYTHON), "-s", "-S", "-P", "-B", "-X", "utf8", "-c", _RUN]
"""Command of this Python with only its standard library: no site, no user folder, no bytecode, UTF-8. The path of the
interpreter is resolved at import, because links of the old root are dangling in the new root."""


def folders() -> list[str]:
    """Return the folders that a program may read: the folders of the system, and the folders of this Python if they
    are elsewhere."""
    base = Path(sys.base_prefix).resolve()
    own = [base / name for name in ("bin", "lib", "lib64") if (base / name).is_dir()]
    own += [_PYTHON.parent, Path(os.__file__).resolve().parent]
    readable = [path for path in _SYSTEM if Path(path).is_dir()]
    for path in map(str, own):
        if not any(_is_below(path, other) for other in readable):
            readable.append(path)
    return readable


def devices() -> list[str]:
    """Return the device files that a program may use."""
    return [path for path in _DEVICES if Path(path).exists()]


def enter_namespaces(channel: socket.socket) -> None:
    """Move this process into new namespaces for users, processes, mounts, network, host name and shared memory.
    Notify the launcher over the channel, and wait until it has mapped the users of the new namespace."""
    kernel.unshare(kernel.ALL_NAMESPACES)
    channel.send(b"unshared")
    if channel.recv(16) != b"mapped":
        os._exit(1)  # the launcher has ended


def make_root(limits: Limits) -> None:
    """Build a root in memory from read-only system folders and a small writable `/tmp`, and unmount the old root."""
    shown, covered = folders(), _packages()
    # Otherwise the mounts below could also appear in the machine's own namespace.
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
    # Not recursive: /tmp stays writable.
    kernel.make_read_only("/", recursive=False)
    socket.sethostname("sandbox")


def become_program(
    descriptors: tuple[int, int, int], channel: int, limits: Limits, prepare: Callable[[], None]
) -> NoReturn:
    """Execute the program with these limits. It gets only these `descriptors` (input, output, program text), and an
    environment that contains only the hash seed. `prepare` changes the user and closes files; it runs before the last
    privileges are dropped.

    `channel`: descriptor over which an error is reported, and which closes when the program is executed.
    """
    stdin, stdout, program = descriptors
    os.setsid()  # the program has no terminal, and shares no process group
    nothing = os.open("/dev/null", os.O_WRONLY)
    for theirs, ours in enumerate((stdin, stdout, nothing, program)):
        os.dup2(ours, theirs)
        # `dup2` of a descriptor to itself does not make it inheritable.
        os.set_inheritable(theirs, True)  # noqa: FBT003 - signature of the standard library
    kernel.close_but(_NOT_OPEN_FROM, channel)
    # Python ignores these signals, and an ignored signal stays ignored in the executed program.
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
    # Without root, the two processes that supervise the program belong to the same user, and count toward the limit.
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
        # Without root, a limit cannot be raised above its present maximum.
        _, most = resource.getrlimit(which)
        bound = bound if most == resource.RLIM_INFINITY else min(bound, most)
        resource.setrlimit(which, (bound, bound))
    resource.setrlimit(resource.RLIMIT_STACK, (min(_STACK_BYTES, memory), memory))


def _show(path: str) -> None:
    """Mount a folder of the old root in the new root, read-only; a link is copied as a link."""
    old = Path(f"/old{path}")
    if old.is_symlink():
        Path(path).symlink_to(old.readlink())
        return
    Path(path).mkdir(parents=True, exist_ok=True)
    kernel.mount(f"/old{path}", path, None, kernel.MS_BIND | kernel.MS_REC)
    kernel.make_read_only(path, recursive=True)


def _packages() -> list[str]:
    """Return the folders of packages installed in the standard library's folder of this Python."""
    library = Path(os.__file__).resolve().parent
    return [str(library / name) for name in _INSTALLED if (library / name).is_dir()]


def _is_below(path: str, folder: str) -> bool:
    real = str(Path(folder).resolve())
    return path == real or path.startswith(f"{real}/")
