"""All checks of the model, the data and the reward of a recipe, in one pass."""

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from ppoctl.algorithms.estimators.python import PythonAdvantages
from ppoctl.algorithms.role_model import lora_starts, model_of, own_models, trainable_of
from ppoctl.algorithms.roles import head_of
from ppoctl.algorithms.sizes import response_tokens, window_tokens
from ppoctl.algorithms.stages.loss_tables import PythonPolicyLoss
from ppoctl.core.errors import EnvironmentProblemError, PpoctlError
from ppoctl.core.finding import Finding, from_error, note, once, problem, require_none
from ppoctl.core.key_path import KeyPath, dotted
from ppoctl.core.recipe_table import Table
from ppoctl.data.chat import ChatTemplate
from ppoctl.data.index import Counted
from ppoctl.data.row_tables import AnyRows, StoredRows, sources_of
from ppoctl.environments.environment_table import EpisodeTable
from ppoctl.models.bundled_configs import carried_folder, source_of
from ppoctl.models.convert.peft_folder import PeftFolder, require_fits
from ppoctl.models.folder import local_folder
from ppoctl.models.shape_reader import read_shape, shape_if_known
from ppoctl.models.trainable_tables import AdaptersTable
from ppoctl.recipe.call_format import call_format_of
from ppoctl.recipe.generator_limits import device_of_the_build
from ppoctl.recipe.loading.capabilities import says, wanting
from ppoctl.recipe.loading.rules.rows_rules import TAKEN_ARGUMENTS
from ppoctl.recipe.paths import resolved_uri
from ppoctl.recipe.schema import Recipe
from ppoctl.recipe.schema_tree import values
from ppoctl.rewards.metric_function import MetricFunction
from ppoctl.rewards.model_reward import ModelScorer
from ppoctl.rewards.python_reward import PythonScorer
from ppoctl.rewards.scorer_table import RewardTable
from ppoctl.start.preflight.conversations import conversation_notes
from ppoctl.start.preflight.model_checks import find_model, model_faults, require_own_model, require_reward_model
from ppoctl.start.preflight.prompt_checks import RowChecks
from ppoctl.start.preflight.tokenizer_checks import stop_errors

OriginOf = Callable[[KeyPath], str]
"""Function that returns where a key was set, as text."""


def check(
    recipe: Recipe,
    place: OriginOf = lambda _: "",
    *,
    rows: bool = True,
    device: str | None = None,
    counted: Counted | None = None,
) -> list[Finding]:
    """Check the model, the tokenizer and its chat template, and the rewards.

    With `rows`, check also every row of the data, and the environment variable with the address of MLflow.

    `recipe` may lack tables and keys that are wrong (`loading.partial`). `device` is the device of the generator
    (vLLM), `cpu` or `gpu`; None means the device that the installed vLLM was built for. `counted` is called with the
    number of rows that were read.
    """
    path = getattr(getattr(recipe, "model", None), "path", None)
    found = list(_models(recipe, path, place, device)) if isinstance(path, str) and not path.startswith("$") else []
    template, own = _template(path, place)
    found += (finding for finding in own if finding.what not in {known.what for known in found})
    if hasattr(recipe, "requires") and hasattr(recipe, "without"):
        lacking = (f"{says(name)}; training requires `--without {name}`" for name in wanting(recipe))
        found += (note(text, kind="recipe") for text in lacking)
    reward = _reward(recipe)
    found += _functions(recipe, reward, place)
    usable, of_environments = _usable_environments(recipe, template, place)
    found += of_environments
    if rows:
        uri = getattr(getattr(recipe, "tracking", None), "uri", None)
        found += _tried("mlflow", place(("tracking", "uri")), lambda: resolved_uri(uri))
        folder = local_folder(path) if isinstance(path, str) else None
        rollout = getattr(recipe, "rollout", None)
        checks = RowChecks(folder, template, getattr(rollout, "max_prompt_tokens", None), counted)
        for key, table in _datasets(recipe):
            enough = getattr(rollout, "prompts_per_round", 1) if key[1] == "train" else 1
            of_round = getattr(rollout, "round_key", "rollout.prompts_per_step")
            name = ".".join(key[1:])
            prepared = partial(checks.examine, table, name, reward=reward, environment=usable.get(name))
            where = place((*key, "path" if getattr(table, "path", None) else "format"))
            for result in prepared(at_least=enough, key=of_round):
                if isinstance(result, str):
                    found.append(note(result, kind="data"))
                else:
                    found.append(from_error(result, where, kind="data"))
    return once(found)


def _models(recipe: Recipe, path: str, place: OriginOf, device: str | None) -> Iterator[Finding]:
    """Yield the findings on the models of all roles. `path` is `model.path`."""
    for error in model_faults(path, device or device_of_the_build()):
        yield from_error(error, place(("model", "path")), kind="model")
    yield from (note(text, kind="model") for text in _carried(path))
    for name, table in own_models(recipe).items():
        own = getattr(table, "path", None)
        if isinstance(own, str) and not own.startswith("$"):
            yield from _noted("model", place(("model", name)), partial(require_own_model, name, own, path))
            yield from _window(recipe, own, name, place)
    yield from _lora_starts(recipe, place)
    yield from _call_format(recipe, path, place)
    yield from _stops(recipe, path, place)
    yield from _window(recipe, path, "model", place)


def _functions(recipe: Recipe, reward: RewardTable | None, place: OriginOf) -> Iterator[Finding]:
    """Yield the findings on scorers, and on functions of the user."""
    for below, scorer in () if reward is None else reward.scorers.items():
        key = ("reward", *below)
        if not isinstance(scorer, ModelScorer):
            named = (*key, "function" if isinstance(scorer, PythonScorer) else "kind")
            yield from _tried("reward", place(named), partial(scorer.require_there, dotted(key)))
        elif not scorer.path.startswith("$"):
            yield from _tried("reward", place((*key, "path")), partial(require_reward_model, scorer, dotted(key)))
    measures = getattr(getattr(recipe, "eval", None), "metrics", None)
    if isinstance(measures, MetricFunction):
        yield from _tried("function", place(("eval", "metrics", "function")), measures.require_there)
    for key, own in _training_functions(recipe):
        yield from _tried("function", place((*key, "function")), own.called.require_there)


def _training_functions(recipe: Recipe) -> Iterator[tuple[KeyPath, PythonPolicyLoss | PythonAdvantages]]:
    """Yield the tables that name a loss or an estimator of the user, if all of their keys are right."""
    ppo = getattr(recipe, "ppo", None)
    for name in ("policy_loss", "advantages"):
        table = getattr(ppo, name, None)
        if isinstance(table, PythonPolicyLoss | PythonAdvantages) and _has_all_keys(table):
            yield ("ppo", name), table


def require(recipe: Recipe) -> None:
    """Raise one error with one line for each problem of the recipe. This check runs before an engine starts.

    Rows are not checked: the startup of a run reads the rows, and raises the same messages.
    """
    require_none(check(recipe, rows=False))


def _noted(kind: str, where: str, notes: Callable[[], Iterable[str]]) -> Iterator[Finding]:
    """Yield the notes that a check returns, or the error that it raises."""
    try:
        for text in notes():
            yield note(text, kind=kind)
    except PpoctlError as error:
        yield from_error(error, where, kind=kind)


def _tried(kind: str, where: str, run_check: Callable[[], object]) -> Iterator[Finding]:
    """Yield the error that a check raises."""
    try:
        run_check()
    except PpoctlError as error:
        yield from_error(error, where, kind=kind)


def _lora_starts(recipe: Recipe, place: OriginOf) -> Iterator[Finding]:
    """Check the adapters that roles start from, if all keys of their tables are right."""
    for role, start in lora_starts(recipe).items():
        table = recipe.trained[role]
        if isinstance(table.train, AdaptersTable) and _has_all_keys(table.train.lora) and not start.startswith("$"):
            key = (role, "train", "lora", "start")
            yield from _tried("model", place(key), partial(_require_start, recipe, role, dotted(key)))


def _require_start(recipe: Recipe, role: str, key: str) -> None:
    """Raise an error if a role cannot start from its adapter: no folder, not a plain LoRA, another model, or other
    settings than those of the recipe. `key`: of the folder. Without the model of the role, which is reported as
    missing, only the folder is checked."""
    start = lora_starts(recipe)[role]
    adapter = PeftFolder(find_model(start, key))
    model = local_folder(model_of(recipe, role).path)
    if model is not None and (model / "config.json").is_file():
        require_fits(
            adapter, trainable_of(recipe, role), read_shape(model), head_of(role), key.removesuffix(".start")
        )


def _call_format(recipe: Recipe, path: str, place: OriginOf) -> Iterator[Finding]:
    """Check that the model has a format of tool calls, if all keys of the environments are right."""
    folder, evaluation = local_folder(path), getattr(recipe, "eval", None)
    if folder is not None and hasattr(recipe, "environment") and hasattr(evaluation, "environment"):
        tables = [table for table in (recipe.environment, recipe.eval.environment) if table is not None]
        if all(map(_has_all_keys, tables)):
            yield from _tried("environment", place(("environment",)), partial(call_format_of, recipe, folder))


def _stops(recipe: Recipe, path: str, place: OriginOf) -> Iterator[Finding]:
    """Check stop tokens and stop strings, if all keys of the rollout are right."""
    rollout, shape = getattr(recipe, "rollout", None), shape_if_known(path)
    if rollout is not None and _has_all_keys(rollout):
        size = None if shape is None else shape.vocab_size
        try:
            for key, error in stop_errors(rollout, path, local_folder(path), size):
                yield from_error(error, place(("rollout", key)), kind="recipe")
        except EnvironmentProblemError:
            pass  # the check of the model reports a tokenizer that cannot be read


def _carried(path: str) -> Iterator[str]:
    """Yield a note if the configuration of the model is not from the folder of the model."""
    folder = None if local_folder(path) else carried_folder(path)
    if folder is not None:
        yield f"the configuration of `{path}` is from a config.json that ships with the recipes ({source_of(folder)})"


def _template(path: object, place: OriginOf) -> tuple[ChatTemplate | None, list[Finding]]:
    """Return the model's chat template, and the finding about it. The template is None if the model is not on this
    machine, or the template cannot be used."""
    folder = local_folder(path) if isinstance(path, str) else None
    if folder is None or not (folder / "tokenizer_config.json").is_file():
        return None, []
    try:
        template = ChatTemplate.of_folder(folder)
    except PpoctlError as error:
        return None, [from_error(error, place(("model", "path")), kind="model")]
    if template.text is not None:
        reads = "the model's chat template reads the clock: all prompts of a run have the time of its creation"
        return template, [note(reads, kind="model")] if template.reads_clock else []
    return template, [note(f"the model in `{folder}` has no chat template: prompts are plain text", kind="model")]


def _usable_environments(
    recipe: Recipe, template: ChatTemplate | None, place: OriginOf
) -> tuple[dict[str, EpisodeTable], Iterable[Finding]]:
    """Check the environments of all data sets, and the chat template with them. Return the environments that start,
    by the name of the set, and the findings, without repetitions."""
    checked, usable, found = set[object](), dict[str, EpisodeTable](), dict[Finding, None]()
    starts: dict[KeyPath, bool] = {}
    for key, table in _datasets(recipe):
        name = ".".join(key[1:])
        environment = _environment(recipe, name)
        if environment is None:
            continue
        own = ("environment",) if environment is getattr(recipe, "environment", None) else ("eval", "environment")
        if own not in starts:
            starts[own], problems = _starts(environment, own, place)
            found |= dict.fromkeys(problems)
        if not starts[own]:
            continue
        usable[name] = environment
        if template is None or template.text is None:
            continue
        for single in sources_of(table).values():
            if not single.template_args.keys().isdisjoint(TAKEN_ARGUMENTS):
                continue  # a rule refuses them, and so would the template
            case = (own, json.dumps(single.template_args, sort_keys=True))
            if case not in checked:
                checked.add(case)
                notes = partial(conversation_notes, template, environment, single.template_args, dotted(own))
                found |= dict.fromkeys(_noted("environment", place((*own, "kind")), notes))
    return usable, found


def _starts(environment: EpisodeTable, key: KeyPath, place: OriginOf) -> tuple[bool, list[Finding]]:
    """Return whether processes of all kinds of an environment start, and its problems: what this machine lacks, or
    else why a process does not start."""
    lacks, fails = list[Finding](), list[Finding]()
    for path, kind in environment.kinds.items():
        where = place((*key, *path, "path" if hasattr(kind, "path") else "kind"))
        lacks += _tried("environment", where, partial(kind.require_there, dotted((*key, *path))))
        fails += _tried("environment", where, kind.schemas)
    return not fails, lacks or fails


def _environment(recipe: Recipe, name: str) -> EpisodeTable | None:
    """Return the environment of a set; None: it has none, or any of its keys is wrong."""
    try:
        environment = recipe.environment_of(name)
        all(True for _ in (() if environment is None else values(environment)))
    except AttributeError:
        return None
    return environment


def _datasets(recipe: Recipe) -> Iterator[tuple[KeyPath, AnyRows]]:
    """Yield the complete tables of the data.

    If a path of a table contains an environment variable that is not set, the table is skipped: loading the recipe
    has already reported the error.
    """
    data = getattr(recipe, "data", None)
    tables: dict[KeyPath, AnyRows | None] = {("data", "train"): getattr(data, "train", None)}
    tables.update({("data", "eval", name): table for name, table in (getattr(data, "eval", None) or {}).items()})
    for key, table in tables.items():
        if table is not None and _is_complete(table) and all(map(_is_complete, sources_of(table).values())):
            yield key, table


def _is_complete(table: AnyRows) -> bool:
    if not _has_all_keys(table):
        return False
    if not isinstance(table, StoredRows):
        return True
    named = (table.path or "",) if isinstance(table.path, str | None) else table.path
    return (table.path is None) != (table.dataset is None) and not any(path.startswith("$") for path in named)


def _has_all_keys(table: Table) -> bool:
    """Whether no key of the table is wrong (`loading.partial`)."""
    return all(hasattr(table, name) for name in type(table).model_fields)


def _reward(recipe: Recipe) -> RewardTable | None:
    """Return the reward table; None if any of its keys is wrong."""
    try:
        all(True for _ in values(recipe.reward))
    except AttributeError:
        return None
    return recipe.reward


def _window(recipe: Recipe, path: str, whose: str, place: OriginOf) -> Iterator[Finding]:
    """Yield a problem if prompt and response together may be longer than the context of the model.

    The generator (vLLM) and the trainer would fail at the first long response or, worse, continue with invalid
    positions.
    """
    shape = shape_if_known(path)
    try:
        window = window_tokens(recipe.rollout, response_tokens(recipe))
    except AttributeError:  # a part of the recipe is wrong (`loading.partial`)
        return
    if shape is not None and window > shape.max_positions:
        key = ("rollout", "max_new_tokens") if recipe.environment is None else ("environment", "tokens")
        parts = f"`rollout.max_prompt_tokens` `{recipe.rollout.max_prompt_tokens}` + `{dotted(key)}` "
        parts += f"`{response_tokens(recipe)}`"
        message = f"a window of {window} tokens ({parts}) does not fit the {whose}'s {shape.max_positions} positions"
        yield problem(message, place(key), f"lower `{dotted(key)}` or `rollout.max_prompt_tokens`")
