"""PPO for language models that you can plan, kill, resume and verify.

import ppoctl

run = ppoctl.train("recipes/quickstart.toml", keys={"steps": 4})
run.metrics().to_pandas()
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppoctl.api.commands import evaluate as evaluate
    from ppoctl.api.commands import resume as resume
    from ppoctl.api.commands import rollout as rollout
    from ppoctl.api.commands import train as train
    from ppoctl.api.run import Run as Run
    from ppoctl.core.errors import PpoctlError as PpoctlError

__version__ = "0.1.0"

_HOMES = {
    **dict.fromkeys(("evaluate", "resume", "rollout", "train"), "api.commands"),
    "Run": "api.run",
    "PpoctlError": "core.errors",
}
"""Public names of the Python API, and the module of `ppoctl` that defines each."""

__all__ = ["PpoctlError", "Run", "__version__", "evaluate", "resume", "rollout", "train"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, because the commands import this package too and must start fast."""
    if name not in _HOMES:
        raise AttributeError(f"module `ppoctl` has no attribute `{name}`")
    from importlib import import_module

    return getattr(import_module(f"ppoctl.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
