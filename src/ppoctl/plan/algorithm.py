"""Descriptions of the algorithm and of the reward shaping of a recipe: each choice with its settings."""

from collections.abc import Mapping

from ppoctl.algorithms.roles import head_of
from ppoctl.algorithms.sizes import segments_per_response
from ppoctl.algorithms.stages.kl_table import NoKl
from ppoctl.algorithms.stages.resample_table import NoResampling
from ppoctl.core.recipe_table import Table
from ppoctl.core.units import counted
from ppoctl.environments.environment_table import EpisodeTable
from ppoctl.models.head import Head
from ppoctl.recipe.bounds import bounds_text
from ppoctl.recipe.schema import Recipe
from ppoctl.rewards.shaping_tables import (
    LengthPenalty,
    OverlongPenalty,
    ReferenceMoments,
    RewardClip,
    RewardScale,
    RunningMoments,
    ShapingTable,
    steps_of,
)

TRUNCATED = {
    "terminal": "count as finished",
    "bootstrap": "continue with the critic's value",
    "filter": "are left out of all losses",
}

OLD_LOGPROBS = {
    "trainer": "of the actor, by a forward pass before its update",
    "sampler": "of the generator, without a forward pass of the actor",
    "current": "of the update itself: every ratio is 1, no forward pass of the actor",
}


def _of_old_responses(recipe: Recipe) -> Mapping[str, str]:
    """Return how old the tokens of a step may be, if they may be old."""
    rollout = recipe.rollout
    if not rollout.may_be_stale:
        return {}
    oldest = rollout.ahead + segments_per_response(recipe) - 1
    per_step = rollout.tokens_per_step
    segments = "" if per_step is None else f"; {per_step:,} tokens of a response per step"
    return {"old responses": f"at most {counted(oldest, 'step')} between generation and training{segments}"}


def algorithm(recipe: Recipe) -> Mapping[str, str]:
    """Return choice -> description of the choice."""
    ppo = recipe.ppo
    losses: Mapping[Head, str] = {"token": _describe(ppo.policy_loss), "value": _value_loss(recipe)}
    groups = recipe.rollout.groups
    choices = {
        **({} if recipe.environment is None else {"environment": _episodes(recipe.environment)}),
        **({} if groups is None else {"dynamic sampling": _describe(groups)}),
        **_of_old_responses(recipe),
        "advantages": _describe(ppo.advantages),
        **{f"{role}'s loss": losses[head_of(role)] for role in recipe.trained},
        **_of_value_head(recipe),
        "old log-probs": OLD_LOGPROBS[ppo.old_logprobs],
        "KL": _kl(recipe),
    }
    if (until := ppo.critic_only_until) is not None:
        bound = f"until the explained variance is {until.explained_variance:g}"
        choices["critic alone"] = f"{bound}, for at most {until.at_most} steps"
    if not isinstance(ppo.resample, NoResampling):
        choices["resampling"] = _describe(ppo.resample)
    if ppo.whiten_rewards:
        choices["token rewards"] = "scaled to unit variance"
    if recipe.until:
        bounds = (f"`{name}` is {bounds_text(each.min, each.max)}" for name, each in recipe.until.items())
        choices["early end"] = f"when {' and '.join(bounds)}"
    if not ppo.corrects_rollouts:
        return choices | {"correction": "none for the difference of sampler and trainer"}
    tables = [_describe(table) for table in (ppo.rollout_correction, ppo.rollout_rejection) if table.kind != "none"]
    if ppo.max_sequence_gap is not None:
        tables.append(f"max_sequence_gap {ppo.max_sequence_gap:g}")
    return choices | {"correction": "; ".join(tables)}


def _episodes(table: EpisodeTable) -> str:
    per_turn = "" if table.tokens_per_turn is None else f" of at most {table.tokens_per_turn} tokens"
    kinds = " or ".join(dict.fromkeys(getattr(kind, "kind", "") for kind in table.kinds.values()))
    return f"{kinds}: at most {table.turns} turns{per_turn}, {table.tokens} tokens with observations"


def _of_value_head(recipe: Recipe) -> Mapping[str, str]:
    head = recipe.value_head
    if head is None:
        return {}
    copied = f", with copies of the last {head.layers_copied} layers" if head.layers_copied else ""
    return {
        "value head": f"{head.kind}, on the actor's model{copied}",
        "joint loss": f"the actor's loss + {recipe.ppo.value_loss.coef:g} x the value loss",
        "value loss": _value_loss(recipe),
    }


def _value_loss(recipe: Recipe) -> str:
    """Return the value loss without its factor in a joint loss."""
    return _describe(recipe.ppo.value_loss, hidden=("coef",))


def _kl(recipe: Recipe) -> str:
    kl, own = recipe.ppo.kl, recipe.model.reference
    if isinstance(kl, NoKl):
        return "none; no reference is loaded"
    return f"in the {kl.place}: {_describe(kl)}" + (f"; reference `{own.path}`" if own is not None else "")


def _describe(table: Table, *, hidden: tuple[str, ...] = ()) -> str:
    """Return the kind of a table and its settings. A setting that is off is left out if it is off by default, too.
    Settings of a switch that is off, such as `normalize_over` of `normalize`, are left out."""
    defaults = {name: field.default for name, field in type(table).model_fields.items()}
    off = [name for name, value in table if value in (None, False, 0) and value == defaults[name]]
    switched_off = tuple(f"{name}_" for name, value in table if value is False)
    shown = (
        name
        for name, _ in table
        if name not in ("kind", "place", *off, *hidden) and not name.startswith(switched_off)
    )
    words = [_setting(name, getattr(table, name)) for name in shown]
    kind = getattr(table, "kind", None)
    return f"{kind}: {', '.join(words)}" if kind and words else kind or ", ".join(words)


def _setting(name: str, value: object) -> str:
    if isinstance(value, Table):
        return f"{name} ({_describe(value)})"
    if isinstance(value, bool):
        return name if value else f"{name} off"
    return f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"


def reward_steps(recipe: Recipe) -> Mapping[str, str]:
    """Return shaping step -> description. The last entry describes how truncated responses are used."""
    steps = dict(_words(step, recipe.rollout.max_new_tokens) for step in steps_of(recipe.reward))
    return steps | {"truncated": f"responses {TRUNCATED[recipe.ppo.truncated]}"}


def _words(step: ShapingTable, longest: int) -> tuple[str, str]:
    match step:
        case RewardScale():
            (low, high), (to_low, to_high) = step.from_, step.to
            return "scale", f"{low:g} .. {high:g} becomes {to_low:g} .. {to_high:g}"
        case RewardClip():
            return "clip", f"to {step.low:g} .. {step.high:g}"
        case RunningMoments():
            return "moments", _divided(step.center, "of the run so far", None)
        case ReferenceMoments():
            return "moments", _divided(step.center, "of the first step whose rewards are not all equal", step.std)
        case OverlongPenalty():
            end, beyond = step.max_tokens or longest, "and no lower beyond" if step.floor else "and lower beyond"
            start = end - step.buffer_tokens
            return "overlong", f"lower from {start} tokens on, {-step.penalty:g} at {end}, {beyond}"
        case LengthPenalty():
            return "length", f"{-step.per_token:g} for each token beyond {step.free_tokens}"
        case factor:
            return "unfinished", f"truncated responses x {factor:g}"


def _divided(center: bool, of: str, std: float | None) -> str:  # noqa: FBT001 - the value of a key
    minus = f"minus the mean {of}, " if center else ""
    return f"{minus}divided by {f'{std:g}' if std else f'the standard deviation {of}'}"
