"""Entries of the metric registry for evaluations (see `metric_registry`)."""

from ppoctl.core.metric import Metric

EVAL_PASS_AT_1 = Metric(
    "eval/{set}/pass_at_1", "fraction", "mean score of sampled responses (mean@n), or fraction of them that passes",
    "rising", "higher",
)  # fmt: skip
EVAL_PASS_AT_1_STDERR = Metric("eval/{set}/pass_at_1_stderr", "fraction", "standard error of pass_at_1, over prompts")
EVAL_PASS_AT_K = Metric(
    "eval/{set}/pass_at_{k}", "fraction", "expected score of the best of k sampled responses (with eval.pass_at)",
    "rising", "higher",
)  # fmt: skip
EVAL_PASS_AT_K_STDERR = Metric(
    "eval/{set}/pass_at_{k}_stderr", "fraction", "standard error of pass_at_k, over prompts"
)
EVAL_MAJ_AT_K = Metric(
    "eval/{set}/maj_at_{k}", "fraction",
    "expected score of the most frequent answer of k responses (with eval.maj_at)", "rising", "higher",
)  # fmt: skip
EVAL_MAJ_AT_K_STDERR = Metric("eval/{set}/maj_at_{k}_stderr", "fraction", "standard error of maj_at_k, over prompts")
EVAL_SCORE_MEAN = Metric(
    "eval/{set}/score_mean", "score", "mean score of sampled responses (with eval.pass_score)", "rising", "higher"
)
EVAL_SCORE_MEAN_STDERR = Metric("eval/{set}/score_mean_stderr", "score", "standard error of score_mean, over prompts")
EVAL_BEST_AT_K = Metric(
    "eval/{set}/best_at_{k}", "score",
    "expected best score of k sampled responses (with eval.pass_score and pass_at)", "rising", "higher",
)  # fmt: skip
EVAL_BEST_AT_K_STDERR = Metric("eval/{set}/best_at_{k}_stderr", "score", "standard error of best_at_k, over prompts")
EVAL_TRUNCATED_FRAC = Metric(
    "eval/{set}/truncated_frac", "fraction", "sampled responses truncated by the length limit", "below 0.1", "lower"
)
EVAL_RESPONSE_TOKENS_MEAN = Metric(
    "eval/{set}/response_tokens_mean", "tokens", "mean length of the sampled responses"
)
EVAL_ERROR_FRAC = Metric("eval/{set}/error_frac", "fraction", "sampled responses without a score", "0")
EVAL_GREEDY_PASS_AT_1 = Metric(
    "eval/{set}/greedy_pass_at_1", "fraction", "mean score of greedy responses", "rising", "higher"
)
EVAL_GREEDY_PASS_AT_1_STDERR = Metric(
    "eval/{set}/greedy_pass_at_1_stderr", "fraction", "standard error of greedy_pass_at_1, over prompts"
)
EVAL_GREEDY_SCORE_MEAN = Metric(
    "eval/{set}/greedy_score_mean", "score", "mean score of greedy responses (with eval.pass_score)", "rising",
    "higher",
)  # fmt: skip
EVAL_GREEDY_SCORE_MEAN_STDERR = Metric(
    "eval/{set}/greedy_score_mean_stderr", "score", "standard error of greedy_score_mean, over prompts"
)
EVAL_GREEDY_TRUNCATED_FRAC = Metric(
    "eval/{set}/greedy_truncated_frac", "fraction", "greedy responses truncated by the length limit", "below 0.1",
    "lower",
)  # fmt: skip
EVAL_GREEDY_RESPONSE_TOKENS_MEAN = Metric(
    "eval/{set}/greedy_response_tokens_mean", "tokens", "mean length of the greedy responses"
)
EVAL_GREEDY_ERROR_FRAC = Metric("eval/{set}/greedy_error_frac", "fraction", "greedy responses without a score", "0")
EVAL_CUSTOM = Metric("eval/{set}/custom_{name}", "value", "result of `eval.metrics` for the sampled responses")
EVAL_GREEDY_CUSTOM = Metric(
    "eval/{set}/greedy_custom_{name}", "value", "result of `eval.metrics` for the greedy responses"
)

EVALUATION_METRICS: tuple[Metric, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric)
)
"""All metrics of evaluations in the order above."""
