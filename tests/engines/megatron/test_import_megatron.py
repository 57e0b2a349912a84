"""Megatron-Core's computation does not depend on which optional packages are installed."""

import subprocess
import sys
from pathlib import Path

import pytest

from ppoctl.core.errors import EnvironmentProblemError
from ppoctl.engines.megatron.import_megatron import import_megatron

LOOK = """
import ppoctl.engines.megatron
import torch
from megatron.core import optimizer
from megatron.core.transformer import transformer_block
print(optimizer.Adam is torch.optim.AdamW, transformer_block.HAVE_TE, transformer_block.HAVE_APEX)
"""
FOREIGN = "class FusedAdam: pass\nclass FusedSGD: pass\nclass FusedLayerNorm: pass\n"


@pytest.mark.ci("test_already_imported_package_raises_with_uninstall_hint")
def test_installed_transformer_engine_and_apex_are_not_used(tmp_path: Path):
    for name in (
        "transformer_engine/__init__",
        "transformer_engine/pytorch/__init__",
        "transformer_engine/pytorch/optimizers",
        "apex/__init__",
        "apex/optimizers",
        "apex/normalization",
    ):
        file = tmp_path / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(FOREIGN)
    look = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{LOOK}"
    found = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=300)
    assert found.stdout.split() == ["True", "False", "False"], found.stderr


@pytest.mark.parametrize("package", ["transformer_engine", "apex"])
def test_already_imported_package_raises_with_uninstall_hint(monkeypatch, package):
    for name in ("transformer_engine", "apex"):
        monkeypatch.setitem(sys.modules, name, sys if name == package else None)  # as Megatron-Core finds them
    with pytest.raises(EnvironmentProblemError, match=f"`{package}` was imported before Megatron-Core") as raised:
        import_megatron()
    assert raised.value.hint == f"pip uninstall {package}  # or do not import it at the start of Python"
