"""The prompts of each step."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppoctl.core.batch.carry import Carry
from ppoctl.core.batch.prompts import Message, Prompt
from ppoctl.core.errors import DataError
from ppoctl.data.row_tables import DataTable, MixRows
from ppoctl.data.source import PromptSource
from ppoctl.data.template import PromptTemplate

MakeTable = Callable[..., Any]


def source(num_rows: int, prompts_per_step: int, seed: int = 42) -> PromptSource:
    rows = tuple(Prompt(id=f"train/{n}", token_ids=(n,), text=f"{n}?", answer=f"{n}") for n in range(num_rows))
    return PromptSource(rows, {"small": rows[:2]}, seed, prompts_per_step)


def ids(prompts: PromptSource, step: int) -> list[str]:
    return [row.id for row in prompts.prompts_for(step).rows]


def test_rounds_use_consecutive_batches_without_a_gap_or_a_repeat() -> None:
    """Steps of 1, 3, 1 and 2 rounds use the prompts of seven steps of one round."""
    prompts, carry, used = source(40, 4), Carry(), []
    for step, rounds in enumerate((1, 3, 1, 2), start=1):
        batches = [prompts.prompts_for(step, carry.batch(step, number)) for number in range(1, rounds + 1)]
        assert {batch.step for batch in batches} == {step}
        used += [batch.rows for batch in batches]
        carry = replace(carry, further_rounds=carry.further_rounds + rounds - 1)
    assert used == [prompts.prompts_for(step).rows for step in range(1, 8)]
    assert carry.as_dict() == {"further_rounds": 3}


def test_prompts_of_a_step_do_not_depend_on_call_order() -> None:
    forwards = [source(10, 4).prompts_for(step) for step in range(1, 8)]
    prompts = source(10, 4)
    assert [prompts.prompts_for(step) for step in reversed(range(1, 8))] == forwards[::-1]
    assert [prompts.step for prompts in forwards] == list(range(1, 8))


def test_prompt_order_never_changes() -> None:
    # Not computed by hand: recorded once, so that no version of any library changes the order within a run.
    assert ids(source(6, 6), 1) == [f"train/{n}" for n in (2, 0, 1, 3, 5, 4)]
    assert ids(source(6, 6), 2) == [f"train/{n}" for n in (0, 4, 1, 2, 3, 5)]


def test_each_epoch_has_every_row_once_in_another_order() -> None:
    prompts = source(12, 3)
    epochs = [[i for step in range(4 * n + 1, 4 * n + 5) for i in ids(prompts, step)] for n in range(3)]
    assert all(sorted(epoch) == sorted(row.id for row in prompts.train) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@given(num_rows=st.integers(1, 12), prompts_per_step=st.integers(1, 12), steps=st.integers(1, 6))
def test_steps_are_consecutive_slices_of_the_epochs(num_rows: int, prompts_per_step: int, steps: int) -> None:
    cut = source(num_rows, prompts_per_step)
    whole = source(num_rows, num_rows)
    answers = [row.answer for step in range(1, steps + 1) for row in cut.prompts_for(step).rows]
    num_epochs = -(-len(answers) // num_rows)
    sequence = [row.answer for epoch in range(1, num_epochs + 1) for row in whole.prompts_for(epoch).rows]
    assert answers == sequence[: len(answers)]


@given(num_rows=st.integers(1, 5), prompts_per_step=st.integers(1, 12), step=st.integers(1, 5))
def test_prompt_ids_are_unique_within_a_step(num_rows: int, prompts_per_step: int, step: int) -> None:
    assert max(Counter(ids(source(num_rows, prompts_per_step), step)).values()) == 1


def test_repeated_prompt_in_a_step_is_numbered() -> None:
    # Two rows and three prompts per step: positions 0 1 | 0, so the second epoch begins with a row of the first step.
    first, second, third = ids(source(2, 3), 1)
    assert {first, second} == {"train/0", "train/1"}
    assert third in {"train/0#2", "train/1#2"}


def test_another_seed_gives_another_order() -> None:
    orders = {tuple(ids(source(20, 20, seed), 1)) for seed in range(5)}
    assert len(orders) == 5


def test_prompts_identity_depends_on_all_fields_and_their_order() -> None:
    first, second = Prompt("a", (1,), "x", "1"), Prompt("b", (2,), "y", "2")
    variants = [
        (first, second),
        (second, first),
        (first,),
        (first, Prompt("c", (2,), "y", "2")),
        (first, Prompt("b", (3,), "y", "2")),
        (first, Prompt("b", (2,), "y", "3")),
        (first, Prompt("b", (2,), "y", None)),
        (first, Prompt("b", (2,), "z", "2")),
        (first, Prompt("b", (2,), "y", "2", (Message("user", "y"),))),
        (first, Prompt("b", (2,), "y", "2", fields={"level": 1})),
    ]
    identities = [PromptSource(rows[:1], {"x": rows}, 0, 1).evaluation_sets()["x"].identity for rows in variants]
    assert len(set(identities)) == len(variants)


def test_evaluation_sets_are_complete_in_order_at_step_0() -> None:
    (small,) = source(5, 2).evaluation_sets().values()
    assert (small.step, [row.id for row in small.rows]) == (0, ["train/0", "train/1"])


def test_steps_count_from_1() -> None:
    with pytest.raises(AssertionError, match="steps count from 1"):
        source(5, 2).prompts_for(0)


def test_prompt_source_is_loaded_from_a_recipe(
    jsonl: MakeTable, make_tokenizer: Callable[..., Any], tmp_path: Path
) -> None:
    data = DataTable(
        train=jsonl('{"q": "one", "a": "1"}', '{"q": "two", "a": "2"}', system="Be brief."),
        eval={"dotted.name": jsonl('{"q": "three", "a": "3"}', name="e.jsonl")},
    )
    template = PromptTemplate(make_tokenizer())
    prompts = _loaded(data, template, max_prompt_tokens=6)
    assert {(row.text, row.answer) for row in prompts.prompts_for(1).rows} == {
        ("<|system|> Be brief. <|user|> one <|assistant|>", "1"),
        ("<|system|> Be brief. <|user|> two <|assistant|>", "2"),
    }
    (row,) = prompts.evaluation_sets()["dotted.name"].rows
    # <|user|> three <|assistant|> are words 4, 10 and 5 of the fixture's list.
    assert (row.id[:24], row.token_ids) == ("eval/dotted/name/000000-", (4, 10, 5))
    assert prompts.digests.keys() == {"data.train", "data.eval.dotted.name", "tokenizer"}
    assert all(len(digest) == 64 for digest in prompts.digests.values())


def test_recipe_with_too_long_prompts_or_too_few_rows_is_refused(
    jsonl: MakeTable, make_tokenizer: Callable[..., Any], tmp_path: Path
) -> None:
    template = PromptTemplate(make_tokenizer())
    train = jsonl('{"q": "one", "a": "1"}', '{"q": "two", "a": "2"}')
    data = DataTable(train=train, eval={"x": jsonl('{"q": "one two", "a": "3"}', name="e.jsonl")})
    with pytest.raises(DataError, match=r"`data.eval.x` exceed it"):
        _loaded(data, template, max_prompt_tokens=3)


def test_source_without_a_row_in_an_epoch_is_refused(jsonl: MakeTable, make_tokenizer: Callable[..., Any]) -> None:
    lines = ('{"q": "one", "a": "1"}', '{"q": "two", "a": "2"}')
    mix = MixRows(format="mix", sources={"much": jsonl(*lines), "little": jsonl(*lines, name="l.jsonl", weight=0.1)})
    with pytest.raises(DataError) as caught:
        _loaded(DataTable(train=mix), PromptTemplate(make_tokenizer()))
    assert caught.value.message == (
        "none of the 2 rows of `data.train.sources.little` is in an epoch: its weight is `0.1`"
    )
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("--set data.train.sources.little.weight=0.5 ")


@pytest.mark.parametrize("fields", [("source",), None])
def test_column_hidden_by_the_source_name_is_refused(
    jsonl: MakeTable, make_tokenizer: Callable[..., Any], fields: tuple[str, ...] | None
) -> None:
    row = '{"q": "one", "a": "1", "source": "olympiads"}'
    template = PromptTemplate(make_tokenizer())
    mix = MixRows(format="mix", sources={"a": jsonl(row, fields=fields)})
    with pytest.raises(DataError, match="line 1 has a field `source`, which in a mix is the name of the row's"):
        _loaded(DataTable(train=mix), template)
    named = MixRows(format="mix", sources={"a": jsonl(row)})
    source = _loaded(DataTable(train=named), template, prompts_per_round=1)
    assert source.train[0].fields == {"source": "a"}


def _loaded(
    data: DataTable, template: PromptTemplate, *, prompts_per_round: int = 2, max_prompt_tokens: int = 8
) -> PromptSource:
    return PromptSource.load(
        data, template, max_prompt_tokens=max_prompt_tokens, prompts_per_round=prompts_per_round, seed=1
    )
