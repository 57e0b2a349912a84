"""The list of checks. Each is a function that gives its findings; none is asked before its turn."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from ppoctl.doctor import folders, gpus, host, recipe_checks
from ppoctl.doctor.finding import Finding, Verdict
from ppoctl.errors import without_secrets
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


def checks(here: HostInfo, runs: Path, wanted: recipe_checks.IntendedRun | None) -> dict[str, RunCheck]:
    """Every check by what it looks at, in the order in which findings are shown."""
    found: dict[str, RunCheck] = {check.__name__: partial(check, here) for check in OF_A_MACHINE}
    found |= {check.__name__: partial(check, runs) for check in OF_A_FOLDER}
    if wanted is not None:
        found |= {
            "model": partial(recipe_checks.model, wanted, here),
            "layout": partial(recipe_checks.layout, wanted, here),
            "memory": partial(recipe_checks.memory, wanted, here),
            "saves": partial(recipe_checks.saves, wanted, runs),
            "joined_ray": partial(recipe_checks.joined_ray, wanted),
            "mlflow": partial(recipe_checks.mlflow, wanted),
        }
    return found


def findings(
    here: HostInfo,
    runs: Path,
    wanted: recipe_checks.IntendedRun | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> Iterator[Finding]:
    """What every check found. A check that fails is a finding itself. `say`: told what is looked at."""
    for key, check in checks(here, runs, wanted).items():
        name = key.replace("_", " ")
        notify(f"looking at {name}")
        try:
            found = check()
            yield from [found] if isinstance(found, Finding) else found
        except Exception as error:  # noqa: BLE001 - on a broken machine anything fails, and the rest is to be seen
            says = without_secrets(f"cannot be looked at: {type(error).__name__}: {error}")
            yield Finding(name, Verdict.WRONG, says)
