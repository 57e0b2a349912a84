"""Before a run starts, the gold answer must beat a wrong, an empty and a truncated answer."""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import pytest

from ppoctl.core.batch.prompts import Prompt
from ppoctl.core.batch.scores import Score, ScoreRequest
from ppoctl.core.errors import RewardError, ServiceLostError
from ppoctl.rewards.exact_match import ExactMatchScorer
from ppoctl.rewards.function import ScorerSpec
from ppoctl.rewards.gsm8k import Gsm8kScorer
from ppoctl.rewards.http import HttpScorer
from ppoctl.rewards.probe import ProbeRow, probe, require_sound, result_of
from ppoctl.rewards.python_reward import PythonScorer
from ppoctl.rewards.scorer_pool import ScorerPool
from ppoctl.rewards.scorer_table import Candidates, ProcessScorer
from ppoctl.rewards.sum import SumReward
from rewards.asking import word_ids
from rewards.scorers_in_process import Scoring

OpenPool = Callable[..., ScorerPool]

FUNCTIONS = Path(__file__).with_name("users_functions.py")
STRICT = Gsm8kScorer(kind="gsm8k")
LENIENT = Gsm8kScorer(kind="gsm8k", strict=False)
EXACT = ExactMatchScorer(kind="exact_match")
WORKED = "48+24 = <<48+24=72>>72 clips.\n#### 72"


class WithoutGold(ProcessScorer):
    """A kind that cannot build a gold answer."""

    @property
    def scores_by(self) -> ScorerSpec:
        return ScorerSpec("drill_scorers:score")


SERVICE = HttpScorer(kind="http", url="http://scores.example:1/score")


def row(truth: str | None, number: int = 0) -> Prompt:
    return Prompt(f"train/{number}", (), "", truth)


@pytest.fixture(scope="module")
def pool_of() -> Iterator[Callable[[ProcessScorer], ScorerPool]]:
    """Yield a function that returns the pool of a reward, which is opened once."""
    pools: dict[str, ScorerPool] = {}

    def pool(reward: ProcessScorer) -> ScorerPool:
        key = repr(reward.scores_by)
        if key not in pools:
            pools[key] = ScorerPool(reward.scores_by)
        return pools[key]

    yield pool
    for opened in pools.values():
        opened.close()


def probed(reward: ProcessScorer, *truths: str | None) -> list[ProbeRow]:
    with closing(ScorerPool(reward.scores_by)) as pool:
        return probe(pool, reward, [row(truth, number) for number, truth in enumerate(truths)], word_ids)


@pytest.mark.parametrize(
    ("reward", "truth", "gold", "wrong", "truncated"),
    [
        (STRICT, WORKED, WORKED, WORKED[:-2] + "73", WORKED[:-8]),
        (LENIENT, WORKED, WORKED, WORKED[:-2] + "73", "48+24 = <<48+24="),
        (STRICT, "1,000", "The answer is\n#### 1,000", "The answer is\n#### 2,000", "The answer is"),
        (LENIENT, "so 1,000 it is\n#### 1,000", "so 1,000 it is\n#### 1,000", "so 1,000 it is\n#### 2,000", "so"),
        (STRICT, "-2", "The answer is\n#### -2", "The answer is\n#### -3", "The answer is"),
        (STRICT, "0.5", "The answer is\n#### 0.5", "The answer is\n#### 1.5", "The answer is"),
        (STRICT, ".5", "The answer is\n#### .5", "The answer is\n#### .6", "The answer is"),
        (EXACT, "72", "72", "73", "7"),
        (EXACT, "B", "B", "A", ""),
        (EXACT, "a", "a", "B", ""),
        (EXACT, "Paris ", "Paris", "not Paris", "Pari"),
    ],
)
def test_probe_candidates_keep_format_of_truth(
    pool_of: Callable[[ProcessScorer], ScorerPool],
    reward: ProcessScorer,
    truth: str,
    gold: str,
    wrong: str,
    truncated: str,
) -> None:
    assert reward.candidates(truth) == Candidates(gold, wrong, "", truncated)
    require_sound(probe(pool_of(reward), reward, [row(truth)], word_ids), reward)


def test_probe_scores_are_kept_by_candidate() -> None:
    (result,) = probed(STRICT, WORKED)
    assert {name: score.value for name, score in result.scores.items()} == {
        "gold": 1.0,
        "wrong": 0.0,
        "empty": 0.0,
        "truncated": 0.0,
    }


def test_unreachable_service_is_reported_instead_of_gold_score() -> None:
    scores = {"gold": Score(None, "unreachable", "Connection refused"), "empty": Score(0.0, "ok")}
    with pytest.raises(RewardError, match="row `train/0` has no score: Connection refused") as refused:
        require_sound([ProbeRow("train/0", "72", {"gold": "72", "empty": ""}, scores)], SERVICE)
    assert refused.value.hint == (
        "start the service and run the command again; `reward.url` is `http://scores.example:1/score`"
    )


def test_reward_of_other_format_raises_and_lists_scores() -> None:
    # The dataset has worked answers, but the reward compares the whole response with one number.
    with closing(ScorerPool(EXACT.scores_by)) as pool:
        rows = probe(pool, STRICT, [row("72", 3)], word_ids)
    with pytest.raises(RewardError) as caught:
        require_sound(rows, STRICT)
    assert caught.value.message == (
        "the reward does not prefer the gold answer of row `train/3`: gold scored 0, wrong scored 0, "
        "empty scored 0, truncated scored 0 (ground truth `72`, gold answer tried `The answer is #### 72`)"
    )
    assert caught.value.hint == "check that `reward.kind` fits the `answer` column"


@pytest.mark.parametrize(
    ("truth", "said"),
    [
        ("constant", "gold scored 8, wrong scored 12, empty scored 0, truncated scored 7"),
        ("number 3", "gold scored 3, wrong scored 3, empty scored 3, truncated scored 3"),
        ("text", "gold got no score (the scorer returned a `str` as value, not a number), wrong got"),
    ],
)
def test_reward_that_ranks_gold_too_low_or_fails_raises(drill_pool: OpenPool, truth: str, said: str) -> None:
    # The drill scorer returns the length of the response, so `not constant` beats `constant`.
    rows = probe(drill_pool(), EXACT, [row(truth)], word_ids)
    with pytest.raises(RewardError) as caught:
        require_sound(rows, STRICT)
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("reward", "truth", "message"),
    [
        (STRICT, "seventy", "row `train/1`: the ground truth `seventy` is neither a number nor a text with"),
        (EXACT, " ", "row `train/1`: the ground truth is empty"),
        (EXACT, None, "row `train/1` has no ground truth"),
    ],
)
def test_unreadable_truth_raises_before_scoring(reward: ProcessScorer, truth: str | None, message: str) -> None:
    with closing(ScorerPool(reward.scores_by)) as pool, pytest.raises(RewardError) as caught:
        probe(pool, reward, [row("72"), row(truth, 1)], word_ids)
    assert caught.value.message.startswith(message)
    assert caught.value.hint is not None
    assert pool.pids == []


def test_long_truth_is_truncated_to_its_end(drill_pool: OpenPool) -> None:
    # The drill scorer returns the length of the response, and wrong and gold answer have the same length.
    rows = probe(drill_pool(), STRICT, [row("so it goes\n" * 50 + "#### 72")], word_ids)
    with pytest.raises(RewardError, match=r"ground truth `\.\.\..{53}#### 72`"):
        require_sound(rows, STRICT)


def test_non_finite_probe_score_raises_reward_error(drill_pool: OpenPool) -> None:
    with pytest.raises(RewardError, match=r"the scorer returned `inf` as reward of a response to prompt `train/0`"):
        probe(drill_pool(), EXACT, [row("number inf")], word_ids)


@pytest.mark.parametrize(("reward", "name"), [(EXACT, "gold"), (WithoutGold(), "short")])
def test_probe_rejects_infinite_scores_of_any_scorer(reward: ProcessScorer, name: str) -> None:
    scorer = Scoring(lambda request: math.inf if request.response else 0.0)
    with pytest.raises(RewardError, match=f"{name} scored inf"):
        require_sound(probe(scorer, reward, [row("A")], word_ids), reward)


class Judge:
    """A reward model that prefers long responses."""

    def tokens(self, request: ScoreRequest) -> tuple[int, ...]:
        return tuple(map(ord, request.response)) or (0,)

    def scores(self, texts: Sequence[tuple[int, ...]]) -> list[float]:
        return [float(len(text)) for text in texts]


def test_reward_model_in_sum_is_probed_without_gold_answer() -> None:
    parts = {"judge": {"kind": "model", "path": "judge", "weight": 2.0}, "right": {"kind": "gsm8k"}}
    table = SumReward.model_validate({"kind": "sum", "parts": parts})
    with closing(table.open(lambda _: Judge())) as scorer:
        [result] = probe(scorer, table, [row("#### 4")], word_ids)
    require_sound([result], STRICT)
    # The gold answer need not win: a model may prefer a longer response.
    assert {name: score.value for name, score in result.scores.items()} == {"short": 34.0, "empty": 2.0}


@pytest.mark.parametrize("truth", [None, "good"])
def test_reward_without_gold_requires_only_a_score(drill_pool: OpenPool, truth: str | None) -> None:
    (result,) = probe(drill_pool(), WithoutGold(), [row(truth)], word_ids)
    require_sound([result], STRICT)
    assert result.scores == {"short": Score(17.0, "ok"), "empty": Score(0.0, "ok")}


@pytest.mark.parametrize("function", ["of_tokens", "of_the_last_token"])
def test_probe_passes_token_ids_to_function(function: str) -> None:
    reward = PythonScorer(kind="python", function=f"{FUNCTIONS}:{function}")
    with closing(reward.open()) as scorer:
        (result,) = probe(scorer, reward, [row("A")], word_ids)
    require_sound([result], STRICT)
    assert [score.outcome for score in result.scores.values()] == ["ok", "ok"]


def test_reward_without_gold_and_without_score_raises(drill_pool: OpenPool) -> None:
    with pytest.raises(RewardError) as caught:
        require_sound(probe(drill_pool(), WithoutGold(), [row("raise")], word_ids), STRICT)
    assert caught.value.message.startswith(
        "the reward has no score to train on for row `train/0`: short got no score (ValueError: cannot parse"
    )
    assert (caught.value.hint or "").startswith("fix the scorer where it raised")


def test_service_lost_before_run_hints_at_repeating_command() -> None:
    future: Future[Score] = Future()
    lost = ServiceLostError("the service is away", hint="start it again; the rollouts are kept: `ppoctl resume RUN`")
    future.set_exception(lost)
    reward = SumReward.model_validate({"kind": "sum", "parts": {"judge": {"kind": "http", "url": SERVICE.url}}})
    with pytest.raises(RewardError, match="the service is away") as caught:
        result_of(future, reward)
    assert caught.value.hint == (
        "start the service and run the command again; `reward.parts.judge.url` is `http://scores.example:1/score`"
    )
