"""One pass over everything that can be known to be wrong with what a recipe names."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from ppoctl.data.chat import ChatTemplate
from ppoctl.errors import PpoctlError
from ppoctl.model.folder import local_folder
from ppoctl.model.reading import shape_if_here
from ppoctl.preflight.model import model_faults, require_critic
from ppoctl.preflight.prompts import Counted, require_rows
from ppoctl.recipe.generator_limits import device_of_the_build
from ppoctl.recipe.layers import told_uri
from ppoctl.recipe.origins import KeyPath
from ppoctl.recipe.problems import Problem, as_error
from ppoctl.recipe.schema import ColumnRows, Gsm8kRows, Recipe

_WINDOW = ("max_prompt_tokens", "max_new_tokens")
OriginOf = Callable[[KeyPath], str]
"""Function that says in words where a key was set."""


@dataclass
class Findings:
    """Problems and notes of one pass."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Facts that are right, and worth knowing."""

    def judged(self, *, strict: bool) -> tuple[list[Problem], list[str]]:
        """Errors and notes; unless `strict`, what is only missing on this machine is a note."""
        wrong = [problem for problem in self.problems if strict or not problem.is_missing]
        missing = [problem for problem in self.problems if problem not in wrong]
        return wrong, [*(f"{problem.says}; not checked" for problem in missing), *self.notes]


def check(
    recipe: Recipe,
    place: OriginOf = lambda _: "",
    *,
    rows: bool = True,
    device: str | None = None,
    counted: Counted | None = None,
) -> Findings:
    """Look at the model and the tokenizer with its template; with `rows` also at what training needs besides: every
    row of the data, and the variable that says where MLflow is.

    `recipe` may lack what is wrong in it (`recipe.partial`). `device`: what the generator will compute on, `cpu` or
    `gpu`; None: what the vLLM that is installed was built for. `counted`: told how many rows were read.
    """
    found = Findings()
    model = getattr(recipe, "model", None)
    path, critic = getattr(model, "path", None), getattr(getattr(model, "critic", None), "path", None)
    if isinstance(path, str) and not path.startswith("$"):
        for error in model_faults(path, device or device_of_the_build()):
            found.problems.append(_problem(error, place(("model", "path"))))
        if isinstance(critic, str) and not critic.startswith("$"):
            _try(found, place(("model", "critic")), lambda: found.notes.extend(require_critic(critic, path)))
            found.problems += _window_problems(recipe, critic, "critic", place)
        found.problems += _window_problems(recipe, path, "model", place)
    template = _template(path, found, place)
    if rows:
        uri = getattr(getattr(recipe, "tracking", None), "uri", None)
        _try(found, place(("tracking", "uri")), lambda: told_uri(uri))
        for key, table in _datasets(recipe):
            enough = getattr(getattr(recipe, "rollout", None), "prompts_per_step", 1) if key[1] == "train" else 1
            ask = partial(require_rows, table, ".".join(key[1:]), template, at_least=enough, counted=counted)
            _try(found, place((*key, "path")), ask)
    return found


def require(recipe: Recipe) -> None:
    """Raise the error of everything that cannot work, one line for each thing, before an engine starts. Rows are left
    to whoever starts, who reads them with the same sentences."""
    if problems := check(recipe, rows=False).problems:
        raise as_error(problems)


def _try(found: Findings, where: str, ask: Callable[[], object]) -> None:
    try:
        ask()
    except PpoctlError as error:
        found.problems.append(_problem(error, where))


def _problem(error: PpoctlError, where: str) -> Problem:
    return Problem(where, error.message, error.hint, type(error))


def _template(path: object, found: Findings, place: OriginOf) -> ChatTemplate | None:
    """The model's chat template; None where there is no model to ask, or none that can be used."""
    folder = local_folder(path) if isinstance(path, str) else None
    if folder is None or not (folder / "tokenizer_config.json").is_file():
        return None
    try:
        template = ChatTemplate(folder)
    except PpoctlError as error:
        if error.message not in {problem.says for problem in found.problems}:
            found.problems.append(_problem(error, place(("model", "path"))))
        return None
    if template.text is None:
        found.notes.append(f"the model in `{folder}` has no chat template: prompts are plain text")
    return template


def _datasets(recipe: Recipe) -> Iterator[tuple[KeyPath, Gsm8kRows | ColumnRows]]:
    """Tables of the data that are whole. A path with a variable that is not set was reported when the recipe was
    read."""
    data = getattr(recipe, "data", None)
    tables: dict[KeyPath, Gsm8kRows | ColumnRows | None] = {("data", "train"): getattr(data, "train", None)}
    tables.update({("data", "eval", name): table for name, table in (getattr(data, "eval", None) or {}).items()})
    for key, table in tables.items():
        is_whole = table is not None and all(hasattr(table, name) for name in type(table).model_fields)
        if table is not None and is_whole and not table.path.startswith("$"):
            yield key, table


def _window_problems(recipe: Recipe, path: str, whose: str, place: OriginOf) -> Iterator[Problem]:
    """Problems of prompts and responses that are too long for the model: generator and trainer would fail at the
    first long response, or worse, go on without positions."""
    shape = shape_if_here(path)
    try:
        window = recipe.rollout.max_prompt_tokens + recipe.rollout.max_new_tokens
    except AttributeError:  # part of the recipe is wrong (`partial`)
        return
    if shape is not None and window > shape.max_positions:
        parts = " + ".join(f"`rollout.{name}` `{getattr(recipe.rollout, name)}`" for name in _WINDOW)
        says = f"a window of {window} tokens ({parts}) does not fit the {whose}'s {shape.max_positions} positions"
        key = ("rollout", "max_new_tokens")
        yield Problem(place(key), says, f"shorten `{key[0]}.{key[1]}` or `rollout.max_prompt_tokens`")
