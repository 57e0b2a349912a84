"""The metric registry: names are unique, documented and defined once; patterns match one part; unknown names are
rejected."""

import ast
import re

import pytest

from conventions.conftest import nodes
from for_each import for_each
from ppoctl.cli.manual.guides import groups, guide, guided
from ppoctl.core.metric_registry import METRICS, ON_THE_CONSOLE, Metric, eval_set, find, named, unknown
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.schema import Recipe
from ppoctl.show.tracking import health


def test_metric_names_are_unique_and_described() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    assert all(metric.unit and metric.description for metric in METRICS)


@for_each(METRICS)
def test_every_metric_name_finds_its_entry(metric: Metric) -> None:
    assert find(metric.name.replace("{set}", "my-set").replace("{k}", "12")) is metric


@pytest.mark.parametrize(
    "name",
    [
        "eval/a/b/pass_at_1",
        "eval//pass_at_1",
        "eval/a/pass_at_0",
        "eval/a/pass_at_x",
        "eval/a/greedy_pass_at_2",
        "time/_s",
        "time/rollouts_s",
        "throughput/x",
        "reward/score_mean ",
    ],
)
def test_metric_pattern_matches_one_name_part(name: str) -> None:
    assert find(name) is None


def test_misspelled_metric_gets_suggestion() -> None:
    assert unknown("eval/x/pas_at_1") == "no metric is called `eval/x/pas_at_1`; did you mean `eval/x/pass_at_1`?"
    assert unknown("train/entropy_mean").endswith("did you mean `policy/entropy_mean`?")


def test_unregistered_metric_name_raises() -> None:
    assert named("value", "clip_frac") == "value/clip_frac"
    with pytest.raises(KeyError, match="value/value_clip_frac"):
        named("value", "value_clip_frac")


def test_eval_set_is_parsed_from_metric_name() -> None:
    assert eval_set("eval/aime/pass_at_1") == "aime"
    assert eval_set("reward/score_mean") is None


def test_metric_names_are_literals_only_in_registry() -> None:
    """Docstrings may mention a metric; code takes its name from the registry."""
    names = {metric.name for metric in METRICS}
    written = [
        f"{module}:{node.lineno} {node.value}"
        for module, found in nodes().items()
        if str(module) not in ("core/metric_registry.py", "core/evaluation_metrics.py", "core/speed_metrics.py")
        for node in found
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names
    ]
    assert not written


# --- guides -------------------------------------------------------------------------------------------------------


def test_console_and_health_metrics_have_guides() -> None:
    """Every user sees the metrics of the console and of health rules."""
    shown = {*ON_THE_CONSOLE.values(), *(name for names in health.METRICS.values() for name in names)}
    assert shown - set(guided()) == set()
    assert len(guided()) >= 25
    # The duration of a stage depends on the task.
    assert [name for name in guided() if not _of(name).healthy and not name.startswith("time/")] == []


def _of(name: str) -> Metric:
    metric = find(name)
    assert metric is not None, name
    return metric


def test_guides_match_metrics_and_groups() -> None:
    assert [name for name in guided() if name not in {metric.name for metric in METRICS}] == []
    assert {metric.name.split("/")[0] for metric in METRICS} == set(groups())


@pytest.mark.parametrize("name", guided())
def test_guide_references_existing_keys_and_metrics(name: str) -> None:
    entry = guide(_of(name))
    assert entry is not None
    assert entry.read
    assert entry.when
    for word in re.findall(r"`([^`]*)`", f"{entry.read} {entry.when}"):
        if word.startswith("ppoctl "):
            continue  # test_commands_of_pages checks the commands of pages
        is_key = tree.keys_at(tree.of(Recipe), tuple(word.split(".")))
        assert is_key or find(word), word
