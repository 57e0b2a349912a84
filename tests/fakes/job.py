"""A whole run on fake engines, in a directory."""

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fakes.sockets import fake_recipe, fake_sockets
from ppoctl.loop.run import Health, run
from ppoctl.recipe.schema import Recipe
from ppoctl.store import artifact, run_dir
from ppoctl.store.attempt import claim
from ppoctl.store.journal import Line, read_lines
from ppoctl.store.layout import RunLayout
from ppoctl.wire.job import Surroundings, Wiring, assemble


class Calm:
    """Health without rules."""

    def judge(self, step: int, figures: Mapping[str, float]) -> list[object]:
        return []

    def would_stop(self, step: int, figures: Mapping[str, float]) -> bool:
        return False


@dataclass
class Witness:
    """Writes down every moment of a run; `act` is told each one with its number."""

    act: Callable[[int, str], None] = lambda number, name: None
    looks: float = 1
    """How often a save in the background is looked at until half a file more is written; infinite: it writes nothing
    before it is waited for."""
    moments: list[str] = field(default_factory=list)
    committed: list[Line] = field(default_factory=list)

    def tell(self, name: str) -> None:
        self.moments.append(name)
        self.act(len(self.moments) - 1, name)

    def on_stage(self, step: int, stage: str) -> None:
        self.tell(f"{step} {stage} starts")

    def on_moment(self, step: int, stage: str, moment: str) -> None:
        self.tell(f"{step} {stage} {moment}")

    def on_committed(self, line: Line) -> None:
        self.committed.append(line)

    def on_minibatch(self, role: str, number: int) -> None:
        if number == 1:
            self.tell(f"inside {role}_update after a minibatch")

    def on_file(self, role: str, number: int) -> None:
        self.tell(f"inside state/{role} after {number} half files")

    def on_progress(self, done: int, total: int, tokens: int) -> None:
        if done == total // 2:
            self.tell(f"inside rollout after {done} samples")


def no_stop() -> None:
    """Nobody asks the job to stop."""


def open_run(
    root: Path,
    recipe: Recipe,
    witness: Witness,
    *,
    recipes: Mapping[int, Recipe] | None = None,
    health: Health | None = None,
    check_stop: Callable[[], None] = no_stop,
) -> Wiring:
    """What `train --or-resume` does, on fakes."""
    layout = RunLayout(root)
    if not root.exists():
        run_dir.create(layout, recipe_toml="", resolved=recipe.model_dump(mode="json", by_alias=True), facts={})
    attempt = claim(layout)
    artifact.sweep(layout)
    around = Surroundings(
        check_stop=check_stop,
        say=lambda text: None,
        observers=(witness,),
        health=health or Calm(),
        versions={},
    )
    sockets = fake_sockets(recipe, on_minibatch=witness.on_minibatch, on_file=witness.on_file, looks=witness.looks)
    return assemble(layout, attempt, recipes or {1: recipe}, sockets, around)


def play(root: Path, recipe: Recipe | None = None, witness: Witness | None = None) -> Wiring:
    """Run to the end."""
    wiring = open_run(root, recipe or fake_recipe(), witness or Witness())
    run(wiring.job)
    return wiring


def result(root: Path) -> dict[str, object]:
    """What two runs must agree on: ledger and final states to the byte, figures of every stage, each once."""
    layout = RunLayout(root)
    states = {
        f"{role}/{path.name}": path.read_bytes()
        for role in ("actor", "critic")
        for path in sorted(layout.state(role, layout.saved_steps(role)[-1]).iterdir())
        if path.name != "manifest.json"
    }
    lines = [line for line in read_lines(layout.journal) if "stage" in line]
    figures = sorted((line["step"], line["stage"], line["identity"], str(line["figures"])) for line in lines)
    return {"ledger": layout.ledger.read_bytes(), "states": states, "figures": figures}


KILLED = -signal.SIGKILL
