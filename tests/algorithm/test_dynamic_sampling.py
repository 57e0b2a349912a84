"""Dynamic sampling as a run: rounds and prompts, both treatments of a short step, the critic's rows, metrics, and the
plan."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import ppoctl
from fakes.components import commands_on_fakes
from fakes.dynamic_sampling import PPO, with_critic, with_groups, without_critic
from fakes.job import play, result
from ppoctl.algorithms.choose import step_function_at, traces
from ppoctl.cli.app import run
from ppoctl.core.errors import DataError, ExitCode
from ppoctl.core.step_metrics import of_step
from ppoctl.plan.memory.driver import batch_of, driver_bytes, records_of
from ppoctl.plan.run_plan import plan
from ppoctl.recipe.schema import Recipe
from ppoctl.show.report import report_time
from ppoctl.show.report.expectations import history
from ppoctl.show.report.run_reader import read_runs
from ppoctl.show.tracking.view import RunView, key_metrics
from ppoctl.store import manifest as manifests
from ppoctl.store.journal import read_lines
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stage_runner import load_record

QUICKSTART = Path(__file__).parents[2] / "recipes/quickstart.toml"
MODEL = {"path": str(QUICKSTART.parent / "quickstart/model"), "dtype": "float32"}
KEEPS_ALL = {"every_steps": 4, "keep_rollouts_every_steps": 1}
PLAIN = {**PPO, "kl": {"place": "none"}}
"""PPO whose return at each token is the score: gamma and lambda are 1, and there is no KL penalty."""

Group = tuple[int, str]


def played(root: Path, recipe: Recipe) -> RunPaths:
    play(root, recipe)
    return RunPaths(root)


def committed(paths: RunPaths, step: int, name: str) -> Any:
    """Return the committed record of a stage."""
    return load_record(paths, step, name, manifests.require(paths.stage(step, name)))


def groups_of(paths: RunPaths, step: int) -> dict[Group, list[float]]:
    """Return (round, prompt) -> scores, from the ledger."""
    found: dict[Group, list[float]] = defaultdict(list)
    for line in read_lines(paths.ledger):
        if line["step"] == step:
            found[line.get("round", 1), line["prompt"]].append(line["score"])
    return dict(found)


def mixed(groups: dict[Group, list[float]]) -> list[Group]:
    return [group for group, scores in groups.items() if len(set(scores)) > 1]


def metrics_of(paths: RunPaths) -> dict[str, dict[int, float]]:
    """Return metric -> step -> value, as `[expect]` and the report read them."""
    return {name: dict(points) for name, points in history(read_lines(paths.journal)).items()}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """Return a run without a critic, whose steps have two rounds, one and three."""
    return played(tmp_path_factory.mktemp("kept") / "run", without_critic(checkpoint=KEEPS_ALL))


@pytest.fixture(scope="module")
def sees_all(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """Return a run whose critic trains on all responses, after a critic-only step."""
    groups = {"max_rounds": 4, "critic_sees": "all", "round_prompts": 3}
    ppo = {**PLAIN, "critic_only_steps": 1, "advantages": {"kind": "gae", "whiten": False}}
    recipe = with_groups(groups, ppo=ppo, checkpoint=KEEPS_ALL, steps=4)
    return played(tmp_path_factory.mktemp("all") / "run", recipe)


def test_first_groups_whose_scores_differ_are_kept(kept: RunPaths) -> None:
    for step, rounds in ((1, 2), (2, 1), (3, 3)):
        groups = groups_of(kept, step)
        assert max(number for number, _ in groups) == rounds
        for number in range(1, rounds + 1):
            record = committed(kept, step, "keep_groups" if number == 1 else f"keep_groups.{number}")
            first = [group for group in mixed(groups) if group[0] <= number][:2]
            pairs = list(zip(record.rounds.tolist(), record.prompt_ids, strict=True))
            assert pairs == [group for group in first for _ in range(2)]
            assert record.sample_indices == [0, 1] * len(first)
            assert record.is_full == (number == rounds)


def test_metrics_of_a_step_describe_all_of_its_rounds(kept: RunPaths) -> None:
    found, lines = metrics_of(kept), [line for line in read_lines(kept.journal) if "stage" in line]
    for step, rounds in ((1, 2), (2, 1), (3, 3)):
        scores = [score for group in groups_of(kept, step).values() for score in group]
        assert len(scores) == 4 * rounds
        assert found["reward/score_mean"][step] == pytest.approx(sum(scores) / len(scores))
        records = [committed(kept, step, f"rollout.{n}" if n > 1 else "rollout") for n in range(1, rounds + 1)]
        assert found["rollout/tokens"][step] == sum(float(record.lengths.sum()) for record in records)
        assert (found["groups/rounds"][step], found["groups/kept"][step]) == (rounds, 2)
        for stage in ("rollout", "reward", "keep_groups"):
            seconds = [
                line["seconds"] for line in lines if line["step"] == step and line["stage"].partition(".")[0] == stage
            ]
            assert len(seconds) == rounds
            assert found[f"time/{stage}_s"][step] == pytest.approx(sum(seconds))
    assert not [name for name in found if ".2" in name]


def test_measured_metrics_of_a_step_cover_its_rounds() -> None:
    """100 tokens in 10 s with engines idle for 1 s, then 300 tokens in 5 s without: 400 tokens in 15 s."""

    def line(stage: str, clocked: dict[str, float], **figures: float) -> dict[str, Any]:
        named = {f"rollout/{name}": value for name, value in figures.items()}
        return {"step": 1, "stage": stage, "seconds": 1.0, "figures": named, "clocked": clocked}

    rates = [
        {"throughput/generated_tokens_per_s": r, "throughput/engine_idle_frac": f, "time/generation_s": s}
        for r, f, s in ((10, 0.1, 10.0), (60, 0, 5.0))
    ]
    scored = [{"reward/seconds_mean": mean, "reward/seconds_max": most} for mean, most in ((1.0, 9.0), (3.0, 4.0))]
    lines = [
        line("rollout.2", {"throughput/generated_tokens_per_s": 1e6}, tokens=1.0),  # of an earlier run of the step
        line(
            "rollout",
            {**rates[0], "time/transfer_s": 0.25, "memory/rollout_gib": 3.0, "time/rollout_wait_s": 1.0},
            tokens=100.0,
        ),
        line("reward", scored[0]),
        line(
            "rollout.2",
            {**rates[1], "time/transfer_s": 0.5, "memory/rollout_gib": 2.0, "time/rollout_wait_s": 0.5},
            tokens=300.0,
        ),
        line("reward.2", scored[1]),
    ]
    found = of_step(lines)
    assert found["throughput/generated_tokens_per_s"] == pytest.approx(400 / 15)
    assert found["throughput/engine_idle_frac"] == pytest.approx(1 / 15)
    assert found["time/transfer_s"] == 0.75, "an engine died in round 2"
    assert found["time/generation_s"] == 15.0
    assert (found["memory/rollout_gib"], found["time/rollout_wait_s"]) == (3.0, 1.5)
    assert (found["reward/seconds_mean"], found["reward/seconds_max"]) == (2.0, 9.0)
    assert of_step(lines[:3])["throughput/generated_tokens_per_s"] == 10


def test_every_screen_shows_one_value_of_a_step(kept: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    scores = {step: [s for group in groups_of(kept, step).values() for s in group] for step in (1, 2, 3)}
    means = {step: sum(values) / len(values) for step, values in scores.items()}
    assert run(["status", str(kept.root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["figures"]["reward/score_mean"] == pytest.approx(means[3])
    assert run(["plot", str(kept.root), "--json", "--metric", "reward/score_mean"]) == 0
    (series,) = json.loads(capsys.readouterr().out)["series"].values()
    assert [point for points in series.values() for point in points] == [
        [step, pytest.approx(mean)] for step, mean in means.items()
    ]
    (read,) = read_runs([kept.root])
    assert dict(read.series["reward/score_mean"]) == pytest.approx(means)
    assert report_time.stages_of(read) == [*read.outlines.at(1).names, "eval"]
    view = RunView("run", 3, lambda _: "actor_update")
    for each in read_lines(kept.journal):
        view.committed(each)
    assert view.rewards == pytest.approx(list(means.values()))
    words = dict(key_metrics(view.step_figures(3)))
    assert (words["rounds"], words["kept"]) == ("3", "2")


def test_critic_trains_on_all_rows_and_the_actor_on_the_kept_ones(sees_all: RunPaths) -> None:
    found, trained = metrics_of(sees_all), 3 * 2
    for step in (2, 3, 4):
        groups = groups_of(sees_all, step)
        of_all, of_kept = [committed(sees_all, step, name) for name in ("critic_advantages", "advantages")]
        values = committed(sees_all, step, "values").values
        scores = [score for group in groups.values() for score in group]
        assert len(groups) % 3 == 0  # rounds of three prompts
        assert of_all.returns.shape[0] == len(scores) == 2 * len(groups)
        for row, score in enumerate(scores):
            assert of_all.returns[row][of_all.mask[row]].tolist() == pytest.approx(
                [score] * int(of_all.mask[row].sum())
            )
        # The advantage of a kept row is its score minus the values of the same row among all rows.
        rows = [2 * list(groups).index(group) + sample for group in mixed(groups)[:2] for sample in (0, 1)]
        assert of_kept.advantages.shape[0] == len(rows) == 4
        for place, row in enumerate(rows):
            mask = of_kept.mask[place]
            assert mask.tolist() == of_all.mask[row].tolist()
            expected = (scores[row] - values[row])[mask]
            assert of_kept.advantages[place][mask].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
        raw = of_kept.advantages[of_kept.mask]
        assert found["advantage/raw_mean"][step] == pytest.approx(float(raw.mean()), abs=1e-6)
        assert found["value/return_mean"][step] == pytest.approx(float(of_all.returns[of_all.mask].mean()))
        trained += 4
        assert found["trained/seqs"][step] == trained
        updates = [
            committed(sees_all, step, name).per_minibatch["loss"] for name in ("critic_update", "actor_update")
        ]
        assert [len(losses) for losses in updates] == [2 * len(scores) // 2, 2 * 4 // 2]  # two epochs of pairs


def test_critic_only_step_that_sees_all_has_one_round(sees_all: RunPaths) -> None:
    assert list(groups_of(sees_all, 1)) == [(1, "p0"), (1, "p1"), (1, "p2")]
    assert committed(sees_all, 1, "advantages").returns.shape[0] == 3 * 2
    assert not sees_all.stage(1, "keep_groups").exists()


def test_each_step_begins_with_the_next_prompt_also_after_a_resume(tmp_path: Path, sees_all: RunPaths) -> None:
    prompts = [prompt for step in (1, 2, 3, 4) for _, prompt in groups_of(sees_all, step)]
    assert prompts == [f"p{number}" for number in range(len(prompts))]
    groups = {"max_rounds": 4, "round_prompts": 3}
    evals = {"at_start": False, "at_end": False}
    recipes = [with_groups(groups, steps=steps, eval=evals, checkpoint={"every_steps": 1}) for steps in (2, 3)]
    for recipe in recipes:
        play(tmp_path / "resumed", recipe)
    play(tmp_path / "whole", recipes[-1])
    assert result(tmp_path / "resumed") == result(tmp_path / "whole")


def test_short_step_trains_on_the_groups_that_there_are(tmp_path: Path) -> None:
    """Step 3 has one group after two rounds: one minibatch of two rows in place of four, in each of two epochs."""
    ppo = {**PLAIN, "minibatch_seqs": 4, "advantages": {"kind": "raw_reward", "whiten": False}}
    groups = {"max_rounds": 2, "when_short": "use_fewer"}
    recipe = with_groups(groups, critic=None, ppo=ppo, steps=4, checkpoint=KEEPS_ALL)
    paths = played(tmp_path / "run", recipe)
    kept = committed(paths, 3, "keep_groups.2")
    assert (kept.is_full, len(kept.rows)) == (False, 2 * len(mixed(groups_of(paths, 3))))
    assert len(kept.rows) == 2, "the test is too weak: no step is short"
    advantages = committed(paths, 3, "advantages")
    assert advantages.advantages.shape[0] == 2
    assert [len(committed(paths, step, "actor_update").per_minibatch["loss"]) for step in (2, 3)] == [2, 2]
    found = metrics_of(paths)
    assert [found["trained/seqs"][step] for step in (1, 2, 3)] == [4, 8, 10]
    tokens = found["trained/tokens"][3] - found["trained/tokens"][2]
    assert tokens == float(advantages.mask.sum())
    # The ratios of the first minibatch are 1, so its loss is -A, averaged over the tokens of these two rows.
    first = committed(paths, 3, "actor_update").per_minibatch["loss"][0]
    assert first == pytest.approx(-float(advantages.advantages[advantages.mask].mean()), rel=1e-5)
    assert abs(first) > 0.01, "the test is too weak: A is 0"


@pytest.fixture
def on_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands run on fake engines."""
    commands_on_fakes(monkeypatch)


@pytest.mark.usefixtures("on_fakes")
def test_step_that_failed_continues_with_other_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rounds of the failed step are committed, and neither repeated nor lost."""
    changes: dict[str, Any] = {
        "name": "short",
        "seed": 13,
        "steps": 3,
        "rollout.prompts_per_step": 2,
        "rollout.samples_per_prompt": 2,
        "rollout.max_new_tokens": 3,
        "rollout.groups": {"max_rounds": 2},
        "ppo.minibatch_seqs": 2,
        "eval.every_steps": 0,
        "checkpoint.every_steps": 2,
        "expect": {},
        "tracking": {"kind": "none"},
    }
    with pytest.raises(DataError) as caught:
        ppoctl.train(QUICKSTART, changes, runs=tmp_path)
    paths = RunPaths(tmp_path / "short")
    step = int(caught.value.message.split()[1])
    assert caught.value.message.startswith(f"step {step} has 1 of 2 groups")
    assert caught.value.exit_code is ExitCode.DATA
    rounds = {name: manifests.require(paths.stage(step, name)).committed_at for name in ("rollout", "rollout.2")}
    assert not paths.stage(step, "keep_groups.2").exists()
    capsys.readouterr()
    assert run(["resume", str(paths.root), "--set", "rollout.groups.when_short=use_fewer"]) == 0
    assert {name: manifests.require(paths.stage(step, name)).committed_at for name in rounds} == rounds
    assert committed(paths, step, "keep_groups.2").is_full is False
    # Keys that the source of prompts reads hold for the whole run, until the steps in the redo log are saved.
    assert run(["resume", str(paths.root), "--set", "steps=4"]) == 0
    capsys.readouterr()


# --- choice and plan ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "ppo", "names"),
    [
        ({}, {}, ["ppo_dynamic_sampling"]),
        ({}, {"critic_only_steps": 1}, ["critic_only_dynamic_sampling", "ppo_dynamic_sampling"]),
        ({}, {"rollout_correction": {"kind": "tis"}}, ["ppo_corrected_dynamic_sampling"]),
        ({}, {"advantages": {"kind": "grpo"}}, ["policy_only_dynamic_sampling"]),
        ({"critic_sees": "all"}, {"critic_only_steps": 1}, ["critic_only", "critic_sees_all_dynamic_sampling"]),
        (
            {"critic_sees": "all"},
            {"rollout_correction": {"kind": "tis"}},
            ["critic_sees_all_corrected_dynamic_sampling"],
        ),
    ],
    ids=str,
)
def test_step_function_follows_the_recipe(groups: dict[str, Any], ppo: dict[str, Any], names: list[str]) -> None:
    critic = {"critic": None} if ppo.get("advantages") else {}
    found = traces(with_groups(groups, ppo={**PLAIN, **ppo}, **critic))
    assert [trace.step_function for trace in found.values()] == names


def test_step_function_without_dynamic_sampling_is_unchanged() -> None:
    recipe = with_critic()
    plain = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"groups": None})})
    assert step_function_at(plain, 1).name == "ppo"
    assert [call.at_most for call in traces(plain).popitem()[1].outline.stages] == [1] * 7


def test_plan_has_the_least_and_the_most() -> None:
    """A step of 2 groups of 2 rows, in 1 to 4 rounds of 2 prompts; a row has 4 + 3 tokens."""
    recipe = without_critic(model=MODEL)
    plain = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"groups": None})})
    found, usual = plan(recipe), plan(plain)
    assert found.work is not None
    assert found.work_min is not None
    assert usual.work is not None
    assert found.work_min == usual.work == usual.work_min
    assert found.work.drawing == 4 * found.work_min.drawing
    assert (found.work.forwards, found.work.updates) == (found.work_min.forwards, found.work_min.updates)
    batch = found.batch
    assert (batch.rounds_min, batch.rounds_max, batch.prompts_per_round) == (1, 4, 2)
    assert (batch.new_tokens_per_step_min, batch.new_tokens_per_step_max) == (4 * 3, 4 * 4 * 3)
    assert (found.train.prompts_total_min, found.train.prompts_total) == (3 * 2, 3 * 4 * 2)
    # Rollouts: ids, mask and log-probs; 4 int64 and 4 characters for each token.
    rollouts = 4 * 4 * 4 + 12 * (4 + 1 + 4) + 4 * 4 * 8 + 12 * 4
    rewards, selection = 4 * (4 + 8), 4 * (8 + 8)
    assert found.storage.records_bytes_min == usual.storage.records_bytes + selection
    assert found.storage.records_bytes - found.storage.records_bytes_min == 3 * (rollouts + rewards + selection)
    assert found.roles == usual.roles
    traced = traces(recipe).popitem()[1]
    held = [
        driver_bytes(batch_of(recipe), records_of(traced, recipe, batch_of(recipe), most=m)) for m in (False, True)
    ]
    assert held[1].records - held[0].records == 2 * 3 * (rollouts + rewards + selection)


def test_plan_counts_the_rows_of_a_critic_that_sees_all() -> None:
    """1 to 4 rounds of 3 prompts of 2 rows: 6 to 24 rows for the critic, 4 for the actor, in 2 epochs of pairs."""
    groups = {"max_rounds": 4, "round_prompts": 3, "critic_sees": "all"}
    recipe = with_groups(groups, model=MODEL, steps=5, ppo={**PLAIN, "critic_only_steps": 2})
    found = plan(recipe)
    assert found.work is not None
    assert found.work_min is not None
    assert found.work.drawing == 4 * found.work_min.drawing
    assert found.work.forwards == 4 * found.work_min.forwards
    roles = {role: (of.updates_per_step_min, of.updates_per_step) for role, of in found.roles.items()}
    assert roles == {"actor": (4, 4), "critic": (6, 24)}
    totals = {role: (of.updates_total_min, of.updates_total) for role, of in found.roles.items()}
    assert totals == {"actor": (3 * 4, 3 * 4), "critic": (5 * 6, 5 * 24)}
    # The two critic-only steps have one round each.
    assert (found.train.prompts_total_min, found.train.prompts_total) == (5 * 3, (2 + 3 * 4) * 3)
    assert found.memory is not None
    # The values of 24 rows of 3 tokens; the selection of all rows.
    assert (found.memory.records["values"], found.memory.records["all_rows"]) == (24 * 3 * 4, 24 * 16)
    assert found.memory.records["advantages"] * 6 == found.memory.records["critic_advantages"]
