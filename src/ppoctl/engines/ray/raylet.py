"""Ray's own command as a node program runs it: python -m ppoctl.engines.ray.raylet start --block ...

It differs from `ray` in three things: it ends with the process that started it, it opens no port for Ray's client,
which nobody uses, and a loopback address stays one.
"""

import ctypes
import signal
from typing import Any

from ray._private import services
from ray.scripts import scripts

SET_PARENT_DEATH_SIGNAL = 1


def main() -> None:
    """Run the command in this process's arguments."""
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    ray_scripts: Any = scripts
    ray_scripts.get_ray_client_dependency_error = lambda: "not used"
    ray_services: Any = services
    ray_services.resolve_ip_for_localhost = lambda host: host
    ray_scripts.cli()


if __name__ == "__main__":
    main()
