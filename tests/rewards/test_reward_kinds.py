"""A kind of reward is a recipe table that opens its scorer; a new kind needs one file and one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ppoctl.batch.scores import Score
from ppoctl.rewards.exact_match import ExactMatchScorer
from ppoctl.rewards.function import ScorerSpec
from ppoctl.rewards.gsm8k import Gsm8kScorer
from ppoctl.rewards.table import ProcessScorer
from rewards.asking import request, scores


def test_scorer_table_names_function_and_options() -> None:
    assert Gsm8kScorer(kind="gsm8k").scores_by == ScorerSpec(
        "ppoctl.rewards.gsm8k:score", {"strict": True, "last_chars": None}
    )
    exact = ExactMatchScorer(kind="exact_match", ignore_case=True)
    assert exact.scores_by == ScorerSpec("ppoctl.rewards.exact_match:score", {"ignore_case": True})


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (Gsm8kScorer(kind="gsm8k"), Score(0.0, "ok", "", {"lenient": 1.0}, answer=None)),
        (Gsm8kScorer(kind="gsm8k", strict=False), Score(1.0, "ok", "", {"strict": 0.0}, answer="42")),
        (ExactMatchScorer(kind="exact_match"), Score(0.0, "ok", answer="it is 42.")),
        (ExactMatchScorer(kind="exact_match", ignore_case=True), Score(0.0, "ok", answer="it is 42.")),
    ],
)
def test_scorer_table_opens_its_scorer(reward: ProcessScorer, expected: Score) -> None:
    scorer = reward.open()
    try:
        assert scores(scorer, [request("it is 42.", "42")]) == [expected]
    finally:
        scorer.close()


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ("forty-two", "ValueError: the ground truth `forty-two` is neither a number"),
        (None, "ValueError: the row has no ground truth"),
    ],
)
def test_unreadable_truth_is_an_error_and_not_score_0(truth: str | None, message: str) -> None:
    scorer = Gsm8kScorer(kind="gsm8k").open()
    try:
        (score,) = scores(scorer, [request("#### 42", truth)])
    finally:
        scorer.close()
    assert (score.value, score.outcome) == (None, "error")
    assert score.message.startswith(message)


@pytest.mark.usefixtures("drill_scorers")
def test_custom_reward_kind_works_from_recipe_to_score(tmp_path: Path) -> None:
    """`third_kind` adds its line to the list of kinds before the recipe is read, as the list itself would."""
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"q": f"Say {word}.", "limits": {"words": 2}}) + "\n" for word in ("yes", "no"))
    )
    script = Path(__file__).parent / "third_kind.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stderr == ""
    assert json.loads(done.stdout) == {
        "reward": {
            "kind": "few_words",
            "at_most": 5,
            "workers": 2,
            "max_error_frac": 0.05,
            "timeout_s": 10.0,
            "moments": {"kind": "none"},
            "unfinished_factor": 1.0,
        },
        "probed": [f"train/00000{row}: short scored 0, empty scored 1" for row in range(2)],
        "scores": [1.0, 0.0, 0.0],
        "unknown": '--set: `reward.kind` is `"nonsense"`: must be one of `"few_words"`',
    }


def test_reward_imports_are_lightweight() -> None:
    modules = "scorer_main, reward, boxed, pool, probe"
    heavy = "{'torch', 'transformers', 'numpy', 'pyarrow', 'sympy', 'math_verify'} & sys.modules.keys()"
    code = f"import sys; from ppoctl.rewards import {modules}; print({heavy} or '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == "\n"
