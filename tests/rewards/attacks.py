"""Programs that try to leave a sandbox, or to exhaust the machine. Each program also limits itself, so that it is
harmless if it succeeds.

A program prints the result of each attempt: `refused NAME` or `got NAME`. It is contained if it ends as listed here
and got nothing.
"""

from dataclasses import dataclass

PRELUDE = """
import ctypes, errno, os, resource, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, work, *given):
    try:
        print("got", name, work(*given), flush=True)
    except (OSError, MemoryError, ValueError, RuntimeError) as error:
        print("refused", name, type(error).__name__, flush=True)
def call(*given):
    if libc.syscall(*given) < 0:
        raise OSError(ctypes.get_errno(), "")
"""


@dataclass(frozen=True)
class Attack:
    """A program, and how it ends inside a sandbox that isolates it."""

    program: str
    outcomes: tuple[str, ...] = ("ok",)
    refused: int = 1
    """Minimum number of attempts that are refused."""


ATTACKS = {
    "a fork bomb": Attack("""
for _ in range(6):  # at most 64 processes, which sleep
    try:
        os.fork()
    except OSError:
        print("refused fork", flush=True)
time.sleep(60)
""", ("timeout",)),
    "many children": Attack("""
def children():
    for number in range(40):
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
attempt("children", children)
"""),
    "many threads": Attack("""
import threading
def threads():
    for number in range(40):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
attempt("threads", threads)
os._exit(0)
"""),
    "a memory bomb at once": Attack("attempt('memory', lambda: len(bytearray(600 << 20)))"),
    "a memory bomb piece by piece": Attack("""
def fill():
    pieces = []
    for _ in range(300):
        pieces.append(bytearray(b"x" * (1 << 20)))
attempt("memory", fill)
"""),
    "memory that is shared": Attack("""
import mmap
attempt("mmap", lambda: len(mmap.mmap(-1, 600 << 20)))
attempt("memfd", lambda: os.memfd_create("x"))
attempt("shm", call, {"x86_64": 29, "aarch64": 194}[os.uname().machine], 0, 1 << 20, 0o1600)
""", refused=3),
    "limits raised": Attack("""
for name in ("AS", "NPROC", "FSIZE", "CPU", "NOFILE", "CORE"):
    which = getattr(resource, "RLIMIT_" + name)
    attempt(name, resource.setrlimit, which, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
""", refused=6),
    "a busy loop in C": Attack("import re; re.match(r'(a|aa)+$', 'a' * 200 + 'b')", ("timeout",), 0),
    "a busy loop that ignores signals": Attack("""
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True: pass
""", ("timeout",), 0),
    "a sleep for ever": Attack("time.sleep(1e6)", ("timeout",), 0),
    "a sleep with its output closed": Attack("os.close(1); time.sleep(1e6)", ("timeout",), 0),
    "a program that stops itself": Attack("os.kill(os.getpid(), signal.SIGSTOP)", ("timeout",), 0),
    "a call of the network": Attack("""
attempt("host", socket.create_connection, ("127.0.0.1", PORT), 1)
attempt("raw", socket.socket, socket.AF_INET, socket.SOCK_RAW)
attempt("udp", socket.socket, socket.AF_INET, socket.SOCK_DGRAM)
attempt("netlink", socket.socket, socket.AF_NETLINK, socket.SOCK_RAW)
attempt("name", socket.gethostbyname, "example.com")
""", refused=5),
    "writing outside": Attack("""
for path in (OUTSIDE, "/usr/lib/x", "/bin/x", "/x", "/dev/x", "/etc/x", os.__file__):
    attempt(path, open, path, "a")
attempt("remove", os.remove, OUTSIDE)
attempt("mkdir", os.mkdir, "/dir")
attempt("mode", os.chmod, "/usr", 0o777)
""", refused=10),
    "an escape by links": Attack("""
def through_a_link(target):
    os.symlink(target, "/tmp/link")
    try:
        return open("/tmp/link/" + OUTSIDE).read()
    finally:
        os.remove("/tmp/link")
for target in ("/", "/old", "/proc/1/root", "../../../../.."):
    attempt(target, through_a_link, target)
attempt("hard link", os.link, OUTSIDE, "/tmp/hard")
attempt("chroot", os.chroot, "/tmp")
""", refused=6),
    "a gigabyte of output": Attack("""
for _ in range(1 << 14):
    os.write(1, b"x" * (1 << 16))
""", ("output",), 0),
    "a disk that is filled": Attack("""
def fill():
    with open("/tmp/much", "wb") as file:
        for _ in range(64):
            file.write(b"x" * (1 << 20))
def many():
    for number in range(5000):
        open(f"/tmp/{number}", "w").close()
def in_pieces():
    for number in range(64):
        with open(f"/tmp/piece{number}", "wb") as file:
            file.write(b"x" * (1 << 20))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
attempt("one file", fill)
attempt("pieces", in_pieces)
attempt("many files", many)
""", refused=3),
    "signals to others": Attack("""
attempt("launcher", os.kill, LAUNCHER, signal.SIGKILL)
attempt("tests", os.kill, TESTS, signal.SIGKILL)
if os.getppid() > 1:
    attempt("parent", os.kill, os.getppid(), signal.SIGKILL)
else:
    print("refused parent is unknown")
for number in (signal.SIGKILL, signal.SIGSTOP):
    try:
        os.kill(1, number)
    except OSError:
        pass
    try:
        os.kill(-1, number)
    except OSError:
        pass
""", refused=3),
    "signals to its group": Attack("os.killpg(0, signal.SIGKILL)", ("signal",), 0),
    "tracing": Attack("""
number = {"x86_64": 101, "aarch64": 117}[os.uname().machine]
attempt("trace me", call, number, 0, 0, 0, 0)
for process in (1, os.getppid(), LAUNCHER, TESTS):
    attempt(f"attach {process}", call, number, 16, process, 0, 0)
    attempt(f"read {process}", call, {"x86_64": 310, "aarch64": 270}[os.uname().machine], process, 0, 0, 0, 0, 0)
""", refused=9),
    "new namespaces": Attack("""
attempt("unshare", call, {"x86_64": 272, "aarch64": 97}[os.uname().machine], 0x10000000)
attempt("clone", call, {"x86_64": 56, "aarch64": 220}[os.uname().machine], 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
attempt("clone3", call, 435, 0, 0)
attempt("mount", call, {"x86_64": 165, "aarch64": 40}[os.uname().machine], b"tmpfs", b"/tmp", b"tmpfs", 0, 0)
attempt("keyctl", call, {"x86_64": 250, "aarch64": 219}[os.uname().machine], 0, 0, 0)
attempt("bpf", call, {"x86_64": 321, "aarch64": 280}[os.uname().machine], 0, 0, 0)
attempt("io_uring", call, 425, 1, 0)
""", refused=7),
    "privileges gained": Attack("""
attempt("uid", os.setuid, 0)
attempt("gid", os.setgid, 0)
attempt("groups", os.setgroups, [0])
attempt("host name", socket.sethostname, "x")
print("got no-new-privileges off" if libc.prctl(39, 0, 0, 0, 0) != 1 else "refused no-new-privileges")
status = os.posix_spawn("/bin/sh", ["sh", "-c", "test -w /usr"], {})
print("got a shell that may write" if os.waitpid(status, 0)[1] == 0 else "refused a shell")
""", refused=6),
    "reading the environment": Attack("""
hidden = {name for name in os.environ if name not in ("PYTHONHASHSEED", "LC_CTYPE")}
print("got", hidden) if hidden else print("refused variables")
"""),
    "reading /proc": Attack("""
for path in ("/proc/self/environ", "/proc/1/environ", "/proc/1/mem", f"/proc/{TESTS}/environ"):
    attempt(path, lambda: open(path, "rb").read(10))
for path in ("/proc/self/fd", "/sys"):
    attempt(path, os.listdir, path)
""", refused=6),
    "reading descriptors": Attack("""
def opened(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
found = [number for number in range(3, 1024) if opened(number)]
print("got", found) if found else print("refused descriptors")
attempt("terminal", os.open, "/dev/tty", os.O_RDWR)
attempt("terminal of the input", os.tcgetpgrp, 0)
""", refused=3),
    "reading frames and objects": Attack("""
import gc
def is_wanted(value):
    return isinstance(value, str) and value.startswith("the-expected") and value.endswith("-output")
frame, held = sys._getframe(), []
while frame:
    held += [name for name, value in {**frame.f_globals, **frame.f_locals}.items() if is_wanted(value)]
    frame = frame.f_back
for each in gc.get_objects():
    inside = list(each.values()) if isinstance(each, dict) else each if isinstance(each, (list, tuple)) else ()
    held += [type(each) for value in inside if is_wanted(value)]
print("got", held) if held else print("refused objects")
"""),
    "reading files of the machine": Attack("""
for path in (OUTSIDE, "/etc/passwd", "/home", "/var", "/work", "/run"):
    attempt(path, lambda: os.listdir(path) if path != OUTSIDE and path != "/etc/passwd" else open(path).read())
""", refused=6),
    "a daemon": Attack("""
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        libc.prctl(1, 0, 0, 0, 0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        time.sleep(60)
    os._exit(0)
os.wait()
print("refused daemon's life, as the tests see")
"""),
    "a daemon that writes on": Attack("""
if os.fork() == 0:
    os.setsid()
    while True:
        os.write(1, b"x")
""", ("ok", "output"), 0),
    "an early end": Attack("print('refused the rest', flush=True); os._exit(0)\nprint('got further')"),
    "bytes that are no text": Attack("os.write(1, bytes(range(256))); print('refused')", ("ok",), 0),
}  # fmt: skip
