"""The algorithm in words: each of its choices with the numbers that are on."""

from collections.abc import Mapping

from ppoctl.recipe.schema import NoKl, Recipe
from ppoctl.recipe_table import Table

OLD_LOGPROBS = {
    "trainer": "the actor's, by a forward pass before its update",
    "sampler": "the generator's, without a forward pass of the actor",
    "current": "those of the update itself: every ratio is 1, no forward pass of the actor",
}


def algorithm(recipe: Recipe) -> Mapping[str, str]:
    """Name of each choice -> what was chosen."""
    ppo, kl = recipe.ppo, recipe.ppo.kl
    told = {
        "advantages": _told(ppo.advantages),
        "actor's loss": _told(ppo.policy_loss),
        "critic's loss": _told(ppo.value_loss),
        "old log-probs": OLD_LOGPROBS[ppo.old_logprobs],
        "KL": "none; no reference is loaded" if isinstance(kl, NoKl) else f"in the {kl.place}: {_told(kl)}",
    }
    if not ppo.corrects_rollouts:
        return told | {"correction": "none of what sampler and trainer differ by"}
    tables = [_told(table) for table in (ppo.rollout_correction, ppo.rollout_rejection) if table.kind != "none"]
    if ppo.max_sequence_gap is not None:
        tables.append(f"max_sequence_gap {ppo.max_sequence_gap:g}")
    return told | {"correction": "; ".join(tables)}


def _told(table: Table) -> str:
    """The kind of a table, and its keys; those that are off by default are left out while they are."""
    usual = {name: field.default for name, field in type(table).model_fields.items()}
    off = [name for name, value in table if value in (None, False, 0) and value == usual[name]]
    words = [_word(name, value) for name, value in table if name not in ("kind", "place", *off)]
    kind = getattr(table, "kind", None)
    return f"{kind}: {', '.join(words)}" if kind and words else kind or ", ".join(words)


def _word(name: str, value: object) -> str:
    if isinstance(value, Table):
        return f"{name} ({_told(value)})"
    if isinstance(value, bool):
        return name if value else f"{name} off"
    return f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
