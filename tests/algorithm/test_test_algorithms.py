"""Algorithms whose rows, rounds or roles differ from PPO's (`fakes/algorithms`, dynamic sampling, PF-PPO): traces,
plans, and records on disk."""

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.algorithms.every import EVERY
from fakes.algorithms.two_critics import JUDGE_UPDATE
from fakes.job import play
from ppoctl.algorithms.choose import outlines, trace_at
from ppoctl.algorithms.update_specs import CRITIC_UPDATE
from ppoctl.core.batch.records import Selection, State, Update
from ppoctl.plan.run_plan import Plan, plan
from ppoctl.recipe.schema import Recipe
from ppoctl.run.loop.run_stage import ReplayingStep, replay
from ppoctl.store import manifest as manifests
from ppoctl.store.journal import read_lines
from ppoctl.store.outline import Outlines
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stage_runner import load_record
from ppoctl.store.states import saved_state
from ppoctl.store.stored_samples import StepRecords
from tolerance import FLOAT32

SMALL_MODEL = {"path": str(Path(__file__).parents[2] / "recipes/quickstart/model"), "dtype": "float32"}
DYNAMIC = EVERY["dynamic sampling"]


def committed(paths: RunPaths, step: int, name: str) -> Any:
    """Return the committed record of a stage."""
    return load_record(paths, step, name, manifests.require(paths.stage(step, name))).result


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunPaths]:
    """Return the run of each algorithm in which every state and record of three steps is kept."""
    found = {}
    for name, algorithm in EVERY.items():
        paths = RunPaths(tmp_path_factory.mktemp("runs") / "run")
        play(paths.root, algorithm.recipe(checkpoint={"every_steps": 3}), choose=algorithm.choose)
        found[name] = paths
    return found


def by_round(lines: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Return (step, round) -> lines of the ledger."""
    found: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        found[line["step"], line.get("round", 1)].append(line)
    return dict(found)


ROWS = {
    "dynamic sampling": {
        "keep_groups": "keep_groups",
        "logprobs": "keep_groups",
        "advantages": "keep_groups",
    },
    "critic sees all": {
        "keep_groups": "keep_groups",
        "all_rows": "all_rows",
        "values": "all_rows",
        "logprobs": "all_rows",
        "correction": "keep_groups",
        "critic_advantages": "all_rows",
        "advantages": "keep_groups",
    },
    "resampled rows": {"resample": "resample"},
    "resampled, then whitened": {"resample": "resample", "whitening": "resample"},
    "two critics": {},
    "one step off": {
        "reward": "next_rollout@-1",
        "logprobs": "next_rollout@-1",
        "correction": "next_rollout@-1",
        "advantages": "next_rollout@-1",
        "next_rollout": "next_rollout",
    },
    "dynamic sampling, one step off": {
        "keep_groups": "keep_groups",
        "logprobs": "keep_groups",
        "correction": "keep_groups",
        "advantages": "keep_groups",
        "next_rollout": "next_rollout",
    },
    "partial rollouts": {"partial_rollout": "partial_rollout"},
    "partial rollouts, one step off": {"next_rollout": "next_rollout"},
}
"""Stages of step 2 whose rows are not those of `rollout`."""


@pytest.mark.parametrize("name", EVERY)
def test_trace_has_the_rows_of_each_record(name: str) -> None:
    algorithm = EVERY[name]
    outline = trace_at(algorithm.recipe(), 2, algorithm.choose).outline
    assert {stage.name: stage.rows for stage in outline.stages if stage.rows is not None} == ROWS[name]
    found = outlines(algorithm.recipe(), algorithm.choose)
    assert Outlines.from_json(found.as_json()) == found
    assert found.reaches_back == ("one step off" in name or "partial" in name)


def test_traces_have_rounds_roles_and_step_functions() -> None:
    stages = trace_at(DYNAMIC.recipe(), 1, DYNAMIC.choose).outline.stages
    loop = [(stage.name, stage.at_most, stage.loop) for stage in stages if stage.loop]
    assert loop == [("rollout", 4, 1), ("reward", 4, 1), ("keep_groups", 4, 1)]
    roles = {name: outlines(each.recipe(), each.choose).roles for name, each in EVERY.items()}
    assert roles == {
        "dynamic sampling": ("actor",),
        "critic sees all": ("actor", "critic"),
        "resampled rows": ("actor", "critic"),
        "resampled, then whitened": ("actor", "critic"),
        "two critics": ("actor", "critic", "judge"),
        "one step off": ("actor",),
        "dynamic sampling, one step off": ("actor",),
        "partial rollouts": ("actor",),
        "partial rollouts, one step off": ("actor",),
    }
    for name, suffix in (
        ("one step off", "_ahead"),
        ("dynamic sampling, one step off", "_dynamic_sampling_ahead"),
        ("partial rollouts", "_partial"),
        ("partial rollouts, one step off", "_partial_ahead"),
    ):
        by_start = outlines(EVERY[name].recipe(), EVERY[name].choose).by_start
        assert {start: outline.story for start, outline in by_start.items()} == {
            1: f"policy_only_corrected{suffix}_first",
            2: f"policy_only_corrected{suffix}",
        }


# --- plan ---------------------------------------------------------------------------------------------------------


def planned(name: str, **changes: Any) -> tuple[Recipe, Plan]:
    recipe = EVERY[name].recipe(model=SMALL_MODEL, **changes)
    return recipe, plan(recipe, choose=EVERY[name].choose)


def test_plan_counts_a_third_role() -> None:
    recipe, found = planned("two critics")
    two = plan(recipe)
    assert list(found.roles) == ["actor", "critic", "judge"]
    assert found.work is not None
    assert two.work is not None
    # The second critic adds a forward pass, and one epoch of three.
    added = found.work.forwards - two.work.forwards
    assert added > 0
    assert found.work.updates - two.work.updates == 3 * added
    assert found.storage.records_bytes - two.storage.records_bytes == 4 * 3 * 4
    assert found.memory is not None
    assert list(found.memory.roles) == ["actor", "critic", "judge"]
    assert "judge's loss" in found.algorithm


def test_plan_counts_the_selection_and_the_responses_of_the_next_step() -> None:
    _, plain = planned(
        "resampled rows", ppo={"epochs": 2, "minibatch_seqs": 2, "kl": {"place": "reward", "coef": 0.05}}
    )
    _, resampled = planned("resampled rows")
    _, whitened = planned("resampled, then whitened")
    assert resampled.storage.records_bytes - plain.storage.records_bytes == 4 * (8 + 8)
    # 4 rows of 3 tokens: advantages, returns and rewards of tokens, the mask; and the score of each row.
    assert whitened.storage.records_bytes - resampled.storage.records_bytes == 12 * (4 + 4 + 4 + 1) + 4 * 4
    assert plain.work == resampled.work == whitened.work
    assert "resampling" not in plain.algorithm
    assert resampled.algorithm["resampling"] == "pow: order after_whitening, power 1.5"
    recipe, ahead = planned("one step off")
    assert ahead.work == plan(recipe).work
    assert ahead.storage == plan(recipe).storage


def test_update_reads_the_optimizer_of_its_own_role() -> None:
    recipe = EVERY["two critics"].recipe()
    others = {
        role: EVERY["two critics"].recipe(**{role: {"optimizer": {"lr": 0.5}}})
        for role in ("actor", "critic", "judge")
    }
    changed = {
        spec.name: [role for role, other in others.items() if spec.fingerprint(other) != spec.fingerprint(recipe)]
        for spec in (CRITIC_UPDATE, JUDGE_UPDATE)
    }
    assert changed == {"critic_update": ["critic"], "judge_update": ["judge"]}


# --- records ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_samples_have_their_own_scores_and_advantages(runs: dict[str, RunPaths], name: str) -> None:
    """The list of samples is joined with the ledger, which is written without a join."""
    paths = runs[name]
    lines = by_round(read_lines(paths.ledger))
    for step in (1, 2, 3):
        rows = StepRecords.read(RecordedRun(paths), step).rows()
        expected = [line for key, each in lines.items() if key[0] == step for line in each]
        assert [(row.round, row.prompt_id, row.sample, row.score) for row in rows] == [
            (line.get("round", 1), line["prompt"], line["sample"], line["score"]) for line in expected
        ]
        if name.startswith("resampled") or name == "two critics":
            whole = committed(paths, step, "advantages")
            means = [float(row[mask].mean()) for row, mask in zip(whole.advantages, whole.mask, strict=True)]
            assert [row.advantage for row in rows] == means
            continue
        if name == "critic sees all":
            last = max(row.round for row in rows)
            kept = committed(paths, step, "keep_groups" if last == 1 else f"keep_groups.{last}")
            whole = committed(paths, step, "advantages")
            means = [float(row[mask].mean()) for row, mask in zip(whole.advantages, whole.mask, strict=True)]
            of_kept = list(zip(kept.rounds.tolist(), kept.prompt_ids, kept.sample_indices, strict=True))
            expected_means = dict(zip(of_kept, means, strict=True))
            found = {(row.round, row.prompt_id, row.sample): row.advantage for row in rows}
            assert {key: value for key, value in found.items() if value is not None} == expected_means
            continue
        left_out = 0
        for first, second in zip(rows[::2], rows[1::2], strict=True):
            assert (first.round, first.prompt_id) == (second.round, second.prompt_id)
            assert first.score is not None
            assert second.score is not None
            if first.advantage is None or second.advantage is None:
                assert name.startswith("dynamic sampling")
                assert first.advantage is second.advantage
                left_out += 1
                continue
            sign = (first.score > second.score) - (first.score < second.score)
            assert first.advantage == pytest.approx(sign * 0.5**0.5, rel=1e-4)  # over the deviation of two scores
            assert second.advantage == pytest.approx(-first.advantage)
        is_chosen = name.startswith("dynamic sampling")
        kept = {row.prompt_id for row in rows if row.advantage is not None}
        assert left_out == (len(rows) // 2 - len(kept) if is_chosen else 0)
        assert not is_chosen or 1 <= len(kept) <= 2


def test_each_round_uses_the_next_batch_of_prompts(runs: dict[str, RunPaths]) -> None:
    """No prompt is used twice, and none is left out, over rounds and steps."""
    for name, batches in (("dynamic sampling", 6), ("critic sees all", 6), ("one step off", 3)):
        used = [line["prompt"] for line in read_lines(runs[name].ledger)]
        assert list(dict.fromkeys(used)) == [f"p{number}" for number in range(2 * batches)]
        assert len(used) == 4 * batches


RESAMPLED = ["resampled rows", "resampled, then whitened"]


@dataclass(frozen=True)
class NotesInputs:
    """An update that does not run: it notes its inputs, and returns its committed record."""

    record: Update
    inputs: list[Any]
    fingerprint: str = ""
    name: str = ""

    def run(self, *inputs: Any) -> Update:
        self.inputs.extend(inputs)
        return self.record


def inputs_of_update(paths: RunPaths, name: str, step: int, update: str) -> tuple[Any, ...]:
    """Return the records that the step function passes to an update."""
    algorithm, noted = EVERY[name], []
    record = load_record(paths, step, update, manifests.require(paths.stage(step, update)))
    build = partial(NotesInputs, record, noted)
    run_stage = ReplayingStep(paths, step, update, lambda _: build())
    replay(algorithm.choose(algorithm.recipe(), step), run_stage, State(record.role, step - 1, 0, ""))
    return tuple(noted[1:])


@pytest.mark.parametrize("name", RESAMPLED)
def test_each_resampled_row_keeps_its_own_tokens_and_numbers(runs: dict[str, RunPaths], name: str) -> None:
    """verl writes the advantages of sampled rows back to the rows with the same position."""
    paths = runs[name]
    for step in (1, 2, 3):
        selection = committed(paths, step, "resample")
        assert isinstance(selection, Selection)
        rows = selection.rows.tolist()
        assert len(rows) == 4
        assert len(set(rows)) < 4, "no row is repeated, so none is dropped: the test is too weak"
        all_rows = {each: committed(paths, step, each) for each in ("rollout", "values", "logprobs", "advantages")}
        raw, mask = (getattr(all_rows["advantages"], field)[rows] for field in ("advantages", "mask"))
        expected = (raw - raw[mask].mean()) / (raw[mask].var() + 1e-8).sqrt() * mask
        for update, read, fields in (
            ("critic_update", "values", ("values",)),
            ("actor_update", "logprobs", ("actor", "entropy")),
        ):
            rollouts, read_record, advantages = found = inputs_of_update(paths, name, step, update)
            assert manifests.require(paths.stage(step, update)).inputs[1:] == tuple(each.identity for each in found)
            sequences = all_rows["rollout"].sequences.unpadded()
            for place, row in enumerate(rows):
                assert rollouts.sequences.unpadded()[place].tolist() == sequences[row].tolist()
                for field in ("prompt_ids", "sample_indices", "texts"):
                    assert getattr(rollouts, field)[place] == getattr(all_rows["rollout"], field)[row]
                for record, source, names in (
                    (rollouts, "rollout", ("tokens", "mask", "sampler_logprobs", "seeds")),
                    (read_record, read, fields),
                    (advantages, "advantages", ("returns", "token_rewards", "mask", "shaped")),
                ):
                    for field in names:
                        assert torch.equal(getattr(record, field)[place], getattr(all_rows[source], field)[row])
            if name == "resampled rows":
                assert torch.equal(advantages.advantages, raw)
            else:
                FLOAT32.check(advantages.advantages, expected)
                assert advantages.identity == committed(paths, step, "whitening").identity


@pytest.mark.parametrize("name", RESAMPLED)
def test_carry_and_metrics_of_a_step_are_those_of_all_rows(runs: dict[str, RunPaths], name: str) -> None:
    paths = runs[name]
    stages = {(line["step"], line["stage"]): line["figures"] for line in read_lines(paths.journal) if "stage" in line}
    for step in (1, 2, 3):
        advantages = committed(paths, step, "advantages")
        assert stages[step, "advantages"]["trained/seqs"] == advantages.carry.trained_seqs == 4 * step
        effective = stages[step, "resample"]["resample/effective_seqs"]
        weights = advantages.shaped.double().abs() ** 1.5
        assert effective == pytest.approx(float(weights.sum() ** 2 / (weights**2).sum()))
        if name != "resampled rows":
            assert stages[step, "whitening"] == {}
            whitened = committed(paths, step, "whitening")
            assert (whitened.carry_out, whitened.penalty_coef) == (advantages.carry_out, 0.05)
    _, carry = saved_state(paths, "actor", 3)
    assert (carry.trained_seqs, carry.kl_coef) == (12, 0.05)


def test_both_critics_train_with_their_own_learning_rates(runs: dict[str, RunPaths]) -> None:
    paths = runs["two critics"]
    rates = {}
    for role, name in (("critic", "critic_update"), ("judge", "judge_update"), ("actor", "actor_update")):
        update = committed(paths, 3, name)
        assert (update.role, update.step, update.updates) == (role, 3, 6)
        rates[role] = next(line for line in read_lines(paths.journal) if line.get("stage") == name)["figures"]
    assert rates["critic"]["value/lr"] == 0.1
    assert rates["judge"]["value/lr"] == 0.02
    advantages = manifests.require(paths.stage(3, "advantages")).inputs
    assert manifests.require(paths.stage(3, "values")).identity in advantages
    assert manifests.require(paths.stage(3, "judge_values")).identity not in advantages


def test_each_step_trains_on_the_responses_of_the_step_before(runs: dict[str, RunPaths]) -> None:
    paths = runs["one step off"]
    generated = {1: "rollout", 2: "next_rollout", 3: "next_rollout"}
    for step, name in generated.items():
        of = 1 if step == 1 else step - 1
        rollouts = committed(paths, of, name)
        assert rollouts.step == of, "the responses are those of the weights before the update of that step"
        assert manifests.require(paths.stage(step, "actor_update")).inputs[1] == rollouts.identity
