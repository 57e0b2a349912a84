"""The choice of groups in dynamic sampling, worked by hand: two rounds of three prompts with three responses.

round  prompt  scores           lengths
1      a       0.35 0.4  -      1 2 3       - : no score
1      b       1    -    -      4 5 6
1      c       0.4  0.4  0.4    1 1 1
2      d       1    1    1      2 2 4
2      e       0    1    -      3 4 5
2      f       0    0.4  1      1 2 1
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fakes.dynamic_sampling import with_groups
from ppoctl.algorithms.dynamic_sampling import ALL_ROWS, KEEP_GROUPS
from ppoctl.algorithms.stages.keep_groups import MeanWithin
from ppoctl.core.batch.records import REWARD_ERROR, REWARD_OK, REWARD_TIMEOUT, Rewards, Rollouts, Selection
from ppoctl.core.errors import DataError
from ppoctl.recipe.schema import Recipe

NONE, LATE = None, "timeout"


def round_of(prompts: str, scores: list[Any], lengths: list[int]) -> tuple[Rollouts, Rewards]:
    """Return rollouts and rewards of a round. Each response has a hole at its second token."""
    count = len(scores)
    present = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]
    mask = present.clone()
    mask[:, 1] = False
    rollouts = Rollouts(
        prompt_tokens=torch.ones(count, dtype=torch.int32),
        prompt_lengths=torch.ones(count, dtype=torch.int64),
        tokens=present.to(torch.int32),
        lengths=torch.tensor(lengths),
        mask=mask,
        sampler_logprobs=-0.5 * mask.float(),
        finish=torch.zeros(count, dtype=torch.int64),
        seeds=torch.arange(count),
        prompt_ids=[prompt for prompt in prompts for _ in range(3)],
        sample_indices=[0, 1, 2] * len(prompts),
        texts=["x"] * count,
        stamps=["actor@6:abc"] * count,
        sends=[1] * count,
    )
    codes = {NONE: REWARD_ERROR, LATE: REWARD_TIMEOUT}
    lost = [score in codes for score in scores]
    rewards = Rewards(
        scores=torch.tensor([0.0 if is_lost else score for score, is_lost in zip(scores, lost, strict=True)]),
        outcomes=torch.tensor([codes[s] if is_lost else REWARD_OK for s, is_lost in zip(scores, lost, strict=True)]),
        extras={},
        outcome_messages=[""] * count,
        truths=[None] * count,
    )
    return rollouts, rewards


ROUND_1 = round_of("abc", [0.35, 0.4, NONE, 1.0, LATE, NONE, 0.4, 0.4, 0.4], [1, 2, 3, 4, 5, 6, 1, 1, 1])
ROUND_2 = round_of("def", [1.0, 1.0, 1.0, 0.0, 1.0, NONE, 0.0, 0.4, 1.0], [2, 2, 4, 3, 4, 5, 1, 2, 1])
ANY = {"prompts_per_step": 6, "samples_per_prompt": 3}
LENGTH = {"kind": "exact_match", "length_penalty": {"per_token": 0.1}}


def selected(recipe: Recipe, *rounds: tuple[Rollouts, Rewards]) -> Selection:
    stage: Any = KEEP_GROUPS.build(recipe, None)  # type: ignore[arg-type]
    record: Selection = stage.run(*(record for pair in rounds for record in pair))
    return record


def test_first_mixed_groups_of_all_rounds_are_kept() -> None:
    recipe = with_groups({}, rollout={"prompts_per_step": 2, "samples_per_prompt": 3})
    first, second = selected(recipe, ROUND_1), selected(recipe, ROUND_1, ROUND_2)
    assert (first.is_full, first.prompt_ids) == (False, ["a", "a", "a"])
    assert (second.is_full, second.prompt_ids) == (True, ["a", "a", "a", "e", "e", "e"])
    assert second.rounds.tolist() == [1, 1, 1, 2, 2, 2]
    assert second.rows.tolist() == [0, 1, 2, 3, 4, 5]  # the row without a score is part of its group
    assert second.sample_indices == [0, 1, 2, 0, 1, 2]


def test_metrics_describe_all_rounds() -> None:
    recipe = with_groups({}, rollout={"prompts_per_step": 2, "samples_per_prompt": 3})
    first, second = (selected(recipe, *rounds).metrics() for rounds in ((ROUND_1,), (ROUND_1, ROUND_2)))
    # 24 tokens in each round; kept are a with 6, later also e with 12. Only b's one score, and d's, are all right;
    # neither a nor c has a score of 1. The 14 scores sum up to 8.35, and 4 of 18 responses have none.
    expected = {
        "groups/kept": (1, 2),
        "groups/rounds": (1, 2),
        "groups/prompts_per_kept": (3, 3),
        "groups/all_right_frac": (1 / 3, 2 / 6),
        "groups/all_wrong_frac": (2 / 3, 2 / 6),
        "groups/dropped_tokens": (24 - 6, 48 - 18),
        "rollout/tokens": (24, 48),
        "rollout/response_tokens_max": (6, 6),
        "reward/score_mean": (2.95 / 6, 8.35 / 14),
        "reward/error_frac": (2 / 9, 3 / 18),
        "reward/timeout_frac": (1 / 9, 1 / 18),
    }
    assert {name: (first[name], second[name]) for name in expected} == {
        name: pytest.approx(values) for name, values in expected.items()
    }
    passing = with_groups({}, rollout=ANY, eval={"pass_score": 0.4})  # c is right now, and a and f are partly right
    found = selected(passing, ROUND_1, ROUND_2).metrics()
    assert (found["groups/all_right_frac"], found["groups/all_wrong_frac"]) == (3 / 6, 0)


@pytest.mark.parametrize(
    ("groups", "changes", "kept"),
    [
        ({}, {}, "aef"),
        ({"keep": {"min": 0.4, "max": 1.0}}, {}, "bcdef"),
        ({"keep": {"min": 0.375, "max": 0.4}}, {}, "ac"),
        ({"keep": {"min": 0.41, "max": 0.9}}, {}, "ef"),
        ({"by": "pass"}, {"eval": {"pass_score": 0.4}}, "aef"),
        ({"by": "pass"}, {"eval": {"pass_score": 0.35}}, "ef"),
        ({"by": "pass", "keep": {"min": 0.6, "max": 0.7}}, {"eval": {"pass_score": 0.4}}, "f"),
        # A penalty of 0.1 a generated token makes d's equal scores 0.9, 0.9 and 0.7.
        ({"by": "shaped"}, {"reward": LENGTH}, "adef"),
        ({"by": "score"}, {"reward": LENGTH}, "aef"),
        # The means are then 0.275 of a, 0.3 of c, 0.25 of e, 0.367 of f, and more of b and d.
        ({"by": "shaped", "keep": {"min": 0.26, "max": 0.3}}, {"reward": LENGTH}, "ac"),
    ],
    ids=str,
)
def test_groups_are_kept_by_these_settings(groups: dict[str, Any], changes: dict[str, Any], kept: str) -> None:
    found = selected(with_groups(groups, rollout=ANY, **changes), ROUND_1, ROUND_2)
    assert "".join(found.prompt_ids[::3]) == kept
    assert not found.is_full


def test_groups_with_equal_scores_are_kept_by_their_components() -> None:
    parts = {"x": {"kind": "exact_match", "weight": 1.0}, "y": {"kind": "exact_match", "weight": 1.0}}
    recipe = with_groups({"by": "components"}, rollout=ANY, reward={"kind": "sum", "parts": parts})
    # a: equal in all; b: other components, equal scores; c: the third failed, so its score is not a sum of parts.
    rollouts, rewards = round_of("abc", [1.0] * 9, [2] * 9)
    x, y = [0.5, 0.5, 0.5, 0.25, 0.5, 0.5, 0.5, 0.5, None], [0.5, 0.5, 0.5, 0.75, 0.5, 0.5, 0.5, 0.5, None]
    found = selected(recipe, (rollouts, replace(rewards, extras={"x": x, "y": y})))
    assert "".join(found.prompt_ids[::3]) == "b"
    failed = replace(rewards, scores=torch.tensor([1.0] * 8 + [0.0]), extras={"x": x, "y": y})
    assert "".join(selected(recipe, (rollouts, failed)).prompt_ids[::3]) == "bc"


def test_group_without_a_score_is_within_no_bounds() -> None:
    assert not MeanWithin(-1e30, 1e30)(torch.tensor([]))


def test_step_with_too_few_groups_fails_or_uses_fewer() -> None:
    groups = {"max_rounds": 2, "round_prompts": 3}
    rollout = {"prompts_per_step": 4, "samples_per_prompt": 3}
    assert selected(with_groups(groups, rollout=rollout), ROUND_1).is_full is False  # another round follows
    with pytest.raises(DataError) as caught:
        selected(with_groups(groups, rollout=rollout), ROUND_1, ROUND_2)
    assert caught.value.message == (
        "step 7 has 3 of 4 groups (`rollout.prompts_per_step`) after 2 rounds (`rollout.groups.max_rounds`): of 6 "
        "generated groups, 2 have only responses that pass, and 2 have none"
    )
    assert caught.value.hint == ("the rounds are saved: ppoctl resume RUN --set rollout.groups.when_short=use_fewer")
    fewer = selected(with_groups({**groups, "when_short": "use_fewer"}, rollout=rollout), ROUND_1, ROUND_2)
    assert (fewer.is_full, fewer.prompt_ids[::3]) == (False, ["a", "e", "f"])
    nothing = {**groups, "when_short": "use_fewer", "keep": {"min": 2.0, "max": 3.0}}
    with pytest.raises(DataError, match="step 7 has 0 of 4 groups") as caught:
        selected(with_groups(nothing, rollout=rollout), ROUND_1, ROUND_2)
    assert str(caught.value.hint).endswith("--set rollout.groups.max_rounds=4")


def test_fingerprint_has_the_keys_that_decide_the_choice() -> None:
    """The number of rounds and what happens after the last one are not among them, except in the last round."""
    base = with_groups({"max_rounds": 3}, eval={"pass_score": 0.5})

    def differs(groups: dict[str, Any], number: int = 1, **changes: Any) -> bool:
        spec = KEEP_GROUPS if number == 1 else type(KEEP_GROUPS)(f"keep_groups.{number}")
        other = with_groups({"max_rounds": 3, **groups}, **{"eval": {"pass_score": 0.5}, **changes})
        return spec.fingerprint(other) != spec.fingerprint(base)

    assert differs({"keep": {"min": 0.1, "max": 0.9}})
    assert differs({"by": "pass"})
    assert differs({}, eval={"pass_score": 0.6})
    assert not differs({}, reward=LENGTH)
    assert not differs({"max_rounds": 4})
    assert not differs({"max_rounds": 4}, 2)
    assert differs({"max_rounds": 4}, 3)
    assert differs({"max_rounds": 4}, 4)
    assert differs({"max_rounds": 2}, 2)
    assert not differs({"when_short": "use_fewer"}, 3)
    assert not differs({"critic_sees": "all"})
    shaped = [with_groups({"by": "shaped"}, reward=reward) for reward in (LENGTH, {"kind": "exact_match"})]
    assert KEEP_GROUPS.fingerprint(shaped[0]) != KEEP_GROUPS.fingerprint(shaped[1])


def test_all_rows_are_those_of_every_round_in_order() -> None:
    stage: Any = ALL_ROWS.build(with_groups({"critic_sees": "all"}), None)  # type: ignore[arg-type]
    every = stage.run(ROUND_1[0], ROUND_2[0])
    assert every.rounds.tolist() == [1] * 9 + [2] * 9
    assert every.rows.tolist() == [*range(9), *range(9)]
    assert (every.is_full, every.metrics()) == (True, {})
