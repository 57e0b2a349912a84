"""What a mirror is given by whoever runs it: where its words go, and what only rooms above this one can make."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


def _silent(_: str) -> None:
    """Say nothing."""


@dataclass(frozen=True)
class MirrorHooks:
    """Functions that a mirror calls from its own thread. Where the files cannot be made that is said in a line, and
    figures of GPUs that cannot be read are missed by nobody."""

    notify: Callable[[str], None] = _silent
    """Takes one line for a person."""
    contract: Callable[[], Mapping[str, str]] = dict
    """Gives tags that say how `[expect]` is met, of a run that did all its steps."""
    files: Callable[[], Mapping[str, str]] = dict
    """Gives texts that are kept when an attempt ends, by their names in MLflow."""
    samples: Callable[[int], Sequence[Mapping[str, Any]]] = lambda _: ()
    """Gives a few samples that a step trained on, as far as they are still there."""
    gpus: Callable[[], Mapping[str, float]] = dict
    """Gives figures of this machine's GPUs, by the end of their names in MLflow."""
