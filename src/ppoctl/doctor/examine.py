"""The list of checks. Each check is a function that returns findings. Checks run one after the other."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from ppoctl.doctor import folders, gpus, host, recipe_checks
from ppoctl.finding import Finding, wrong
from ppoctl.machine.host_info import HostInfo

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


def checks(machine: HostInfo, runs: Path, run: recipe_checks.IntendedRun | None) -> dict[str, RunCheck]:
    """Return name -> check. The findings of the checks are shown in this order."""
    by_name: dict[str, RunCheck] = {check.__name__: partial(check, machine) for check in OF_A_MACHINE}
    by_name |= {check.__name__: partial(check, runs) for check in OF_A_FOLDER}
    if run is not None:
        by_name |= {
            "model": partial(recipe_checks.model, run, machine),
            "layout": partial(recipe_checks.layout, run, machine),
            "memory": partial(recipe_checks.memory, run, machine),
            "saves": partial(recipe_checks.saves, run, runs),
            "joined_ray": partial(recipe_checks.joined_ray, run),
            "mlflow": partial(recipe_checks.mlflow, run),
        }
    return by_name


def findings(
    machine: HostInfo,
    runs: Path,
    run: recipe_checks.IntendedRun | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> Iterator[Finding]:
    """Yield the findings of all checks. If a check raises an error, the error becomes a finding.

    `notify` is called with the current activity before each check.
    """
    for key, check in checks(machine, runs, run).items():
        name = key.replace("_", " ")
        notify(f"checking {name}")
        try:
            result = check()
            yield from [result] if isinstance(result, Finding) else result
        except Exception as error:  # noqa: BLE001 - on a broken machine any check may fail; the others must still run
            yield wrong(f"the check failed: {type(error).__name__}: {error}", name, kind="doctor")
