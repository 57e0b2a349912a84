"""The complete fault-injection test (drill) of the commit protocol, on fakes: SIGKILL at every moment of every stage,
then resume.

Verified: ledger, final weights, optimizer and every journaled metric equal those of the undisturbed run, with states
saved every step and every third, synchronously, and in the background at three speeds. Not verified here: that the
real engines replay bit-equal (see `tests/end_to_end/test_real_engines.py`).

A kill leaves what is on disk. The run directory is therefore copied at every moment of one run, and every distinct
copy is resumed once; two neighbouring moments may share a copy, and so may moments of two speeds that differ only in
clocks. At every twenty-fourth moment a process is really killed, and must leave such a directory, from which another
process resumes. `make test` resumes every other state of each walk, `make test-slow` those between them.
"""

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path

import pytest

from end_to_end.drill import in_a_process, killer, side_by_side
from fakes.components import fake_recipe
from fakes.job import Witness, play, result, saved_checkpoints
from fakes.step_functions import NO_CRITIC, TWO_ROUNDS
from ppoctl.algorithm.choose import step_function_at
from ppoctl.store.run_paths import RunPaths


@pytest.fixture
def folder() -> Iterator[Path]:
    """Use memory if possible: the drill flushes tens of thousands of files."""
    parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="ppoctl-drill-", dir=parent) as name:
        yield Path(name)


HOW_SAVED: dict[str, tuple[dict[str, object], tuple[float, ...]]] = {
    "every step": ({"every_steps": 1, "asynchronous": False}, (1,)),
    "every third": ({"every_steps": 3, "asynchronous": False}, (1,)),
    "behind the rollout": ({"every_steps": 1}, (1,)),
    # A background save writes half a file more at each poll (it ends after the rollout), at every fifth poll (after
    # the whole step), or never (when the next save waits).
    "at three paces": ({"every_steps": 1}, (1, 4, inf)),
}


TWO_MINIBATCHES = {"epochs": 2, "minibatch_seqs": 2, "kl": {"place": "reward", "coef": 0.05}}

WITH: dict[str, dict[str, object]] = {
    "all adapts": {
        "reward": {
            "kind": "exact_match",
            "moments": {"kind": "running", "center": True},
            "clip": {"low": -1.5, "high": 1.5, "place": "after_moments"},
            "overlong": {"buffer_tokens": 3},
        },
        "ppo": {
            **TWO_MINIBATCHES,
            "advantages": {"kind": "gae", "gae_lambda_value": 0.9, "length_adaptive_alpha": 0.5},
            "truncated": "bootstrap",
        },
    },
    "grpo": {
        "critic": None,
        "reward": {"kind": "exact_match", "moments": {"kind": "running"}},
        "ppo": {
            **TWO_MINIBATCHES,
            "advantages": {"kind": "grpo"},
            "kl": {
                "place": "loss",
                "estimator": "k3",
                "coef": 0.05,
                "adaptive": {"target_per_token": 0.001, "horizon_seqs": 50},
            },
            "rollout_correction": {"kind": "tis"},
        },
    },
}
"""Settings under which something is carried from step to step, and optional outputs of stages are on."""

STEP_FUNCTIONS = {
    "ppo": step_function_at,
    "no critic": lambda _, __: NO_CRITIC,
    "two rounds": lambda _, __: TWO_ROUNDS,
}
"""Two step functions exist only here: the step function alone may define what a step is."""

KEEPS_EACH = {
    "prompts_per_step": 2,
    "samples_per_prompt": 2,
    "max_prompt_tokens": 4,
    "max_new_tokens": 6,
    "keep_finished_every_s": 1e-9,
}

EACH = 24
"""One of EACH moments is a real kill."""


CLOCKS = re.compile(rb'"(at|seconds|committed_at|created|id|name|seal|throughput/[a-z_]+)": ("[^"]*"|[0-9.e+-]+)')
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


@pytest.mark.sampled(7)  # one half of each walk, because halves of a walk are neighbours
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize(
    ("how", "step_function"),
    [
        *((how, "ppo") for how in ("every step", "every third", "at three paces")),
        ("every third", "no critic"),
        ("behind the rollout", "two rounds"),
        ("every third", "all adapts"),
        ("every third", "grpo"),
    ],
)
def test_run_killed_at_any_moment_ends_like_an_uninterrupted_run(
    folder: Path, how: str, step_function: str, half: int
) -> None:
    (checkpoint, paces), choose = HOW_SAVED[how], STEP_FUNCTIONS.get(step_function, step_function_at)
    recipe = fake_recipe(
        checkpoint=checkpoint, rollout=KEEPS_EACH, **{"ppo": TWO_MINIBATCHES, **WITH.get(step_function, {})}
    )
    walks = {looks: Walk(folder / f"whole {looks}") for looks in paces}
    witnesses = {looks: Witness(act=walk.on_moment, looks=looks) for looks, walk in walks.items()}
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
            play(root, recipe, choose=choose)
            assert result(root) == expected[0]
        except Exception as error:
            error.add_note(f"killed at: {left.moments}")
            raise
        shutil.rmtree(root)

    def die_and_go_on(looks: float, number: int, name: str) -> None:
        root = folder / f"{looks} {number} killed"
        died = in_a_process(lambda: play(root, recipe, Witness(act=killer(number), looks=looks), choose))
        assert died == signal.SIGKILL, f"not killed at {name}"
        assert contents(root).keys() == walks[looks].left_at(number).files.keys(), f"killed at: {name}"
        assert in_a_process(lambda: play(root, recipe, choose=choose)) == 0
        assert result(root) == expected[0], f"killed at: {name}"

    killed = [
        (looks, *moment)
        for looks, witness in witnesses.items()
        for moment in list(enumerate(witness.moments))[(len(how) + 7 * paces.index(looks)) % EACH :: EACH]
    ]
    lefts = {left.without_clocks(): left for walk in walks.values() for left in walk.all}
    assert len(lefts) >= max(len(walk.all) for walk in walks.values()), "what differs was taken for the same"
    side_by_side(
        [partial(die_and_go_on, *moment) for moment in killed[half::2]]
        + [partial(go_on, folder / f"{number}", left) for number, left in list(enumerate(lefts.values()))[half::2]]
    )


def test_recorded_walk_has_run_files_of_every_moment(folder: Path) -> None:
    whole = Walk(folder / "whole")
    witness = Witness(act=whole.on_moment)
    play(whole.root, fake_recipe(), witness)
    assert [name for left in whole.all for name in left.moments] == witness.moments
    assert 50 < len(whole.all) < len(witness.moments)
    # Neighbours that share a state come from one directory, whose bytes differ from those before and after.
    assert all(one.files != other.files for one, other in pairwise(whole.all))
    last = folder / "last"
    whole.all[-1].restore(last)
    assert contents(last) == whole.all[-1].files


@pytest.mark.parametrize("first", ["actor", "critic"])
def test_run_killed_between_two_role_saves_resumes(folder: Path, first: str) -> None:
    """One role's state of step 3 exists, the other's is still being written: the run resumes from the source."""
    other = {"actor": "critic", "critic": "actor"}[first]
    recipe = fake_recipe(steps=5, checkpoint={"every_steps": 3})
    paces = {first: 1, other: inf}
    witness = Witness(looks=paces)
    play(folder / "whole", recipe, witness)
    expected = result(folder / "whole")
    begin, end = (witness.moments.index(f"3 state/{role} renamed") for role in (first, other))
    assert begin < end

    def die_and_go_on(number: int) -> None:
        root = folder / f"{number}"
        died = in_a_process(lambda: play(root, recipe, Witness(act=killer(number), looks=paces)))
        assert died == signal.SIGKILL
        assert RunPaths(root).saved_steps(first) == [3]
        assert saved_checkpoints(RunPaths(root)) == []
        assert in_a_process(lambda: play(root, recipe)) == 0
        assert result(root) == expected, f"killed at: {witness.moments[number]}"

    side_by_side([partial(die_and_go_on, number) for number in range(begin + 1, end, 8)])


def test_killed_evaluation_generates_only_missing_samples(folder: Path) -> None:
    recipe = fake_recipe(steps=1, rollout=KEEPS_EACH)
    witness = Witness()
    play(folder / "whole", recipe, witness)
    number = next(i for i, moment in enumerate(witness.moments) if moment.startswith("inside eval after"))
    root = folder / "run"
    died = in_a_process(lambda: play(root, recipe, Witness(act=killer(number))))
    assert died == signal.SIGKILL
    finished = int(witness.moments[number].split()[3])
    assert len(list(RunPaths(root).parts(0, "eval").iterdir())) == finished
    num_generated = {run: play(folder / run, recipe).generator.num_generated for run in ("run", "again")}  # type: ignore[attr-defined]
    assert num_generated["run"] == num_generated["again"] - finished
    assert result(root) == result(folder / "whole")


WARMED_AND_DECAYED = {"lr": 0.05, "lr_schedule": "linear", "lr_warmup_updates": 3}


def test_schedules_and_critic_only_steps_survive_a_kill(folder: Path) -> None:
    # A constant rate and a constant step function would hide errors here: a replay counts updates and steps as the
    # update found them.
    recipe = fake_recipe(
        steps=5,
        checkpoint={"every_steps": 4},
        ppo={"epochs": 1, "critic_epochs": 2, "minibatch_seqs": 4, "critic_only_steps": 2},
        actor={"optimizer": WARMED_AND_DECAYED},
        critic={"optimizer": WARMED_AND_DECAYED},
    )
    witness = Witness()
    play(folder / "whole", recipe, witness)
    interesting = ("renamed", "written", "starts")
    moments = [(i, m) for i, m in enumerate(witness.moments) if m[0] in "345" and m.endswith(interesting)]

    def die_and_go_on(number: int, name: str) -> None:
        root = folder / f"{number}"
        assert in_a_process(lambda: play(root, recipe, Witness(act=killer(number)))) == signal.SIGKILL
        assert in_a_process(lambda: play(root, recipe)) == 0
        assert result(root) == result(folder / "whole"), f"killed at: {name}"

    side_by_side([partial(die_and_go_on, *moment) for moment in moments[::6]])


def test_repeatedly_killed_run_ends_like_an_uninterrupted_run(folder: Path) -> None:
    recipe = fake_recipe(checkpoint={"every_steps": 3})
    play(folder / "whole", recipe)
    root = folder / "often"
    deaths = 0
    # Later than the moments of replaying two steps of two roles and of saving the third: a run that always dies
    # earlier makes no progress.
    while in_a_process(lambda: play(root, recipe, Witness(act=killer(16)))) == signal.SIGKILL:
        deaths += 1
        assert deaths < 50
    assert deaths > 5
    assert result(root) == result(folder / "whole")
