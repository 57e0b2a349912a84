"""The `[eval]` table: when the actor is evaluated, how responses are generated, and which metrics are estimated from
the responses."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from ppoctl.core.recipe_table import REPORTING, RESULTS, Array, AtLeastOne, NotNegative, Positive, Table
from ppoctl.environments.environment_kinds import EvalEnvironment
from ppoctl.rewards.metric_function import MetricFunction

FunctionOrTable = BeforeValidator(lambda value: {"function": value} if isinstance(value, str) else value)
"""Validator of a table that may be written as the name of its function."""


class EvalTable(Table):
    """Evaluation of the actor on every set of `data.eval`, with greedy decoding and with sampling at
    `temperature`."""

    every_steps: Annotated[int, REPORTING, NotNegative] = 0
    """Steps between evaluations; 0: no evaluation between the start and the end of the run."""
    first_step: Annotated[int | None, REPORTING, AtLeastOne] = None
    """Step of the first evaluation after the start; the next one follows `every_steps` later. Evaluations at the
    start and at the end of the run do not depend on this key. Absent: `every_steps`."""
    at_start: Annotated[bool, REPORTING] = True
    """Whether to evaluate before the first step."""
    at_end: Annotated[bool, REPORTING] = True
    """Whether to evaluate after the last step in any case; false: only if `every_steps` and `first_step` include this
    step."""
    passes: Annotated[Literal["both", "greedy", "sampled"], RESULTS] = "both"
    """Passes over each set. greedy: one response per prompt, the most likely token at each position; sampled:
    `samples_per_prompt` responses at `temperature`; both: one pass of each."""
    samples_per_prompt: Annotated[int, RESULTS, AtLeastOne] = 1
    """Responses per prompt in the sampled pass."""
    temperature: Annotated[float, RESULTS, Positive] = 1.0
    """Sampling temperature of the sampled pass."""
    top_p: Annotated[float, RESULTS, Field(gt=0, le=1)] = 1.0
    """Top-p of the sampled pass: each token is sampled from the most likely tokens that together have this
    probability (see `rollout.top_p`); 1: from all tokens."""
    top_k: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Top-k of the sampled pass: each token is sampled from the k most likely tokens; absent: from all tokens."""
    min_p: Annotated[float, RESULTS, Field(ge=0, le=1)] = 0.0
    """Min-p of the sampled pass: each token is sampled from the tokens whose probability is at least this fraction of
    the highest probability; 0: from all tokens."""
    max_new_tokens: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Maximum number of response tokens in an evaluation; absent: `rollout.max_new_tokens`."""
    pass_at: Annotated[tuple[int, ...], RESULTS, Array] = ()
    """Values of k for which `pass_at_k` is reported: the expected score of the best of k responses, estimated without
    bias from all `samples_per_prompt` responses. `pass_at_1`, the mean score, is always reported."""
    pass_score: Annotated[float | None, RESULTS] = None
    """Lowest score that passes. `pass_at_k` and `maj_at_k` then count a response as 1 or 0, and `score_mean` and
    `best_at_k` report the scores themselves. Absent: `pass_at_k` and `maj_at_k` use the score."""
    maj_at: Annotated[tuple[int, ...], RESULTS, Array] = ()
    """Values of k for which `maj_at_k` is reported: the expected score of the most frequent answer among k responses,
    estimated without bias from all `samples_per_prompt` responses. Ties are broken at random. The reward must extract
    answers from responses."""
    metrics: Annotated[MetricFunction | None, FunctionOrTable] = None
    """Your own function that computes metrics from samples: a table, or the name of the function alone. Absent: no
    function."""
    environment: EvalEnvironment | None = None
    """Environment of evaluations (NeMo-RL's `val_task_to_env`); `kind = "none"`: responses of one turn. Absent:
    `[environment]`."""
    print_samples: Annotated[int, REPORTING, NotNegative] = 0
    """Number of responses of each set and pass that are printed in the log: always the responses to the first
    prompts."""

    @property
    def modes(self) -> tuple[Literal["greedy", "sampled"], ...]:
        """The passes over each set, in order."""
        return ("greedy", "sampled") if self.passes == "both" else (self.passes,)

    @property
    def responses_per_prompt(self) -> int:
        """Number of responses to each prompt in all passes together."""
        return sum({"greedy": 1, "sampled": self.samples_per_prompt}[mode] for mode in self.modes)
