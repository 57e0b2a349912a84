"""Response length and end conditions: the generator's settings, and trainer log-probs under the same settings."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.bigram import END
from fakes.job import BuiltStages
from ppoctl.core.batch.records import TRUNCATED
from tolerance import STEP
from wiring.cases import holds
from wiring.harness import STEP_NUMBER, open_harness, with_keys

KEYS = ("min_new_tokens", "stop_token_ids", "max_window_tokens", "special_tokens")


@holds(*(f"rollout.{key}" for key in KEYS))
@pytest.mark.parametrize(
    "changes",
    [{}, {"min_new_tokens": 4}, {"stop_token_ids": [2, 5]}, {"min_new_tokens": 4, "stop_token_ids": [2, 5]}],
    ids=str,
)
def test_excluded_end_tokens_are_neither_generated_nor_scored(tmp_path: Path, changes: dict[str, Any]) -> None:
    plain = {f"rollout.{key}": value for key, value in changes.items()}
    harness = open_harness(tmp_path, with_keys({**plain, "ppo.rollout_correction": {"kind": "none"}}))
    stages: Any = BuiltStages(harness.job, STEP_NUMBER)
    actor: Any = harness.state("actor")
    rollouts = stages.rollout.run(actor, harness.prompt_source.prompts_for(STEP_NUMBER))
    fewest, ends = changes.get("min_new_tokens", 0), {END, *changes.get("stop_token_ids", [])}
    rows = zip(rollouts.tokens.tolist(), rollouts.lengths.tolist(), rollouts.finish.tolist(), strict=True)
    for tokens, length, finish in rows:
        assert length >= fewest
        assert not ends & {*tokens[: length - 1]}
        assert not ends & {*tokens[:fewest]}
        assert finish == TRUNCATED or tokens[length - 1] in ends or "7, 3" in str(tokens)
    assert (int(rollouts.lengths.min()) < 4) == (fewest == 0)
    logprobs = stages.logprobs.run(actor, rollouts)
    STEP.check(logprobs.actor, rollouts.sampler_logprobs)
    # The reference is not filtered.
    unfiltered = harness.actor.reference_logprobs(rollouts.sequences, type(stages.logprobs.scored)(temperature=1.25))
    STEP.check(logprobs.reference, unfiltered.where(rollouts.mask, 0.0))
    assert stages.actor_update.scored == stages.logprobs.scored


def test_window_limits_the_response_to_the_space_after_the_prompt(tmp_path: Path) -> None:
    lengths = {}
    for window in (None, 5):
        harness = open_harness(tmp_path / str(window), with_keys({"rollout.max_window_tokens": window}))
        stages: Any = BuiltStages(harness.job, STEP_NUMBER)
        actor: Any = harness.state("actor")
        rollouts = stages.rollout.run(actor, harness.prompt_source.prompts_for(STEP_NUMBER))
        lengths[window] = rollouts.lengths
        both = rollouts.prompt_lengths + rollouts.lengths
        assert int(both.max()) == (window or 8)
        assert {*both[rollouts.finish == TRUNCATED].tolist()} == {window or 8}
        record: Any = BuiltStages(harness.job, 2).eval
        params = {params.max_window_tokens for _, params, _ in harness.generator.requests}
        assert params == {window}
        assert record.sampled.max_window_tokens == window
    assert bool((lengths[5] <= lengths[None]).all())
    assert not torch.equal(lengths[5], lengths[None])


def test_evaluations_share_end_tokens_but_not_the_minimum_length(tmp_path: Path) -> None:
    changes = {
        "rollout.stop_token_ids": [2, 5],
        "rollout.special_tokens": "drop",
        "rollout.min_new_tokens": 4,
        "rollout.max_window_tokens": 7,
    }
    stage: Any = BuiltStages(open_harness(tmp_path / "a", with_keys(changes)).job, 2).eval
    sampled = stage.sampled
    assert (sampled.stop_token_ids, sampled.min_new_tokens, sampled.max_window_tokens) == ((2, 5), 0, 7)
    assert sampled.special_tokens == "drop"
    fingerprints = set()
    for number, change in enumerate(({}, *({key: value} for key, value in changes.items()))):
        other: Any = BuiltStages(open_harness(tmp_path / str(number), with_keys(change)).job, 2).eval
        fingerprints.add(other.fingerprint)
    assert len(fingerprints) == 4  # the minimum length changes nothing


def test_special_tokens_are_in_the_text_of_rollouts_and_evaluations(tmp_path: Path) -> None:
    texts = {}
    for choice in ("keep", "drop"):
        harness = open_harness(
            tmp_path / choice, with_keys({"rollout.special_tokens": choice, "rollout.stop_strings": []})
        )
        harness.generator.special = 3
        stages: Any = BuiltStages(harness.job, STEP_NUMBER)
        rollouts = stages.rollout.run(harness.state("actor"), harness.prompt_source.prompts_for(STEP_NUMBER))
        texts[choice] = [*rollouts.texts]
        assert {params.special_tokens for _, params, _ in harness.generator.requests} == {choice}
    without = [" ".join(word for word in text.split() if word != "3") for text in texts["keep"]]
    assert texts["drop"] == without != texts["keep"]
