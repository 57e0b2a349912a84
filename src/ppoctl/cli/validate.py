"""`ppoctl validate`: everything that is wrong with a recipe, in one pass, without loading a model."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppoctl.cli import preflight, render
from ppoctl.cli.options import Assets, GpuGib, Here, Json, Recipes, Sets

if TYPE_CHECKING:
    from ppoctl.recipe.load import Loaded


def validate(
    files: Recipes,
    sets: Sets = None,
    show: Annotated[bool, typer.Option("--show", help="Print every value and where it was set.")] = False,
    reward: Annotated[
        bool, typer.Option("--reward", help="Ask the scorer: gold answers must beat wrong ones.")
    ] = False,
    assets: Assets = False,
    gpu_gib: GpuGib = None,
    here: Here = False,
    json: Json = False,
) -> None:
    """Check a recipe: keys, values, rules across tables, every row of data, and whether the model can be trained."""
    from ppoctl.preflight.fit import gpu_gib_here, require_fit
    from ppoctl.recipe.rules import unused

    loaded, notes = preflight.examined(files, sets or (), strict=assets, device=None if gpu_gib is None else "gpu")
    if here or gpu_gib is not None:
        require_fit(loaded.recipe, gpu_gib or gpu_gib_here())
    probe = None
    if reward:
        from ppoctl.wire.session import probe_reward

        probe = list(probe_reward(loaded.recipe))
    if json:
        answer: dict[str, Any] = {
            "ok": True,
            "name": loaded.recipe.name,
            "files": [str(file) for file in files],
            "notes": notes,
        }
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
    for note in unused(loaded.recipe):
        render.say(f"note: {note}")
    render.say(f"ok: {' + '.join(str(file) for file in files)}")


def _show(loaded: "Loaded") -> None:
    from ppoctl.recipe import schema_tree as tree
    from ppoctl.recipe.explain import shown
    from ppoctl.recipe.origins import dotted

    rows = []
    for found in tree.values(loaded.recipe):
        key, effect = dotted(found.path), found.key.effect
        rows.append((key, shown(found.value), loaded.origins[key], effect.value if effect else ""))
    render.table(rows, ("key", "value", "set by", "changes"))
