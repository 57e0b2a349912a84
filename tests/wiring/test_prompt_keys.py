"""Prompts and truths are those of the rows that the recipe names: from files to what a generator and a scorer are
asked."""

import json
from pathlib import Path
from typing import Any

import pytest

from ppoctl.batch.prompts import Prompts
from ppoctl.data.source import PromptSource
from ppoctl.data.template import PromptTemplate
from ppoctl.errors import DataError
from ppoctl.recipe.schema import Recipe
from wiring.bench import BASE
from wiring.cases import each_key, holds

COLUMNS = {"format": "columns", "path": "columns.jsonl", "prompt": "q", "answer": "a.gold"}
GSM8K = {"format": "gsm8k", "path": "gsm8k.jsonl"}


class Words:
    """A tokenizer of a base model: a number for each word, in the order in which words come."""

    bos_token_id = None

    def __init__(self) -> None:
        self.words: dict[str, int] = {}
        self.special_tokens_map: dict[str, str] = {}

    def __call__(self, texts: Any, **_: Any) -> dict[str, Any]:
        assert not isinstance(texts, str) or texts == "x"
        return {"input_ids": [[self.words.setdefault(w, len(self.words)) for w in text.split()] for text in texts]}

    def get_vocab(self) -> dict[str, int]:
        return self.words


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the working folder, where the tables above name them."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {"q": f"number {n}", "other": f"other {n}", "a": {"gold": f"{n}", "silver": f"-{n}"}, "b": "7"}
        for n in range(4)
    ]
    (tmp_path / "columns.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "more.jsonl").write_text("".join(json.dumps({**row, "q": "more " + row["q"]}) + "\n" for row in rows))
    maths = [{"question": f"sum {n}", "answer": f"thus #### {n}"} for n in range(4)]
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in maths))
    (tmp_path / "gsm8k2.jsonl").write_text("".join(json.dumps({**r, "question": "two"}) + "\n" for r in maths[:2]))


def asked(data: dict[str, Any], **rollout: Any) -> PromptSource:
    tables = {**BASE, "data": data, "rollout": {**BASE["rollout"], "prompts_per_step": 1, **rollout}}
    recipe = Recipe.model_validate(tables)
    template = PromptTemplate(Words())
    return PromptSource.load(recipe.data, recipe.rollout, template, seed=recipe.seed)


def read(rows: tuple[Any, ...]) -> list[tuple[str, str]]:
    return [(row.text, row.answer) for row in rows]


NUMBERS = [(f"number {n}", f"{n}") for n in range(4)]
SUMS = [(f"sum {n}", f"thus #### {n}") for n in range(4)]
CASES: list[tuple[str, dict[str, Any], Any, list[tuple[str, str]]]] = [
    ("path", COLUMNS, "more.jsonl", [(f"more {q}", a) for q, a in NUMBERS]),
    ("path", GSM8K, "gsm8k2.jsonl", [("two", "thus #### 0"), ("two", "thus #### 1")]),
    ("prompt", COLUMNS, "other", [(f"other {n}", f"{n}") for n in range(4)]),
    ("answer", COLUMNS, "a.silver", [(f"number {n}", f"-{n}") for n in range(4)]),
    ("answer", COLUMNS, "b", [(q, "7") for q, _ in NUMBERS]),
    ("system", COLUMNS, "Be brief.", [(f"Be brief.\n\n{q}", a) for q, a in NUMBERS]),
    ("system", GSM8K, "Be brief.", [(f"Be brief.\n\n{q}", a) for q, a in SUMS]),
    ("instruction", COLUMNS, "Think.", [(f"{q}\nThink.", a) for q, a in NUMBERS]),
    ("instruction", GSM8K, "Think.", [(f"{q}\nThink.", a) for q, a in SUMS]),
    ("max_rows", COLUMNS, 3, NUMBERS[:3]),
    ("max_rows", GSM8K, 2, SUMS[:2]),
]


@holds(*(f"data.{name}.{case[0]}" for case in CASES for name in ("train", "eval.*")))
@pytest.mark.parametrize(("key", "table", "value", "told"), CASES, ids=[f"{c[0]}={c[2]}" for c in CASES])
def test_rows_are_read_as_the_recipe_says(
    key: str, table: dict[str, Any], value: Any, told: list[tuple[str, str]]
) -> None:
    plain = NUMBERS if table is COLUMNS else SUMS
    changed = asked({"train": {**table, key: value}, "eval": {"held": table}}, max_prompt_tokens=9)
    assert (read(changed.train), read(changed.evaluations["held"])) == (told, plain)
    changed = asked({"train": table, "eval": {"held": {**table, key: value}}}, max_prompt_tokens=9)
    assert (read(changed.train), read(changed.evaluations["held"])) == (plain, told)


@holds("data.train.fields", "data.eval.*.fields")
def test_a_prompt_has_the_columns_that_the_recipe_names_for_the_reward() -> None:
    def fields(rows: tuple[Any, ...]) -> list[dict[str, Any]]:
        return [row.fields for row in rows]

    named = {**COLUMNS, "fields": ["b", "a.silver"]}
    silver, nothing = [{"b": "7", "a.silver": f"-{n}"} for n in range(4)], [{}] * 4
    source = asked({"train": named, "eval": {"held": COLUMNS}})
    assert (fields(source.train), fields(source.evaluations["held"])) == (silver, nothing)
    source = asked({"train": COLUMNS, "eval": {"held": named}})
    assert (fields(source.train), fields(source.evaluations["held"])) == (nothing, silver)


def test_a_prompt_has_the_chat_that_was_rendered() -> None:
    source = asked({"train": {**COLUMNS, "system": "Be brief.", "instruction": "Think."}}, max_prompt_tokens=9)
    first = [(message.role, message.content) for message in source.train[0].messages]
    assert first == [("system", "Be brief."), ("user", "number 0\nThink.")]


@holds("data.train.format", "data.eval.*.format")
def test_each_format_reads_its_own_columns() -> None:
    for train, held in ((COLUMNS, GSM8K), (GSM8K, COLUMNS)):
        source = asked({"train": train, "eval": {"held": held}})
        found = (read(source.train), read(source.evaluations["held"]))
        assert found == ((NUMBERS, SUMS) if train is COLUMNS else (SUMS, NUMBERS))


@holds("rollout.max_prompt_tokens")
def test_a_longer_prompt_is_refused() -> None:
    assert asked({"train": COLUMNS}, max_prompt_tokens=2)
    with pytest.raises(DataError, match=r"has 2 prompt tokens, and `rollout\.max_prompt_tokens` is 1"):
        asked({"train": COLUMNS}, max_prompt_tokens=1)


@each_key("key, value", [("rollout.prompts_per_step", 3), ("seed", 6)])
def test_a_step_asks_so_many_rows_in_the_order_of_the_seed(key: str, value: int) -> None:
    source = asked({"train": COLUMNS}, **({"prompts_per_step": value} if key != "seed" else {}))
    found = source.prompts_for(1)
    assert isinstance(found, Prompts)
    assert len(found.rows) == (value if key != "seed" else 1)
    if key == "seed":
        orders = []
        for seed in (5, value):
            recipe = Recipe.model_validate({**BASE, "seed": seed, "data": {"train": COLUMNS}})
            rollout = recipe.rollout.model_copy(update={"prompts_per_step": 4})
            template = PromptTemplate(Words())
            seeded = PromptSource.load(recipe.data, rollout, template, seed=recipe.seed)
            orders.append([row.text for row in seeded.prompts_for(1).rows])
        assert sorted(orders[0]) == sorted(orders[1]) == [q for q, _ in NUMBERS]
        assert orders[0] != orders[1]
