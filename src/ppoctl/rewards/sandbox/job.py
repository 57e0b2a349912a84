"""Jobs of a sandbox and their results. Both are sent as JSON. Imports only the standard library."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["namespaces", "user"]
"""Isolation by new namespaces, or by a separate user and Landlock."""

ExitKind = Literal["ok", "exit", "signal", "timeout", "output"]
"""How a program ended: with exit code 0, with another exit code, by a signal, at its deadline, or with too much
output."""

EXIT_SLACK_S = 30.0
"""Seconds for creating and removing a sandbox, in addition to the time of the program. The value is generous, because
machines may be loaded."""


@dataclass(frozen=True)
class Limits:
    """Resource limits of a program. The memory limit applies to each process; `processes` includes threads."""

    timeout_s: float = 10.0
    memory_mib: int = 1024
    processes: int = 4
    output_kib: int = 1024
    files_mib: int = 16
    """Space for files that the program writes. The files are in memory."""


@dataclass(frozen=True)
class SandboxJob:
    """A Python program, the text of its standard input, and its limits."""

    program: str
    stdin: str = ""
    limits: Limits = Limits()


@dataclass(frozen=True)
class Ran:
    """How a program ended, and its standard output: the only results that leave a sandbox."""

    outcome: ExitKind
    code: int = 0
    """Exit code, or number of the signal."""
    output: str = ""
    """Text decoded from UTF-8; invalid bytes are replaced."""


class UnreachableError(Exception):
    """Programs cannot be run, because the endpoint did not answer, or its answer is not valid."""
