"""What travels with a record."""

import pickle
from dataclasses import replace

import pytest
import torch

from ppoctl.batch import codec
from ppoctl.batch.lineage import initial_state
from ppoctl.batch.prompts import Message, Prompt, Prompts
from ppoctl.batch.records import Values
from ppoctl.batch.scores import Score
from ppoctl.batch.seeds import derive_seed
from ppoctl.batch.sequences import one_sequence


def test_a_record_on_its_way_to_another_process_leaves_its_encoding_behind() -> None:
    record = Values(values=torch.arange(6.0).view(2, 3), stamp="critic@0:0")
    fresh = pickle.dumps(record)
    encoded, identity = record.encoded, record.identity
    assert len(pickle.dumps(record)) == len(fresh)
    arrived = pickle.loads(fresh)
    assert torch.equal(arrived.values, record.values)
    assert (arrived.encoded, arrived.identity) == (encoded, identity)


def test_equal_content_has_equal_bytes_however_it_is_held_in_memory() -> None:
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
def test_prompts_are_named_by_all_that_a_generator_or_a_scorer_may_read(changes: dict[str, object]) -> None:
    row = Prompt("a", (5, 6), "why?", "x", (Message("user", "why?"),), {"level": 3})
    other = replace(row, **changes)  # type: ignore[arg-type]
    assert Prompts(1, (row,)).identity == Prompts(2, (replace(row),)).identity != Prompts(1, (other,)).identity
    assert Prompts(1, (row, other)).identity != Prompts(1, (other, row)).identity


def test_roles_that_start_from_one_model_are_two_states() -> None:
    actor, critic = (initial_state(role, "digest") for role in ("actor", "critic"))
    assert actor.lineage != critic.lineage
    assert actor.lineage != initial_state("actor", "other").lineage


def test_the_parts_of_a_seed_are_apart() -> None:
    seeds = {derive_seed(*parts) for parts in ((1, 23), (12, 3), (123,), ("1", "2", "3"), (3, 12))}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**62 for seed in seeds)


def test_how_long_scoring_took_is_no_part_of_a_score() -> None:
    assert Score(1.0, "ok", seconds=0.5) == Score(1.0, "ok", seconds=9.0) != Score(2.0, "ok", seconds=0.5)


def test_one_sequence_is_its_first_token_and_the_response_to_it() -> None:
    found = one_sequence((7, 5, 3, 9))
    assert (found.prompt_tokens.tolist(), found.tokens.tolist(), found.lengths.tolist()) == ([7], [[5, 3, 9]], [3])
    assert [ids.tolist() for ids in found.unpadded()] == [[7, 5, 3, 9]]
