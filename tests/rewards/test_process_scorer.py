"""The scorer port: typed outcomes pass, numbers that must not train do not."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from ppoctl.errors import ExitCode, NonFiniteError
from ppoctl.ports import Answer, Score, Scorer
from ppoctl.recipe.schema import ExactMatchReward, Gsm8kReward
from ppoctl.rewards.pool import ScorerPool
from ppoctl.rewards.processes import ProcessScorer
from ppoctl.rewards.scorers import spec_of
from ppoctl.rewards.worker import ScorerSpec

OpenPool = Callable[..., ScorerPool]


def test_a_recipe_table_names_its_function_and_options() -> None:
    assert spec_of(Gsm8kReward(kind="gsm8k")) == ScorerSpec("ppoctl.rewards.gsm8k:score", {"strict": True})
    assert spec_of(ExactMatchReward(kind="exact_match", ignore_case=True)) == ScorerSpec(
        "ppoctl.rewards.exact_match:score", {"ignore_case": True}
    )


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (Gsm8kReward(kind="gsm8k"), Score(0.0, "ok", "", {"lenient": 1.0})),
        (Gsm8kReward(kind="gsm8k", strict=False), Score(1.0, "ok", "", {"strict": 0.0})),
        (ExactMatchReward(kind="exact_match"), Score(0.0, "ok", "", {})),
        (ExactMatchReward(kind="exact_match", ignore_case=True), Score(0.0, "ok", "", {})),
    ],
)
def test_a_recipe_table_becomes_a_scorer(reward: Gsm8kReward | ExactMatchReward, expected: Score) -> None:
    scorer: Scorer = ProcessScorer.of(reward)
    try:
        assert scorer.score([Answer("it is 42.", "42", "train/0")]) == [expected]
    finally:
        scorer.close()


def test_an_unreadable_truth_is_an_error_and_never_a_score_of_0() -> None:
    scorer = ProcessScorer.of(Gsm8kReward(kind="gsm8k"))
    try:
        (score,) = scorer.score([Answer("#### 42", "forty-two", "train/0")])
    finally:
        scorer.close()
    assert (score.value, score.outcome) == (None, "error")
    assert score.message.startswith("ValueError: the ground truth `forty-two` is neither a number")


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ("number nan", "the scorer gave `nan` as reward of sample 1 (prompt `train/1`)"),
        ("number -inf", "the scorer gave `-inf` as reward of sample 1 (prompt `train/1`)"),
        ("number 1e39", "the scorer gave `1e+39` as reward of sample 1 (prompt `train/1`)"),
        ("nan-extra", "the scorer gave `nan` as margin of sample 1 (prompt `train/1`)"),
    ],
)
def test_a_number_that_must_not_train_is_a_named_error(drill_pool: OpenPool, truth: str, message: str) -> None:
    scorer = ProcessScorer(drill_pool(workers=2))
    answers = [Answer("a", "good", "train/0"), Answer("", truth, "train/1"), Answer("", "number inf", "train/2")]
    with pytest.raises(NonFiniteError) as caught:
        scorer.score(answers)
    assert caught.value.message == message
    assert caught.value.hint is not None
    assert caught.value.exit_code == ExitCode.HEALTH
    assert scorer.score(answers[:1]) == [Score(1.0, "ok", "", {})]


def test_the_largest_float32_is_still_a_score(drill_pool: OpenPool) -> None:
    (score,) = ProcessScorer(drill_pool()).score([Answer("", "number 3.4028234663852886e38", "train/0")])
    assert score.outcome == "ok"


def test_timeouts_and_errors_pass_as_typed_outcomes(drill_pool: OpenPool) -> None:
    scorer = ProcessScorer(drill_pool(timeout_s=0.3))
    scores = scorer.score([Answer("", truth, "train/0") for truth in ("hang-in-c", "os._exit")])
    assert [(score.value, score.outcome) for score in scores] == [(None, "timeout"), (None, "error")]


def test_what_validate_and_the_children_import_is_light() -> None:
    modules = "child, gsm8k, exact_match, worker, pool, scorers, probe"
    heavy = "{'torch', 'transformers', 'numpy', 'pyarrow'} & sys.modules.keys()"
    code = f"import sys; from ppoctl.rewards import {modules}; print({heavy} or '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == "\n"
