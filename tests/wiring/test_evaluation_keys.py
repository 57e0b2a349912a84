"""An evaluation follows the recipe, and its metrics are computed from its samples."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes.job import BuiltStages
from ppoctl.algorithms.evaluation_spec import EVALUATION
from ppoctl.algorithms.stage_spec import ScoringParts
from ppoctl.algorithms.stages.evaluation import ignore_message
from ppoctl.core.batch.records import Evaluation
from ppoctl.core.batch.scores import Score
from ppoctl.core.errors import RewardError
from ppoctl.core.ports import SamplingParams
from ppoctl.core.user_functions import digest_of
from ppoctl.recipe.schema import Recipe
from wiring import textbook
from wiring.cases import each_key, holds
from wiring.harness import Harness, open_harness, riddle, with_key, with_keys

METRICS = Path(__file__).parents[1] / "rewards" / "users_metrics.py"
LOST = {1: Score(None, "error", "no number"), 2: Score(None, "timeout", "10 s")}


def evaluated(folder: Path, **changes: Any) -> tuple[Harness, Evaluation]:
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    played = open_harness(folder, with_keys(keys), lost=LOST)
    stage = BuiltStages(played.job, 2).eval
    assert stage is not None
    record = stage.run(played.state("actor"))
    assert isinstance(record, Evaluation)
    assert record.stamp == played.state("actor").stamp
    return played, record


SAMPLED = [
    ("eval.samples_per_prompt", 2), ("eval.temperature", 1.7), ("eval.max_new_tokens", 2),
    ("eval.max_new_tokens", None),
    ("eval.top_p", 0.7), ("eval.top_k", 3), ("eval.min_p", 0.1), ("seed", 8),
]  # fmt: skip


@holds("rollout.stop_strings", "eval.passes")
@each_key("key, value", [*SAMPLED, ("eval.passes", "greedy"), ("eval.passes", "sampled")])
def test_each_set_is_sampled_with_the_recipe_settings(tmp_path: Path, key: str, value: Any) -> None:
    settings = {"eval.samples_per_prompt": 3, "eval.temperature": 0.6, "eval.max_new_tokens": 4, "seed": 5}
    settings = {
        **settings,
        "eval.top_p": 1.0,
        "eval.top_k": None,
        "eval.min_p": 0.0,
        "eval.passes": "both",
        key: value,
    }
    played, _ = evaluated(tmp_path, **{key: value})
    count, seed, length = settings["eval.samples_per_prompt"], settings["seed"], settings["eval.max_new_tokens"] or 6
    plain = SamplingParams(0.0, length, stop_strings=("7 3",))
    filters = {name: settings[f"eval.{name}"] for name in ("temperature", "top_p", "top_k", "min_p")}
    wanted = []
    for name, prompts in played.prompt_source.evaluation_sets().items():
        for mode, times, params in (("greedy", 1, plain), ("sampled", count, replace(plain, **filters))):
            for prompt in prompts.rows if settings["eval.passes"] in (mode, "both") else ():
                for index in range(times):
                    derived_seed = textbook.derived(seed, "eval", mode, prompt.id, index)
                    wanted.append((f"{name}/{mode}/{prompt.id}#{index}", prompt.token_ids, derived_seed, params))
    assert [(r.key, r.prompt_tokens, r.seed, p) for r, p, _ in played.generator.requests] == wanted


@holds("eval.pass_at", "eval.pass_score", "eval.maj_at")
def test_estimates_follow_the_recipe(tmp_path: Path) -> None:
    plain = set(evaluated(tmp_path / "plain", eval__passes="sampled")[1].metrics())
    for key, value, more in (
        ("pass_at", [2, 3], {"pass_at_2", "pass_at_3"}),
        ("maj_at", [2], {"maj_at_2"}),
        ("pass_score", 0.5, {"score_mean"}),
    ):
        changes = {"eval__passes": "sampled", f"eval__{key}": value}
        metrics = evaluated(tmp_path / key, **changes)[1].metrics()
        sets, endings = ("held", "far"), ("", "_stderr")
        assert set(metrics) - plain == {f"eval/{name}/{m}{end}" for name in sets for m in more for end in endings}
        passed = metrics["eval/far/pass_at_1"] * 15
        assert (passed == pytest.approx(round(passed))) == (key == "pass_score")


def test_eval_row_has_the_answer_read_by_the_scorer(tmp_path: Path) -> None:
    played = open_harness(tmp_path, with_keys({"eval.passes": "sampled", "eval.maj_at": [3]}), lost={})
    stage: Any = BuiltStages(played.job, 2).eval
    submit = played.scorer.submit

    def reading(request: Any) -> Any:
        handed = submit(request)
        handed._result = replace(handed._result, answer=request.response[:1] or None)
        return handed

    played.scorer.submit = reading  # type: ignore[method-assign]
    record = stage.run(played.state("actor"))
    assert [row.get("given") for row in record.rows] == [row["response"][:1] or None for row in record.rows]
    means = []
    for name in ("held", "far"):
        by_prompt = defaultdict(list)
        for row in record.rows:
            if row["set"] == name:
                by_prompt[row["prompt_id"]].append((row["response"][:1], row["score"]))
        for answers in by_prompt.values():
            votes = [sum(other == answer for other, _ in answers) for answer, _ in answers]
            # If several answers lead, each has the same number of votes: their mean is the mean of their samples'
            # scores.
            means.append(
                (name, np.mean([score for (_, score), n in zip(answers, votes, strict=True) if n == max(votes)]))
            )
    for name in ("held", "far"):
        mean = np.mean([value for of, value in means if of == name])
        assert record.metrics()[f"eval/{name}/maj_at_3"] == pytest.approx(mean)


def test_first_samples_of_each_set_and_pass_are_printed(tmp_path: Path) -> None:
    played = open_harness(tmp_path, with_key("eval.print_samples", 2))
    messages: list[str] = []
    stage = replace(BuiltStages(played.job, 2).eval, notify=messages.append)  # type: ignore[type-var]
    record: Any = stage.run(played.state("actor"))
    assert [text.split(":")[0] for text in messages] == [
        f"eval {name} {mode} riddle {number}"
        for name, first in (("held", 100), ("far", 200))
        for mode, numbers in (("greedy", (0, 1)), ("sampled", (0, 0)))
        for number in (first + numbers[0], first + numbers[1])
    ]
    assert all(part in messages[0] for part in (record.rows[0]["prompt"], record.rows[0]["response"], "score "))


@holds("eval.metrics.function", "eval.metrics.options.*")
@pytest.mark.parametrize("unit", [pytest.param(None, marks=pytest.mark.ci("4.0")), 4.0])
def test_custom_metrics_are_computed_per_set_and_pass(tmp_path: Path, unit: float | None) -> None:
    options = {} if unit is None else {"options": {"unit": unit}}
    _, record = evaluated(tmp_path, eval__metrics={"function": f"{METRICS}:measure", **options})
    for name in ("held", "far"):
        for mode, prefix in (("greedy", "greedy_"), ("sampled", "")):
            words = [len(row["response"].split()) for row in record.rows if (row["set"], row["mode"]) == (name, mode)]
            assert record.metrics()[f"eval/{name}/{prefix}custom_words"] == pytest.approx(
                np.mean(words) / (unit or 1)
            )


def test_only_the_custom_metric_function_gets_row_fields(tmp_path: Path) -> None:
    played = open_harness(tmp_path, with_key("eval.metrics", f"{METRICS}:of_fields"), lost={})
    stage: Any = BuiltStages(played.job, 2).eval
    held = stage.sets["held"]
    rows = tuple(replace(row, fields={"level": number}) for number, row in enumerate(held.rows))
    record = replace(stage, sets={"held": replace(held, rows=rows)}).run(played.state("actor"))
    levels = sum(range(len(rows)))
    metrics = {name: value for name, value in record.metrics().items() if "custom_" in name}
    assert metrics == {
        "eval/held/greedy_custom_level": levels,
        "eval/held/greedy_custom_sampled": 0,
        "eval/held/custom_level": 3 * levels,
        "eval/held/custom_sampled": 1,
    }
    assert not any("fields" in row for row in record.rows)


def test_failing_custom_metrics_are_left_out_and_reported(tmp_path: Path) -> None:
    played = open_harness(tmp_path, with_key("eval.metrics", f"{METRICS}:raises"))
    stage: Any = BuiltStages(played.job, 2).eval
    messages: list[str] = []
    recipe = Recipe.model_validate(with_key("eval.metrics", f"{METRICS}:raises"))
    parts = ScoringParts(
        generation=stage.generation, scorer=stage.scorer, notify=messages.append, evaluation_sets=stage.sets
    )
    stage = EVALUATION.build(recipe, parts)
    metrics = stage.run(played.state("actor")).metrics()
    assert set(metrics) == set(evaluated(tmp_path / "plain")[1].metrics())
    assert [text.rpartition("; ")[2] for text in messages] == [
        f"its metrics of `{name}` {mode} are left out" for name in ("held", "far") for mode in ("greedy", "sampled")
    ]
    assert "ZeroDivisionError" in messages[0]


@holds("eval.metrics.digest")
def test_metric_function_with_another_digest_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def measure(samples): return {}\n")
    digest = digest_of(f"{file}:measure")
    for noted in (digest, "0" * 64):
        keys = {"function": f"{file}:measure", "digest": noted}
        table = Recipe.model_validate(with_key("eval.metrics", keys)).eval.metrics
        assert table is not None
        if noted == digest:
            table.require_there()
            continue
        with pytest.raises(RewardError, match="the evaluation's function has changed"):
            table.require_there()


def test_rows_without_required_ground_truth_are_not_scored(tmp_path: Path) -> None:
    played = open_harness(tmp_path, with_keys({}), lost={})
    stage: Any = BuiltStages(played.job, 2).eval
    far = stage.sets["far"]
    without = replace(far, rows=tuple(replace(row, answer=None) for row in far.rows))
    record = replace(stage, sets={"held": stage.sets["held"], "far": without}).run(played.state("actor"))
    assert {row["outcome"] for row in record.rows if row["set"] == "far"} == {"unscored"}
    assert {row["outcome"] for row in record.rows if row["set"] == "held"} == {"ok"}
    assert {name for name in record.metrics() if "/far/" in name and "greedy" not in name} == {
        "eval/far/truncated_frac",
        "eval/far/response_tokens_mean",
    }


def test_each_evaluation_setting_changes_the_fingerprint(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"eval.samples_per_prompt": 2},
        {"eval.temperature": 1.7},
        {"eval.max_new_tokens": 2},
        {"eval.max_new_tokens": None},
        *({key: value} for key, value in SAMPLED[4:7]),
        {"eval.passes": "greedy"},
        {"eval.pass_at": [2]},
        {"eval.metrics": f"{METRICS}:measure"},
        {"eval.metrics": {"function": f"{METRICS}:measure", "digest": "0" * 64}},
        {"rollout.stop_strings": ["1"]},
        {"seed": 8},
    ]
    harnesses = [open_harness(tmp_path / str(place), with_keys(change)) for place, change in enumerate(changes)]
    stages: list[Any] = [BuiltStages(harness.job, 2).eval for harness in harnesses]
    assert len({stage.fingerprint for stage in stages}) == len(changes)
    harnesses[0].prompt_source.first_held += 1
    first = stages[0]
    recipe, sets = Recipe.model_validate(with_keys({})), harnesses[0].prompt_source.evaluation_sets()
    parts = ScoringParts(
        generation=first.generation, scorer=first.scorer, notify=ignore_message, evaluation_sets=sets
    )
    other = EVALUATION.build(recipe, parts)
    assert other.fingerprint != first.fingerprint
    judged = EVALUATION.build(recipe, replace(parts, reward_digest="a judge"))
    assert judged.fingerprint not in (other.fingerprint, first.fingerprint)


def test_evaluation_metrics_are_computed_from_its_samples(tmp_path: Path) -> None:
    """In each sampling pass, samples 1 and 2 have no score: in the greedy pass these are two prompts of each set."""
    played, record = evaluated(tmp_path)
    expected: dict[str, float] = {}
    for name, prompts in played.prompt_source.evaluation_sets().items():
        for mode, prefix in (("greedy", "greedy_"), ("sampled", "")):
            rows = [row for row in record.rows if (row["set"], row["mode"]) == (name, mode)]
            by_prompt = defaultdict(list)
            for place, row in enumerate(rows):
                prompt = prompts.rows[place // (1 if mode == "greedy" else 3)]
                score = None if place in LOST else riddle(row["response"], prompt.answer)
                assert (row["prompt_id"], row["prompt"], row["answer"]) == (prompt.id, prompt.text, prompt.answer)
                assert (row["sample"], row["score"]) == (0 if mode == "greedy" else place % 3, score)
                assert row["outcome"] == {1: "error", 2: "timeout"}.get(place, "ok")
                if score is not None:
                    by_prompt[prompt.id].append(score)
            means = np.array([np.mean(scores) for scores in by_prompt.values()])
            expected[f"eval/{name}/{prefix}pass_at_1"] = means.mean()
            error = means.std(ddof=1) / np.sqrt(len(means)) if len(means) > 1 else 0.0
            expected[f"eval/{name}/{prefix}pass_at_1_stderr"] = float(error)
            expected[f"eval/{name}/{prefix}error_frac"] = 2 / len(rows)
            tokens = [row["response_tokens"] for row in rows]
            expected[f"eval/{name}/{prefix}response_tokens_mean"] = float(np.mean(tokens))
            expected[f"eval/{name}/{prefix}truncated_frac"] = float(np.mean([not row["terminated"] for row in rows]))
            assert all(len(row["response"].split()) <= row["response_tokens"] for row in rows)
            assert {row["response_tokens"] for row in rows if not row["terminated"]} <= {4}
    assert record.metrics() == pytest.approx(expected)
    assert len({value for name, value in expected.items() if name.endswith("pass_at_1")}) == 4


def test_evaluation_uses_the_given_actor_state(tmp_path: Path) -> None:
    played, _ = evaluated(tmp_path)
    assert {at.stamp for _, _, at in played.generator.requests} == {played.state("actor").stamp}
