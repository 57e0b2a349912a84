"""Choices of a recipe: the step function of each combination of tables, and the stage that each key reaches in
every step function."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import fields, is_dataclass
from functools import cache, partial
from itertools import product
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

from fakes.components import EvenScorer, fake_recipe
from for_each import for_each
from ppoctl.algorithms.choose import step_function_at, trace_at
from ppoctl.algorithms.estimators.kinds import ESTIMATORS
from ppoctl.algorithms.evaluation_spec import EVALUATION
from ppoctl.algorithms.joint import JointUpdateSpec
from ppoctl.algorithms.stage_spec import StageParts, StageSpec
from ppoctl.core.recipe_table import Effect
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.schema import Recipe
from stages.stub_models import Models
from wiring.harness import BASE
from wiring.test_step_keys import CASES, LEVELS, RATIO

KINDS = [kind for table in ESTIMATORS for kind in tree.allowed(table.model_fields["kind"].annotation)]
NEEDED: Mapping[str, dict[str, Any]] = {"python": {"function": "mine.py:estimate"}}
"""Keys that a kind of estimator requires."""
CORRECTED: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "weights": {"rollout_correction": {"kind": "tis"}},
    "rejection": {"rollout_rejection": {"kind": "ratio", "level": "token", "max_ratio": 2.0}},
    "gap": {"max_sequence_gap": 1.5},
}
GROUPS = {"one round": None, "kept": {"max_rounds": 3}, "all": {"critic_sees": "all", "max_rounds": 4}}
RESAMPLED = (None, "after_whitening", "before_whitening")
HEAD = {"on": "actor", "head": "mlp"}


def combinations() -> Iterator[tuple[str, Recipe, int, str, str | None, bool]]:
    """Yield name, recipe, step, way of getting samples, order of resampling, and whether rollouts are corrected, for
    all combinations that have a meaning."""
    for kind, corrected, groups, order, head, step in product(
        KINDS, CORRECTED, GROUPS, RESAMPLED, (False, True), (1, 2, 3)
    ):
        advantages = {"kind": kind, **NEEDED.get(kind, {})}
        has_critic = kind in ("gae", "monte_carlo")
        if (order or head or step < 3 or groups == "all") and not has_critic:
            continue
        if (head and (order or step < 3 or groups == "all")) or (
            groups != "one round" and (order or kind == "remax")
        ):
            continue
        ppo = {"minibatch_seqs": 4, "critic_only_steps": 0 if head or not has_critic else 2, **CORRECTED[corrected]}
        resample = {} if order is None else {"resample": {"kind": "max_min", "order": order}}
        rollout = {"prompts_per_step": 4, "samples_per_prompt": 2, "max_prompt_tokens": 4, "max_new_tokens": 6}
        tables: dict[str, Any] = {"ppo": {**ppo, "advantages": advantages, **resample}}
        tables["rollout"] = {**rollout, "groups": GROUPS[groups]}
        if not has_critic or head:
            tables["critic"] = HEAD if head else None
        name = f"{kind}, {corrected}, {groups}, {order}, {'head' if head else 'model'}, step {step}"
        yield name, fake_recipe(**tables), step, groups, order, corrected != "plain"


@for_each(combinations())
def test_step_has_the_stages_of_its_recipe(
    name: str,
    recipe: Recipe,
    step: int,
    groups: str,
    order: str | None,
    corrects: bool,
) -> None:
    found = trace_at(recipe, step)
    stages = {entry.name: entry for entry in found.outline.stages}
    kind, head = recipe.ppo.advantages.kind, recipe.value_head is not None  # type: ignore[attr-defined]
    has_critic = kind in ("gae", "monte_carlo") and not head
    trains_actor = step > recipe.ppo.critic_only_steps
    has_rounds = groups == "kept" or (groups == "all" and trains_actor)
    expected = {
        "rollout": True,
        "reward": True,
        "greedy_rollout": kind == "remax",
        "greedy_reward": kind == "remax",
        "keep_groups": has_rounds,
        "all_rows": groups == "all" and trains_actor,
        "values": has_critic,
        "logprobs": True,
        "correction": trains_actor and corrects,
        "critic_advantages": groups == "all" and trains_actor,
        "advantages": True,
        "resample": order is not None,
        "whitening": order == "before_whitening" and trains_actor,
        "critic_update": has_critic,
        "actor_update": trains_actor,
    }
    assert set(stages) == {name for name, is_there in expected.items() if is_there}
    assert not trains_actor or ("correction" in stages["actor_update"].reads) == corrects
    most = {"kept": 3, "all": 4}[groups] if has_rounds else 1
    assert stages["rollout"].at_most == stages["reward"].at_most == most
    assert not trains_actor or isinstance(found["actor_update"], JointUpdateSpec) == head
    raw: Any = found["advantages"]
    assert raw.whitens == (not expected["whitening"])
    if has_critic:
        whose = "critic_advantages" if expected["critic_advantages"] else "advantages"
        assert whose in stages["critic_update"].reads or order is not None


PLAIN_HEAD = {"on": "actor", "head": "linear", "layers_copied": 0}
LOSS_KL = {"place": "loss", "estimator": "k3", "gradient": "estimator", "coef": 0.4}
STEPS: Mapping[str, dict[str, Any]] = {
    "ppo": {},
    "penalty in the loss": {"ppo.kl": LOSS_KL},
    "critic only": {"ppo.critic_only_steps": 3},
    "value head": {"critic": PLAIN_HEAD, "ppo.critic_only_steps": 0, "ppo.critic_epochs": None},
    "group estimator": {"critic": None, "ppo.advantages": {"kind": "grpo"}, "ppo.critic_only_steps": 0},
    "remax": {"critic": None, "ppo.advantages": {"kind": "remax"}, "ppo.critic_only_steps": 0},
    "pf_ppo": {"ppo.resample": {"kind": "pow", "power": 2.0, "order": "after_whitening"}},
    "pf_ppo, whitened last": {"ppo.resample": {"kind": "pow", "power": 2.0, "order": "before_whitening"}},
    "dynamic sampling": {"rollout.groups": {"max_rounds": 3}},
    "critic sees all": {"rollout.groups": {"max_rounds": 3, "critic_sees": "all"}},
}
"""Name -> changes of the recipe of the harness, which give it another step function at step 2."""


def tables_of(changes: Mapping[str, Any]) -> dict[str, Any]:
    found = deepcopy(BASE)
    for key, value in changes.items():
        *path, last = key.split(".")
        table = found
        for name in path:
            table = table[name]
        if value is None and last == "critic":
            table.pop(last, None)
        else:
            table[last] = deepcopy(value)
    return found


UPDATES = ("critic_update", "actor_update")
REACHES: Mapping[str, tuple[str, ...]] = {
    "seed": ("rollout", "greedy_rollout", "resample", *UPDATES, "eval"),
    "rollout.samples_per_prompt": ("rollout",),
    "rollout.max_new_tokens": ("rollout", "greedy_rollout"),
    "rollout.temperature": ("rollout", "logprobs", "actor_update"),
    "rollout.top_p": ("rollout", "logprobs", "actor_update"),
    "rollout.top_k": ("rollout", "logprobs", "actor_update"),
    "rollout.min_p": ("rollout", "logprobs", "actor_update"),
    "rollout.min_new_tokens": ("rollout", "greedy_rollout", "logprobs", "actor_update"),
    "rollout.stop_strings": ("rollout", "greedy_rollout", "eval"),
    "rollout.stop_token_ids": ("rollout", "greedy_rollout", "logprobs", "actor_update", "eval"),
    "rollout.special_tokens": ("rollout", "greedy_rollout", "eval"),
    "rollout.max_window_tokens": ("rollout", "greedy_rollout", "eval"),
    "rollout.prompts_per_step": ("keep_groups",),
    "rollout.groups.keep": ("keep_groups",),
    "rollout.groups.by": ("keep_groups",),
    "rollout.groups.max_rounds": ("keep_groups",),
    "rollout.groups.when_short": ("keep_groups",),
    "reward.max_error_frac": ("reward", "greedy_reward"),
    "reward.scale": ("advantages", "critic_advantages"),
    "reward.clip": ("advantages", "critic_advantages"),
    "reward.moments": ("advantages", "critic_advantages"),
    "reward.unfinished_factor": ("advantages", "critic_advantages"),
    "reward.overlong": ("advantages", "critic_advantages"),
    "reward.length_penalty": ("advantages", "critic_advantages"),
    "ppo.epochs": ("actor_update",),
    "ppo.critic_epochs": ("critic_update",),
    "ppo.minibatch_seqs": UPDATES,
    "ppo.critic_minibatch_seqs": ("critic_update",),
    "ppo.minibatch_order": UPDATES,
    "ppo.critic_only_until": ("advantages", "critic_advantages"),
    "ppo.advantages": ("advantages", "critic_advantages"),
    "ppo.truncated": ("advantages", "critic_advantages"),
    "ppo.whiten_rewards": ("advantages", "critic_advantages"),
    "ppo.resample": ("resample",),
    "ppo.kl": ("advantages", "critic_advantages", "actor_update"),
    "ppo.kl.place": ("advantages", "critic_advantages", "actor_update"),
    "ppo.policy_loss": ("actor_update",),
    "ppo.old_logprobs": ("logprobs",),
    "actor.router_replay": ("logprobs",),
    "ppo.value_loss": ("critic_update", "joint"),
    "ppo.rollout_correction": ("correction",),
    "ppo.rollout_rejection": ("correction",),
    "ppo.max_sequence_gap": ("correction",),
    "actor.optimizer": ("actor_update",),
    "critic.optimizer": ("critic_update",),
    "eval.passes": ("eval",),
    "eval.samples_per_prompt": ("eval",),
    "eval.temperature": ("eval",),
    "eval.top_p": ("eval",),
    "eval.top_k": ("eval",),
    "eval.min_p": ("eval",),
    "eval.max_new_tokens": ("eval",),
    "eval.pass_at": ("eval",),
    "eval.pass_score": ("eval",),
    "eval.maj_at": ("eval",),
    "eval.metrics": ("eval",),
}  # fmt: skip
"""Key or table -> stages that are built with it, in every step function that has them; the longest name holds.
`joint`: the update of the actor, if it trains a value head."""
ELSEWHERE = ("name", "steps", "model", "data", "cluster", "actor.train", "actor.freeze", "critic.train",
             "critic.freeze", "critic.on", "critic.head", "critic.layers_copied", "ppo.critic_only_steps",
             "actor.router_aux_loss_coef", "actor.router_bias_rate",
             "ppo.value_loss.coef", "rollout.max_prompt_tokens", "rollout.groups.round_prompts",
             "rollout.groups.critic_sees", "rollout.ahead", "rollout.tokens_per_step",
             "rollout.accept_stale", "ppo.resample.order", "eval.environment", "reward",
             "environment")  # fmt: skip
"""Keys and tables that other tests hold: no stage is built with them, or only the stages of one step function."""
UNTIL = {"explained_variance": 0.5, "at_most": 2}
CHANGES: list[tuple[str, Any]] = [
    *CASES,
    ("rollout.min_new_tokens", 2),
    ("actor.router_replay", "trainer"),
    ("rollout.stop_token_ids", [2, 5]),
    ("rollout.special_tokens", "drop"),
    ("rollout.max_window_tokens", 9),
    ("rollout.groups.keep", {"min": 0.1, "max": 0.9}),
    *(("rollout.groups.by", by) for by in ("shaped", "components")),
    ("rollout.groups.max_rounds", 4),
    ("rollout.groups.when_short", "use_fewer"),
    ("reward.max_error_frac", 0.5),
    ("ppo.critic_only_until", UNTIL),
    ("ppo.old_logprobs", "sampler"),
    ("ppo.kl.gradient", "k2"),
    ("ppo.resample.power", 1.0),
    *(("ppo.rollout_rejection", {**RATIO, "level": level}) for level in LEVELS),
    *(("ppo.rollout_rejection", {**RATIO, "statistic": of, "max_ratio": None, "max": 0.1}) for of in ("k2", "k3")),
    *((f"{role}.optimizer.lr_ticks", "step") for role in ("actor", "critic")),
    *(("ppo.advantages", {"kind": kind}) for kind in KINDS if kind not in ("python", "grpo", "remax")),
    ("ppo.advantages", {"kind": "grpo", "scale": "batch"}),
    ("ppo.advantages", {"kind": "grpo", "leave_one_out": True}),
    *(("eval.passes", passes) for passes in ("greedy", "sampled")),
    ("eval.samples_per_prompt", 2),
    ("eval.temperature", 1.7),
    ("eval.top_p", 0.7),
    ("eval.top_k", 3),
    ("eval.min_p", 0.1),
    ("eval.max_new_tokens", 2),
    ("eval.pass_at", [2]),
    ("eval.pass_score", 0.5),
    ("eval.maj_at", [2]),
    ("eval.metrics", "mine.py:measure"),
]


_NOTHING: Any = SimpleNamespace(gate=SimpleNamespace(between=print))
_MODELS: Any = Models()
PARTS = StageParts(generation=_NOTHING, scorer=EvenScorer(), notify=print, models=_MODELS)


def described(value: Any) -> Any:
    """Return a value of which two are equal if two stages with them do the same."""
    if isinstance(value, Recipe | SimpleNamespace | Models | EvenScorer):
        return type(value).__name__
    if is_dataclass(value) and not isinstance(value, type):
        settings = (field.name for field in fields(value) if field.name != "fingerprint")
        return (type(value).__name__, *((name, described(getattr(value, name))) for name in settings))
    if isinstance(value, partial):
        return described(value.func), described(value.args), described(value.keywords)
    if isinstance(value, MethodType):
        return described(value.__func__), described(value.__self__)
    if isinstance(value, FunctionType):
        return value.__qualname__, [described(cell.cell_contents) for cell in value.__closure__ or ()]
    if isinstance(value, Mapping):
        return {key: described(each) for key, each in value.items()}
    return [described(each) for each in value] if isinstance(value, list | tuple) else repr(value)


@cache
def recipe_of(name: str, change: int | None) -> Recipe | None:
    """Return a recipe with one change; None: it does not have this key."""
    try:
        tables = tables_of({**STEPS[name], **({} if change is None else dict([CHANGES[change]]))})
        found = Recipe.model_validate(tables)
    except (KeyError, TypeError, ValueError):
        return None
    is_whole = not found.ppo.advantages.trains_critic or found.value_head is not None or "critic" in found.trained
    return found if is_whole else None


@cache
def specs_of(name: str) -> dict[str, StageSpec[Any]]:
    recipe = recipe_of(name, None)
    assert recipe is not None
    return {spec.name: spec for spec in (*trace_at(recipe, 2).stages, EVALUATION)}


@cache
def built(name: str, change: int | None, stage: str) -> tuple[str, Any]:
    """Return the fingerprint and the settings of a stage."""
    recipe = recipe_of(name, change)
    assert recipe is not None
    found = specs_of(name)[stage].build(recipe, PARTS)
    return found.fingerprint, described(found)


def reached(key: str, name: str) -> set[str]:
    """Return the stages that a key must reach in a step function."""
    places = sorted(REACHES, key=len, reverse=True)
    table = next(place for place in places if f"{key}.".startswith(f"{place}."))
    stages = {"actor_update" if each == "joint" and name == "value head" else each for each in REACHES[table]}
    return stages & specs_of(name).keys()


BY_ANOTHER_STAGE = {("ppo.advantages.whiten", "pf_ppo, whitened last")}
"""Key and step function in which another stage uses the key."""
NOT_IN_THE_FINGERPRINT = ("rollout.groups.max_rounds", "rollout.groups.when_short")
"""Keys that a resume may change, because committed records do not depend on them."""
ALWAYS = ("ppo", "value head")
"""Step functions in which each key is tried. In the others, only stages are that these do not have."""


@for_each((f"{CHANGES[number]}", number) for number in range(len(CHANGES)))
def test_key_reaches_its_stages_in_every_step_function(name: str, number: int) -> None:
    key, tried, is_chosen = CHANGES[number][0], set[StageSpec[Any]](), False
    for step in STEPS:
        untried = [each for each in reached(key, step) if step in ALWAYS or specs_of(step)[each] not in tried]
        before, after = recipe_of(step, None), recipe_of(step, number) if untried else None
        if before is None or after is None or after == before or (key, step) in BY_ANOTHER_STAGE:
            continue
        is_chosen = step_function_at(after, 2).name != step_function_at(before, 2).name
        if not is_chosen:
            for stage in untried:
                tried.add(specs_of(step)[stage])
                (old_print, old), (new_print, new) = built(step, None, stage), built(step, number, stage)
                assert new != old, f"{stage} of {step} does not have it"
                assert new_print != old_print or key in NOT_IN_THE_FINGERPRINT, f"{stage} of {step} does not tell"
    assert tried or is_chosen, "no step function has it"


def test_every_key_of_a_stage_is_changed() -> None:
    changed = {inner for key, value in CHANGES for inner in (key, *_keys_below(key, value))}
    keys = {".".join(path) for path, key in tree.walk(tree.of(Recipe)) if key.effect is Effect.RESULTS}
    kinds = ("kind", "place", "function", "options", "options.*", "digest", "trains_critic", "needs_entropy")
    left = {
        key
        for key in keys - changed
        if not any(f"{key}.".startswith(f"{place}.") for place in ELSEWHERE) and key.split(".", 2)[-1] not in kinds
    }
    assert left == set()


def _keys_below(key: str, value: Any) -> Iterator[str]:
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield f"{key}.{name}"
        yield from _keys_below(f"{key}.{name}", inner)
