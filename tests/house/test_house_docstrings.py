"""A docstring makes sense in an editor's tooltip, without the name beside it: it says what it is about."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from house.conftest import trees

BEGINNINGS = ("Of ", "By ", "The same")
# Files that still have such docstrings. The list only gets shorter.
NOT_YET = {
    "engines/megatron/attention.py",
    "engines/megatron/capped_attention.py",
    "engines/megatron/layer_spec.py",
    "engines/megatron/logprobs.py",
    "engines/megatron/microbatches.py",
    "engines/megatron/packed_input.py",
    "engines/megatron/rank.py",
    "engines/megatron/ranks.py",
    "engines/megatron/schedule.py",
    "engines/megatron/trainer.py",
    "engines/vllm/engine.py",
    "engines/vllm/settings.py",
    "loop/stories.py",
    "ports.py",
    "rewards/pool.py",
    "stages/actor_update.py",
    "store/once.py",
    "wire/job.py",
    "wire/sockets.py",
}


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every string that stands alone: of the module, its classes, functions, and their fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


@pytest.mark.parametrize("module", sorted(trees()), ids=str)
def test_a_docstring_names_what_it_is_about(module: Path) -> None:
    found = [
        f"{module}:{line} {text[:60]}" for line, text in docstrings(trees()[module]) if text.startswith(BEGINNINGS)
    ]
    if str(module) in NOT_YET:
        assert found, f"{module} is clean: take it off the list"
    else:
        assert found == []
