"""Rules about reward shaping and truncated responses: each setting of reward shaping has an effect, and each range
contains a value.

See `all_rules`.
"""

import json
import re
from collections.abc import Iterator

from ppoctl.algorithms.role_model import reward_models
from ppoctl.core import metric_registry
from ppoctl.core.finding import Finding, conflict
from ppoctl.core.key_path import KeyPath, dotted
from ppoctl.recipe.schema import Recipe
from ppoctl.rewards.code import CodeScorer
from ppoctl.rewards.sum import SumReward

_PART = re.compile(r"[A-Za-z0-9_-]+")
_NEW_TOKENS: KeyPath = ("rollout", "max_new_tokens")


def check_reward_scale(recipe: Recipe) -> Iterator[Finding]:
    scale = recipe.reward.scale
    if scale is not None and scale.from_[0] >= scale.from_[1]:
        yield conflict("the lowest score must be below the highest", (("reward", "scale", "from"),))
    if scale is not None and scale.to[0] == scale.to[1]:
        yield conflict("all scores would become the same reward", (("reward", "scale", "to"),))


def check_reward_clip(recipe: Recipe) -> Iterator[Finding]:
    clip = recipe.reward.clip
    if clip is not None and clip.low >= clip.high:
        yield conflict(
            "the lowest reward must be below the highest", (("reward", "clip", "low"), ("reward", "clip", "high"))
        )


def check_overlong_reachable(recipe: Recipe) -> Iterator[Finding]:
    overlong, longest = recipe.reward.overlong, recipe.rollout.max_new_tokens
    if overlong is None:
        return
    key: KeyPath = ("reward", "overlong", "buffer_tokens")
    length = overlong.max_tokens or longest
    keys = (key, ("reward", "overlong", "max_tokens"), _NEW_TOKENS)
    if overlong.buffer_tokens > length:
        message = f"a buffer of {overlong.buffer_tokens} tokens is longer than a response of {length}"
        yield conflict(message, keys, f"--set reward.overlong.buffer_tokens={length}")
    elif length - overlong.buffer_tokens >= longest:
        message = f"no response of at most {longest} tokens reaches the buffer, which begins at "
        yield conflict(f"{message}{length - overlong.buffer_tokens}", keys)


def check_length_penalty_reachable(recipe: Recipe) -> Iterator[Finding]:
    penalty = recipe.reward.length_penalty
    if penalty is not None and penalty.free_tokens >= recipe.rollout.max_new_tokens:
        yield conflict(
            f"no response of at most {recipe.rollout.max_new_tokens} tokens exceeds the {penalty.free_tokens} tokens "
            "without a penalty",
            (("reward", "length_penalty", "free_tokens"), _NEW_TOKENS),
        )


def check_truncated_factor_used(recipe: Recipe) -> Iterator[Finding]:
    if recipe.ppo.truncated == "filter" and recipe.reward.unfinished_factor != 1:
        yield conflict(
            "truncated responses are left out, so a factor of their rewards has no effect",
            (("reward", "unfinished_factor"), ("ppo", "truncated")),
            "--set reward.unfinished_factor=1.0",
        )


def check_truncated_factor_sign(recipe: Recipe) -> Iterator[Finding]:
    """Check that `unfinished_factor` does not raise a reward: a negative reward times a factor below 1 is higher."""
    reward, keys = recipe.reward, [KeyPath(("reward", "unfinished_factor"))]
    if reward.unfinished_factor >= 1:
        return
    if reward.scale is not None and min(reward.scale.to) < 0:
        keys.append(("reward", "scale", "to"))
    if getattr(reward.moments, "center", False):
        keys.append(("reward", "moments", "center"))
    if len(keys) > 1:
        message = f"a factor of {reward.unfinished_factor:g} raises the negative reward of a truncated response"
        yield conflict(message, tuple(keys), "--set reward.unfinished_factor=1.0")


def check_positive_nll_reachable(recipe: Recipe) -> Iterator[Finding]:
    scale, coef = recipe.reward.scale, recipe.ppo.policy_loss.positive_nll_coef
    if coef > 0 and scale is not None and max(scale.to) <= 0:
        yield conflict(
            "the NLL term trains on responses with a reward above 0, but no response can have one",
            (("ppo", "policy_loss", "positive_nll_coef"), ("reward", "scale", "to")),
        )


def check_part_names(recipe: Recipe) -> Iterator[Finding]:
    for name in recipe.reward.parts if isinstance(recipe.reward, SumReward) else ():
        key: KeyPath = ("reward", "parts", name)
        if not _PART.fullmatch(name):
            yield conflict(
                f"`{name}` names a component of the reward and must consist of letters, digits, `_` and `-`", (key,)
            )
        elif metric_registry.reward_part(f"reward/{name}_mean") is None:
            yield conflict(f"`reward/{name}_mean` is the name of another metric", (key,))


def check_code_endpoint(recipe: Recipe) -> Iterator[Finding]:
    for path, scorer in recipe.reward.scorers.items():
        if not isinstance(scorer, CodeScorer):
            continue
        key = KeyPath(("reward", *path))
        place, url = (*key, "sandbox"), (*key, "url")
        if scorer.sandbox == "fusion" and scorer.url is None:
            message = "a sandbox endpoint requires its address"
            yield conflict(message, (place, url), f"--set {dotted(url)}=http://HOST:8080/run_code")
        elif scorer.sandbox != "fusion" and scorer.url is not None:
            message = "programs run on this machine, so no endpoint is used"
            yield conflict(message, (place, url), f"--set {dotted(place)}=fusion")
        if scorer.sandbox != "fusion" and scorer.language != "python":
            message = f"programs in `{scorer.language}` run at an endpoint only"
            yield conflict(message, (place, (*key, "language")), f"--set {dotted(place)}=fusion")


def check_vllm_reward_model_layout(recipe: Recipe) -> Iterator[Finding]:
    for key, table in reward_models(recipe).items():
        if table.engine == "vllm" and table.parallel is not None and table.parallel.world_size > 1:
            message = "vLLM runs a reward model in one process; Megatron-Core supports several"
            yield conflict(message, ((*key, "engine"), (*key, "parallel")), f"--set {dotted(key)}.engine=megatron")


def check_offload_without_reward_model(recipe: Recipe) -> Iterator[Finding]:
    if "reward" in recipe.cluster.offload and not reward_models(recipe):
        listed = [role for role in recipe.cluster.offload if role != "reward"]
        yield conflict(
            "the reward has no model to offload",
            (("cluster", "offload"), ("reward", "kind")),
            f"--set 'cluster.offload={json.dumps(listed)}'",
        )
