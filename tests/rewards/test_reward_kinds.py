"""A kind of reward is a recipe table that opens its scorer; a new kind needs one file and one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ppoctl.core.batch.scores import Score
from ppoctl.rewards.exact_match import ExactMatchScorer
from ppoctl.rewards.gsm8k import Gsm8kScorer
from ppoctl.rewards.scorer_table import ProcessScorer
from rewards.asking import request, scores_of


@pytest.mark.parametrize(
    ("reward", "truth", "expected"),
    [
        (Gsm8kScorer(kind="gsm8k"), "42", Score(0.0, "ok", "", {"lenient": 1.0}, answer=None)),
        pytest.param(
            Gsm8kScorer(kind="gsm8k", strict=False),
            "42",
            Score(1.0, "ok", "", {"strict": 0.0}, answer="42"),
            marks=pytest.mark.ci("the case with `last_chars`"),
        ),
        (
            Gsm8kScorer(kind="gsm8k", strict=False, last_chars=2),
            "42",
            Score(0.0, "ok", "", {"strict": 0.0}, answer="2"),
        ),
        pytest.param(
            ExactMatchScorer(kind="exact_match"),
            "It is 42.",
            Score(0.0, "ok", answer="it is 42."),
            marks=pytest.mark.ci("the case with `ignore_case`"),
        ),
        (ExactMatchScorer(kind="exact_match", ignore_case=True), "It is 42.", Score(1.0, "ok", answer="it is 42.")),
    ],
)
def test_scorer_table_opens_its_scorer(reward: ProcessScorer, truth: str, expected: Score) -> None:
    assert scores_of(reward, request("it is 42.", truth)) == [expected]


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ("forty-two", "ValueError: the ground truth `forty-two` is neither a number"),
        (None, "ValueError: the row has no ground truth"),
    ],
)
def test_unreadable_truth_is_an_error_and_not_score_0(truth: str | None, message: str) -> None:
    (score,) = scores_of(Gsm8kScorer(kind="gsm8k"), request("#### 42", truth))
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
    modules = "scorer_main, reward_table, boxed, scorer_pool, probe"
    heavy = "{'torch', 'transformers', 'numpy', 'pyarrow', 'sympy', 'math_verify'} & sys.modules.keys()"
    code = f"import sys; from ppoctl.rewards import {modules}; print({heavy} or '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == "\n"
