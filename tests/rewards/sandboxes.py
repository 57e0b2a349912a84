"""The kinds of sandbox that this machine can create, and the reasons why it cannot create others."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from ppoctl.rewards.sandbox.job import Kind

WAYS = ("namespaces", "namespaces without root", "user")
SYSTEM_PYTHON = Path("/usr/bin/python3")
_ANY_USER = "12345"
_BOUNDS = ("--as=1073741824", "--fsize=67108864", "--cpu=120", "--nofile=256")
_BOUNDED = ("prlimit", *_BOUNDS) if shutil.which("prlimit") else ()
"""Limits of the launcher itself, so that a failing test does not harm the machine."""


def way(name: str) -> tuple[Kind, tuple[str, ...]]:
    """Return kind and Python of a sandbox. Skip the test if this machine or user does not support it."""
    if name == "namespaces":
        return "namespaces", (*_BOUNDED, sys.executable)
    if os.geteuid() != 0:
        pytest.skip("only root becomes another user")
    # Other users may have no access to the folder of root's Python.
    if not SYSTEM_PYTHON.exists():
        pytest.skip(f"no `{SYSTEM_PYTHON}`, which every user may run")
    if name == "user":
        return "user", (*_BOUNDED, str(SYSTEM_PYTHON))
    if shutil.which("setpriv") is None:
        pytest.skip("no `setpriv`, to become another user with")
    user = ("setpriv", "--reuid", _ANY_USER, "--regid", _ANY_USER, "--clear-groups")
    return "namespaces", (*_BOUNDED, *user, str(SYSTEM_PYTHON))
