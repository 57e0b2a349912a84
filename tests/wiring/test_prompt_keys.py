"""Prompts and ground truths come from the rows that the recipe names: from files to the requests of generator and
scorer."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from ppoctl.core.batch.prompts import Prompts
from ppoctl.core.errors import DataError
from ppoctl.data.source import PromptSource
from ppoctl.data.template import PromptTemplate
from ppoctl.recipe.loading.rules.rows_rules import check_mix_weights
from ppoctl.recipe.schema import Recipe
from ppoctl.run.wire.engines import prompt_source
from wiring.cases import each_key, holds
from wiring.harness import BASE

COLUMNS = {"format": "columns", "path": "columns.jsonl", "prompt": "q", "answer": "a.gold"}
GSM8K = {"format": "gsm8k", "path": "gsm8k.jsonl"}


class WordTokenizer:
    """The tokenizer of a base model: each new word gets the next number."""

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
    """Write the files that the tables above name into the working folder."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {"q": f"number {n}", "other": f"other {n}", "a": {"gold": f"{n}", "silver": f"-{n}"}, "b": "7"}
        for n in range(4)
    ]
    (tmp_path / "columns.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "more.jsonl").write_text("".join(json.dumps({**row, "q": "more " + row["q"]}) + "\n" for row in rows))
    maths = [{"question": f"sum {n}", "answer": f"thus #### {n}"} for n in range(4)]
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in maths))
    (tmp_path / "frame.txt").write_text("Say: {question}!\n")
    lengths = [{"q": "short", "a": {"gold": "0"}}, {"q": " ".join("abcdefghij"), "a": {"gold": "1"}}]
    (tmp_path / "lengths.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lengths))
    (tmp_path / "twice.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:2] * 2))
    (tmp_path / "rows.py").write_text(
        "def numbers(word='number', count=4):\n"
        "    return [{'prompt': f'{word} {n}', 'answer': n, 'b': '7'} for n in range(count)]\n"
        "def others(): return numbers('other')\n"
    )
    (tmp_path / "gsm8k2.jsonl").write_text("".join(json.dumps({**r, "question": "two"}) + "\n" for r in maths[:2]))


class ArgumentPrintingTokenizer(WordTokenizer):
    """A tokenizer whose template prints its arguments."""

    chat_template = "{{ messages[0].content }} {{ {'thinks': thinks} if thinks is defined else {} }}"


DATASET = ("path", "name", "split")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders for the library `datasets`, with a separate cache."""
    folder = tmp_path_factory.mktemp("library")
    for name in ("one", "other"):
        (folder / name).mkdir()
        for split in ("train", "test"):
            (folder / name / f"{split}.jsonl").write_text(json.dumps({"q": f"{name} {split}"}) + "\n")
    (folder / "named").mkdir()
    configs = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in "ab")
    (folder / "named" / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    for name in "ab":
        (folder / "named" / f"{name}.jsonl").write_text(json.dumps({"q": f"{name} train"}) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        yield folder


def prompts_of(data: dict[str, Any], tokenizer: WordTokenizer | None = None, **rollout: Any) -> PromptSource:
    tables = {**BASE, "data": data, "rollout": {**BASE["rollout"], "prompts_per_step": 1, **rollout}}
    recipe = Recipe.model_validate(tables)
    return prompt_source(recipe, PromptTemplate(tokenizer or WordTokenizer()))


def read(rows: Any) -> list[tuple[str, str]]:
    return [(row.text, row.answer) for row in rows]


NUMBERS = [(f"number {n}", f"{n}") for n in range(4)]
SUMS = [(f"sum {n}", f"thus #### {n}") for n in range(4)]
PYTHON = {"format": "python", "function": "rows.py:numbers"}
CASES: list[tuple[str, dict[str, Any], Any, list[tuple[str, str]]]] = [
    ("path", COLUMNS, "more.jsonl", [(f"more {q}", a) for q, a in NUMBERS]),
    ("path", COLUMNS, ["more.jsonl", "columns.jsonl"], [*((f"more {q}", a) for q, a in NUMBERS), *NUMBERS]),
    ("path", GSM8K, "gsm8k2.jsonl", [("two", "thus #### 0"), ("two", "thus #### 1")]),
    ("prompt", COLUMNS, "other", [(f"other {n}", f"{n}") for n in range(4)]),
    ("answer", COLUMNS, "a.silver", [(f"number {n}", f"-{n}") for n in range(4)]),
    ("answer", COLUMNS, "b", [(q, "7") for q, _ in NUMBERS]),
    ("system", COLUMNS, "Be brief.", [(f"Be brief.\n\n{q}", a) for q, a in NUMBERS]),
    ("system", GSM8K, "Be brief.", [(f"Be brief.\n\n{q}", a) for q, a in SUMS]),
    ("instruction", COLUMNS, "Think.", [(f"{q}\nThink.", a) for q, a in NUMBERS]),
    ("instruction", GSM8K, "Think.", [(f"{q}\nThink.", a) for q, a in SUMS]),
    ("prompt_file", COLUMNS, "frame.txt", [(f"Say: {q}!", a) for q, a in NUMBERS]),
    ("max_rows", COLUMNS, 3, NUMBERS[:3]),
    ("max_rows", GSM8K, 2, SUMS[:2]),
    ("max_rows", PYTHON, 2, NUMBERS[:2]),
    ("function", PYTHON, "rows.py:others", [(f"other {n}", f"{n}") for n in range(4)]),
    ("options", PYTHON, {"count": 1}, NUMBERS[:1]),
    ("long_prompts", {**COLUMNS, "path": "lengths.jsonl", "long_prompts": "cut"}, "drop", [("short", "0")]),
    ("duplicates", {**COLUMNS, "path": "twice.jsonl"}, "drop", NUMBERS[:2]),
]
PLAIN = {"lengths.jsonl": [("short", "0"), (" ".join("abcdefghij"), "1")], "twice.jsonl": NUMBERS[:2] * 2}


NAMED = {"options": "options.*"}


def as_source(table: dict[str, Any]) -> dict[str, Any]:
    """Return a mix that has this table as its only source."""
    return {"format": "mix", "sources": {"only": table}}


@holds(
    *(
        f"data.{name}.{key}{NAMED.get(case[0], case[0])}"
        for case in CASES
        for name in ("train", "eval.*")
        for key in ("", "sources.*.")
    )
)
@pytest.mark.parametrize("wrapped", [dict, as_source], ids=["alone", "source"])
@pytest.mark.parametrize(("key", "table", "value", "expected"), CASES, ids=[f"{c[0]}={c[2]}" for c in CASES])
def test_rows_are_read_with_the_recipe_settings(
    key: str, table: dict[str, Any], value: Any, expected: list[tuple[str, str]], wrapped: Any
) -> None:
    plain = PLAIN.get(table.get("path", ""), SUMS if table is GSM8K else NUMBERS)
    changed = {**table, key: value}
    for tables in (
        {"train": wrapped(changed), "eval": {"held": table}},
        {"train": table, "eval": {"held": wrapped(changed)}},
    ):
        found = prompts_of(tables, max_prompt_tokens=9)
        both = (read(found.train), read(found.evaluations["held"]))
        assert both == ((expected, plain) if tables["eval"]["held"] is table else (plain, expected))


@holds(*(f"data.{name}{inside}.fields" for name in ("train", "eval.*") for inside in ("", ".sources.*")))
@pytest.mark.parametrize(
    ("wrapped", "source"), [(dict, {}), (as_source, {"source": "only"})], ids=["alone", "source"]
)
def test_prompt_has_the_reward_fields_named_in_the_recipe(wrapped: Any, source: dict[str, Any]) -> None:
    def fields(rows: Any) -> list[dict[str, Any]]:
        return [row.fields for row in rows]

    named, every = {**COLUMNS, "fields": ["b", "a.silver"]}, {**PYTHON, "fields": ["b"]}
    silver, nothing = [{"b": "7", "a.silver": f"-{n}", **source} for n in range(4)], [{}] * 4
    found = prompts_of({"train": wrapped(named), "eval": {"held": COLUMNS}})
    assert (fields(found.train), fields(found.evaluations["held"])) == (silver, nothing)
    found = prompts_of({"train": COLUMNS, "eval": {"held": wrapped(named)}})
    assert (fields(found.train), fields(found.evaluations["held"])) == (nothing, silver)
    found = prompts_of({"train": every, "eval": {"held": {**PYTHON, "fields": []}}})
    assert (fields(found.train), fields(found.evaluations["held"])) == ([{"b": "7"}] * 4, nothing)


@holds("data.train.weight", "data.eval.*.weight", "data.eval.*.sources.*.weight")
@pytest.mark.parametrize("place", ["train", "eval.held", "eval.held.sources.one"])
def test_weight_is_refused_outside_training_sources(place: str) -> None:
    table = {**COLUMNS, "weight": 2.0}
    data: dict[str, Any] = {"train": COLUMNS, "eval": {"held": COLUMNS}}
    if place == "train":
        data["train"] = table
    else:
        data["eval"]["held"] = table if place == "eval.held" else {"format": "mix", "sources": {"one": table}}
    recipe = Recipe.model_validate({**BASE, "data": data})
    (conflict,) = check_mix_weights(recipe)
    assert conflict.keys == ((*("data", *place.split(".")), "weight"),)


@holds("data.train.sources.*.weight")
def test_source_occurs_in_an_epoch_as_often_as_its_weight() -> None:
    mix = {"format": "mix", "sources": {"a": {**COLUMNS, "weight": 2.5}, "b": GSM8K}}
    found = prompts_of({"train": mix}, prompts_per_step=14)  # 2.5 * 4 + 4
    for step in (1, 2):
        texts = Counter(row.text for row in found.prompts_for(step).rows)
        assert sorted(texts.values()) == [1, 1, 1, 1, 2, 2, 3, 3]
        assert all(texts[q] == 1 for q, _ in SUMS)
    both = Counter(row.text for step in (1, 2) for row in found.prompts_for(step).rows)
    assert all(both[q] == 5 for q, _ in NUMBERS)
    assert {row.fields["source"] for row in found.prompts_for(1).rows} == {"a", "b"}


@holds(*(f"data.{name}{inside}.template_args.*" for name in ("train", "eval.*") for inside in ("", ".sources.*")))
@pytest.mark.parametrize("wrapped", [dict, as_source], ids=["alone", "source"])
def test_template_arguments_reach_the_chat_template(wrapped: Any) -> None:
    changed = wrapped({**COLUMNS, "template_args": {"thinks": False}})
    found = prompts_of({"train": changed, "eval": {"held": COLUMNS}}, tokenizer=ArgumentPrintingTokenizer())
    assert (found.train[0].text, found.evaluations["held"][0].text) == ("number 0 {'thinks': False}", "number 0 {}")
    found = prompts_of({"train": COLUMNS, "eval": {"held": changed}}, tokenizer=ArgumentPrintingTokenizer())
    assert (found.train[0].text, found.evaluations["held"][0].text) == ("number 0 {}", "number 0 {'thinks': False}")


@holds(*(f"data.{n}{i}.dataset.{key}" for n in ("train", "eval.*") for i in ("", ".sources.*") for key in DATASET))
@pytest.mark.parametrize("wrapped", [dict, as_source], ids=["alone", "source"])
def test_datasets_library_rows_follow_the_recipe(wrapped: Any, library: Path) -> None:
    def table(**keys: str) -> dict[str, Any]:
        named = {"path": str(library / "one"), **keys}
        return wrapped({"format": "columns", "prompt": "q", "dataset": named})

    def texts(**keys: str) -> list[str]:
        found = prompts_of({"train": table(**keys), "eval": {"held": table(**keys)}})
        trained, held = ([row.text for row in rows] for rows in (found.train, found.evaluations["held"]))
        assert trained == held
        return trained

    assert texts() == ["one train"]
    assert texts(split="test") == ["one test"]
    assert texts(path=str(library / "other")) == ["other train"]
    assert texts(path=str(library / "named"), name="b") == ["b train"]


def test_prompt_has_the_rendered_chat() -> None:
    source = prompts_of({"train": {**COLUMNS, "system": "Be brief.", "instruction": "Think."}}, max_prompt_tokens=9)
    first = [(message.role, message.content) for message in source.train[0].messages]
    assert first == [("system", "Be brief."), ("user", "number 0\nThink.")]


@holds(*(f"data.{name}{inside}.format" for name in ("train", "eval.*") for inside in ("", ".sources.*")))
@pytest.mark.parametrize("wrapped", [dict, as_source], ids=["alone", "source"])
def test_each_format_reads_its_own_columns(wrapped: Any) -> None:
    for train, held in ((COLUMNS, GSM8K), (GSM8K, COLUMNS)):
        source = prompts_of({"train": wrapped(train), "eval": {"held": wrapped(held)}})
        found = (read(source.train), read(source.evaluations["held"]))
        assert found == ((NUMBERS, SUMS) if train is COLUMNS else (SUMS, NUMBERS))


@holds("rollout.max_prompt_tokens")
def test_prompt_over_the_token_limit_is_refused() -> None:
    assert prompts_of({"train": COLUMNS}, max_prompt_tokens=2)
    with pytest.raises(DataError, match=r"has 2 prompt tokens, but `rollout\.max_prompt_tokens` is 1"):
        prompts_of({"train": COLUMNS}, max_prompt_tokens=1)


@each_key("key, value", [("rollout.prompts_per_step", 3), ("seed", 6)])
def test_step_has_prompts_per_step_rows_in_seed_order(key: str, value: int) -> None:
    source = prompts_of({"train": COLUMNS}, **({"prompts_per_step": value} if key != "seed" else {}))
    found = source.prompts_for(1)
    assert isinstance(found, Prompts)
    assert len(found.rows) == (value if key != "seed" else 1)
    with pytest.raises(
        DataError, match=rf"`data.train` has {len(NUMBERS)} rows, but a step takes {len(NUMBERS) + 1}"
    ):
        prompts_of({"train": COLUMNS}, prompts_per_step=len(NUMBERS) + 1)
    if key == "seed":
        orders = []
        for seed in (5, value):
            tables = {**BASE, "seed": seed, "rollout": {**BASE["rollout"], "prompts_per_step": 4}}
            recipe = Recipe.model_validate({**tables, "data": {"train": COLUMNS}})
            seeded = prompt_source(recipe, PromptTemplate(WordTokenizer()))
            orders.append([row.text for row in seeded.prompts_for(1).rows])
        assert sorted(orders[0]) == sorted(orders[1]) == [q for q, _ in NUMBERS]
        assert orders[0] != orders[1]
