"""Rules about `[eval]`: estimates have the responses they take, and figures are asked for only where a pass reports
them. See `rules`."""

from collections.abc import Iterator

from ppoctl import metric_registry
from ppoctl.loading.problems import Conflict, rules_of
from ppoctl.loading.rules.rows import has_truth
from ppoctl.recipe.origins import KeyPath
from ppoctl.recipe.rows import sources_of
from ppoctl.recipe.schema import Recipe

_SAMPLES: KeyPath = ("eval", "samples_per_prompt")
_PASSES: KeyPath = ("eval", "passes")
_MOST_VOTES = 1000
"""Responses over which votes are counted exactly: binomials of more leave the range of floats."""


def check_eval_sample_counts(recipe: Recipe) -> Iterator[Conflict]:
    table = recipe.eval
    for name, numbers in (("pass_at", table.pass_at), ("maj_at", table.maj_at)):
        most = max(numbers, default=0)
        if most > table.samples_per_prompt:
            says = f"`eval.{name}` speaks of {most} responses to a prompt, and fewer are drawn"
            yield Conflict(says, (("eval", name), _SAMPLES), f"--set eval.samples_per_prompt={most}")
        if min(numbers, default=1) < 1:
            yield Conflict(f"`eval.{name}` has a number of responses below 1", (("eval", name),))
        if len(set(numbers)) != len(numbers):
            yield Conflict(f"`eval.{name}` has a number twice", (("eval", name),))
    if table.maj_at and not recipe.reward.reads_answers:
        says = "`eval.maj_at` counts votes for answers, and this reward reads none out of a response"
        yield Conflict(says, (("eval", "maj_at"), ("reward", "kind")))
    if table.maj_at and table.samples_per_prompt > _MOST_VOTES:
        yield Conflict(f"votes of more than {_MOST_VOTES} responses are not counted", (("eval", "maj_at"), _SAMPLES))


def check_sampled_eval_keys(recipe: Recipe) -> Iterator[Conflict]:
    table = recipe.eval
    if "sampled" in table.modes:
        return
    for name in ("samples_per_prompt", "temperature", "top_p", "top_k", "min_p", "pass_at", "maj_at"):
        if getattr(table, name) != type(table).model_fields[name].default:
            yield Conflict(
                f"`eval.{name}` is of the sampled pass, and there is none",
                (("eval", name), _PASSES),
                "--set eval.passes=both",
            )


EVALUATION_RULES = rules_of(globals())


def not_evaluated(recipe: Recipe, name: str, key: KeyPath) -> Iterator[Conflict]:
    """Reasons why no evaluation of this recipe reports the metric, which is of one of its sets."""
    table, figure = recipe.eval, name.rsplit("/", 1)[-1]
    mode = "greedy" if figure.startswith("greedy_") else "sampled"
    figure = figure.removeprefix("greedy_").removesuffix("_stderr")
    if mode not in table.modes:
        yield Conflict(f"`{name}` is of the {mode} pass, and there is none", (key, _PASSES), "--set eval.passes=both")
        return
    if metric_registry.is_custom(name):
        if table.metrics is None:
            yield Conflict(f"`{name}` is of a function of one's own, and there is none", (key, ("eval", "metrics")))
        return
    if figure in ("truncated_frac", "response_tokens_mean"):
        return
    tables = sources_of(recipe.data.eval[metric_registry.eval_set(name) or ""]).values()
    if recipe.reward.reads_truth and not any(has_truth(table) for table in tables):
        says = f"`{name}` is of scores, and the rows of this set have no ground truth to compare with"
        yield Conflict(says, (key, ("reward", "kind")))
    if table.pass_score is None and figure.startswith(("score_mean", "best_at_")):
        yield Conflict(f"`{name}` needs `eval.pass_score`; without it scores are what passes", (key,))
    k = metric_registry.responses_asked(name)
    asked = "maj_at" if figure.startswith("maj_at_") else "pass_at"
    if k is not None and figure != "pass_at_1" and k not in getattr(table, asked):
        yield Conflict(f"`{name}` needs {k} in `eval.{asked}`", (key,), f"--set 'eval.{asked}=[{k}]'")
