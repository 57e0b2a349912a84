"""Import of Megatron-Core: the same code on every machine, independent of other installed packages, without
warnings."""

import sys
import warnings

from ppoctl.errors import EnvironmentProblemError
from ppoctl.machine.device import on_gpu

_REPLACING_PACKAGES = ("transformer_engine", "apex")


def import_megatron() -> None:
    """Import the parts of Megatron-Core that are used.

    If Megatron-Core finds Transformer Engine or Apex, it uses their Adam, norms and gradient norm instead of torch's:
    different arithmetic and optimizer states than those tested here. Both packages are therefore hidden in this
    process, permanently. Raises EnvironmentProblemError if one of them is already imported.

    The only warnings that are suppressed occur during the import: that Apex or Transformer Engine is not installed,
    and Megatron-Core's use of deprecated torch.jit and of its own deprecated import path.
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
