"""Ray's command in the form that the node program runs: python -m ppoctl.engines.ray.raylet start --block ...

This command differs from `ray` in three ways. It ends with the process that started it, it does not open the unused
port for Ray's client, and it keeps a loopback address.
"""

import ctypes
import signal
from typing import Any

from ray._private import services
from ray.scripts import scripts

SET_PARENT_DEATH_SIGNAL = 1


def main() -> None:
    """Run the command that this process's arguments contain."""
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    ray_scripts: Any = scripts
    ray_scripts.get_ray_client_dependency_error = lambda: "not used"
    ray_services: Any = services
    ray_services.resolve_ip_for_localhost = lambda host: host
    ray_scripts.cli()


if __name__ == "__main__":
    main()
