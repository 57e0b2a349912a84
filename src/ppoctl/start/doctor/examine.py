"""The list of checks. Each check is a function that returns findings. Checks run one after the other."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from ppoctl.core.finding import Finding, ok, wrong
from ppoctl.core.machine.host_info import HostInfo
from ppoctl.recipe.loading.load import Loaded
from ppoctl.recipe.schema import Recipe
from ppoctl.start.doctor import folders, gpus, host
from ppoctl.start.preflight import resource_checks
from ppoctl.start.preflight.check import check

RunCheck = Callable[[], Finding | Iterable[Finding]]

OF_A_MACHINE = (
    gpus.driver,
    host.packages,
    gpus.torch,
    gpus.gpus,
    gpus.compute_mode,
    gpus.peer_access,
    gpus.nccl,
    gpus.compiler,
    host.shared_memory,
    host.limits,
    host.ports,
    host.ray,
    host.slurm,
)
OF_A_FOLDER = (folders.runs_folder, folders.disk)


def of_machine(machine: HostInfo, runs: Path) -> dict[str, RunCheck]:
    """Return name -> check of the machine and the runs folder, in the order of their findings."""
    by_name: dict[str, RunCheck] = {check.__name__: partial(check, machine) for check in OF_A_MACHINE}
    return by_name | {check.__name__: partial(check, runs) for check in OF_A_FOLDER}


def of_recipe(loaded: Loaded, machine: HostInfo, runs: Path) -> dict[str, RunCheck]:
    """Return name -> check of what a recipe requires of this machine, in the order of their findings."""
    recipe = loaded.recipe
    return {
        "model": partial(_model, loaded, machine),
        "layout": partial(resource_checks.layout, recipe, machine),
        "memory": partial(_memory, recipe, machine),
        "space": partial(resource_checks.disk, recipe, runs / recipe.name),
        "joined_ray": partial(resource_checks.joined_ray, recipe),
        "mlflow": partial(resource_checks.mlflow, recipe),
    }


def _model(loaded: Loaded, machine: HostInfo) -> Iterator[Finding]:
    """Yield the findings on models and rewards. Rows are not checked, because that takes long: `validate` reads
    them."""
    yield from (found := check(loaded.recipe, loaded.place, rows=False, device="gpu" if machine.gpus else "cpu"))
    if not any(finding.is_error for finding in found):
        yield ok(f"`{loaded.recipe.model.path}`, with its tokenizer", "model", kind="model")


def _memory(recipe: Recipe, machine: HostInfo) -> Finding:
    """Check the memory of this machine. The nodes of a running Ray are not checked."""
    if (address := resource_checks.joined(recipe)) is not None:
        return ok(f"not checked: ppoctl train queries the Ray at `{address}`", "memory", kind="memory")
    return resource_checks.memory(recipe, resource_checks.smallest_gib(machine.gpus))


def findings(checks: Mapping[str, RunCheck], notify: Callable[[str], None] = lambda _: None) -> Iterator[Finding]:
    """Yield the findings of all checks. If a check raises an error, the error becomes a finding.

    `notify` is called with the current activity before each check.
    """
    for key, run_check in checks.items():
        name = key.replace("_", " ")
        notify(f"checking {name}")
        try:
            result = run_check()
            yield from [result] if isinstance(result, Finding) else result
        except Exception as error:  # noqa: BLE001 - on a broken machine any check may fail; the others must still run
            yield wrong(f"the check failed: {type(error).__name__}: {error}", name, kind="doctor")
