"""Each invariant of a record, broken once; and the metrics and sizes of an intact record."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch

from ppoctl.core.batch import codec
from ppoctl.core.batch.records import (
    RECORDS,
    Advantages,
    Carry,
    Correction,
    Evaluation,
    GreedyRewards,
    GreedyRollouts,
    Logprobs,
    PartialRollouts,
    Record,
    Rewards,
    Rollouts,
    Selection,
    State,
    Update,
    Values,
    decode,
)

GRID = torch.tensor([[0.5, -1.0, 0.0], [0.0, 0.0, 2.0], [1.5, 0.0, 0.0]])
MASK = torch.tensor([[True, True, False], [False, False, True], [True, False, False]])


def ids(rows: list[Any]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def rollouts(**changes: Any) -> Rollouts:
    """Return three responses to two prompts: of two, three and two tokens; the last has one unmasked token."""
    whole = Rollouts(
        prompt_tokens=ids([5, 5, 6, 7]),
        prompt_lengths=torch.tensor([1, 1, 2]),
        tokens=ids([[2, 1, 0], [3, 4, 1], [8, 9, 0]]),
        lengths=torch.tensor([2, 3, 2]),
        mask=MASK,
        sampler_logprobs=-GRID.abs(),
        finish=torch.tensor([0, 0, 1]),
        seeds=torch.tensor([1, 2, 3]),
        prompt_ids=["a", "a", "b"],
        sample_indices=[0, 1, 0],
        texts=["2", "3 4", "8 9"],
        stamps=["actor@4:abc", "actor@4:abc", "actor@4:abc+r1"],
        sends=[1, 3, 2],
    )
    return replace(whole, **changes)


def rewards(**changes: Any) -> Rewards:
    """Return rewards: the second sample has no score, the third timed out."""
    whole = Rewards(
        scores=torch.tensor([1.0, 0.0, 0.0, 0.5]),
        outcomes=torch.tensor([0, 2, 1, 0]),
        extras={"words": [1.0, 9.0, 9.0, 4.0]},
        outcome_messages=["", "boom", "10 s", ""],
        truths=["x", "x", None, "y"],
    )
    return replace(whole, **changes)


def advantages(**changes: Any) -> Advantages:
    return replace(Advantages(GRID, GRID * 2, MASK, {"kl_coef": 0.3}, {"b": 2.0, "a": 1.0}, GRID * 3), **changes)


def selection(**changes: Any) -> Selection:
    """Return two samples, the first of them twice."""
    whole = Selection(
        rounds=torch.tensor([2, 1, 2]),
        rows=torch.tensor([0, 3, 0]),
        prompt_ids=["b", "a", "b"],
        sample_indices=[0, 1, 0],
        is_full=True,
        summary={"selection/rows": 3.0},
    )
    return replace(whole, **changes)


def set_at(grid: torch.Tensor, row: int, column: int, value: float) -> torch.Tensor:
    changed = grid.clone()
    changed[row, column] = value
    return changed


BROKEN: list[tuple[str, Callable[[], Record]]] = [
    ("prompt lengths add up", lambda: rollouts(prompt_lengths=torch.tensor([1, 1, 1]))),
    ("tokens are int32", lambda: rollouts(tokens=torch.tensor([[2, 1, 0], [3, 4, 1], [8, 9, 0]]))),
    ("unmasked tokens are present", lambda: rollouts(mask=set_at(MASK, 2, 2, True))),
    (
        "every response has a token",
        lambda: rollouts(
            lengths=torch.tensor([0, 3, 2]),
            mask=MASK & torch.tensor([[False], [True], [True]]),
            tokens=ids([[0, 0, 0], [3, 4, 1], [8, 9, 0]]),
            sampler_logprobs=torch.zeros(3, 3),
        ),
    ),
    ("masked-out log-probs are 0", lambda: rollouts(sampler_logprobs=set_at(-GRID.abs(), 1, 0, -0.1))),
    ("ids beyond the length are 0", lambda: rollouts(tokens=ids([[2, 1, 7], [3, 4, 1], [8, 9, 0]]))),
    ("prompt_ids has one entry per sequence", lambda: rollouts(prompt_ids=["a", "a"])),
    ("sample_indices has one entry per sequence", lambda: rollouts(sample_indices=[0, 1])),
    ("texts has one entry per sequence", lambda: rollouts(texts=["2", "3 4", "8 9", ""])),
    ("stamps has one entry per sequence", lambda: rollouts(stamps=[])),
    ("sends has one entry per sequence", lambda: rollouts(sends=[1, 1])),
    ("segment_stamps has one entry per sequence", lambda: rollouts(segment_stamps=[["actor@3:x"]])),
    ("segments have all tokens", lambda: rollouts(segment_tokens=[[1, 1], [2], [2]])),
    ("a missing score is stored as 0", lambda: rewards(scores=torch.tensor([1.0, 0.1, 0.0, 0.5]))),
    ("missing token scores are stored as 0", lambda: rewards(token_scores=torch.ones(4, 2))),
    ("outcome_messages has one entry per sequence", lambda: rewards(outcome_messages=["", "boom"])),
    ("truths has one entry per sequence", lambda: rewards(truths=["x"])),
    ("words has one entry per sequence", lambda: rewards(extras={"words": [1.0]})),
    ("masked-out advantages are 0", lambda: advantages(advantages=set_at(GRID, 1, 1, 0.1))),
    ("masked-out returns are 0", lambda: advantages(returns=set_at(GRID, 2, 1, -0.1))),
    ("masked-out weights are 0", lambda: Correction(GRID.abs() + 1, MASK, {})),
    ("rounds count from 1, rows from 0", lambda: selection(rounds=torch.tensor([0, 1, 2]))),
    ("rounds count from 1, rows from 0", lambda: selection(rows=torch.tensor([0, -1, 2]))),
    ("prompt_ids has one entry per selected sample", lambda: selection(prompt_ids=["b"])),
    ("sample_indices has one entry per selected sample", lambda: selection(sample_indices=[0])),
    ("masked-out token_rewards are 0", lambda: advantages(token_rewards=set_at(GRID, 0, 2, 0.1))),
]


@pytest.mark.parametrize(("invariant", "broken"), BROKEN, ids=[invariant for invariant, _ in BROKEN])
def test_record_rejects_broken_invariant_by_name(invariant: str, broken: Callable[[], Record]) -> None:
    with pytest.raises(ValueError, match=f"record violates an invariant: {invariant}$"):
        broken()


WHOLE: list[Record] = [
    rollouts(),
    rewards(),
    rewards(token_scores=torch.tensor([[1.0, 0.5], [0.0, 0.0], [0.0, 0.0], [0.0, 0.25]])),
    PartialRollouts(
        **{
            **rollouts().__getstate__(),
            "segment_stamps": [["actor@2:x", "actor@3:y"], ["actor@3:y"], ["actor@3:y"]],
            "segment_tokens": [[1, int(rollouts().lengths[0]) - 1], *([int(n)] for n in rollouts().lengths[1:])],
        }
    ),
    GreedyRollouts(**rollouts().__getstate__()),
    GreedyRewards(**rewards().__getstate__()),
    Values(GRID, "critic@1:x"),
    Logprobs("actor@1:x", {}),
    Logprobs("actor@1:x", {"gap_mean_abs": 0.5}, GRID, GRID.abs()),
    Logprobs("actor@1:x", {"gap_mean_abs": 0.5}, GRID, GRID.abs(), GRID * 2),
    Correction(GRID.abs(), MASK, {"correction/weight_mean": 1.25}),
    advantages(),
    advantages(shaped=torch.tensor([1.0, -0.5, 0.0])),
    selection(),
    Update("actor", 3, "p", "q", 7, {"loss": [0.5, 0.25]}, {"policy/loss": 0.375}, {"gap_k3": 0.25}),
    Evaluation("actor@1:x", {"eval/held/pass_at_1": 0.5}, [{"score": 1.0, "b": 2, "a": "x"}, {"score": None}]),
]


@pytest.mark.parametrize("record", WHOLE, ids=lambda record: type(record).__name__)
def test_record_round_trips_through_encoding(record: Record) -> None:
    back = decode(record.encoded)
    assert type(back) is type(record)
    assert (back.identity, back.encoded) == (record.identity, record.encoded)
    for each in fields(record):
        one, other = getattr(record, each.name), getattr(back, each.name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_invariant_tests_cover_every_record_kind() -> None:
    assert {type(record) for record in WHOLE} == set(RECORDS.values())


def test_decode_rejects_unknown_record_kind() -> None:
    with pytest.raises(ValueError, match="unknown record kind `tale`"):
        decode(codec.encode("tale", {"x": torch.zeros(1)}, {}))


def test_large_texts_round_trip_through_codec() -> None:
    """A safetensors header may have 100 MB; backslashes are escaped twice in it."""
    step = {"texts": ["\\" * 26_000_000]}
    kind, tensors, meta = codec.decode(codec.encode("tale", {"x": torch.ones(2)}, step))
    assert (kind, tensors.keys()) == ("tale", {"x"})
    assert meta == step


@pytest.mark.parametrize("record", WHOLE, ids=lambda record: type(record).__name__)
def test_record_identity_ignores_measured_fields(record: Record) -> None:
    for each in fields(record):
        if each.name in record.unsaved:
            continue
        value = getattr(record, each.name)
        changed = replace(record, **{each.name: another(value)}) if another(value) is not None else record
        is_measured = each.name in record.measured
        assert changed is record or (changed.identity == record.identity) is is_measured, each.name
        assert changed is record or changed.encoded != record.encoded, each.name


def another(value: Any) -> Any:
    """Return another value that breaks no invariant, or None if there is none."""
    if isinstance(value, torch.Tensor):
        return value * 2 if value.is_floating_point() else None
    if isinstance(value, list):
        return value[::-1] if value[::-1] != value else None
    if isinstance(value, dict):
        return {**value, "another": [0.0] * 4 if any(isinstance(each, list) for each in value.values()) else 0.0}
    if isinstance(value, bool):
        return not value
    return f"other {value}" if isinstance(value, str) else value + 1 if isinstance(value, int) else None


def test_only_sampler_logprobs_sends_and_gap_are_measured_fields() -> None:
    measured = {cls.__name__: cls.measured for cls in RECORDS.values() if cls.measured}
    of_samples = dict.fromkeys(("Rollouts", "PartialRollouts", "GreedyRollouts"), ("sampler_logprobs", "sends"))
    assert measured == {**of_samples, "Logprobs": ("gap",), "Update": ("gap",)}


def test_unpadded_sequence_is_prompt_plus_response() -> None:
    assert [row.tolist() for row in rollouts().sequences.unpadded()] == [[5, 2, 1], [5, 3, 4, 1], [6, 7, 8, 9]]
    assert (rollouts().num_seqs, rollouts().step) == (3, 5)


def test_rollout_metrics_match_hand_computed_values() -> None:
    metrics = rollouts().metrics()
    assert metrics["rollout/response_tokens_mean"] == pytest.approx(7 / 3)
    assert metrics["rollout/response_tokens_max"] == 3
    assert metrics["rollout/truncated_frac"] == pytest.approx(1 / 3)
    assert metrics["rollout/resent_seqs"] == 2


def test_rollout_throughput_counts_only_tokens_of_this_attempt() -> None:
    assert rollouts(drawing=(12, 4.0)).timing_metrics() == {
        "throughput/generated_tokens_per_s": 3.0,
        "time/generation_s": 4.0,
    }
    assert rollouts(drawing=(1, 0.5)).timing_metrics()["throughput/generated_tokens_per_s"] == 2.0
    for nothing in ((0, 0.0), (0, 3.0), (5, 0.0), None):
        assert rollouts(drawing=nothing).timing_metrics() == {}


def test_reward_metrics_cover_only_scored_rows() -> None:
    assert rewards().valid.tolist() == [True, False, False, True]
    assert rewards().metrics() == {
        "reward/error_frac": 0.25,
        "reward/timeout_frac": 0.25,
        "reward/score_mean": 0.75,
        "reward/score_std": 0.25,
        "reward/words_mean": 2.5,
    }
    more_errors = rewards(outcomes=torch.tensor([0, 2, 2, 0])).metrics()
    assert (more_errors["reward/error_frac"], more_errors["reward/timeout_frac"]) == (0.5, 0.0)
    none = rewards(scores=torch.zeros(4), outcomes=torch.tensor([1, 2, 1, 1]))
    assert none.metrics() == {"reward/error_frac": 0.25, "reward/timeout_frac": 0.75}


def test_record_metrics_are_the_summaries_in_order() -> None:
    found = {type(record).__name__: list(record.metrics().items()) for record in WHOLE}
    assert found["Logprobs"] == [("mismatch/gap_mean_abs", 0.5)]
    assert found["Correction"] == [("correction/weight_mean", 1.25)]
    assert found["Advantages"] == [("a", 1.0), ("b", 2.0)]
    assert found["Update"] == [("policy/loss", 0.375), ("mismatch/gap_k3", 0.25)]
    assert found["Evaluation"] == [("eval/held/pass_at_1", 0.5)]
    assert found["Values"] == []


def test_evaluation_samples_are_readable_json_lines() -> None:
    assert WHOLE[-1].readable_files() == {
        "samples.jsonl": b'{"a": "x", "b": 2, "score": 1.0}\n{"score": null}\n',
    }
    assert WHOLE[0].readable_files() == {}


def test_state_identity_follows_lineage() -> None:
    state = State("actor", 3, 7, "0123456789abcdefXYZ")
    assert (state.stamp, state.identity) == ("actor@3:0123456789abcdef", "actor:0123456789abcdefXYZ")
    again = replace(state, replay=2)
    assert (again.stamp, again.identity) == ("actor@3:0123456789abcdef+r2", state.identity)
    assert replace(state, role="critic").identity != state.identity
    update = WHOLE[-2]
    assert isinstance(update, Update)
    assert update.result == State("actor", 3, 7, "q")


def test_carry_identity_follows_its_values() -> None:
    advantages = WHOLE[-4]
    assert isinstance(advantages, Advantages)
    assert advantages.carry == Carry(0.3)
    assert Carry(0.3).identity == Carry(0.3).identity != Carry(0.31).identity
    assert Carry(0.3).as_dict() == {"kl_coef": 0.3}
    assert Carry().as_dict() == {}
    assert Carry(**Carry(0.3).as_dict()) == Carry(0.3)


def test_new_carry_field_with_default_keeps_identity() -> None:
    @dataclass(frozen=True)
    class Later(Carry):
        moments: float = 0.0

    assert Later(0.3).identity == Carry(0.3).identity != Later(0.3, 0.1).identity


def test_decode_fills_default_fields_and_names_unknown_fields() -> None:
    whole = {"actor": GRID, "entropy": GRID.abs()}
    found = decode(codec.encode("logprobs", whole, {"stamp": "actor@1:x", "gap": {}}))
    assert isinstance(found, Logprobs)
    assert found.reference is None
    with pytest.raises(ValueError, match="kind `logprobs` with no field `stamp`"):
        decode(codec.encode("logprobs", whole, {"gap": {}}))
    with pytest.raises(ValueError, match="kind `logprobs` with unknown field `later`"):
        decode(codec.encode("logprobs", whole, {"stamp": "x", "gap": {}, "later": 1}))


def test_new_record_field_with_default_keeps_identity() -> None:
    @dataclass(frozen=True)
    class Later(Logprobs):
        coef: float = 0.0

    plain = ("actor", GRID), ("entropy", GRID.abs()), ("stamp", "actor@1:x"), ("gap", {})
    before, after = Logprobs(**dict(plain)), Later(**dict(plain))  # type: ignore[arg-type]
    assert after.identity == before.identity != replace(after, coef=0.5).identity


def test_removed_record_field_is_dropped_and_identity_stays() -> None:
    whole = rewards()
    tensors = {"scores": whole.scores, "outcomes": whole.outcomes, "shaped": whole.scores * 2 - 1}
    meta = {"extras": whole.extras, "outcome_messages": whole.outcome_messages, "truths": whole.truths}
    before = codec.encode("rewards", tensors, meta)
    found = decode(before)
    assert isinstance(found, Rewards)
    assert torch.equal(found.scores, whole.scores)
    assert found.identity == codec.digest(before) != whole.identity
