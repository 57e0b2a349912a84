"""A user's reward function: what it may return, and how its faults are reported."""

import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from ppoctl.core.batch.scores import Score, ScoreRequest
from ppoctl.core.errors import MissingAssetError, RecipeError, RewardError
from ppoctl.recipe.loading.load import load
from ppoctl.recipe.loading.write import recipe_as_toml
from ppoctl.rewards.python_reward import PythonScorer
from ppoctl.rewards.scorer_main import judge
from ppoctl.rewards.user_function import opened
from rewards.asking import request, scores_of

FILE = Path(__file__).parent / "users_functions.py"
QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
SAMPLE = replace(request("so good"), token_ids=(2, 4))


@pytest.fixture(autouse=True)
def as_in_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo in this process what a scorer process does to its own."""
    monkeypatch.setattr(sys, "path", list(sys.path))


def replies(name: str, *requests: ScoreRequest, batched: bool = False, **options: Any) -> list[dict[str, Any]]:
    function = opened(function=f"{FILE}:{name}", options=options, batched=batched, limit_s=1.0)
    return judge(function, requests)


def test_python_reward_scores_with_function_of_recipe() -> None:
    table = PythonScorer(kind="python", function=f"{FILE}:contains", options={"scale": 2.0})
    good, bad, failed = scores_of(table, SAMPLE, request("no"), request("x", None))
    assert (good, bad) == (Score(2.0, "ok"), Score(0.0, "ok"))
    line = "return scale * float(sample.truth in sample.response)"
    assert failed.message.endswith(f"(users_functions.py:10, in `contains`: `{line}`)")


def test_python_reward_batches_samples_as_configured() -> None:
    table = PythonScorer(kind="python", function=f"{FILE}:many", batched=True, batch_samples=4)
    concurrent = [score.value for score in scores_of(table, *[SAMPLE] * 6)]
    assert 3 <= max(value for value in concurrent if value is not None) <= 4


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("contains", {"value": 1.0, "extras": {}}),
        ("told", {"value": 7.0, "extras": {"known": 6.0}}),
        ("votes", {"value": 1.0, "extras": {"short": 1.0}, "answer": "so good"}),
        ("of_tokens", {"value": 3.0, "extras": {}, "tokens": [1.0, 2.0]}),
    ],
)
def test_function_may_return_number_dict_or_token_scores(name: str, told: dict[str, Any]) -> None:
    assert replies(name, SAMPLE) == [told]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("forgets_to_return", "the function returned None: does every path through it end with `return`?"),
        ("returns_text", 'the function returned a str (`"1.0"`) as the score, not a number'),
        (
            "without_score",
            "the function returned a mapping without the required key `score`; it has `reward`",
        ),
        (
            "of_some_tokens",
            "the function returned 2 numbers for the 3 tokens of the response: a list must have one number for "
            "each of `sample.token_ids`",
        ),
        (
            "fails",
            "AttributeError: 'NoneType' object has no attribute 'strip' (users_functions.py:67, in `fails`: "
            "`return float(sample.truth.strip())`)",
        ),
    ],
)
def test_invalid_return_value_error_names_cause(name: str, says: str) -> None:
    sample = replace(SAMPLE, truth=None, token_ids=(1, 2, 3))
    assert replies(name, sample) == [{"error": says, "outcome": "error"}]


def test_deeply_nested_return_value_fails_its_own_sample_only() -> None:
    deep, good = (replace(request(text), token_ids=(1,)) for text in ("deep", "good"))
    assert replies("nests", deep, good) == [
        {"error": "the function returned a list for token 0, not a number", "outcome": "error"},
        {"value": 1.0, "extras": {}, "tokens": [1.0]},
    ]


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("nothing", {}, r"has no `nothing`; it defines compute_score, contains, fails"),
        ("COUNT", {}, r"`COUNT` of `.*` is a int, not a function"),
        ("contains", {"scal": 1}, r"and the options `scal`: got an unexpected keyword argument 'scal'"),
        ("compute_score", {}, r"is called with a sample \(`sample.response`.*missing a required argument"),
    ],
)
def test_uncallable_reward_function_raises(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises((AttributeError, TypeError), match=says):
        opened(function=f"{FILE}:{name}", options=options, batched=False, limit_s=1.0)


def test_import_failure_error_names_configured_function(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import no_such_package\n")
    with pytest.raises(RewardError) as caught:
        scores_of(PythonScorer(kind="python", function=f"{tmp_path}/mine.py:score"), SAMPLE)
    assert caught.value.message == (
        f"the scorer `{tmp_path}/mine.py:score` does not start: ModuleNotFoundError: No module named "
        "'no_such_package'"
    )
    assert caught.value.hint == "ppoctl validate RECIPE --reward"


def test_batched_function_returns_one_result_per_sample() -> None:
    assert replies("many", SAMPLE, SAMPLE, batched=True) == [{"value": 2.0, "extras": {}}] * 2
    assert "returned 1 answers for 2 samples" in replies("too_few", SAMPLE, SAMPLE, batched=True)[0]["error"]
    says = "the function returned a float (`1.0`), not a list: `batched = true` requires one answer for each sample"
    assert replies("one_for_all", SAMPLE, batched=True) == [{"error": f"TypeError: {says}"}]


def test_async_calls_run_concurrently_with_separate_deadlines() -> None:
    """One after the other, the first eight would wait for each other until the limit."""
    answers = replies("meets", *[request("8")] * 8, request("hang"), request("x"))
    assert answers[:8] == [{"value": 1.0, "extras": {}}] * 8
    assert [answer["outcome"] for answer in answers[8:]] == ["timeout", "error"]


def test_neighbor_module_is_importable_and_shadows_no_other(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("HALF = 0.5\n")
    (tmp_path / "json.py").write_text("raise SystemError('this is not the json of the library')\n")
    (tmp_path / "mine.py").write_text("import json\nfrom beside import HALF\ndef score(sample): return HALF\n")
    function = opened(function=f"{tmp_path}/mine.py:score", options={}, batched=False, limit_s=1.0)
    assert judge(function, [SAMPLE]) == [{"value": 0.5, "extras": {}}]


def test_function_path_starts_at_recipe_and_file_change_is_detected(tmp_path: Path) -> None:
    file, recipe = tmp_path / "mine.py", tmp_path / "mine.toml"
    file.write_text("def score(sample): return 1.0\n")
    recipe.write_text('[reward]\nkind = "python"\nfunction = "mine.py:score"\noptions = {a = [1, {b = 2}]}\n')
    read = load([QUICKSTART, recipe], [], {}).recipe
    kept = tmp_path / "kept.toml"
    kept.write_text(recipe_as_toml(read))
    file.write_text("def score(sample): return 2.0\n")
    reloaded = load([kept], [], {}).recipe
    assert reloaded == read
    with pytest.raises(RewardError, match=r"the reward's function has changed: .*mine.py. differs from the file"):
        reloaded.reward.open()
    accepted = load([kept], [f"reward.function={file}:score"], {}).recipe
    assert accepted.reward != read.reward
    accepted.reward.open().close()
    file.unlink()
    with pytest.raises(MissingAssetError, match=r"but the file `.*` does not exist"):
        reloaded.reward.open()


def test_package_function_has_no_file_digest(tmp_path: Path) -> None:
    read = load([QUICKSTART], ["reward={kind='python', function='package.rewards:score'}"], {}).recipe.reward
    assert isinstance(read, PythonScorer)
    assert (read.function, read.digest) == ("package.rewards:score", "")
    with pytest.raises(RecipeError, match=r"reward.function"):
        load([QUICKSTART], ["reward={kind='python', function='package.rewards'}"], {})


def test_function_paths_of_parts_and_cases_start_at_recipe(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(sample): return 1.0\n")
    function = "{kind = 'python', function = 'mine.py:score'}"
    for name, table in {
        "sum": f"parts = {{a = {function}}}",
        "choose": f"cases = {{a = {function}}}",
        "choose2": f"cases = {{a = {{kind = 'gsm8k'}}}}\notherwise = {function}",
    }.items():
        recipe = tmp_path / f"{name}.toml"
        recipe.write_text(f'[reward]\nkind = "{name.rstrip("2")}"\n{table}\n')
        singles = load([QUICKSTART, recipe], [], {}).recipe.reward.singles
        (scorer,) = (single for single in singles if single.kind == "python")  # type: ignore[attr-defined]
        assert isinstance(scorer, PythonScorer)
        assert scorer.function == f"{tmp_path}/mine.py:score"
        assert len(scorer.digest) == 64


def test_rewards_page_shows_working_function(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text("utf-8")
    code = page.partition("`my_reward.py`:\n\n")[2].partition("\n\nand in the recipe:\n\n")
    (tmp_path / "my_reward.py").write_text(dedent(code[0]))
    (tmp_path / "mine.toml").write_text(dedent(code[2].partition("\n\n- **")[0]))
    table = load([QUICKSTART, tmp_path / "mine.toml"], [], {}).recipe.reward
    assert isinstance(table, PythonScorer)
    function = opened(function=table.function, options=dict(table.options), batched=False, limit_s=1.0)
    answers = judge(function, [request("it is 42", "42"), request("no", "42")])
    assert answers == [{"value": value, "extras": {"short": 1.0}} for value in (1.1, 0.1)]
