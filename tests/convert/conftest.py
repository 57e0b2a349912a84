"""Tiny random models of the Megatron tests, written once per session."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engines" / "megatron"))
import megatron_lab as lab


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a model by kind, with tokenizer files; see `megatron_lab.MODELS`."""
    root = tmp_path_factory.mktemp("models")

    def folder(kind: str) -> Path:
        if not (root / kind).exists():
            lab.model_folder(kind, root / kind)
            (root / kind / "tokenizer.json").write_text("{}", "utf-8")
            (root / kind / "chat_template.jinja").write_text("{{ messages }}", "utf-8")
        return root / kind

    return folder


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **changes}), "utf-8")
