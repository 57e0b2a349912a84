"""Debian packages that tests need. They are installed if this process is root."""

import os
import shutil
import subprocess
from collections.abc import Callable

import pytest


def require(is_installed: Callable[[], bool], *packages: str) -> None:
    """Require the programs; without them, skip the tests that need them. In CI that is a failure."""
    if is_installed():
        return
    install = ("apt-get", "install", "--no-install-recommends", "-y", "-qq", *packages)
    root_on_debian = os.getuid() == 0 and shutil.which("apt-get") is not None
    trouble = _installed(install) if root_on_debian else "only root on Debian installs it"
    if is_installed():
        return
    not_run = pytest.fail if os.environ.get("CI") else pytest.skip
    not_run(f"no {', '.join(packages)} here: {' '.join(install)}: {trouble}")


def _installed(install: tuple[str, ...]) -> str:
    """Return the last line of apt-get's output."""
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (install, ("apt-get", "update", "-qq"), install):
        done = subprocess.run(words, env=quiet, capture_output=True, text=True, check=False, timeout=500)
        if words is install and done.returncode == 0:
            break
    return done.stderr[-1000:]
