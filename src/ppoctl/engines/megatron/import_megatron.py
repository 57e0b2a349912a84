"""Importing Megatron-Core: the same code on every machine, whatever else is installed, and without its notes."""

import sys
import warnings

from ppoctl.errors import EnvironmentProblemError
from ppoctl.machine.device import on_gpu

_SWAPPED_IN = ("transformer_engine", "apex")


def import_megatron() -> None:
    """Import the parts of Megatron-Core in use.

    Where it finds Transformer Engine or Apex, Megatron-Core takes their Adam, norms and gradient norm instead of
    torch's: other arithmetic and other states than those that are tested here. Both are hidden in this process, for
    good. Raises EnvironmentProblemError where one is imported already.

    Only warnings raised while importing are dropped, and only those: that Apex or Transformer Engine is not
    installed, and Megatron-Core's use of deprecated torch.jit and of its own deprecated import path.
    """
    for package in _SWAPPED_IN:
        if sys.modules.get(package) is not None:
            raise EnvironmentProblemError(
                f"`{package}` was imported in this process before Megatron-Core, which would take its Adam and norms",
                hint=f"pip uninstall {package}  # or do not import it at the start of Python",
            )
        sys.modules[package] = None  # type: ignore[assignment]  # Python's way to say that there is none
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (is|are) not installed")
        warnings.filterwarnings("ignore", message=".*torch.jit.script", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message="The following imports from `dynamic_context.py`")
        import megatron.core.dist_checkpointing.strategies.torch
        import megatron.core.distributed
        import megatron.core.models.gpt
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel  # noqa: F401
    if not on_gpu():
        # Its fused helpers would go through the C++ compiler, 5-15 s, and an error without one.
        import torch._dynamo.config

        torch._dynamo.config.disable = True
