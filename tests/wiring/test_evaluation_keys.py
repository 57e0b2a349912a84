"""An evaluation does what the recipe says, and its figures are those of its samples."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ppoctl.batch.records import Evaluation
from ppoctl.batch.scores import Score
from ppoctl.recipe.schema import Recipe
from ppoctl.wire.stages import evaluation_stage
from wiring import book
from wiring.bench import Bench, open_bench, riddle, with_keys
from wiring.cases import holds

LOST = {1: Score(None, "error", "no number"), 2: Score(None, "timeout", "10 s")}


def evaluated(folder: Path, **changes: Any) -> tuple[Bench, Evaluation]:
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    played = open_bench(folder, with_keys(keys), lost=LOST)
    stage = played.job.evaluate(2)
    assert stage is not None
    record = stage.run(played.state("actor"))
    assert isinstance(record, Evaluation)
    assert record.stamp == played.state("actor").stamp
    return played, record


@holds("eval.samples_per_prompt", "eval.temperature", "eval.max_new_tokens", "seed", "rollout.stop_strings")
@pytest.mark.parametrize(
    ("changes", "count", "temperature", "length", "seed"),
    [
        ({}, 3, 0.6, 4, 5),
        ({"eval__samples_per_prompt": 2}, 2, 0.6, 4, 5),
        ({"eval__temperature": 1.7}, 3, 1.7, 4, 5),
        ({"eval__max_new_tokens": 2}, 3, 0.6, 2, 5),
        ({"eval__max_new_tokens": None}, 3, 0.6, 6, 5),
        ({"seed": 8}, 3, 0.6, 4, 8),
    ],
    ids=str,
)
def test_each_set_is_drawn_greedily_and_sampled_as_the_recipe_says(
    tmp_path: Path, changes: dict[str, Any], count: int, temperature: float, length: int, seed: int
) -> None:
    played, _ = evaluated(tmp_path, **changes)
    wanted = []
    for name, prompts in played.questions.evaluation_sets().items():
        for mode, times, heat in (("greedy", 1, 0.0), ("sampled", count, temperature)):
            for prompt in prompts.rows:
                for index in range(times):
                    drawn = book.derived(seed, "eval", mode, prompt.id, index)
                    key = f"{name}/{mode}/{prompt.id}#{index}"
                    wanted.append((key, prompt.token_ids, drawn, heat, length, ("7 3",)))
    assert [
        (r.key, r.prompt_tokens, r.seed, p.temperature, p.max_new_tokens, p.stop_strings)
        for r, p, _ in played.generator.asked
    ] == wanted


def test_what_changes_an_evaluation_changes_its_fingerprint(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"eval.samples_per_prompt": 2},
        {"eval.temperature": 1.7},
        {"eval.max_new_tokens": 2},
        {"eval.max_new_tokens": None},
        {"rollout.stop_strings": ["1"]},
        {"seed": 8},
    ]
    benches = [open_bench(tmp_path / str(place), with_keys(change)) for place, change in enumerate(changes)]
    stages: list[Any] = [bench.job.evaluate(2) for bench in benches]
    assert len({stage.fingerprint for stage in stages}) == len(changes)
    benches[0].questions.first_held += 1
    first = stages[0]
    other = evaluation_stage(
        Recipe.model_validate(with_keys({})), first.drawing, first.scorer, benches[0].questions.evaluation_sets()
    )
    assert other.fingerprint != first.fingerprint


def test_figures_of_an_evaluation_are_those_of_its_samples(tmp_path: Path) -> None:
    """Samples 1 and 2 of each draw have no score: in the greedy draws two prompts of each set."""
    played, record = evaluated(tmp_path)
    told: dict[str, float] = {}
    for name, prompts in played.questions.evaluation_sets().items():
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
            told[f"eval/{name}/{prefix}pass_at_1"] = means.mean()
            error = means.std(ddof=1) / np.sqrt(len(means)) if len(means) > 1 else 0.0
            told[f"eval/{name}/{prefix}pass_at_1_stderr"] = float(error)
            told[f"eval/{name}/{prefix}error_frac"] = 2 / len(rows)
            tokens = [row["response_tokens"] for row in rows]
            told[f"eval/{name}/{prefix}response_tokens_mean"] = float(np.mean(tokens))
            told[f"eval/{name}/{prefix}truncated_frac"] = float(np.mean([not row["terminated"] for row in rows]))
            assert all(len(row["response"].split()) <= row["response_tokens"] for row in rows)
            assert {row["response_tokens"] for row in rows if not row["terminated"]} <= {4}
    assert record.figures() == pytest.approx(told)
    assert len({value for name, value in told.items() if name.endswith("pass_at_1")}) == 4


def test_an_evaluation_draws_from_the_actor_it_is_given(tmp_path: Path) -> None:
    played, _ = evaluated(tmp_path)
    assert {at.stamp for _, _, at in played.generator.asked} == {played.state("actor").stamp}
