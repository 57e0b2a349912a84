"""The metric registry: names are unique and explained; patterns match one part; unknown names are refused."""

import pytest

from ppoctl.errors import RecipeError
from ppoctl.recipe.metrics import METRICS, eval_set, find, require_known


def test_names_are_unique_and_explained() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    assert all(metric.unit and metric.says for metric in METRICS)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_every_name_finds_its_own_entry(metric: object) -> None:
    name = metric.name.replace("{set}", "my-set").replace("{stage}", "rollout").replace("{name}", "tokens_per_s")  # type: ignore[attr-defined]
    assert require_known(name) is metric


@pytest.mark.parametrize("name", ["eval/a/b/pass_at_1", "eval//pass_at_1", "time/_s", "reward/score_mean ", "x"])
def test_a_pattern_matches_one_part_and_no_more(name: str) -> None:
    assert find(name) is None


def test_a_misspelt_metric_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        RecipeError, match=r"no metric is called `eval/x/pass_at_2`; did you mean `eval/x/pass_at_1`\?"
    ):
        require_known("eval/x/pass_at_2")
    with pytest.raises(RecipeError, match=r"did you mean `policy/entropy_mean`\?"):
        require_known("train/entropy_mean")


def test_the_set_of_an_evaluation_metric() -> None:
    assert eval_set("eval/aime/pass_at_1") == "aime"
    assert eval_set("reward/score_mean") is None
