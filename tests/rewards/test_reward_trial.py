"""A reward trial tries many rows, and reports each problem in one sentence."""

import re
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from math import nan
from typing import Any

import pytest

from ppoctl.core.batch.prompts import Message, Prompt
from ppoctl.core.batch.scores import Score, ScoreRequest
from ppoctl.core.errors import RecipeError, RewardError
from ppoctl.core.finding import Finding, Level
from ppoctl.recipe.schema import Recipe
from ppoctl.rewards import gsm8k
from ppoctl.rewards.boxed import last_boxed
from ppoctl.rewards.gsm8k import Gsm8kScorer
from ppoctl.rewards.length import LengthScorer
from ppoctl.rewards.math import MathScorer
from ppoctl.rewards.probe import MEND
from ppoctl.rewards.reward_findings import findings
from ppoctl.rewards.scorer_pool import WorkerPool
from ppoctl.rewards.scorer_table import ScorerTable
from ppoctl.rewards.trial import ATTACKS, Trial, chosen_rows, trials
from rewards.asking import word_ids
from rewards.scorers_in_process import Gathers, Scoring
from wiring.harness import with_keys

GSM8K = Gsm8kScorer(kind="gsm8k")
LENIENT = Gsm8kScorer(kind="gsm8k", strict=False)
NO_GOLD = LengthScorer(kind="length", at_least=2000, fall=2000)


def said(level: str, what: str, hint: str | None = None) -> Finding:
    return Finding(Level(level), what, hint=hint, kind="reward")


WINS = said("ok", "gold beats wrong, empty and cut answers on all 8 rows")
OTHER_FORMS = said(
    "note",
    "a correct answer does not get full credit as `\\boxed{7}`, `Answer: 7`, `<answer>7</answer>`, `it is 7.`, `7`: "
    "request the format in the prompt",
)
SENTENCES = "for 1, 4, 16 and 64 sentences without content"
SAYS_LITTLE = said("note", "this kind cannot build a gold answer: check the scores above, and the first rollouts")


def rows(count: int = 8, **fields: Any) -> list[Prompt]:
    return [
        Prompt(
            f"train/{number}",
            (),
            "",
            f"so\n#### {number + 50}",
            (Message("user", f"What is {number} + 50?"),),
            fields,
        )
        for number in range(count)
    ]


def tried(
    function: Callable[[ScoreRequest], float | str], table: ScorerTable = GSM8K, count: int = 8
) -> tuple[Trial, list[Finding]]:
    """Return the trial of the reward, and its findings without the name of the scorer and the class of the error."""
    (trial,) = trials(Scoring(function), table, rows(count), word_ids)
    found = findings(trial)
    assert {(finding.where, finding.error) for finding in found if finding.is_error} <= {(trial.scorer, RewardError)}
    return trial, [replace(finding, where="", error=RecipeError) for finding in found]


def strict(request: ScoreRequest) -> float:
    return gsm8k.score(request).value


def test_sound_reward_passes_trial_and_lists_unread_forms() -> None:
    trial, shown = tried(strict)
    assert shown == [WINS, OTHER_FORMS]
    assert (trial.scored("gold"), trial.scored("wrong")) == ([1.0] * 8, [0.0] * 8)
    assert (trial.as_gold("wrong, then gold"), trial.as_gold("gold, then wrong")) == (1.0, 0.0)
    assert {response.row for response in trial.tried if response.name in ATTACKS} == {"train/0"}


def test_trial_passes_token_ids_and_finish_to_scorer() -> None:
    scoring = Scoring(lambda request: 1.0)
    trials(scoring, GSM8K, rows(1), word_ids)
    assert all(sample.token_ids == word_ids(sample.response, sample.finish) for sample in scoring.asked)
    assert [sample.response for sample in scoring.asked if sample.finish == "truncated"] == ["so"]


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (
            lambda sample: float("+ 50" in sample.response) or strict(sample),
            [said("warning", "`question` scores as well as the gold answer on 100.0% of the rows")],
        ),
        (
            lambda sample: float(sample.response == "The answer is 42.") or strict(sample),
            [said("warning", "`guess` scores as well as the gold answer on 100.0% of the rows")],
        ),
        (
            lambda sample: float(gsm8k.gold_number(sample.truth or "") in sample.response),
            [said("warning", "a response with two answers scores as well as the gold answer, whichever comes last")],
        ),
        (
            lambda sample: strict(sample) - 1e-4 * len(sample.response),
            [
                said(
                    "warning", "after 2,000 characters of filler a correct answer scores lower on 100.0% of the rows"
                ),
                said("note", "a correct answer scores only at the end of a response"),
                said("note", "a correct answer scores less if it is repeated"),
            ],
        ),
        (
            lambda sample: strict(sample) + 1e-3 * len(sample.response),
            [
                said(
                    "warning", "after 2,000 characters of filler a wrong answer scores as gold on 100.0% of the rows"
                ),
                said("warning", "a correct answer scores more if it is repeated"),
            ],
        ),
        (
            lambda sample: gsm8k.score(sample, last_chars=300).value,
            [said("note", "a correct answer scores only at the end of a response")],
        ),
    ],
)
def test_trial_names_rewarded_wrong_responses(
    function: Callable[[ScoreRequest], float], found: list[Finding]
) -> None:
    _, shown = tried(function)
    assert shown[0] == WINS
    assert [finding for finding in shown if finding in found] == found


def _of_first_number(text: str) -> str:
    """A wrong reader: the first number after the mark."""
    found = re.search("[0-9]+", text)
    return found.group() if found else ""


def _of_digits_after_mark(text: str) -> str:
    """A wrong reader: the digits after `#### `, whatever follows; the whole text if there are none."""
    found = re.findall("#### (-?[0-9.,]+)", text)
    return found[-1] if found else text


@pytest.mark.parametrize(
    ("answer", "read", "message"),
    [
        ("3/4", _of_digits_after_mark, "gold does not win on 100.0% of 8 rows; first `train/0`: gold 0, wrong 0"),
        ("$12", _of_digits_after_mark, "gold does not win on 100.0% of 8 rows"),
        (
            "3/4",
            lambda truth: _of_first_number(truth.rpartition("####")[2]),
            "a wrong answer that agrees with a part of the ground truth scores as gold on 100.0% of the rows; first "
            "`train/0`: `It follows.\nThe answer is $\\boxed{3/5}$.` scores 1",
        ),
    ],
)
def test_trial_finds_scorer_that_reads_only_a_part_of_the_truth(
    answer: str, read: Callable[[str], str], message: str
) -> None:
    reads_part = read is not _of_digits_after_mark

    def score(sample: ScoreRequest) -> float:
        box = last_boxed(sample.response) or ""
        return float((_of_first_number(box) if reads_part else box) == read(sample.truth or ""))

    rows_of_answer = [replace(row, answer=f"3 of 4\n#### {answer}") for row in rows()]
    (trial,) = trials(Scoring(score), MathScorer(kind="math"), rows_of_answer, word_ids)
    errors = [finding.what for finding in findings(trial) if finding.is_error]
    assert any(what.startswith(message) for what in errors), errors


@pytest.mark.parametrize(
    ("credited", "says"), [(1, []), (2, ["`question` scores as well as the gold answer on 10.0%"])]
)
def test_rewarded_wrong_responses_on_5_percent_of_rows_are_tolerated(credited: int, says: list[str]) -> None:
    bad = {f"train/{number}" for number in range(credited)}
    _, shown = tried(
        lambda sample: float("+ 50" in sample.response and sample.prompt_id in bad) or strict(sample), count=20
    )
    assert [
        finding.what.partition(" of the rows")[0] for finding in shown if finding.what.startswith("`question`")
    ] == says


@pytest.mark.parametrize(("lost", "level"), [(1, "warning"), (2, "error")])
def test_gold_losing_on_1_percent_of_rows_is_a_warning(lost: int, level: str) -> None:
    """Real data has a few wrong rows."""
    _, (first, *_) = tried(lambda sample: float(sample.prompt_id >= f"train/{9 - lost}") or strict(sample), count=9)
    assert first.is_error
    bad = {f"train/{number}" for number in range(lost)}
    _, (first, *_) = tried(lambda sample: 1.0 if sample.prompt_id in bad else strict(sample), count=100)
    more = " (and 1 more)" if lost > 1 else ""
    says = f"gold does not win on {lost}.0% of 100 rows; first `train/0`: gold 1, wrong 1, empty 1, cut 1{more}"
    assert first == said(level, says)


def test_unreadable_truth_counts_as_row_lost_by_gold() -> None:
    bad = Prompt("train/x", (), "", "fifty", (Message("user", "?"),))
    (trial,) = trials(Scoring(strict), GSM8K, [*rows(), bad], word_ids)
    (first, *_) = findings(trial)
    assert first.is_error
    assert first.what.startswith(
        "gold does not win on 11.1% of 9 rows; first `train/x`: the ground truth `fifty` is neither"
    )


def test_unscored_responses_are_counted_with_first_reason() -> None:
    _, shown = tried(lambda sample: "error" if sample.response == "I do not know." else strict(sample), count=8)
    says = "8 of 152 responses have no score; first `no answer` of `train/0`: error why"
    assert said("error", says, MEND) in shown
    _, shown = tried(
        lambda sample: "error" if sample.prompt_id == "train/0" and "I do" in sample.response else strict(sample)
    )
    assert said("warning", says.replace("8 of", "1 of"), MEND) in shown


@pytest.mark.parametrize(
    ("outcome", "found"),
    [
        ("timeout", said("warning", "20,000 numbers: why; each such response costs that much time")),
        ("error", said("note", "20,000 numbers: error, why")),
        (1.0, said("warning", "20,000 numbers: scores 1, as much as the gold answer")),
    ],
)
def test_attack_response_that_breaks_scorer_is_named(outcome: float | str, found: Finding) -> None:
    attack = ATTACKS["20,000 numbers"]
    _, shown = tried(lambda sample: outcome if sample.response == attack else strict(sample))
    assert shown == [WINS, OTHER_FORMS, found]


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (
            lambda sample: 0.5,
            said("warning", "all responses score 0.5: the trial does not show what would score more"),
        ),
        (lambda sample: "error", said("error", "no response has a score")),
        (
            lambda sample: float(len(sample.token_ids)),
            said("warning", f"the score rises with length alone: 9 -> 33 -> 129 -> 513 {SENTENCES}"),
        ),
        (
            lambda sample: -float(len(sample.token_ids)),
            said("warning", "`empty` scores highest of all responses tried, -1 on average"),
        ),
        (
            lambda sample: -float(len(sample.token_ids)),
            said("note", f"the score falls with length alone: -9 -> -33 -> -129 -> -513 {SENTENCES}"),
        ),
    ],
)  # fmt: skip
def test_trial_without_gold_reports_limited_findings(
    function: Callable[[ScoreRequest], float | str], found: Finding
) -> None:
    trial, shown = tried(function, NO_GOLD)
    assert found in shown
    assert (SAYS_LITTLE in shown) == (not found.is_error)
    assert "ground truth" in trial.names
    assert trial.as_gold("empty") is None


def test_refused_long_response_is_only_a_warning() -> None:
    def judge(request: ScoreRequest) -> float | str:
        return "refused" if len(request.response) > 500 else 1.0

    [trial] = trials(Scoring(judge), NO_GOLD, rows(), word_ids)
    [finding] = [reported for reported in findings(trial) if "have no score" in reported.what]
    assert finding.level == "warning"


@pytest.mark.parametrize(
    ("table", "end", "text"),
    [
        ({"kind": "format", "pattern": r"(?s)<think>.*?</think>\s*<answer>(A|B)</answer>"}, "<think>\n", "<think>"),
        ({"kind": "format", "pattern": r"\\boxed\{", "match": "search"}, "\\boxed{", "\\boxed{"),
        ({"kind": "format", "pattern": "<think>|<answer>"}, "<think>", None),
        ({"kind": "format", "pattern": "<?think>"}, "<think>", "think>"),
        ({"kind": "gsm8k"}, "#### ", "####"),
        ({"kind": "gsm8k", "strict": False}, "#### ", None),
        ({"kind": "math", "rule": "last_box"}, "$\\boxed{", "\\boxed{"),
        ({"kind": "dapo_math"}, "Answer: ", "Answer:"),
        ({"kind": "sum", "parts": {"form": {"kind": "format", "pattern": "<think>.*"}}}, "<think>", "<think>"),
    ],
)
def test_trial_names_prompts_that_end_with_what_the_reward_requires(
    table: dict[str, Any], end: str, text: str | None
) -> None:
    reward = Recipe.model_validate(with_keys({"reward": table})).reward
    prompts = [replace(row, answer="4", text=f"What is 2+2?<|assistant|>{end}") for row in rows(2)]
    prompts.append(replace(prompts[0], id="train/9", text="What is 2+2?"))
    (trial,) = trials(Scoring(lambda sample: 1.0), reward, prompts, word_ids)
    shown = [finding.what for finding in findings(trial) if "the prompts of" in finding.what]
    says = (
        f"the prompts of 2 of 3 rows (first `train/0`) end with `{text}`, which the reward requires in the response"
    )
    assert shown == ([] if text is None else [says])


def test_trial_judges_names_of_metrics_and_notes_those_of_some_responses() -> None:
    class Returning(Scoring):
        name: str

        def submit(self, request: ScoreRequest) -> Future[Score]:
            future = super().submit(request)
            extras = {self.name: 1.0} if "####" in request.response else {}
            given: Future[Score] = Future()
            given.set_result(replace(future.result(), extras=extras))
            return given

    for name, level, says in (
        ("right", "note", "only some responses have `right`: each mean is over the responses that have it"),
        ("shaped", "error", "the reward returns a metric `shaped` in addition to its score"),
        ("acc@1", "error", "the reward returns a metric `acc@1` in addition to its score"),
    ):
        scorer = Returning(lambda sample: float(len(sample.response)))
        scorer.name = name
        (trial,) = trials(scorer, NO_GOLD, rows(2), word_ids)
        assert any(finding.level == level and finding.what.startswith(says) for finding in findings(trial))


def test_trial_flushes_batch_scorer() -> None:
    [trial] = trials(Gathers(), NO_GOLD, rows(), word_ids)
    assert all(response.score.value == 2.0 for response in trial.tried)


def test_non_finite_score_ends_trial() -> None:
    pool = WorkerPool([lambda requests: [Score(nan, "ok") for _ in requests]])
    with closing(pool), pytest.raises(RewardError, match="`nan` as reward of a response to prompt `train/0`"):
        trials(pool, GSM8K, rows(1), word_ids)


def test_choose_reward_has_one_trial_per_scorer() -> None:
    choose = {"kind": "choose", "cases": {"a": {"kind": "gsm8k"}, "b": {"kind": "length", "at_most": 9}}}
    reward = Recipe.model_validate(with_keys({"reward": choose})).reward
    prompts = [*rows(3, data_source="a"), *rows(2, data_source="b"), *rows(1, data_source="c")]
    by_scorer = trials(Scoring(strict), reward, prompts, word_ids)
    assert [(trial.scorer, trial.has_gold, len(trial.rows)) for trial in by_scorer] == [
        ("reward.cases.a (gsm8k)", True, 3),
        ("reward.cases.b (length)", False, 2),
        ("no scorer", False, 1),
    ]
    (last,) = findings(by_scorer[-1])
    assert last.is_error
    assert "`data_source` is `c`, and the reward has no case of that name" in last.what


def test_trial_rows_are_evenly_spaced_and_cover_every_scorer() -> None:
    assert [row.id for row in chosen_rows(GSM8K, rows(100), 4)] == [f"train/{number}" for number in (0, 25, 50, 75)]
    assert len(chosen_rows(GSM8K, rows(3), 64)) == 3
    choose = {"kind": "choose", "cases": {"a": {"kind": "gsm8k"}, "b": {"kind": "gsm8k"}}}
    reward = Recipe.model_validate(with_keys({"reward": choose})).reward
    prompts = [
        Prompt(f"train/{number}", (), "", "4", (), {"data_source": "ba"[number != 33]}) for number in range(100)
    ]
    assert "train/33" in [row.id for row in chosen_rows(reward, prompts, 2)]
