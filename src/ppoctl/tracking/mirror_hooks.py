"""Functions that the caller of a mirror passes to the mirror.

They receive the mirror's messages, or return data that only higher packages can create.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


def _silent(_: str) -> None:
    """Ignore the message."""


@dataclass(frozen=True)
class MirrorHooks:
    """Functions that a mirror calls from its own thread.

    If `files` fails, the mirror reports it in one line; if `gpus` fails, the metrics are omitted.
    """

    notify: Callable[[str], None] = _silent
    """Receives a message of one line."""
    contract: Callable[[], Mapping[str, str]] = dict
    """Returns the tags with the result of `[expect]`, for a run that finished all steps."""
    files: Callable[[], Mapping[str, str]] = dict
    """Returns the text files that are uploaded when an attempt ends, by their names in MLflow."""
    samples: Callable[[int], Sequence[Mapping[str, Any]]] = lambda _: ()
    """Returns a few training samples of a step, if its records still exist."""
    gpus: Callable[[], Mapping[str, float]] = dict
    """Returns metrics of this machine's GPUs, by the last part of their names in MLflow."""
