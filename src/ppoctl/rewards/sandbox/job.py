"""What a sandbox is asked to run, and what became of it. Both travel as JSON. Standard library only."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["namespaces", "user"]
"""Namespaces of its own, or a user of its own and Landlock."""

ExitKind = Literal["ok", "exit", "signal", "timeout", "output"]
"""How a program ended: with exit code 0, with another one, by a signal, at its deadline, or with too much output."""

EXIT_SLACK_S = 10.0
"""Seconds in which the launcher has a sandbox made and taken down, beside the program's own; generous, for machines
with much else to do."""


@dataclass(frozen=True)
class Limits:
    """What a program may use. Memory is for each of its processes; `processes` counts threads too."""

    timeout_s: float = 10.0
    memory_mib: int = 1024
    processes: int = 4
    output_kib: int = 1024
    files_mib: int = 16
    """Room for the files that it writes, which is memory."""


@dataclass(frozen=True)
class SandboxJob:
    """A Python program, what it reads from its standard input, and its limits."""

    program: str
    stdin: str = ""
    limits: Limits = Limits()


@dataclass(frozen=True)
class Ran:
    """How a program ended and what it wrote to its standard output, which is all that leaves a sandbox."""

    outcome: ExitKind
    code: int = 0
    """Exit code, or number of the signal."""
    output: str = ""
    """Text decoded from UTF-8; what is none is replaced."""
