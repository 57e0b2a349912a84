"""`epochs` replaces `steps`: it is converted with the number of rows when the recipe is read, and is a fixed number
afterwards."""

from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from ppoctl.core.errors import DataError, MissingAssetError, RecipeError
from ppoctl.core.finding import note
from ppoctl.recipe.loading.load import examine, load
from ppoctl.recipe.loading.write import recipe_as_toml
from recipe.conftest import SMALLEST, Write, refusal

IN_EPOCHS = SMALLEST.replace("steps = 10", "epochs = 3")
ROW = '{"question": "1", "answer": "#### 1"}\n'
PARQUET = 'format = "columns"\npath = "train.parquet"\nprompt = "q"\nanswer = "q"'


def test_epochs_become_whole_steps_rounded_down(write: Write) -> None:
    write(ROW * 5 + "\n" + ROW, "train.jsonl")  # a blank line is not a row
    loaded, found = examine([write(IN_EPOCHS)], [], {})
    assert loaded is not None
    # 3 x 6 rows are 4 steps of 4 prompts: two rows of an epoch begin the next, and the last two are not used.
    assert (loaded.recipe.steps, loaded.recipe.epochs) == (4, None)
    text = "`epochs` = `3` of 6 rows: 4 steps of 4 prompts; 2 rows of the last epoch are not used"
    assert found == [note(text, kind="recipe")]
    assert loaded.origins["steps"] == "r.toml:2"
    assert load([write(recipe_as_toml(loaded.recipe), "kept.toml")], [], {}).recipe == loaded.recipe
    fewer, found = examine([write(IN_EPOCHS)], ["data.train.max_rows=4"], {})
    assert fewer is not None
    assert (fewer.recipe.steps, found[0].what) == (3, "`epochs` = `3` of 4 rows: 3 steps of 4 prompts")


def test_epochs_count_parquet_rows(write: Write) -> None:
    file = write(IN_EPOCHS.replace('format = "gsm8k"\npath = "train.jsonl"', PARQUET))
    parquet.write_table(pyarrow.table({"q": list("abcdefg")}), "train.parquet")
    assert load([file], [], {}).recipe.steps == 3 * 7 // 4


def test_stronger_layer_decides_between_steps_and_epochs(write: Write) -> None:
    write(ROW * 8, "train.jsonl")
    steps, epochs = write(SMALLEST, "steps.toml"), write(IN_EPOCHS, "epochs.toml")
    variants = [
        load([steps], ["epochs=1"], {}),
        load([epochs], ["steps=7"], {}),
        load([steps, epochs], [], {}),
        load([epochs], [], {"PPOCTL_STEPS": "9"}),
    ]
    assert [loaded.recipe.steps for loaded in variants] == [2, 7, 6, 9]
    with pytest.raises(RecipeError, match=r"^--set: `steps` and `epochs` are both set"):
        load([steps], ["steps=7", "epochs=1"], {})


def test_uncountable_epochs_are_reported_once(write: Write) -> None:
    file = write(IN_EPOCHS)
    with pytest.raises(MissingAssetError, match=r"^r.toml:\d+: `data.train.path` is `/[^\n]*`: no such file$"):
        load([file], [], {})
    for sets in ([], ["data.train.path=$NOWHERE/x.jsonl"]):
        loaded, problems = examine([file], sets, {})
        assert (loaded, len(problems)) == (None, 1)
    write(ROW, "train.jsonl")
    with pytest.raises(DataError, match=r"^r.toml:2: `epochs` is `1`: 1 rows of `data.train` do not"):
        load([write(IN_EPOCHS.replace("3", "1", 1))], [], {})


@pytest.mark.parametrize(("value", "says"), [("0", "must be at least 1"), ("1.5", "must be a whole number")])
def test_invalid_epochs_value_raises(write: Write, value: str, says: str) -> None:
    write(ROW * 8, "train.jsonl")
    assert refusal([write(SMALLEST)], [f"epochs={value}"], {}).message == f"--set: `epochs` is `{value}`: {says}"


def test_epochs_count_multiple_files_and_mix_weights(write: Write) -> None:
    write(ROW * 5, "rows/a.jsonl")
    write(ROW * 3, "rows/b.jsonl")
    file = write(IN_EPOCHS)
    assert load([file], ["data.train.path=rows"], {}).recipe.steps == 3 * 8 // 4
    assert load([file], ["data.train.path=['rows/*.jsonl', 'rows/a.jsonl']"], {}).recipe.steps == 3 * 13 // 4
    source = "{format='gsm8k', path='rows/%s.jsonl', weight=%s}"
    mix = f"data.train={{format='mix', sources={{a={source % ('a', 0.4)}, b={source % ('b', 3.0)}}}}}"
    assert load([file], [mix], {}).recipe.steps == 3 * (2 + 9) // 4


def test_epochs_of_rows_counted_only_on_read_raise(write: Write) -> None:
    write(ROW * 5, "train.jsonl")
    file = write(IN_EPOCHS)
    with pytest.raises(
        RecipeError, match=r'the rows of \[data.train\], with `duplicates = "drop"`, are counted only'
    ):
        load([file], ["data.train.duplicates=drop"], {})
    with pytest.raises(
        RecipeError, match=r"the rows of \[data.train\], which are not in a file, are counted only when they are"
    ):
        load([file], ["data.train={format='python', function='x.py:rows'}"], {})


def test_data_paths_start_at_recipe_folder_or_variable(write: Write, tmp_path: Path) -> None:
    text = SMALLEST.replace('path = "train.jsonl"', 'path = ["a/*.jsonl", "$ROWS/b"]\nprompt_file = "frame.txt"')
    file = write(text + "[data.eval.x]\nformat = 'python'\nfunction = 'load.py:rows'\n", "deep/r.toml")
    table = "{format='columns', prompt='q', answer='a', dataset={path='%s'}}"
    sets = [f"data.eval.{name}={table % path}" for name, path in (("hub", "org/rows"), ("own", "./rows"))]
    data = load([file], sets, {"ROWS": "/rows"}).recipe.data
    assert data.train.path == (f"{tmp_path}/deep/a/*.jsonl", "/rows/b")
    assert data.train.prompt_file == f"{tmp_path}/deep/frame.txt"
    assert data.eval["x"].function == f"{tmp_path}/deep/load.py:rows"
    assert [data.eval[name].dataset.path for name in ("hub", "own")] == ["org/rows", f"{tmp_path}/rows"]


def test_epochs_with_dynamic_sampling_are_refused(write: Write) -> None:
    write(ROW * 8, "train.jsonl")
    caught = refusal([write(IN_EPOCHS)], ["rollout.groups={}", "rollout.samples_per_prompt=2"], {})
    assert caught.message == (
        "r.toml:2: `epochs` is `3`, but with [rollout.groups] the prompts of a step depend on the scores, so no "
        "number of steps is an epoch"
    )
    assert caught.hint == "write `steps` in place of `epochs`"
