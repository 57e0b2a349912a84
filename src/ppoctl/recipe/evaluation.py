"""`[eval]`: when the actor is evaluated, how responses are drawn for it, and what is estimated from them."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from ppoctl.recipe_table import REPORTING, RESULTS, Array, AtLeastOne, NotNegative, Positive, Table
from ppoctl.rewards.metric_function import MetricFunction

FunctionOrTable = BeforeValidator(lambda value: {"function": value} if isinstance(value, str) else value)
"""A table that may be written as its function alone."""


class EvalTable(Table):
    """Evaluation of the actor on every set of `data.eval`: greedy, and sampled at `temperature`."""

    every_steps: Annotated[int, REPORTING, NotNegative] = 0
    """Steps between evaluations; 0: none between the first step and the end."""
    at_start: Annotated[bool, REPORTING] = True
    """Evaluate before the first step too."""
    at_end: Annotated[bool, REPORTING] = True
    """Evaluate after the last step, whatever `every_steps` is; false: only if `every_steps` divides it."""
    passes: Annotated[Literal["both", "greedy", "sampled"], RESULTS] = "both"
    """How each set is drawn. greedy: one response per prompt, the likeliest id each time; sampled:
    `samples_per_prompt` responses, at `temperature`; both: one pass of each."""
    samples_per_prompt: Annotated[int, RESULTS, AtLeastOne] = 1
    """Responses per prompt in the sampled pass."""
    temperature: Annotated[float, RESULTS, Positive] = 1.0
    """Sampling temperature of the sampled pass."""
    top_p: Annotated[float, RESULTS, Field(gt=0, le=1)] = 1.0
    """Share of the probability of the ids that the sampled pass draws from, as `rollout.top_p` says it; 1: all."""
    top_k: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Likeliest ids that the sampled pass draws from; absent: all."""
    min_p: Annotated[float, RESULTS, Field(ge=0, le=1)] = 0.0
    """Ids at least this many times as likely as the likeliest are drawn in the sampled pass; 0: all."""
    max_new_tokens: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Most tokens of a response in an evaluation; absent: as in rollouts."""
    pass_at: Annotated[tuple[int, ...], RESULTS, Array] = ()
    """Numbers k of responses of which the best counts: `pass_at_k` is what the best of k would score, estimated
    without bias from all of `samples_per_prompt`. `pass_at_1`, the mean score, is always reported."""
    pass_score: Annotated[float | None, RESULTS] = None
    """Lowest score that passes; a response then counts as 1 or 0 in `pass_at_k` and `maj_at_k`, and the scores
    themselves are reported as `score_mean` and `best_at_k`. Absent: the score is what counts."""
    maj_at: Annotated[tuple[int, ...], RESULTS, Array] = ()
    """Numbers k of responses that vote: `maj_at_k` is what the answer that most of k give would score, ties broken by
    lot, estimated without bias from all of `samples_per_prompt`. The reward must read answers out of responses."""
    metrics: Annotated[MetricFunction | None, FunctionOrTable] = None
    """A function of one's own that measures samples, as a table or as its `function` alone; absent: none."""
    print_samples: Annotated[int, REPORTING, NotNegative] = 0
    """Responses of each set and pass that are printed in the log: the first ones, the same prompts each time."""

    @property
    def modes(self) -> tuple[Literal["greedy", "sampled"], ...]:
        """The passes over each set, in their order."""
        return ("greedy", "sampled") if self.passes == "both" else (self.passes,)

    @property
    def responses_per_prompt(self) -> int:
        """Responses to each prompt in all passes together."""
        return sum({"greedy": 1, "sampled": self.samples_per_prompt}[mode] for mode in self.modes)
