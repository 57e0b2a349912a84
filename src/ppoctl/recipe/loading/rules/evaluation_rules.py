"""Rules about `[eval]`: estimates have enough responses, and a recipe names only metrics that a pass of the
evaluation reports.

See `all_rules`.
"""

from collections.abc import Iterator

from ppoctl.core import metric_registry
from ppoctl.core.finding import Finding, conflict
from ppoctl.core.key_path import KeyPath
from ppoctl.data.row_tables import sources_of
from ppoctl.recipe.loading.rules.rows_rules import has_truth
from ppoctl.recipe.schema import Recipe

_SAMPLES: KeyPath = ("eval", "samples_per_prompt")
_FIRST: KeyPath = ("eval", "first_step")
_PASSES: KeyPath = ("eval", "passes")
_MOST_VOTES = 1000
"""Maximum number of responses for `eval.maj_at`: binomial coefficients of larger numbers exceed the range of
floats."""


def check_eval_sample_counts(recipe: Recipe) -> Iterator[Finding]:
    table = recipe.eval
    for name, numbers in (("pass_at", table.pass_at), ("maj_at", table.maj_at)):
        most = max(numbers, default=0)
        if most > table.samples_per_prompt:
            message = f"`eval.{name}` needs {most} responses per prompt, but fewer are generated"
            yield conflict(message, (("eval", name), _SAMPLES), f"--set eval.samples_per_prompt={most}")
        if min(numbers, default=1) < 1:
            yield conflict(f"`eval.{name}` contains a number below 1", (("eval", name),))
        if len(set(numbers)) != len(numbers):
            yield conflict(f"`eval.{name}` contains a number twice", (("eval", name),))
    if table.maj_at and not recipe.reward.reads_answers:
        message = "`eval.maj_at` counts votes for answers, but this reward extracts no answers"
        yield conflict(message, (("eval", "maj_at"), ("reward", "kind")))
    if table.maj_at and table.samples_per_prompt > _MOST_VOTES:
        yield conflict(f"votes are counted for at most {_MOST_VOTES} responses", (("eval", "maj_at"), _SAMPLES))


def check_sampled_eval_keys(recipe: Recipe) -> Iterator[Finding]:
    table = recipe.eval
    if "sampled" in table.modes:
        return
    for name in ("samples_per_prompt", "temperature", "top_p", "top_k", "min_p", "pass_at", "maj_at"):
        if getattr(table, name) != type(table).model_fields[name].default:
            yield conflict(
                f"`eval.{name}` belongs to the sampled pass, but there is none",
                (("eval", name), _PASSES),
                "--set eval.passes=both",
            )


def check_first_evaluation(recipe: Recipe) -> Iterator[Finding]:
    table = recipe.eval
    if table.first_step is None:
        return
    if table.every_steps == 0:
        yield conflict(
            "`eval.first_step` is the step of the first of several evaluations, but `eval.every_steps` sets none",
            (_FIRST, ("eval", "every_steps")),
            "--set eval.every_steps=10",
        )
    elif table.first_step > recipe.steps:
        message = f"the first evaluation follows step {table.first_step} of a run of {recipe.steps} steps"
        yield conflict(message, (_FIRST, ("steps",)))


def not_evaluated(recipe: Recipe, name: str, key: KeyPath) -> Iterator[Finding]:
    """Yield the reasons why no evaluation of this recipe reports the metric of one of its sets."""
    table, metric = recipe.eval, name.rsplit("/", 1)[-1]
    mode = "greedy" if metric.startswith("greedy_") else "sampled"
    metric = metric.removeprefix("greedy_").removesuffix("_stderr")
    if mode not in table.modes:
        yield conflict(
            f"`{name}` belongs to the {mode} pass, but there is none", (key, _PASSES), "--set eval.passes=both"
        )
        return
    if metric_registry.is_custom(name):
        if table.metrics is None:
            yield conflict(
                f"`{name}` belongs to a custom metrics function, but there is none", (key, ("eval", "metrics"))
            )
        return
    if metric in ("truncated_frac", "response_tokens_mean"):
        return
    tables = sources_of(recipe.data.eval[metric_registry.eval_set(name) or ""]).values()
    if recipe.reward.reads_truth and not any(has_truth(table) for table in tables):
        message = f"`{name}` is computed from scores, but the rows of this set have no ground truth"
        yield conflict(message, (key, ("reward", "kind")))
    if table.pass_score is None and metric.startswith(("score_mean", "best_at_")):
        yield conflict(
            f"`{name}` requires `eval.pass_score`; without it, `pass_at_k` uses the scores themselves", (key,)
        )
    count = metric_registry.responses_asked(name)
    key_of_k = "maj_at" if metric.startswith("maj_at_") else "pass_at"
    if count is not None and metric != "pass_at_1" and count not in getattr(table, key_of_k):
        yield conflict(f"`{name}` needs {count} in `eval.{key_of_k}`", (key,), f"--set 'eval.{key_of_k}=[{count}]'")
