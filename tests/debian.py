"""Debian packages that tests need. They are installed if this process is root."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest


def require(is_installed: Callable[[], bool], *packages: str) -> None:
    """Require the programs; without them, skip the tests that need them. In CI that is a failure."""
    if is_installed():
        return
    install = ("apt-get", "install", "--no-install-recommends", "-y", "-qq", *packages)
    root_on_debian = os.getuid() == 0 and shutil.which("apt-get") is not None
    trouble = "only root on Debian installs it"
    if root_on_debian:
        with (Path(tempfile.gettempdir()) / "ppoctl-apt-get.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two workers must not install at the same time
            trouble = _installed(install)
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
