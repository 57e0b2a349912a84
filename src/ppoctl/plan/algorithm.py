"""Description of the algorithm of a recipe: each choice with its settings."""

from collections.abc import Mapping

from ppoctl.recipe.schema import NoKl, Recipe
from ppoctl.recipe_table import Table

OLD_LOGPROBS = {
    "trainer": "of the actor, by a forward pass before its update",
    "sampler": "of the generator, without a forward pass of the actor",
    "current": "of the update itself: every ratio is 1, no forward pass of the actor",
}


def algorithm(recipe: Recipe) -> Mapping[str, str]:
    """Return choice -> description of the choice."""
    ppo, kl = recipe.ppo, recipe.ppo.kl
    choices = {
        "advantages": _describe(ppo.advantages),
        "actor's loss": _describe(ppo.policy_loss),
        "critic's loss": _describe(ppo.value_loss),
        "old log-probs": OLD_LOGPROBS[ppo.old_logprobs],
        "KL": "none; no reference is loaded" if isinstance(kl, NoKl) else f"in the {kl.place}: {_describe(kl)}",
    }
    if not ppo.corrects_rollouts:
        return choices | {"correction": "none for the difference of sampler and trainer"}
    tables = [_describe(table) for table in (ppo.rollout_correction, ppo.rollout_rejection) if table.kind != "none"]
    if ppo.max_sequence_gap is not None:
        tables.append(f"max_sequence_gap {ppo.max_sequence_gap:g}")
    return choices | {"correction": "; ".join(tables)}


def _describe(table: Table) -> str:
    """Return the kind of a table and its settings. A setting that is off is left out if it is off by default, too."""
    defaults = {name: field.default for name, field in type(table).model_fields.items()}
    off = [name for name, value in table if value in (None, False, 0) and value == defaults[name]]
    words = [_setting(name, value) for name, value in table if name not in ("kind", "place", *off)]
    kind = getattr(table, "kind", None)
    return f"{kind}: {', '.join(words)}" if kind and words else kind or ", ".join(words)


def _setting(name: str, value: object) -> str:
    if isinstance(value, Table):
        return f"{name} ({_describe(value)})"
    if isinstance(value, bool):
        return name if value else f"{name} off"
    return f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
