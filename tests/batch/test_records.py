"""Fields that are stored with a record."""

import pickle
from dataclasses import replace

import pytest
import torch

from ppoctl.core.batch import codec
from ppoctl.core.batch.lineage import initial_state
from ppoctl.core.batch.prompts import Message, Prompt, Prompts
from ppoctl.core.batch.records import Values
from ppoctl.core.batch.scores import Score
from ppoctl.core.batch.seeds import derive_seed
from ppoctl.core.batch.sequences import one_sequence


def test_pickled_record_excludes_cached_encoding() -> None:
    record = Values(values=torch.arange(6.0).view(2, 3), stamp="critic@0:0")
    fresh = pickle.dumps(record)
    encoded, identity = record.encoded, record.identity
    assert len(pickle.dumps(record)) == len(fresh)
    arrived = pickle.loads(fresh)
    assert torch.equal(arrived.values, record.values)
    assert (arrived.encoded, arrived.identity) == (encoded, identity)


def test_encoding_ignores_memory_layout_and_key_order() -> None:
    grid = torch.arange(6.0).reshape(2, 3)
    plain = codec.encode("values", {"a": grid}, {"x": {"b": 1, "c": 2}, "y": 3})
    turned = codec.encode("values", {"a": grid.t().contiguous().t()}, {"y": 3, "x": {"c": 2, "b": 1}})
    assert turned == plain


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "b"},
        {"token_ids": (5, 7)},
        {"text": "why"},
        {"answer": "y"},
        {"answer": None},
        {"messages": (Message("user", "why"),)},
        {"messages": (Message("system", "why?"),)},
        {"fields": {"level": 4}},
        {"fields": {"depth": 3}},
    ],
    ids=str,
)
def test_prompts_identity_covers_generator_and_scorer_inputs(changes: dict[str, object]) -> None:
    row = Prompt("a", (5, 6), "why?", "x", (Message("user", "why?"),), {"level": 3})
    other = replace(row, **changes)  # type: ignore[arg-type]
    assert Prompts(1, (row,)).identity == Prompts(2, (replace(row),)).identity != Prompts(1, (other,)).identity
    assert Prompts(1, (row, other)).identity != Prompts(1, (other, row)).identity


def test_initial_states_of_roles_have_distinct_lineages() -> None:
    actor, critic = (initial_state(role, "digest") for role in ("actor", "critic"))
    assert actor.lineage != critic.lineage
    assert actor.lineage != initial_state("actor", "other").lineage


def test_derived_seed_separates_its_parts() -> None:
    seeds = {derive_seed(*parts) for parts in ((1, 23), (12, 3), (123,), ("1", "2", "3"), (3, 12))}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**62 for seed in seeds)


def test_score_equality_ignores_scoring_time() -> None:
    assert Score(1.0, "ok", seconds=0.5) == Score(1.0, "ok", seconds=9.0) != Score(2.0, "ok", seconds=0.5)


def test_single_sequence_splits_first_token_from_response() -> None:
    found = one_sequence((7, 5, 3, 9))
    assert (found.prompt_tokens.tolist(), found.tokens.tolist(), found.lengths.tolist()) == ([7], [[5, 3, 9]], [3])
    assert [ids.tolist() for ids in found.unpadded()] == [[7, 5, 3, 9]]
