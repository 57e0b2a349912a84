"""A network of namespaces, each of which acts as a host: own address, name, hosts file, /tmp and shared memory. They
share one folder, that of the lab. Needs root.

A sleeping process holds each namespace; when it and everything else in the namespace is killed, the kernel removes
namespace and cable. Only the bridge between them can outlive this process: the next network removes bridges without a
cable.
"""

import fcntl
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

BRIDGE = "ppolab"
LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp."""


class Network:
    """Hosts by name, and this machine at `address`."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self._names = tuple(names)
        self._folder = folder
        self._number = -1
        self._holders: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def address(self) -> str:
        """Address of this machine."""
        return f"10.88.{self._number}.254"

    @property
    def addresses(self) -> dict[str, str]:
        return {name: f"10.88.{self._number}.{place}" for place, name in enumerate(self._names, start=1)}

    def make(self) -> None:
        with _alone():
            _remove_unplugged()
            self._number = _new_bridge()
            _ip(f"addr add {self.address}/24 dev {self._bridge}")
            _ip(f"link set {self._bridge} up")
            hosts = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self.addresses.items())]
            (self._folder / "hosts").write_text("\n".join([*hosts, ""]))
            # Name servers are unreachable from inside; without this every look-up waits for one.
            (self._folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")
            for name in self._names:
                self._plug_in(name)

    def enter(self, name: str) -> list[str]:
        """Return the words that run a command on the host."""
        return ["nsenter", "-t", str(self._holders[name].pid), "--net", "--uts", "--mount", "--"]

    def cut(self, name: str) -> None:
        _ip(f"link set {self._cable(name)} down")

    def restore(self, name: str) -> None:
        _ip(f"link set {self._cable(name)} up")

    def traces(self, name: str) -> list[str]:
        """Return traces on the host: files in its /tmp and its shared memory, and listening ports."""
        inside = Path(f"/proc/{self._holders[name].pid}")
        places = [inside / "root/tmp", inside / "root/dev/shm"]
        files = [f"/{path.relative_to(inside / 'root')}" for place in places for path in place.iterdir()]
        sockets = [
            line.split() for kind in ("tcp", "tcp6") for line in (inside / "net" / kind).read_text().splitlines()
        ]
        ports = {int(socket[1].split(":")[1], 16) for socket in sockets if socket[3] == LISTENS}
        return sorted([*files, *(f"port {port}" for port in ports)])

    def remove(self) -> None:
        for holder in self._holders.values():
            holder.kill()
            holder.wait()
        if self._number >= 0:
            _ip(f"link del {self._bridge}")

    @property
    def _bridge(self) -> str:
        return f"{BRIDGE}{self._number}"

    def _cable(self, name: str) -> str:
        """Return this machine's end of the host's cable."""
        return f"{self._bridge}v{self._names.index(name) + 1}"

    def _plug_in(self, name: str) -> None:
        inside = (
            'hostname "$1" && mount --bind "$2/hosts" /etc/hosts && mount --bind "$2/resolv.conf" /etc/resolv.conf '
            '&& mount -t tmpfs tmpfs /dev/shm && mount --bind "$2" "$3/${2##*/}" && mount --rbind "$3" /tmp '
            "&& echo ready && exec sleep infinity"
        )
        own = self._folder / f"{name}.tmp"
        (own / self._folder.name).mkdir(parents=True)
        alone = ("setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "--mount")
        holder = subprocess.Popen(
            [*alone, "sh", "-c", inside, "sh", name, str(self._folder), str(own)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._holders[name] = holder
        assert holder.stdout is not None
        with holder.stdout as says:
            assert says.readline() == b"ready\n", f"no namespace for {name}"
        cable, eth0 = self._cable(name), f"{self._cable(name)}e"
        _ip(f"link add {cable} type veth peer name {eth0}")
        _ip(f"link set {eth0} netns {holder.pid}")
        _ip(f"link set {cable} master {self._bridge} up")
        for words in (
            f"link set {eth0} name eth0",
            "link set lo up",
            f"addr add {self.addresses[name]}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {self.address}",
        ):
            subprocess.run([*self.enter(name), "ip", *words.split()], check=True)


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


@contextmanager
def _alone() -> Iterator[None]:
    """Hold a lock while a bridge is made, so that it is not mistaken for a leftover."""
    with Path("/tmp/ppolab.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _new_bridge() -> int:
    """Return an unused bridge number."""
    for number in range(100, 250):
        bridge = f"{BRIDGE}{number}"
        if subprocess.run(["ip", "link", "add", bridge, "type", "bridge"], capture_output=True).returncode == 0:
            return number
    raise OSError("no bridge can be made: this needs root")


def _remove_unplugged() -> None:
    for bridge in Path("/sys/class/net").glob(f"{BRIDGE}*"):
        if (bridge / "brif").is_dir() and not any((bridge / "brif").iterdir()):
            _ip(f"link del {bridge.name}")
