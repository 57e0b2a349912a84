"""Tests do not patch our own code: what a test varies is a parameter. Two lists of the patches that are left may only
shrink.

A patch is found by syntax: `setattr`, `delattr`, `setitem` and `delitem` of a monkeypatch, `patch.object`, `patch` of
a dotted name, and an assignment to an attribute or item of an imported name. The first name of its target decides: a
name that the file imports from ppoctl, or a variable, which is mostly an object of our classes or of a fake. Not seen
are attributes assigned through a variable, and what a helper of the tests patches in a name that it receives.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache

from conventions.conftest import ROOT

TESTS = ROOT / "tests"
METHODS = ("setattr", "delattr", "setitem", "delitem", "object", "patch")

# Patches of modules and classes of ppoctl, by file.
OWN_MODULES: dict[str, int] = {
    "cli/test_cli_exit_codes.py": 1,
    "cli/test_cli_plan.py": 1,
    "cli/test_cli_runs.py": 1,
    "cli/test_cli_track.py": 1,
    "convert/test_conversion.py": 3,
    "engines/megatron/test_megatron_checkpoint.py": 1,
    "engines/megatron/test_process_group.py": 1,
    "engines/megatron/test_sent_weights.py": 1,
    "engines/ray/test_private_folders.py": 1,
    "engines/ray/test_ray_processes.py": 1,
    "engines/vllm/test_environment.py": 5,
    "engines/vllm/test_weight_faults.py": 1,
    "fakes/components.py": 1,
    "loop/test_run.py": 1,
    "plan/test_gpu_memory.py": 1,
    "preflight/test_preflight_rows_and_space.py": 5,
    "rewards/third_kind.py": 1,
    "runs/test_changed_settings.py": 1,
    "runs/test_evaluate.py": 1,
    "runs/test_session.py": 1,
    "slurm/ppoctl_on_fakes.py": 2,
    "tracking/test_rebuild.py": 1,
    "vllm_in_process.py": 2,
    "wire/test_engines.py": 1,
    "wiring/test_reward_keys.py": 1,
}

# Patches of variables, by file.
VARIABLES: dict[str, int] = {
    "cli/test_cli_runs.py": 1,
    "engines/megatron/test_megatron_checkpoint.py": 1,
    "engines/megatron/test_sent_weights.py": 5,
    "engines/ray/test_ray_broadcast.py": 3,
    "engines/ray/test_ray_processes.py": 5,
    "engines/vllm/test_environment.py": 1,
    "engines/vllm/test_fleet.py": 7,
    "engines/vllm/test_restored_engines.py": 4,
    "engines/vllm/test_vllm_process.py": 1,
    "engines/vllm/test_vllm_turns.py": 2,
    "engines/vllm/test_weight_faults.py": 11,
}


def test_patches_of_our_modules_only_become_fewer() -> None:
    assert found("ppoctl") == OWN_MODULES, "make what the test varies a parameter; lower a count that is too high"


def test_patches_of_objects_only_become_fewer() -> None:
    assert found("") == VARIABLES, "build the object with what the test varies; lower a count that is too high"


def test_every_form_of_a_patch_is_found() -> None:
    source = """
import os
import ppoctl.core.clock
from ppoctl.plan.memory import driver
from ppoctl.core.units import GIB as size
def test(monkeypatch, patch, actor):
    monkeypatch.setattr(driver, "free", 1)
    monkeypatch.setattr(driver.shutil, "disk_usage", 1)
    monkeypatch.setitem(driver.TABLE, "cpu", 1)
    monkeypatch.delattr("ppoctl.plan.free")
    patch.object(size, "free")
    patch("ppoctl.plan.free")
    driver.free = 1
    del driver.free
    driver.TABLE["cpu"] = 1
    ppoctl.core.clock.free += 1
    monkeypatch.setattr(type(driver), "free", 1)
    monkeypatch.setattr(actor.engine, "step", 1)
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr("os.environ", {})
    monkeypatch.setenv("ppoctl.plan", "1")
    actor.step = driver.free
"""
    assert Counter(targets(ast.parse(source))) == {"ppoctl": 11, "": 1, "os": 2, "a variable": 1}


def found(package: str) -> dict[str, int]:
    """Return the number of patches of a package by file; of an empty name those of variables."""
    return {file: counts[package] for file, counts in patches().items() if counts[package]}


@cache
def patches() -> dict[str, Counter[str]]:
    files = sorted(TESTS.rglob("*.py"))
    return {str(file.relative_to(TESTS)): Counter(targets(ast.parse(file.read_text("utf-8")))) for file in files}


def targets(tree: ast.Module) -> Iterator[str]:
    """Yield of every patch the package of its target, empty if the target is a variable."""
    imported, nodes = {}, list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            imported |= {(a.asname or a.name).split(".")[0]: (module or a.name).split(".")[0] for a in node.names}
    for node in nodes:
        if isinstance(node, ast.Call) and name_of(node.func) in METHODS and node.args:
            target = node.args[0]
            if isinstance(target, ast.Constant):
                yield str(target.value).split(".")[0]
            else:
                yield imported.get(head(target), "")
        elif isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield imported.get(head(node), "a variable")


def name_of(function: ast.expr) -> str:
    """Return the last name of a function; empty: it is the result of an expression."""
    return getattr(function, "attr", "") or getattr(function, "id", "")


def head(target: ast.expr) -> str:
    """Return the first name of `name.attribute[...](...)`, and that inside `type(...)`."""
    while not isinstance(target, ast.Name):
        if isinstance(target, ast.Call):
            target = target.args[0] if name_of(target.func) == "type" else target.func
        elif isinstance(target, ast.Attribute | ast.Subscript):
            target = target.value
        else:
            return ""
    return target.id
