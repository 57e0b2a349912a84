"""Import of Megatron-Core without warnings, so that the same code runs on every machine regardless of other installed
packages."""

import sys
import warnings

from ppoctl.core.errors import EnvironmentProblemError
from ppoctl.core.machine.device import on_gpu

_REPLACING_PACKAGES = ("transformer_engine", "apex")


def import_megatron() -> None:
    """Import the parts of Megatron-Core that ppoctl uses.

    If Megatron-Core finds Transformer Engine or Apex, it uses their Adam, norms and gradient norm instead of torch's.
    Their arithmetic and optimizer states differ from those that ppoctl tests. This function therefore hides both
    packages in this process, permanently. Raises EnvironmentProblemError if one of the packages is already imported.

    Warnings are suppressed only during the import: that Apex or Transformer Engine is not installed, that
    Megatron-Core uses the deprecated torch.jit, and that it uses a deprecated import path of its own package.
    """
    for package in _REPLACING_PACKAGES:
        if sys.modules.get(package) is not None:
            raise EnvironmentProblemError(
                f"`{package}` was imported before Megatron-Core, which would use its Adam and norms",
                hint=f"pip uninstall {package}  # or do not import it at the start of Python",
            )
        sys.modules[package] = None  # type: ignore[assignment]  # makes an import raise ImportError
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
        # Megatron-Core's fused helpers would use the C++ compiler: 5-15 s, and an error if there is none.
        import torch._dynamo.config

        torch._dynamo.config.disable = True
