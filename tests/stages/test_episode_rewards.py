"""Rewards of episodes: failed environments, and length penalties that count only generated tokens."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fakes.components import EvenScorer
from ppoctl.algorithms.stages.overlapped_scoring import OverlappedScorer, request_about
from ppoctl.algorithms.stages.reward import RewardStage, requests_about
from ppoctl.algorithms.stages.shaping import PenalizeLength, PenalizeOverlong, apply_shaping
from ppoctl.core.batch.episodes import Episode, EpisodeTurn, FailureReason
from ppoctl.core.batch.prompts import Message, Prompt, Prompts
from ppoctl.core.batch.records import Carry, Rollouts
from ppoctl.core.batch.scores import Score, ScoreRequest
from ppoctl.core.errors import RewardError
from ppoctl.core.ports import Sample
from stages import stub_models

PROMPTS = Prompts(3, tuple(Prompt(name, (5,), f"{name}?", None) for name in "ab"))
SEEN = EpisodeTurn(1, "2", observed=1, messages=(Message("user", "go on"),), reward=0.5)
DONE = Episode((SEEN, EpisodeTurn(1, "4", reward=0.25)), "done")
SHORT = Episode((EpisodeTurn(2, "3 5"),), "turns")


def failed(reason: FailureReason = "timeout") -> Episode:
    return Episode((EpisodeTurn(2, "3 5"),), reason, "no answer within 30 s")


class Asked(EvenScorer):
    """Records its requests."""

    def __init__(self, outcomes: dict[str, Score] | None = None) -> None:
        super().__init__(outcomes)
        self.requests: list[ScoreRequest] = []

    def submit(self, request: ScoreRequest) -> Any:
        self.requests.append(request)
        return super().submit(request)


def rollouts(*episodes: Episode) -> Rollouts:
    """Return rows for prompt `a` with 3 tokens, of which the middle is observed, and for prompt `b` with 2 tokens."""
    return stub_models.rollouts(
        tokens=torch.tensor([[2, 9, 4], [3, 5, 0]], dtype=torch.int32),
        lengths=torch.tensor([3, 2]),
        mask=torch.tensor([[True, False, True], [True, True, False]]),
        sampler_logprobs=torch.zeros(2, 3),
        finish=torch.tensor([0, 1]),
        texts=["2\n4", "3 5"],
        stamps=["actor@2:x"] * 2,
        episodes=[episode.as_json() for episode in episodes],
    )


def stage(scorer: EvenScorer, **settings: Any) -> RewardStage:
    return RewardStage(scorer, **{"max_error_frac": 0.5, "fingerprint": "", "between": lambda: None, **settings})


def test_failed_episode_is_not_scored_and_has_the_outcome_error() -> None:
    scorer = Asked()
    rewards = stage(scorer).run(PROMPTS, rollouts(DONE, failed()))
    assert [request.prompt_id for request in scorer.requests] == ["a"]
    assert rewards.scores.tolist() == [1.0, 0.0]
    assert rewards.valid.tolist() == [True, False]
    assert rewards.outcome_messages == ["", "environment timeout: no answer within 30 s"]
    assert rewards.metrics()["reward/error_frac"] == 0.5


def test_failed_episode_has_the_score_of_the_recipe() -> None:
    rewards = stage(Asked(), failed_score=-2.0).run(PROMPTS, rollouts(failed("died"), SHORT))
    assert rewards.scores.tolist() == [-2.0, 0.0]
    assert rewards.valid.tolist() == [True, True]
    assert rewards.outcome_messages == ["", ""]
    assert rewards.metrics()["reward/error_frac"] == 0


def test_score_of_failed_episode_is_at_its_last_token() -> None:
    class PerToken(EvenScorer):
        def _score(self, request: ScoreRequest) -> Score:
            return Score(3.0, "ok", token_values=(1.0, 0.0, 2.0))

    rewards = stage(PerToken(), failed_score=-2.0).run(PROMPTS, rollouts(DONE, failed()))
    assert rewards.token_scores is not None
    assert rewards.token_scores.tolist() == [[1.0, 0.0, 2.0], [0.0, -2.0, 0.0]]


def test_one_limit_counts_failed_episodes_and_missing_scores() -> None:
    no_number = Asked({"a": Score(None, "error", "no number")})
    half = stage(no_number, max_error_frac=0.4, failed_score=0.0)
    with pytest.raises(RewardError, match=r"^1 of 2 environments failed, and 0 other samples have no score") as error:
        half.run(PROMPTS, rollouts(failed(), SHORT))
    assert error.value.message.endswith(
        "(50.0%, `reward.max_error_frac` is 40.0%); first `a` environment timeout: no answer within 30 s"
    )
    assert error.value.hint is not None
    assert "`ppoctl resume RUN --back-to 2`" in error.value.hint
    assert "reward.max_error_frac=0.5`" in error.value.hint
    with pytest.raises(RewardError, match=r"^1 of 2 environments failed, and 1 other samples have no score \(100.0%"):
        half.run(PROMPTS, rollouts(SHORT, failed()))
    old = replace(rollouts(failed(), SHORT), stamps=["actor@1:x"] * 2)
    with pytest.raises(RewardError) as error:
        half.run(PROMPTS, old)
    assert "`ppoctl resume RUN --back-to 1`" in (error.value.hint or ""), "the step that generated is repeated"
    first = replace(rollouts(failed(), SHORT), stamps=["actor@0:x"] * 2)
    with pytest.raises(RewardError) as error:
        half.run(PROMPTS, first)
    assert "fix the environment and run `ppoctl train RECIPE`, or allow" in (error.value.hint or "")


def test_step_without_any_score_stops_the_run() -> None:
    with pytest.raises(RewardError, match=r"none of the 2 samples of step 3 .*`a` environment died: no answer"):
        stage(Asked(), max_error_frac=1.0).run(PROMPTS, rollouts(failed("died"), failed()))
    scored = stage(Asked(), max_error_frac=1.0, failed_score=0.5)
    assert scored.run(PROMPTS, rollouts(failed(), failed())).valid.all()
    not_opened = Episode((), "died", "killed")
    assert scored.run(PROMPTS, rollouts(not_opened, SHORT)).valid.all()
    with pytest.raises(RewardError, match=r"none of the 2 samples of step 3 has a turn, .*`a` environment died"):
        scored.run(PROMPTS, rollouts(not_opened, not_opened))


def samples(*episodes: Episode) -> list[Sample]:
    return [
        Sample(f"{name}#0", tokens, (0.0,) * len(tokens), terminated, episode.text, "s", episode=episode)
        for name, tokens, terminated, episode in zip("ab", ((2, 9, 4), (3, 5)), (True, False), episodes, strict=True)
    ]


def test_live_sample_and_stored_row_give_equal_requests() -> None:
    live = [request_about(prompt, sample) for prompt, sample in zip(PROMPTS.rows, samples(DONE, SHORT), strict=True)]
    assert live == requests_about(PROMPTS, rollouts(DONE, SHORT))
    assert live[0].turn_spans == ((0, 1), (2, 3))


def test_scoring_during_generation_leaves_out_failed_episodes() -> None:
    scorer = Asked()
    overlapped = OverlappedScorer(scorer)
    for prompt, sample in zip(PROMPTS.rows, samples(DONE, failed()), strict=True):
        overlapped.start(prompt, sample)
    assert [request.prompt_id for request in scorer.requests] == ["a"]
    stage(overlapped).run(PROMPTS, rollouts(DONE, failed()))  # type: ignore[arg-type]
    assert len(scorer.requests) == 1


def test_length_penalties_count_generated_tokens_only() -> None:
    rewards, shaped = stub_models.rewards(1.0, 1.0), rollouts(DONE, SHORT)
    for step in (PenalizeLength(per_token=0.25, free_tokens=1), PenalizeOverlong(3, 2, penalty=0.5, floor=True)):
        assert apply_shaping(rewards, shaped, Carry(), [step]).rewards.tolist() == [0.75, 0.75]
        plain = replace(shaped, mask=shaped.sequences.present, episodes=None)
        assert apply_shaping(rewards, plain, Carry(), [step]).rewards.tolist() == [0.5, 0.75]
