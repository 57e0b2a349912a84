"""The kill grid of the fault-injection tests (drills): a run on fakes, killed at every moment and resumed.

A kill leaves what is on disk. The run directory is therefore copied at every moment of one run, and every distinct
copy is resumed once; two neighbouring moments may share a copy, and so may moments of two speeds that differ only in
clocks. At some moments a process is really killed, and must leave such a directory, from which another process
resumes.

A resume depends on the stages that the newest step has, on the states, on the end of the journal, and on drafts.
`make test` resumes one state of each such kind of PPO (`one_of_each`), and of other step functions the kinds that PPO
lacks. CI resumes one of each kind of every step function, and kills it; `make test-slow` resumes every state.
"""

import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Literal

import pytest

from end_to_end.drill import in_a_process, killer, side_by_side
from fakes.job import Witness, play, result
from ppoctl.algorithms.choose import StepFunctionAt
from ppoctl.recipe.schema import Recipe
from ppoctl.store.recorded_run import RecordedRun
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
"""One of EACH moments is a real kill, if every state is resumed."""

States = Literal[
    "of own stages", "of each stage", "and of kills", "of each save", "of each moment", "first half", "second half"
]
"""States of a walk to resume: one for each stage that may be the last, or only for those that PPO lacks and for a few
others, or also some that a killed process leaves; one for each part of a save; one for each of both, and for each
moment of each kind of record; half of all."""
GRAINS: dict[States, slice] = {
    "of own stages": slice(1),
    "of each stage": slice(1),
    "and of kills": slice(1),
    "of each save": slice(1, 2),
    "of each moment": slice(3),
}
OF_PPO = re.compile("|eval|rollout|reward|values|logprobs|advantages|(critic|actor)_update")
AFTER = ("reward", "actor_update", "eval")
"""Stages of PPO after which each walk is resumed: what is carried has changed, or the run ends."""
STEP = re.compile(r"\b(steps|states[/.][a-z_0-9]+)[/.]([0-9]{6})")
ROUND = re.compile("[.][2-9](?=/|[.]parts|$)")
SAMPLE = re.compile("(?<=[.]parts/)(?!episodes).*")
OF_A_STAGE = re.compile("(?<=steps newest[.])[^/]*")
ATTEMPT = re.compile("drafts/attempt-[0-9]+/")
LAST_KIND = re.compile(rb'"(?:kind|number)": "?([a-z0-9]+)')

CLOCKS = re.compile(
    rb'"(at|began_at|seconds|rounds_s|waited_s|committed_at|created|id|name|seal|(throughput|memory|time)/[a-z_]+)"'
    rb': ("[^"]*"|[0-9.e+-]+)'
)
"""The parts of files in which two equal runs differ."""


def in_ci(*walk: object, states: States = "and of kills") -> Any:
    """Return the case of this walk that CI resumes from each stage, and after kills."""
    return pytest.param(*walk, states, marks=pytest.mark.ci("the walk of its own stages, and that of PPO"))


def steps_of(states: States) -> int:
    """Return the number of steps of a walk. Two steps suffice: the second has what the first carries."""
    return 2 if states in ("of own stages", "of each moment") else 3


def every_state(walks: Iterable[tuple[object, ...]] = ((),)) -> list[Any]:
    """Return the slow cases of these walks: both halves of all states."""
    halves = ("first half", "second half")
    return [pytest.param(*walk, half, marks=pytest.mark.slow) for walk in walks for half in halves]


@dataclass
class Left:
    """Files with their bytes, and folders with None, as a kill at these moments leaves them."""

    number: int
    files: dict[str, bytes | None]
    moments: list[str]

    def without_clocks(self) -> int:
        """Return a digest that two moments of different walks share if they leave equal files."""
        return hash(frozenset((name, data and _without_clocks(data)) for name, data in self.files.items()))

    @cached_property
    def step(self) -> int:
        """The newest step that has a folder."""
        return max((int(name[6:12]) for name in self.files if re.match("steps/[0-9]{6}", name)), default=0)

    def kinds(self, states: States) -> list[Hashable]:
        """Return the last stage of the newest step, what is saved, and what the unfinished stage has left. The words
        are the same in each step and each later round, and in all stages with the same kind of record."""
        names = {SAMPLE.sub("", ROUND.sub(".later", STEP.sub(self._relative, name))) for name in self.files}
        journal, number = self.files.get("./journal.jsonl") or b"", self.step
        listed = [name.decode() for name in re.findall(rb'"stage": "([^"]+)", "step": %d\b' % number, journal)]
        found = (re.fullmatch(f"steps/{number:06d}/[0-9]*-?(.*)/manifest.json", name) for name in self.files)
        unlisted = {name[1] for name in found if name} - {*listed}
        last = [*listed[-1:], *unlisted][-1:]
        parts = frozenset(name for name in names if re.match("steps newest/.*[.]parts/", name))
        logs = [LAST_KIND.findall(self._last_line(name)) for name in sorted(self.files) if "/episodes-" in name]
        saved = frozenset(
            name for name in names if "states" in name and not re.match("drafts.*/(?!man)[a-z]*[.]", name)
        )
        draft = frozenset(OF_A_STAGE.sub(_kind_of, name) for name in names if "own/steps" in name)
        cut = draft, bool(unlisted), b'"step": %d,' % number in self._last_line("./ledger.jsonl")
        stage = ROUND.sub(".later", "".join(last))
        if states == "of own stages" and not _is_own(stage, parts):
            return []
        return [(stage, parts, *map(tuple, logs)), saved, cut][GRAINS[states]]

    def _relative(self, name: re.Match[str]) -> str:
        """Return `steps newest` for `steps/000002`, or `states/actor older`."""
        return f"{name[1]} {'older' if int(name[2]) < self.step else 'newest'}"

    def _last_line(self, name: str) -> bytes:
        *_, last = [b"", *(self.files.get(name) or b"").splitlines()]
        return last

    def restore(self, root: Path) -> None:
        if self.files:
            root.mkdir(parents=True)
        for name, data in self.files.items():
            if data is None:
                (root / name).mkdir()
            else:
                (root / name).write_bytes(data)


@cache
def _without_clocks(data: bytes) -> bytes:
    return CLOCKS.sub(b"", data)


def _is_own(last: str, parts: Iterable[str]) -> bool:
    """Return whether PPO has no such state, or each walk is resumed from it."""
    begun = [re.sub(".*/([0-9]+-)?(?=.*[.]parts)|[.]parts/.*", "", name) for name in parts]
    return (last in AFTER and not begun) or not all(map(OF_PPO.fullmatch, (last, *begun)))


def _kind_of(stage: re.Match[str]) -> str:
    """Return the kind of record of a stage."""
    return next((kind for kind in ("rollout", "eval", "update") if kind in stage[0]), "record")


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
    folders = [(str(root), "./")]
    for folder, inside in folders:  # which grows
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    name = "own" if ATTEMPT.fullmatch(inside) else entry.name
                    found[inside + name] = None
                    folders.append((entry.path, f"{inside.removeprefix('./')}{name}/"))
                else:
                    with open(entry.path, "rb", buffering=0) as file:  # noqa: PTH123 - called a million times
                        found[inside + entry.name] = file.read()
    return found


def one_of_each(lefts: Sequence[Left], states: States) -> list[Left]:
    """Return some of these states that have all kinds between them, more of later steps, whose rest is shorter."""
    of_kind: dict[Hashable, list[Left]] = {}
    for left in lefts:
        for kind in enumerate(left.kinds(states)):
            of_kind.setdefault(kind, []).append(left)
    chosen: list[Left] = []
    times, seen = Counter[int](), set[Hashable]()
    for kind, members in of_kind.items():
        if kind not in seen:
            left = min(members, key=lambda left: (times[left.step] / (1 + left.step), -left.step))
            chosen.append(left)
            times[left.step] += 1
            seen |= {*enumerate(left.kinds(states))}
    return chosen


def selected(lefts: Sequence[Left], states: States) -> list[Left]:
    """Return the states to resume."""
    if states in ("first half", "second half"):
        return list(lefts)[states == "second half" :: 2]
    return one_of_each(lefts, states)


def resume_each(
    folder: Path, lefts: Iterable[Left], play: Callable[[Path], object], expected: dict[str, object]
) -> None:
    """Resume, by `play`, what kills leave. Each run must end as expected."""

    def go_on(left: Left) -> None:
        root = folder / f"{left.number}"
        left.restore(root)
        play(root)
        assert result(root) == expected, f"killed at: {left.moments}"

    side_by_side([partial(go_on, left) for left in lefts])


def kill_each(folder: Path, recipe: Recipe, witness: Witness, numbers: Iterable[int]) -> None:
    """Kill processes at these moments of the run `whole`, which this witness recorded, and resume each run in another
    process. Each must end like `whole`."""
    expected = result(folder / "whole")

    def die_and_go_on(number: int) -> None:
        root = folder / f"{number}"
        killed = Witness(act=killer(number), looks=witness.looks, turns=witness.turns)
        assert in_a_process(lambda: play(root, recipe, killed)) == signal.SIGKILL
        assert in_a_process(lambda: play(root, recipe)) == 0
        assert result(root) == expected, f"killed at: {witness.moments[number]}"

    side_by_side([partial(die_and_go_on, number) for number in numbers])


def resume_from(
    folder: Path, recipe: Recipe, choose: StepFunctionAt, *, states: States, paces: Sequence[float] = (1,)
) -> None:
    """Run the recipe once for each pace of background saves, and resume it from states that a kill leaves.

    Each resume plan is without fault, and each resumed run ends like the uninterrupted run.
    """
    walks = {looks: Walk(folder / f"whole {looks}") for looks in paces}
    turns = recipe.environment is not None
    witnesses = {looks: Witness(act=walk.on_moment, looks=looks, turns=turns) for looks, walk in walks.items()}
    for looks, witness in witnesses.items():
        play(walks[looks].root, recipe, witness, choose)
        stages = {moment.split()[1] for moment in witness.moments}
        assert {"rollout", "actor_update", "state/actor", "eval"} <= stages
        generate = {moment.split()[1] for moment in witness.moments if moment.endswith("samples")}
        generates = "partial_rollout" if recipe.rollout.tokens_per_step else "rollout"
        assert {generates, "eval"} <= generate
    expected = [result(walk.root) for walk in walks.values()]
    assert all(each == expected[0] for each in expected)

    def go_on(root: Path, left: Left) -> None:
        left.restore(root)
        try:
            if RunPaths(root).run_json.exists():
                assert not plan_resume(RecordedRun(RunPaths(root))).broken
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

    lefts = {left.without_clocks(): left for walk in walks.values() for left in walk.all}
    assert len(lefts) >= max(len(walk.all) for walk in walks.values()), "what differs was taken for the same"
    chosen = selected(list(lefts.values()), states)
    # Each stage may be the last, and one of each of four kinds is begun, drafted, and published without its line.
    names = {ROUND.sub(".later", name) for name in stages if "/" not in name}
    names = {name for name in names if states != "of own stages" or _is_own(name, ())}
    # Nothing is saved, the first role, both, also the first role of the newest step, also both.
    least = 5 if states == "of each save" else len(names) + 4 * 3 * (states == "of each moment")
    assert len(chosen) >= least
    kills = [
        (looks, *moment)
        for looks, witness in witnesses.items()
        for moment in real_kills(witness.moments, states, recipe.checkpoint.every_steps)
    ]
    side_by_side(
        [partial(die_and_go_on, *kill) for kill in kills]
        + [partial(go_on, folder / f"{number}", left) for number, left in enumerate(chosen)]
    )


def real_kills(moments: Sequence[str], states: States, first: int) -> list[tuple[int, str]]:
    """Return moments at which a process is killed: none, one of each kind, or one of `EACH`. `make test` kills at
    each kind of moment of PPO, CI also in the walks of other step functions."""
    if states in ("of own stages", "of each stage", "of each save"):
        return []
    every = list(enumerate(moments))
    if states == "of each moment":
        return list({name.split(" ")[-1]: (number, name) for number, name in every[: len(every) // 2]}.values())
    return every[(first + EACH * (states == "second half")) % (2 * EACH) :: 2 * EACH]
