"""Score of an episode: the rewards of its environment, in sum or at each turn, alone or as a component of a sum."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes.components import fake_recipe
from ppoctl.core.batch.episodes import Episode, EpisodeTurn
from ppoctl.core.batch.prompts import Message, Prompt
from ppoctl.core.batch.scores import Score, ScoreRequest
from ppoctl.rewards.environment_reward import AsOneTurn
from ppoctl.rewards.function import RewardValue
from ppoctl.rewards.length import score as length_score
from ppoctl.rewards.probe import probe, require_sound
from ppoctl.rewards.reward_findings import findings
from ppoctl.rewards.scorer_table import ScorerTable
from ppoctl.rewards.sum import SumReward
from ppoctl.rewards.trial import trials
from rewards.asking import word_ids

PROMPT = Prompt("train/3", (4, 5), "<user>2 + 3?", "5", (Message("user", "2 + 3?"),), {"level": 2})
RULES, RESULT = Message("system", "use the tool"), Message("tool", "5")
EPISODE = Episode(
    turns=(
        EpisodeTurn(3, "add(2, 3)", observed=2, messages=(RESULT,), reward=0.25),
        EpisodeTurn(1, "hm", observed=1, messages=(Message("user", "and?"),)),
        EpisodeTurn(2, "#### 5", messages=(Message("user", "thanks"),), reward=-1.0),
    ),
    end="done",
    first=(RULES,),
)
REQUEST = ScoreRequest.about(PROMPT, EPISODE.text, "terminated", (7, 8, 9, 3, 3, 6, 3, 5, 1), EPISODE)


def score(reward: dict[str, Any], request: ScoreRequest = REQUEST) -> Score:
    with closing(fake_recipe(reward=reward).reward.open()) as scorer:
        return scorer.submit(request).result(timeout=120)


def test_request_has_the_conversation_without_what_followed_the_last_turn() -> None:
    assert REQUEST.messages == (Message("user", "2 + 3?"), RULES)
    said = [("assistant", "add(2, 3)"), ("tool", "5"), ("assistant", "hm"), ("user", "and?"), ("assistant", "#### 5")]
    assert [(message.role, message.content) for message in REQUEST.conversation] == said
    assert REQUEST.turn_spans == ((0, 3), (5, 6), (7, 9))
    assert REQUEST.turn_rewards == (0.25, 0.0, -1.0)
    assert REQUEST.response == "add(2, 3)\nhm\n#### 5"
    assert (REQUEST.generated_tokens, len(REQUEST.token_ids)) == (6, 9)


def test_request_survives_json_and_one_turn_has_no_new_fields() -> None:
    assert ScoreRequest.from_json(json.loads(json.dumps(REQUEST.as_json()))) == REQUEST
    plain = ScoreRequest.about(PROMPT, "#### 5", "truncated", (3, 5))
    assert plain.as_json() == {
        "prompt_id": "train/3", "prompt": "<user>2 + 3?", "messages": [{"role": "user", "content": "2 + 3?"}],
        "response": "#### 5", "truth": "5", "fields": {"level": 2}, "finish": "truncated", "token_ids": (3, 5),
    }  # fmt: skip
    assert ScoreRequest.from_json(json.loads(json.dumps(plain.as_json()))) == plain
    assert plain.generated_tokens == 2


def test_score_is_the_sum_of_the_turn_rewards() -> None:
    assert score({"kind": "environment"}) == Score(-0.75, "ok")
    assert score({"kind": "environment"}, replace(REQUEST, turn_rewards=(0.1, 0.2, 0.3))).value == 0.6


def test_reward_of_each_turn_is_at_its_last_generated_token() -> None:
    scored = score({"kind": "environment", "per_turn": True})
    assert scored == Score(-0.75, "ok", token_values=(0, 0, 0.25, 0, 0, 0.0, 0, 0, -1.0))


def test_response_without_environment_has_no_score() -> None:
    scored = score({"kind": "environment"}, ScoreRequest.about(PROMPT, "#### 5", "terminated", (3, 5)))
    assert scored == Score(None, "error", "no environment answered the response")


def test_sum_adds_rewards_of_turns_to_a_score_of_the_answer() -> None:
    parts = {"own": {"kind": "environment", "per_turn": True, "weight": 2}, "right": {"kind": "gsm8k"}}
    scored = score({"kind": "sum", "parts": parts})
    assert scored.value == -0.5
    assert scored.token_values == (0, 0, 0.5, 0, 0, 0, 0, 0, -1.0)
    assert (scored.extras["own"], scored.extras["right"]) == (-0.75, 1.0)


def test_function_of_the_user_receives_the_conversation(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def score(sample):\n"
        "    asked = [m.content for m in sample.conversation if m.role == 'tool']\n"
        "    return sum(sample.turn_rewards) + len(asked) + 10 * sample.turn_spans[1][0]\n"
    )
    assert score({"kind": "python", "function": f"{file}:score"}).value == 50.25


def test_length_counts_generated_tokens() -> None:
    assert length_score(REQUEST, unit="tokens", at_most=6) == RewardValue(1.0)
    assert length_score(REQUEST, unit="tokens", at_most=5) == RewardValue(0.0)


def table(reward: dict[str, Any]) -> ScorerTable:
    return fake_recipe(reward=reward).reward


def test_answers_are_tried_with_an_environment_reward_of_zero() -> None:
    reward = table({"kind": "sum", "parts": {"own": {"kind": "environment"}, "right": {"kind": "gsm8k"}}})
    with closing(AsOneTurn(reward.open())) as scorer:
        [row] = probe(scorer, reward, [PROMPT], word_ids)
        assert row.scores["gold"].extras["own"] == 0.0
        require_sound([row], reward)
        [trial] = trials(scorer, reward, [PROMPT], word_ids)
    assert trial.as_gold("wrong") == 0.0
    assert isinstance(reward, SumReward)


def test_environment_reward_has_no_answers_to_try() -> None:
    reward = table({"kind": "choose", "by": "level", "cases": {"2": {"kind": "environment"}, "1": {"kind": "gsm8k"}}})
    with closing(AsOneTurn(reward.open())) as scorer:
        first, second = trials(scorer, reward, [PROMPT, replace(PROMPT, id="b", fields={"level": 1})], word_ids)
        require_sound(probe(scorer, reward, [PROMPT], word_ids), reward)
    assert (first.scorer, first.rows, first.tried) == ("reward.cases.2 (environment)", ("train/3",), ())
    [finding] = findings(first)
    assert (finding.level, finding.what) == (
        "note", "the environment returns the score of an episode: there are no answers to try",
    )  # fmt: skip
    assert second.of("gold")


@pytest.mark.parametrize("per_turn", [False, True])
def test_empty_answer_is_tried_with_an_environment_reward(*, per_turn: bool) -> None:
    """An empty answer that was cut has no tokens."""
    with closing(AsOneTurn(table({"kind": "environment", "per_turn": per_turn}).open())) as scorer:
        assert scorer.submit(ScoreRequest.about(PROMPT, "", "truncated")).result().value == 0.0
