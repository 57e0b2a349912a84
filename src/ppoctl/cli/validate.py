"""`ppoctl validate`: everything that is wrong with a recipe, in one pass, without loading a model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppoctl.cli import render
from ppoctl.cli.options import Json, Recipes, Sets

if TYPE_CHECKING:
    from ppoctl.recipe.load import Loaded


def validate(
    files: Recipes,
    sets: Sets = None,
    show: Annotated[bool, typer.Option("--show", help="Print every value and where it was set.")] = False,
    reward: Annotated[
        bool, typer.Option("--reward", help="Ask the scorer: gold answers must beat wrong ones.")
    ] = False,
    json: Json = False,
) -> None:
    """Check a recipe: keys, values, rules across tables, model folder and data files."""
    from ppoctl.recipe.assets import missing_assets
    from ppoctl.recipe.load import examine
    from ppoctl.recipe.problems import as_error
    from ppoctl.recipe.rules import unused, violations

    loaded, problems = examine(files, sets or (), judges=(violations, missing_assets))
    if loaded is None:
        raise as_error(problems)
    probe = _probe(loaded) if reward else None
    if json:
        answer: dict[str, Any] = {"ok": True, "name": loaded.recipe.name, "files": [str(file) for file in files]}
        if show:
            answer |= {"recipe": loaded.resolved(), "origins": loaded.origins}
        if probe is not None:
            answer["reward"] = probe
        render.json(answer)
        return
    if show:
        _show(loaded)
    for text in probe or ():
        render.line(text)
    if not Path(loaded.recipe.model.path).is_absolute():
        render.say(f"note: `{loaded.recipe.model.path}` is no folder here; taken for a hub id and not looked up")
    for note in unused(loaded.recipe):
        render.say(f"note: {note}")
    render.say(f"ok: {' + '.join(str(file) for file in files)}")


def _probe(loaded: "Loaded") -> list[str]:
    """What the scorer said to gold, wrong, empty and truncated answers; raises RewardError when gold does not win."""
    from ppoctl.wire.session import probe_reward

    return list(probe_reward(loaded.recipe))


def _show(loaded: "Loaded") -> None:
    from ppoctl.recipe import shape
    from ppoctl.recipe.explain import shown
    from ppoctl.recipe.origins import dotted

    rows = []
    for path, key, value in shape.values(loaded.recipe):
        effect = key.effect.value if key.effect else ""
        rows.append((dotted(path), shown(value), loaded.origins[dotted(path)], effect))
    render.table(rows, ("key", "value", "set by", "changes"))
