"""Every metric that a run reports: name, unit, description, value in a healthy run, and better direction.

Metric names are defined only here; stages, console, health rules and the final table use these constants. A test
checks that the registry and the journals of test runs have the same metrics. Braces mark a part that the user
chooses: `eval/{set}/pass_at_{k}`. `loading.rules.metrics_rules` determines which metrics the settings of a recipe
report. `evaluation_metrics` has the metrics of evaluations, `speed_metrics` those of times and rates. These modules
import only the standard library.
"""

import re
from difflib import get_close_matches
from functools import lru_cache

from ppoctl.core.evaluation_metrics import EVAL_PASS_AT_1 as EVAL_PASS_AT_1
from ppoctl.core.evaluation_metrics import EVALUATION_METRICS
from ppoctl.core.metric import Metric as Metric
from ppoctl.core.speed_metrics import GENERATIONS_S as GENERATIONS_S
from ppoctl.core.speed_metrics import PARALLEL_S as PARALLEL_S
from ppoctl.core.speed_metrics import PEAKS as PEAKS
from ppoctl.core.speed_metrics import POLICY_EXPERTS_UNUSED_FRAC as POLICY_EXPERTS_UNUSED_FRAC
from ppoctl.core.speed_metrics import ROLLOUTS_S as ROLLOUTS_S
from ppoctl.core.speed_metrics import SAVES as SAVES
from ppoctl.core.speed_metrics import SCORINGS_S as SCORINGS_S
from ppoctl.core.speed_metrics import SPEED_METRICS
from ppoctl.core.speed_metrics import THROUGHPUT_ENGINE_IDLE_FRAC as THROUGHPUT_ENGINE_IDLE_FRAC
from ppoctl.core.speed_metrics import THROUGHPUT_GENERATED as THROUGHPUT_GENERATED
from ppoctl.core.speed_metrics import TIME_EVAL_S as TIME_EVAL_S
from ppoctl.core.speed_metrics import TIME_GENERATION_S as TIME_GENERATION_S
from ppoctl.core.speed_metrics import TIME_ROLLOUT_S as TIME_ROLLOUT_S
from ppoctl.core.speed_metrics import TIME_TRANSFER_S as TIME_TRANSFER_S
from ppoctl.core.speed_metrics import WAITS as WAITS
from ppoctl.core.speed_metrics import pass_metrics as pass_metrics
from ppoctl.core.speed_metrics import save_metric as save_metric
from ppoctl.core.speed_metrics import stage_metrics as stage_metrics
from ppoctl.core.speed_metrics import usage_metrics as usage_metrics

ROLLOUT_RESPONSE_TOKENS_MEAN = Metric(
    "rollout/response_tokens_mean", "tokens", "mean length of the responses", "no collapse towards 0"
)
ROLLOUT_RESPONSE_TOKENS_MAX = Metric(
    "rollout/response_tokens_max", "tokens", "longest response", "below rollout.max_new_tokens"
)
ROLLOUT_TRUNCATED_FRAC = Metric(
    "rollout/truncated_frac", "fraction", "responses that a limit truncated", "below 0.1, not rising", "lower"
)
ROLLOUT_RESENT_SEQS = Metric(
    "rollout/resent_seqs", "sequences", "responses requested again because an engine died", "0"
)
ROLLOUT_UNFINISHED_SEQS = Metric(
    "rollout/unfinished_seqs", "sequences",
    "responses that the next step continues (with rollout.tokens_per_step)", "steady",
)  # fmt: skip
ROLLOUT_TOKENS = Metric("rollout/tokens", "tokens", "response tokens of the step, without prompts")
GROUPS_KEPT = Metric("groups/kept", "groups", "groups that the step trains on (with rollout.groups)", "steady")
GROUPS_ROUNDS = Metric("groups/rounds", "rounds", "rounds of generation of the step (with rollout.groups)", "1 to 3")
GROUPS_PROMPTS_PER_KEPT = Metric("groups/prompts_per_kept", "prompts", "generated prompts per kept group", "1 to 3")
GROUPS_ALL_RIGHT_FRAC = Metric("groups/all_right_frac", "fraction", "groups whose responses all pass", "below 0.5")
GROUPS_ALL_WRONG_FRAC = Metric("groups/all_wrong_frac", "fraction", "groups whose responses all fail", "falling")
GROUPS_DROPPED_TOKENS = Metric("groups/dropped_tokens", "tokens", "response tokens of groups that the step drops")
ENVIRONMENT_TURNS_MEAN = Metric(
    "environment/turns_mean", "turns", "mean number of turns of an episode (with [environment])", "above 1"
)
ENVIRONMENT_OBSERVED_TOKENS_MEAN = Metric(
    "environment/observed_tokens_mean", "tokens", "mean number of observation tokens of an episode"
)
ENVIRONMENT_CALLS_MEAN = Metric("environment/calls_mean", "calls", "mean number of tool calls of an episode")
ENVIRONMENT_MALFORMED_FRAC = Metric(
    "environment/malformed_frac", "fraction", "episodes with a tool call that cannot be read", "below 0.1", "lower"
)
ENVIRONMENT_TURN_LIMIT_FRAC = Metric(
    "environment/turn_limit_frac", "fraction", "episodes that environment.turns ended", "below 0.1", "lower"
)
ENVIRONMENT_FAILED_FRAC = Metric(
    "environment/failed_frac", "fraction", "episodes whose environment failed", "0", "lower"
)
ENVIRONMENT_METRIC_MEAN = Metric(
    "environment/{name}_mean", "value", "mean of a metric of your environment, over the episodes that have it"
)
REWARD_SCORE_MEAN = Metric("reward/score_mean", "score", "mean score as the scorer returned it", "rising", "higher")
REWARD_SCORE_STD = Metric(
    "reward/score_std", "score", "standard deviation of the scores", "above 0; at 0 there is nothing to learn from"
)
REWARD_SHAPED_MEAN = Metric(
    "reward/shaped_mean", "reward", "mean reward of a response, before any KL penalty", "rising", "higher"
)
REWARD_CLAMPED_FRAC = Metric(
    "reward/clamped_frac", "fraction", "scores outside reward.scale.from", "0, unless clamping is intended"
)
REWARD_CLIPPED_FRAC = Metric("reward/clipped_frac", "fraction", "rewards clipped by reward.clip", "near 0")
REWARD_MOMENTS_MEAN = Metric(
    "reward/moments_mean", "reward", "mean that reward.moments subtracts, if it subtracts a mean"
)
REWARD_MOMENTS_STD = Metric(
    "reward/moments_std", "reward",
    "divisor of reward.moments; 0: all rewards so far were equal, so rewards are not divided", "steady",
)  # fmt: skip
REWARD_UNFINISHED_MEAN = Metric(
    "reward/unfinished_mean", "reward", "mean change of the reward by reward.unfinished_factor", "near 0"
)
REWARD_OVERLONG_MEAN = Metric(
    "reward/overlong_mean", "reward", "mean change of the reward by reward.overlong", "near 0"
)
REWARD_LENGTH_MEAN = Metric("reward/length_mean", "reward", "mean change of the reward by reward.length_penalty")
REWARD_ERROR_FRAC = Metric("reward/error_frac", "fraction", "samples whose scorer failed", "0")
REWARD_PART_MEAN = Metric(
    "reward/{part}_mean", "score", "mean score of a reward part, or mean of a further metric of your scoring function"
)
REWARD_SECONDS_MEAN = Metric("reward/seconds_mean", "s", "mean time of a scorer per sample")
REWARD_SECONDS_MAX = Metric(
    "reward/seconds_max", "s", "time of a scorer for the slowest sample", "below the time of the rollout"
)
REWARD_TIMEOUT_FRAC = Metric(
    "reward/timeout_frac", "fraction", "samples whose scorer was killed at reward.timeout_s", "0"
)
REWARD_LENIENT_MEAN = Metric(
    "reward/lenient_mean", "score", "mean score by the lenient rule (with reward.strict)", "above score_mean",
    "higher",
)  # fmt: skip
REWARD_STRICT_MEAN = Metric(
    "reward/strict_mean", "score", "mean score by the strict rule (without reward.strict)", "approaching score_mean",
    "higher",
)  # fmt: skip
BASELINE_SCORE_MEAN = Metric(
    "baseline/score_mean", "score", "mean score of the greedy responses (with remax)", "rising", "higher"
)
BASELINE_ERROR_FRAC = Metric(
    "baseline/error_frac", "fraction",
    "greedy responses without a score: the responses to their prompts are not trained on (with remax)", "0",
)  # fmt: skip
BASELINE_RESPONSE_TOKENS_MEAN = Metric(
    "baseline/response_tokens_mean", "tokens", "mean length of the greedy responses (with remax)"
)
BASELINE_TRUNCATED_FRAC = Metric(
    "baseline/truncated_frac", "fraction", "greedy responses truncated by max_new_tokens (with remax)",
    "below 0.1, not rising", "lower",
)  # fmt: skip
BASELINE_TOKENS = Metric("baseline/tokens", "tokens", "tokens of the greedy responses of the step (with remax)")
MISMATCH_GAP_MEAN_ABS = Metric(
    "mismatch/gap_mean_abs", "nats", "mean |trainer - sampler log-prob| of the sampled tokens", "below 0.05"
)
MISMATCH_GAP_MAX_ABS = Metric("mismatch/gap_max_abs", "nats", "largest |trainer - sampler log-prob|", "below 2")
MISMATCH_GAP_K3 = Metric("mismatch/gap_k3", "nats", "k3 estimate of KL(sampler, trainer) per token", "below 0.01")
MISMATCH_ESS_FRAC = Metric(
    "mismatch/ess_frac", "fraction", "effective sample size of trainer/sampler weights", "above 0.9"
)
KL_REFERENCE_MEAN = Metric(
    "kl/reference_mean", "nats", "estimated KL of the actor from the reference, per token", "below 1"
)
MISMATCH_SEQUENCE_GAP_MEAN = Metric(
    "mismatch/sequence_gap_mean", "factor",
    "mean over sequences of their gap, the mean over tokens of exp|trainer - sampler| (see ppo.max_sequence_gap)",
    "below 1.05",
)  # fmt: skip
MISMATCH_SEQUENCE_GAP_MAX = Metric(
    "mismatch/sequence_gap_max", "factor", "largest gap of a sequence, as in sequence_gap_mean", "below 1.2"
)
KL_COEF = Metric("kl/coef", "factor", "coefficient of the KL penalty")
KL_CLAMPED_FRAC = Metric(
    "kl/clamped_frac", "fraction",
    "tokens whose KL estimate is clamped (by ppo.kl.input_clamp, output_clamp, or k3's limit of 20 nats)",
    "below 0.01",
)  # fmt: skip
KL_PENALTY_MEAN = Metric(
    "kl/penalty_mean", "reward", "mean KL penalty per token", "small compared with the shaped reward"
)
KL_MEASURED = Metric(
    "kl/measured", "nats", "KL from the reference, which ppo.kl.adaptive compares with its target", "near the target"
)
CORRECTION_WEIGHT_MEAN = Metric(
    "correction/weight_mean", "factor",
    "mean importance weight of the tokens in the actor's loss (with a correction)", "near 1",
)  # fmt: skip
CORRECTION_CAPPED_FRAC = Metric(
    "correction/capped_frac", "fraction", "tokens whose ratio is outside the bounds of rollout_correction", "near 0"
)
CORRECTION_REJECTED_FRAC = Metric(
    "correction/rejected_frac", "fraction", "tokens that a correction masks out of the actor's loss", "near 0"
)
CORRECTION_DROPPED_SEQS = Metric(
    "correction/dropped_seqs", "sequences", "responses whose tokens are all masked out by a correction", "near 0"
)
ADVANTAGE_RAW_MEAN = Metric("advantage/raw_mean", "reward", "mean advantage over unmasked tokens, before whitening")
ADVANTAGE_RAW_STD = Metric(
    "advantage/raw_std", "reward", "standard deviation of the advantages before whitening", "above 0"
)
ADVANTAGE_RAW_ABS_MAX = Metric("advantage/raw_abs_max", "reward", "largest |advantage| before whitening")
TRAINED_SEQS = Metric(
    "trained/seqs", "sequences", "responses with a score that have been trained on, in this and all earlier steps"
)
TRAINED_TOKENS = Metric(
    "trained/tokens", "tokens", "response tokens in a loss so far; each is counted once, for any ppo.epochs"
)
ADVANTAGE_LAMBDA_MEAN = Metric(
    "advantage/lambda_mean", "factor",
    "mean lambda of the policy's advantages, over sequences (with length_adaptive_alpha)",
)  # fmt: skip
ADVANTAGE_BOOTSTRAP_MEAN = Metric(
    "advantage/bootstrap_mean", "reward",
    "mean bootstrap value after the last token, 0 for finished responses (with ppo.truncated = bootstrap)",
)  # fmt: skip
ADVANTAGE_FILTERED_FRAC = Metric(
    "advantage/filtered_frac", "fraction", "scored responses that are excluded (with ppo.truncated = filter)",
    "below 0.1",
)  # fmt: skip
ADVANTAGE_EQUAL_GROUPS_FRAC = Metric(
    "advantage/equal_groups_frac", "fraction",
    "prompts without two different scores, so that their responses have advantage 0 (before any whitening)",
    "below 0.5",
)  # fmt: skip
ADVANTAGE_CUSTOM = Metric(
    "advantage/custom_{name}", "value", "metric that your estimator returns (ppo.advantages.kind = python)"
)
RESAMPLE_EFFECTIVE_SEQS = Metric(
    "resample/effective_seqs", "sequences", "(sum w)^2 / sum w^2 of the weights w of rows", "above 1/10 of the rows"
)
VALUE_EXPLAINED_VARIANCE = Metric(
    "value/explained_variance", "fraction", "1 - Var(return - value) / Var(return)", "rising towards 1"
)
VALUE_EXPLAINED_VARIANCE_LAST_EPOCH = Metric(
    "value/explained_variance_last_epoch", "fraction",
    "explained variance in the critic's last epoch; each value is computed before its minibatch is trained on",
    "above explained_variance if the critic has several epochs",
)  # fmt: skip
VALUE_CLIP_FRAC = Metric(
    "value/clip_frac", "fraction",
    "tokens whose clipped value error is larger than the unclipped error; 0 without value_loss.clip", "below 0.3",
)  # fmt: skip
VALUE_MEAN = Metric("value/value_mean", "reward", "mean value", "near return_mean")
VALUE_RETURN_MEAN = Metric("value/return_mean", "reward", "mean return")
VALUE_RETURN_STD = Metric("value/return_std", "reward", "standard deviation of the returns")
VALUE_ERROR = Metric("value/value_error", "reward", "mean |value - return|", "falling")
VALUE_LOSS = Metric("value/loss", "loss", "the critic's loss", "falling")
VALUE_GRAD_NORM = Metric("value/grad_norm", "norm", "global gradient norm of the critic before clipping", "no spikes")
VALUE_LR = Metric("value/lr", "rate", "the critic's learning rate at the last update of the step")
POLICY_TRAINED = Metric(
    "policy/trained", "0 or 1",
    "1: the step trained the actor; 0: only the critic, so the actor's update has no metrics (critic_only_until)",
)  # fmt: skip
POLICY_LOSS = Metric("policy/loss", "loss", "the actor's loss", "near 0; not very informative")
POLICY_SURROGATE_LOSS = Metric(
    "policy/surrogate_loss", "loss", "the term of policy/loss from the advantages", "near 0"
)
POLICY_ENTROPY_LOSS = Metric(
    "policy/entropy_loss", "loss", "the term of policy/loss from the entropy bonus: at most 0 (with entropy_coef)"
)
POLICY_KL_LOSS = Metric(
    "policy/kl_loss", "loss", "the term of policy/loss from the KL penalty (with ppo.kl.place = loss)",
    "small, rising slowly",
)  # fmt: skip
POLICY_VALUE_LOSS = Metric(
    "policy/value_loss", "loss", "the term of policy/loss from a value head on the actor's model", "falling"
)  # fmt: skip
POLICY_NLL_LOSS = Metric(
    "policy/nll_loss", "loss", "the term of policy/loss from good responses (with positive_nll_coef)", "falling"
)
POLICY_NLL_TOKENS = Metric(
    "policy/nll_tokens", "tokens", "tokens of good responses in the step, over which positive_nll_coef averages",
    "above 0",
)  # fmt: skip
POLICY_GRAD_NORM = Metric(
    "policy/grad_norm", "norm", "global gradient norm of the actor before clipping", "no spikes"
)
POLICY_LR = Metric("policy/lr", "rate", "the actor's learning rate at the last update of the step")
POLICY_MERGE_ERROR = Metric(
    "policy/merge_error", "fraction", "part of the change by adapters that rounding loses", "falling", "lower"
)
POLICY_APPROX_KL = Metric(
    "policy/approx_kl", "nats", "KL between the actor before and after the step, per token (k3)", "below 0.05"
)
POLICY_CLIP_FRAC = Metric("policy/clip_frac", "fraction", "tokens whose ratio was clipped", "0.01 to 0.3")
POLICY_CLIP_FRAC_HIGH = Metric("policy/clip_frac_high", "fraction", "tokens with advantage > 0 clipped above")
POLICY_CLIP_FRAC_LOW = Metric("policy/clip_frac_low", "fraction", "tokens with advantage < 0 clipped below")
POLICY_DUAL_CLIP_FRAC = Metric(
    "policy/dual_clip_frac", "fraction", "tokens bounded by dual_clip; 0 without dual_clip", "near 0"
)
POLICY_RATIO_MEAN = Metric("policy/ratio_mean", "factor", "mean new / old probability", "near 1")
POLICY_RATIO_P01 = Metric("policy/ratio_p01", "factor", "1st percentile of the ratio", "above 0.5")
POLICY_RATIO_P50 = Metric("policy/ratio_p50", "factor", "median of the ratio", "near 1")
POLICY_RATIO_P99 = Metric("policy/ratio_p99", "factor", "99th percentile of the ratio", "below 2")
POLICY_RATIO_MAX = Metric("policy/ratio_max", "factor", "largest ratio", "below 10")
POLICY_CLAMPED_RATIO_MIN = Metric(
    "policy/clamped_ratio_min", "factor", "smallest ratio after the clip of the loss", "1 - clip_low to 1"
)
POLICY_CLAMPED_RATIO_MAX = Metric(
    "policy/clamped_ratio_max", "factor", "largest ratio after the clip of the loss", "1 to 1 + clip_high"
)
POLICY_STALENESS_MAX = Metric(
    "policy/staleness_max", "steps",
    "largest number of steps between the weights that generated a token and those at the start of the update (with "
    "rollout.ahead or rollout.tokens_per_step)", "steady", "lower",
)  # fmt: skip
POLICY_ENTROPY_MEAN = Metric(
    "policy/entropy_mean", "nats", "entropy of the next-token distribution", "falling slowly, not to 0"
)
POLICY_CUSTOM = Metric(
    "policy/custom_{name}", "value",
    "mean over tokens of a metric that your loss returns (ppo.policy_loss.kind = python)",
)  # fmt: skip
_ELSEWHERE = (*EVALUATION_METRICS, *SPEED_METRICS)
_OWN = [value for value in list(globals().values()) if isinstance(value, Metric) and value not in _ELSEWHERE]
METRICS: tuple[Metric, ...] = (*_OWN, *_ELSEWHERE)
"""All metrics in the order above; those of evaluations are before the times. Times measure work (see `clock`) and do
not include the startup of engines, trainers or Ray."""
_BY_NAME = {metric.name: metric for metric in METRICS}


def named(group: str, figure: str) -> str:
    """Return the full name of the metric that a stage calls `figure`.

    Raises KeyError if the metric is not in the registry, so that no stage reports an unregistered name.
    """
    name = f"{group}/{figure}"
    if find(name) is None:
        raise KeyError(f"`{name}` is not in the registry of metrics")
    return name


ON_THE_CONSOLE: dict[str, str] = {
    "reward": REWARD_SCORE_MEAN.name,
    "kl": POLICY_APPROX_KL.name,
    "ev": VALUE_EXPLAINED_VARIANCE.name,
    "clip": POLICY_CLIP_FRAC.name,
    "trunc": ROLLOUT_TRUNCATED_FRAC.name,
    "rounds": GROUPS_ROUNDS.name,
    "kept": GROUPS_KEPT.name,
}
"""Metrics that the console shows for every step, by their short names on the console."""


@lru_cache(maxsize=4096)
def find(name: str) -> Metric | None:
    """Return the registry entry of a metric name or of a short name on the console; None if the registry has no such
    entry.

    The name may contain any evaluation set and any number of responses.
    """
    name = ON_THE_CONSOLE.get(name, name)
    if custom := _CUSTOM.fullmatch(name):
        of_any_name = name.removesuffix(custom[2]) + "{name}"
        return _BY_NAME.get(of_any_name.replace(f"/{custom[1]}/", "/{set}/"))
    general = name.replace(f"/{set_name}/", "/{set}/") if (set_name := eval_set(name)) else name
    metric = _BY_NAME.get(general) or _BY_NAME.get(_OF_NUMBER.sub("_at_{k}", general))
    if metric is None and _OF_ENVIRONMENT.fullmatch(name):
        return ENVIRONMENT_METRIC_MEAN
    return REWARD_PART_MEAN if metric is None and reward_part(name) else metric


def is_custom(name: str) -> bool:
    """Whether a metric is computed by a function of the user."""
    return _CUSTOM.fullmatch(name) is not None


_CUSTOM = re.compile(r"(?:eval/([^/]+)|policy|advantage)/(?:greedy_)?custom_([A-Za-z0-9_]+)")
_OF_NUMBER = re.compile(r"_at_[1-9][0-9]*(?=(_stderr)?$)")


def responses_asked(name: str) -> int | None:
    """Return the number of responses k of a metric such as `eval/SET/pass_at_8`; None for other metrics."""
    match = _OF_NUMBER.search(name) if eval_set(name) else None
    return int(match.group().removeprefix("_at_")) if match else None


def reward_part(name: str) -> str | None:
    """Return the name of the reward part in `reward/PART_mean`; None for other metrics."""
    match = _OF_PART.fullmatch(name)
    return match[1] if match and name not in _BY_NAME else None


def is_of_a_scorer(name: str) -> bool:
    """Whether a scorer may return a further metric of this name with its score.

    `reward/NAME_mean` must not be the name of another metric, and must have only characters that tracking accepts.
    """
    metric = f"reward/{name}_mean"
    return _OF_PART.fullmatch(metric) is not None and metric not in _OF_THE_STEP


_OF_THE_STEP = {
    metric.name for metric in (
        REWARD_SCORE_MEAN, REWARD_SHAPED_MEAN, REWARD_MOMENTS_MEAN, REWARD_UNFINISHED_MEAN, REWARD_OVERLONG_MEAN,
        REWARD_LENGTH_MEAN, REWARD_SECONDS_MEAN,
    )
}  # fmt: skip
_OF_ENVIRONMENT = re.compile(r"environment/[A-Za-z0-9_-]+_mean")
_OF_PART = re.compile(r"reward/([A-Za-z0-9_-]+)_mean")


def eval_set(name: str) -> str | None:
    """Return the evaluation set of `eval/SET/...`; None for other metrics."""
    parts = name.split("/")
    return parts[1] if len(parts) == 3 and parts[0] == "eval" else None


def unknown(name: str) -> str:
    """Return the error message for a name that is not a metric, with a suggestion if a metric has a similar name."""
    set_name = eval_set(name)
    known = [metric.name.replace("{set}", set_name or "SET") for metric in METRICS if metric is not REWARD_PART_MEAN]
    close = get_close_matches(name, known, n=1, cutoff=0.6)
    same_last = [other for other in known if other.rsplit("/", 1)[-1] == name.rsplit("/", 1)[-1]]
    return f"no metric is called `{name}`" + (f"; did you mean `{near[0]}`?" if (near := close or same_last) else "")
