"""The kill grid of the fault-injection tests (drills): a run on fakes, killed at every moment and resumed.

A kill leaves what is on disk. The run directory is therefore copied at every moment of one run, and every distinct
copy is resumed once; two neighbouring moments may share a copy, and so may moments of two speeds that differ only in
clocks. At every twenty-fourth moment a process is really killed, and must leave such a directory, from which another
process resumes. `make test` resumes every other state of each walk, `make test-slow` those between them.
"""

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from end_to_end.drill import in_a_process, killer, side_by_side
from fakes.job import Witness, play, result
from ppoctl.algorithm.choose import StepFunctionAt
from ppoctl.recipe.schema import Recipe
from ppoctl.store.resume_plan import plan_resume
from ppoctl.store.run_paths import RunPaths

KEEPS_EACH = {
    "prompts_per_step": 2,
    "samples_per_prompt": 2,
    "max_prompt_tokens": 4,
    "max_new_tokens": 6,
    "keep_finished_every_s": 1e-9,
}

EACH = 24
"""One of EACH moments is a real kill."""


CLOCKS = re.compile(
    rb'"(at|seconds|rounds_s|committed_at|created|id|name|seal|throughput/[a-z_]+)": ("[^"]*"|[0-9.e+-]+)'
)
"""The parts of files in which two equal runs differ."""


@dataclass
class Left:
    """Files with their bytes, and folders with None, as a kill at these moments leaves them."""

    number: int
    files: dict[str, bytes | None]
    moments: list[str]

    def without_clocks(self) -> int:
        """Return a digest that two moments of different walks share if they leave equal files."""
        parts = (f"{name} {data if data is None else CLOCKS.sub(b'', data)!r}" for name, data in self.files.items())
        return hash("\n".join(sorted(parts)))

    def restore(self, root: Path) -> None:
        for name, data in self.files.items():
            if data is None:
                (root / name).mkdir(parents=True)
            else:
                (root / name).write_bytes(data)


class Walk:
    """A run that is copied at every moment."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.all: list[Left] = []

    def on_moment(self, number: int, name: str) -> None:
        files = contents(self.root)
        if self.all and self.all[-1].files == files:
            self.all[-1].moments.append(name)
        else:
            self.all.append(Left(number, files, [name]))

    def left_at(self, number: int) -> Left:
        return next(left for left in reversed(self.all) if left.number <= number)


def contents(root: Path) -> dict[str, bytes | None]:
    """Return the contents of a directory; a folder comes before its files. An attempt's own folder has another name
    in each run."""
    found: dict[str, bytes | None] = {}
    for folder, folders, files in os.walk(root):
        inside = re.sub("^(drafts/attempt-[0-9]+)/[0-9a-f]{8}", r"\1/own", os.path.relpath(folder, root))
        named = ["own" if re.fullmatch("drafts/attempt-[0-9]+", inside) else name for name in folders]
        found |= {os.path.join(inside, name): None for name in named}  # noqa: PTH118 - names, not paths
        found |= {os.path.join(inside, name): (Path(folder) / name).read_bytes() for name in files}  # noqa: PTH118
    return found


def resume_each(
    folder: Path, walk: Walk, numbers: Iterable[int], play: Callable[[Path], object], expected: dict[str, object]
) -> None:
    """Resume, by `play`, what kills at these moments of a walk leave. Each run must end as expected."""

    def go_on(number: int) -> None:
        root = folder / f"{number}"
        walk.all[number].restore(root)
        play(root)
        assert result(root) == expected, f"killed at: {walk.all[number].moments}"

    side_by_side([partial(go_on, number) for number in numbers])


def kill_each(
    folder: Path,
    recipe: Recipe,
    witness: Witness,
    numbers: Iterable[int],
    after_kill: Callable[[RunPaths], object] = lambda paths: None,
) -> None:
    """Kill processes at these moments of the run `whole`, which this witness recorded, and resume each run in another
    process. Each must end like `whole`; `after_kill` is called in between."""
    expected = result(folder / "whole")

    def die_and_go_on(number: int) -> None:
        root = folder / f"{number}"
        killed = Witness(act=killer(number), looks=witness.looks, turns=witness.turns)
        assert in_a_process(lambda: play(root, recipe, killed)) == signal.SIGKILL
        after_kill(RunPaths(root))
        assert in_a_process(lambda: play(root, recipe)) == 0
        assert result(root) == expected, f"killed at: {witness.moments[number]}"

    side_by_side([partial(die_and_go_on, number) for number in numbers])


def resume_from_every_moment(
    folder: Path, recipe: Recipe, choose: StepFunctionAt, *, paces: Sequence[float] = (1,), half: int
) -> None:
    """Run the recipe once for each pace of background saves, and resume it from every other state that a kill leaves.

    `half` is 0 or 1. Each resume plan is without fault, and each resumed run ends like the uninterrupted run.
    """
    walks = {looks: Walk(folder / f"whole {looks}") for looks in paces}
    turns = recipe.environment is not None
    witnesses = {looks: Witness(act=walk.on_moment, looks=looks, turns=turns) for looks, walk in walks.items()}
    for looks, witness in witnesses.items():
        play(walks[looks].root, recipe, witness, choose)
        stages = {moment.split()[1] for moment in witness.moments}
        assert {"rollout", "actor_update", "state/actor", "eval"} <= stages
        assert {"rollout", "eval"} <= {moment.split()[1] for moment in witness.moments if moment.endswith("samples")}
    expected = [result(walk.root) for walk in walks.values()]
    assert all(each == expected[0] for each in expected)

    def go_on(root: Path, left: Left) -> None:
        left.restore(root)
        try:
            if RunPaths(root).run_json.exists():
                assert not plan_resume(RunPaths(root)).broken
            play(root, recipe, choose=choose)
            assert result(root) == expected[0]
        except Exception as error:
            error.add_note(f"killed at: {left.moments}")
            raise
        shutil.rmtree(root)

    def die_and_go_on(looks: float, number: int, name: str) -> None:
        root = folder / f"{looks} {number} killed"
        died = in_a_process(lambda: play(root, recipe, Witness(act=killer(number), looks=looks, turns=turns), choose))
        assert died == signal.SIGKILL, f"not killed at {name}"
        assert contents(root).keys() == walks[looks].left_at(number).files.keys(), f"killed at: {name}"
        assert in_a_process(lambda: play(root, recipe, choose=choose)) == 0
        assert result(root) == expected[0], f"killed at: {name}"

    killed = [
        (looks, *moment)
        for place, (looks, witness) in enumerate(witnesses.items())
        for moment in list(enumerate(witness.moments))[(recipe.checkpoint.every_steps + 7 * place) % EACH :: EACH]
    ]
    lefts = {left.without_clocks(): left for walk in walks.values() for left in walk.all}
    assert len(lefts) >= max(len(walk.all) for walk in walks.values()), "what differs was taken for the same"
    side_by_side(
        [partial(die_and_go_on, *moment) for moment in killed[half::2]]
        + [partial(go_on, folder / f"{number}", left) for number, left in list(enumerate(lefts.values()))[half::2]]
    )
