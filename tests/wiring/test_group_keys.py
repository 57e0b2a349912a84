"""Two values of each key of `rollout.groups` give two steps, each as the textbook chooses its groups: from the recipe
through the wired stages, on responses of which some have no score."""

import json
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fakes.job import MEMORY
from ppoctl.core.batch.scores import Score
from ppoctl.core.errors import DataError
from ppoctl.run.loop.steps import run
from ppoctl.store import manifest as manifests
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stage_runner import load_record
from wiring import textbook_dynamic_sampling
from wiring.cases import each_key
from wiring.harness import BASE, components, open_harness, summed, weights_of
from wiring.textbook_dynamic_sampling import TextbookGroup

GROUPS = {
    "keep": "mixed",
    "by": "score",
    "round_prompts": 2,
    "max_rounds": 4,
    "when_short": "use_fewer",
    "critic_sees": "kept",
}
LENGTH = {"per_token": 0.2, "free_tokens": 1}
LOST = {3: Score(None, "error", "no number")}
"""The last response of two prompts has no score in each round."""
BOUNDS = {"min": 0.05, "max": 0.5}

PARTS = {"right": {"kind": "exact_match", "weight": 1.0}, "form": {"kind": "exact_match", "weight": -1.0}}
"""Components whose difference, the score, has two values (see `harness.riddle`)."""

CASES: list[tuple[str, Any]] = [
    ("rollout.groups.keep.min", [{"keep": BOUNDS}, {"keep": {**BOUNDS, "min": 0.3}}]),
    ("rollout.groups.keep.max", [{"keep": {"min": -0.5, "max": most}} for most in (0.5, 0.05)]),
    ("rollout.groups.by", [{"keep": BOUNDS}, {"keep": BOUNDS, "by": "pass"}]),
    ("rollout.groups.by", [{"keep": BOUNDS}, {"keep": BOUNDS, "by": "shaped"}]),
    ("rollout.groups.by", [{"by": by, "parts": PARTS} for by in ("score", "components")]),
    ("rollout.groups.round_prompts", [{}, {"round_prompts": 3}]),
    ("rollout.groups.max_rounds", [{"by": "pass"}, {"by": "pass", "max_rounds": 2}]),
    (
        "rollout.groups.when_short",
        [{"by": "pass", "max_rounds": 2, "when_short": how} for how in ("use_fewer", "fail")],
    ),
    ("rollout.groups.critic_sees", [{"by": "pass"}, {"by": "pass", "critic_sees": "all"}]),
]


@dataclass(frozen=True)
class Chosen:
    """Prompts that a step trains the actor on, the number of its rounds, and the rows that train the critic."""

    prompts: tuple[str, ...]
    rounds: int
    critic_rows: int


def tables_with(groups: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe of the harness as one step of three groups of two responses."""
    tables = deepcopy(BASE)
    tables |= {"steps": 1, "eval": {"at_start": False, "at_end": False, "pass_score": 0.2}}
    parts = groups.get("parts")
    groups = {name: value for name, value in groups.items() if name != "parts"}
    tables["rollout"] |= {"prompts_per_step": 3, "groups": {**GROUPS, **groups}}
    tables["reward"] |= {"scale": None, "length_penalty": LENGTH}
    tables["reward"] |= {} if parts is None else {"kind": "sum", "parts": parts}
    tables["ppo"] |= {"minibatch_seqs": 2, "critic_only_steps": 0, "rollout_correction": {"kind": "none"}}
    tables["critic"]["optimizer"] |= {"lr_warmup_updates": 0}
    tables["actor"]["optimizer"] |= {"lr_warmup_updates": 0}
    return tables


@cache
def wired_and_textbook(written: str) -> tuple[Chosen | None, Chosen | None]:
    """Return the choice of a run and that of the textbook; None: the step fails."""
    tables = json.loads(written)
    with TemporaryDirectory(dir=MEMORY) as folder:
        job, paths = open_harness(Path(folder), tables, lost=LOST).job, RunPaths(Path(folder) / "run")
        try:
            run(job)
        except DataError:
            return None, _of_textbook(tables, paths)
        kept = _last(paths, "keep_groups")
        ids = tuple(dict.fromkeys(kept.prompt_ids))
        values = _record(paths, "values").values
        return Chosen(ids, len(_rounds(paths, "keep_groups")), len(values)), _of_textbook(tables, paths)


def _of_textbook(tables: dict[str, Any], paths: RunPaths) -> Chosen | None:
    """Return the choice of the textbook from the texts of the run's responses."""
    names, prompts = [], []
    for name in _rounds(paths, "rollout"):
        rollouts = _record(paths, name)
        rows = list(zip(rollouts.prompt_ids, rollouts.texts, rollouts.lengths.tolist(), strict=True))
        truths, weights = [id_.split()[1] for id_ in rollouts.prompt_ids], weights_of(tables)
        parts = [components(weights, text, truth) for text, truth in zip(rollouts.texts, truths, strict=True)]
        totals = [summed(weights, *each) for each in zip(parts, rollouts.texts, truths, strict=True)]
        scores = [None if row in LOST else total for row, total in enumerate(totals)]
        shaped = [(score or 0.0) - 0.2 * max(rows[row][2] - 1, 0) for row, score in enumerate(scores)]
        for first in range(0, len(rows), 2):
            names.append(rows[first][0])
            of_group = slice(first, first + 2)
            values = [list(each.values()) for each in parts[of_group]]
            prompts.append(TextbookGroup(scores[of_group], shaped[of_group], values))
    found = textbook_dynamic_sampling.step(tables, prompts)
    if found is None:
        return None
    chosen, rounds = found
    sees_all = tables["rollout"]["groups"]["critic_sees"] == "all"
    return Chosen(tuple(names[at] for at in chosen), rounds, 2 * len(names if sees_all else chosen))


def _rounds(paths: RunPaths, name: str) -> list[str]:
    names = [name, *(f"{name}.{number}" for number in range(2, 5))]
    return [each for each in names if manifests.read(paths.stage(1, each)) is not None]


def _last(paths: RunPaths, name: str) -> Any:
    return _record(paths, _rounds(paths, name)[-1])


def _record(paths: RunPaths, name: str) -> Any:
    return load_record(paths, 1, name, manifests.require(paths.stage(1, name)))


@each_key("key, groups", CASES)
def test_two_values_choose_groups_as_the_textbook(key: str, groups: list[dict[str, Any]]) -> None:
    pairs = [wired_and_textbook(json.dumps(tables_with(each))) for each in groups]
    for wired, textbook in pairs:
        assert wired == textbook
    assert pairs[0][0] != pairs[1][0], f"the test is too weak: `{key}` changes nothing"
