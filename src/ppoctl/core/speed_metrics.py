"""Metrics of the time, the speed and the experts of passes (see `metric_registry`)."""

from ppoctl.core.metric import Metric

TIME_ROLLOUT_S = Metric("time/rollout_s", "s", "time of the rollout, including the weight transfer to the engines")
TIME_TRANSFER_S = Metric(
    "time/transfer_s", "s", "part of the rollout: weights are sent to the engines and verified; 0 after an evaluation"
)
TIME_GENERATION_S = Metric(
    "time/generation_s", "s",
    "time for which the engines generate the responses of a rollout, without the transfer; with rollout.ahead, those "
    "of a later step, while this step trains",
)  # fmt: skip
TIME_NEXT_ROLLOUT_S = Metric(
    "time/next_rollout_s", "s",
    "time that training waits for the rollout of a later step: the transfer, and the rest of the generation when "
    "training has ended (with rollout.ahead)",
)  # fmt: skip
TIME_PARTIAL_ROLLOUT_S = Metric(
    "time/partial_rollout_s", "s",
    "time of generating at most a number of tokens of each response, with the weight transfer (with "
    "rollout.tokens_per_step)",
)  # fmt: skip
TIME_REWARD_S = Metric("time/reward_s", "s", "time of scoring")
TIME_GREEDY_ROLLOUT_S = Metric("time/greedy_rollout_s", "s", "time of the greedy responses (with remax)")
TIME_GREEDY_REWARD_S = Metric("time/greedy_reward_s", "s", "time of scoring the greedy responses (with remax)")
TIME_KEEP_GROUPS_S = Metric("time/keep_groups_s", "s", "time of the choice of groups (with rollout.groups)")
GROUPS_CANCELLED_TOKENS = Metric(
    "groups/cancelled_tokens", "tokens",
    "tokens of a round that was cancelled because the step had enough groups (with rollout.groups.overlap_rounds)",
    "far below rollout/tokens", "lower",
)  # fmt: skip
TIME_CANCELLED_S = Metric(
    "time/cancelled_s", "s",
    "time for which the engines generate a round that is cancelled, while scores are computed (with "
    "rollout.groups.overlap_rounds)",
)  # fmt: skip
TIME_ALL_ROWS_S = Metric("time/all_rows_s", "s", "time of the join of all rounds (with critic_sees = all)")
TIME_VALUES_S = Metric("time/values_s", "s", "time of the critic's values")
TIME_LOGPROBS_S = Metric("time/logprobs_s", "s", "time of log-probs, including those of the reference")
TIME_CORRECTION_S = Metric("time/correction_s", "s", "time of the rollout correction")
TIME_ADVANTAGES_S = Metric("time/advantages_s", "s", "time of the advantages")
TIME_CRITIC_ADVANTAGES_S = Metric(
    "time/critic_advantages_s", "s", "time of the advantages of all generated responses (with critic_sees = all)"
)
TIME_RESAMPLE_S = Metric("time/resample_s", "s", "time of sampling rows again")
TIME_WHITENING_S = Metric("time/whitening_s", "s", "time of whitening the advantages of rows that are sampled again")
TIME_CRITIC_UPDATE_S = Metric("time/critic_update_s", "s", "time of the critic's update")
TIME_ACTOR_UPDATE_S = Metric("time/actor_update_s", "s", "time of the actor's update")
TIME_EVAL_S = Metric("time/eval_s", "s", "time of an evaluation of all sets")
_TOKENS_PER_S, _MFU = "tokens that the model reads (prompt and response) per second of", "matrix rate reached in"
THROUGHPUT_VALUES = Metric("throughput/values_tokens_per_s", "tokens/s", f"{_TOKENS_PER_S} the critic's values")
THROUGHPUT_LOGPROBS = Metric("throughput/logprobs_tokens_per_s", "tokens/s", f"{_TOKENS_PER_S} log-probs")
THROUGHPUT_CRITIC_UPDATE = Metric(
    "throughput/critic_update_tokens_per_s", "tokens/s", f"{_TOKENS_PER_S} the critic's update"
)
THROUGHPUT_ACTOR_UPDATE = Metric(
    "throughput/actor_update_tokens_per_s", "tokens/s", f"{_TOKENS_PER_S} the actor's update"
)
MFU_VALUES = Metric("throughput/values_mfu", "fraction", f"{_MFU} the critic's values", "above 0.3", "higher")
MFU_LOGPROBS = Metric("throughput/logprobs_mfu", "fraction", f"{_MFU} log-probs", "above 0.3", "higher")
MFU_CRITIC_UPDATE = Metric(
    "throughput/critic_update_mfu", "fraction", f"{_MFU} the critic's update", "above 0.3", "higher"
)
MFU_ACTOR_UPDATE = Metric(
    "throughput/actor_update_mfu", "fraction", f"{_MFU} the actor's update", "above 0.3", "higher"
)
THROUGHPUT_GENERATED = Metric(
    "throughput/generated_tokens_per_s", "tokens/s",
    "response tokens per second of generation, in the attempt that finished the rollout", "steady",
)  # fmt: skip
THROUGHPUT_ENGINE_IDLE_FRAC = Metric(
    "throughput/engine_idle_frac", "fraction",
    "part of the generation in which all open episodes waited for environments (with [environment])", "below 0.05",
    "lower",
)  # fmt: skip
_WAIT = "part of the stage: it waits until models have moved between devices and host memory (with cluster.offload)"
_PEAK = "largest memory peak (on a GPU what torch allocates, on a CPU resident memory) of a process of"
TIME_ROLLOUT_WAIT_S = Metric("time/rollout_wait_s", "s", _WAIT)
TIME_VALUES_WAIT_S = Metric("time/values_wait_s", "s", _WAIT)
TIME_LOGPROBS_WAIT_S = Metric("time/logprobs_wait_s", "s", _WAIT)
TIME_CRITIC_UPDATE_WAIT_S = Metric("time/critic_update_wait_s", "s", _WAIT)
TIME_ACTOR_UPDATE_WAIT_S = Metric("time/actor_update_wait_s", "s", _WAIT)
TIME_ACTOR_SAVE_S = Metric("time/actor_save_s", "s", "time for which training waits for a save of the actor")
TIME_CRITIC_SAVE_S = Metric("time/critic_save_s", "s", "time for which training waits for a save of the critic")
MEMORY_ROLLOUT = Metric("memory/rollout_gib", "GiB", f"{_PEAK} the engines")
MEMORY_VALUES = Metric("memory/values_gib", "GiB", f"{_PEAK} the critic")
MEMORY_LOGPROBS = Metric("memory/logprobs_gib", "GiB", f"{_PEAK} the actor")
MEMORY_CRITIC_UPDATE = Metric("memory/critic_update_gib", "GiB", f"{_PEAK} the critic")
MEMORY_ACTOR_UPDATE = Metric("memory/actor_update_gib", "GiB", f"{_PEAK} the actor", "below the size of the GPU")
POLICY_EXPERT_LOAD_MAX = Metric(
    "policy/expert_load_max", "factor",
    "tokens of an expert divided by the mean of its layer, for the most loaded expert (mixtures of experts)",
    "1 to 3, steady",
)  # fmt: skip
POLICY_EXPERT_LOAD_MAX_AT_K = Metric(
    "policy/expert_load_max_at_{k}", "factor", "expert_load_max of layer k, counted from 1", "1 to 3, steady"
)
POLICY_EXPERTS_UNUSED_FRAC = Metric(
    "policy/experts_unused_frac", "fraction", "experts without a token in the update (mixtures of experts)",
    "near 0, steady", "lower",
)  # fmt: skip
MISMATCH_EXPERTS_DIFFER_FRAC = Metric(
    "mismatch/experts_differ_frac", "fraction",
    "given experts that the trainer's routers would not have chosen (`actor.router_replay`)", "below 0.1", "lower",
)  # fmt: skip
POLICY_ROUTER_AUX_LOSS = Metric(
    "policy/router_aux_loss", "factor",
    "balance loss of a layer without its coefficient, mean over layers and optimizer steps"
    " (`actor.router_aux_loss_coef`)",
    "near 1, steady", "lower",
)  # fmt: skip
SPEED_METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))


def pass_metrics(stage: str) -> tuple[str, str]:
    """Return the names of tokens per second and MFU of a stage. Only stages with a trained model have them."""
    return f"throughput/{stage}_tokens_per_s", f"throughput/{stage}_mfu"


def load_metrics(stage: str) -> tuple[str, ...]:
    """Return the names of the metrics of experts, which only stages of the actor have."""
    differ = MISMATCH_EXPERTS_DIFFER_FRAC.name
    loads = POLICY_EXPERT_LOAD_MAX, POLICY_EXPERT_LOAD_MAX_AT_K, POLICY_EXPERTS_UNUSED_FRAC, POLICY_ROUTER_AUX_LOSS
    of_update = (*(metric.name for metric in loads), differ)
    return {"actor_update": of_update, "logprobs": (differ,)}.get(stage, ())


ROLLOUTS_S = (TIME_ROLLOUT_S.name, TIME_PARTIAL_ROLLOUT_S.name, TIME_NEXT_ROLLOUT_S.name)
"""Names of the times of stages that send weights and generate. If a step has several, the last of these generated
last: after a partial rollout, the stage `rollout` only takes the groups that have ended."""
PARALLEL_S = (TIME_NEXT_ROLLOUT_S.name,)
"""Names of the times of stages that generate while other stages of the step run."""
GENERATIONS_S = (*ROLLOUTS_S, TIME_GREEDY_ROLLOUT_S.name)
"""Names of the times of stages in which the engines generate, except evaluations."""
SCORINGS_S = (TIME_REWARD_S.name, TIME_GREEDY_REWARD_S.name)
"""Names of the times of stages that score responses."""


def usage_metrics(stage: str) -> tuple[str, str]:
    """Return the names of the memory peak and of the wait of a stage. Only stages of models have them. A
    partial rollout and the rollout of the next step have those of a rollout."""
    stage = stage.removeprefix("next_").removeprefix("partial_")
    return f"memory/{stage}_gib", f"time/{stage}_wait_s"


def stage_metrics(stage: str) -> dict[str, str]:
    """Return the names of the metrics of a stage in tables of stages, by column. Few stages have all of them."""
    (rate, mfu), (peak, wait), seconds = pass_metrics(stage), usage_metrics(stage), f"time/{stage}_s"
    if seconds in ROLLOUTS_S:
        rate = THROUGHPUT_GENERATED.name
    return {"seconds": seconds, "wait_s": wait, "tokens_per_s": rate, "mfu": mfu, "peak_gib": peak}


def save_metric(role: str) -> str:
    """Return the name of the metric of the saves of a role."""
    return f"time/{role}_save_s"


SAVES = (TIME_ACTOR_SAVE_S.name, TIME_CRITIC_SAVE_S.name)
"""Names of the waits for saves."""
WAITS = tuple(value.name for value in SPEED_METRICS if value.description == _WAIT)
"""Names of the waits for models that move."""
PEAKS = tuple(value.name for value in SPEED_METRICS if value.description.startswith(_PEAK))
"""Names of the memory peaks."""
