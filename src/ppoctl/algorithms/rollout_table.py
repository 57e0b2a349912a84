"""The recipe table `[rollout]`: how responses are sampled."""

from typing import Annotated, Literal

from pydantic import Field

from ppoctl.algorithms.stages.groups_table import GroupsTable
from ppoctl.core.recipe_table import RESULTS, SPEED, Array, AtLeastOne, NotNegative, Positive, Table


class RolloutTable(Table):
    """Sampling of responses. These settings also define the distribution of log-probs: in the stage `logprobs` and in
    updates, the trainer scales and filters logits as the generator (vLLM) does. Both probabilities of a ratio
    therefore have the same temperature and filters.

    Formula: logits / temperature, at the first min_new_tokens positions without the ids that end a response; then
        min_p, top_k, top_p in this order (vLLM's); a sampled id is always kept. The reference's log-probs use the
        same temperature and no filter, so that the KL from the reference is at least -log(its probability of the kept
        ids)
    Source: top-p: Holtzman et al. 2020 (arXiv:1904.09751); min-p: Nguyen et al. 2024 (arXiv:2407.01082)
    Default of: all systems (no filter); the trainers of verl and trlX score the full distribution even if the
        generator filters
    """

    prompts_per_step: Annotated[int, RESULTS, AtLeastOne]
    """Number of prompts in one PPO step."""
    samples_per_prompt: Annotated[int, RESULTS, AtLeastOne] = 1
    """Number of responses per prompt; sequences in a step = prompts_per_step x samples_per_prompt."""
    max_prompt_tokens: Annotated[int, RESULTS, AtLeastOne]
    """Maximum number of prompt tokens. `long_prompts` of the rows sets the treatment of a longer prompt (default: the
    run does not start)."""
    max_new_tokens: Annotated[int, RESULTS, AtLeastOne]
    """Maximum number of response tokens (vLLM's `max_tokens`). A response that reaches this limit is truncated."""
    temperature: Annotated[float, RESULTS, Positive] = 1.0
    """Sampling temperature: both the generator and the trainer divide logits by this value."""
    top_p: Annotated[float, RESULTS, Field(gt=0, le=1)] = 1.0
    """Top-p: each token is sampled from the smallest set of most likely tokens whose total probability is at least
    this value; 1: from all tokens. Evaluations have their own filters (`[eval]`)."""
    top_k: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Top-k: each token is sampled from the k most likely tokens, and from further tokens that are as likely as the
    k-th; absent: from all tokens."""
    min_p: Annotated[float, RESULTS, Field(ge=0, le=1)] = 0.0
    """Min-p: each token is sampled from the tokens whose probability is at least this fraction of the highest
    probability; 0: from all tokens."""
    stop_strings: Annotated[tuple[str, ...], RESULTS, Array] = ()
    """Texts that end a response when they are generated (vLLM's `stop`). End-of-sequence tokens always end a
    response."""
    stop_token_ids: Annotated[tuple[int, ...], RESULTS, Array] = ()
    """Token ids that end a response, in addition to the model's end-of-sequence tokens. The text of the response
    contains neither kind of token."""
    special_tokens: Annotated[Literal["keep", "drop"], RESULTS] = "keep"
    """Special tokens in the text of a response, which rewards, environments, evaluations and screens receive. keep:
    the text contains them (`<answer>`), except end tokens and padding; drop: it contains none, and a stop string
    cannot contain one. Parsers of tool calls always receive them."""
    min_new_tokens: Annotated[int, RESULTS, NotNegative] = 0
    """Minimum number of response tokens (vLLM's `min_tokens`). Before this number is reached, generator and trainer
    mask token ids that end a response, and stop strings are ignored. Evaluations do not use this key."""
    max_window_tokens: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Maximum number of prompt and response tokens together, also in evaluations. After a long prompt, a response may
    have fewer than `max_new_tokens` tokens. Absent: no such limit."""
    groups: GroupsTable | None = None
    """Dynamic sampling: rounds of generation until a step has enough groups to learn from; absent: a step trains on
    every response."""
    ahead: Annotated[int, RESULTS, Field(ge=0, le=2)] = 0
    """Number of steps by which generation is ahead of training. 0: a step generates, then trains; 1: while a step
    trains, the engines generate the responses of the next step, with the weights before the update; 2: they generate
    those of the step after the next, and may end while the next step trains, so that a long generation delays
    training less. Every response but those of the first steps is then as many updates old. The rollouts of the last
    steps are not used.
    Default of: all systems (0; asynchronous PPO of NeMo-RL is off)
    """
    tokens_per_step: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Partial rollouts: maximum number of tokens that a step generates of a response. A response that has not ended
    continues in the next step with the next weights, so no step waits for the longest responses. A group trains in
    the step in which its last response ends; the number of sequences of a step therefore varies, with a mean of
    prompts_per_step x samples_per_prompt. They are divided into minibatches of equal sizes, at most
    `ppo.minibatch_seqs`; a step of more sequences than that mean has as many minibatches as the mean, of more
    sequences. If fewer than prompts_per_step / 8 groups have ended, the step generates as many tokens again.
    Absent: a step generates whole responses.
    Source: Kimi k1.5 (arXiv:2501.12599), section 2.6.2
    Default of: all systems (whole responses; slime and verl's asynchronous trainer can interrupt responses)
    """
    accept_stale: Annotated[bool, RESULTS] = False
    """Whether a step may train on tokens of older weights (`ahead`, `tokens_per_step`) without a correction: the
    ratio of PPO's loss then compares with the weights at the start of the step and not with those that generated."""
    keep_finished_every_s: Annotated[float, SPEED, Positive] = 5.0
    """Seconds between writes of the finished samples of an unfinished rollout or evaluation. If the run is killed, at
    most the samples of one interval are lost."""

    @property
    def may_be_stale(self) -> bool:
        """Whether a step may train on tokens of weights before those at its start."""
        return self.ahead > 0 or self.tokens_per_step is not None

    @property
    def prompts_per_round(self) -> int:
        """Number of prompts that a round of generation takes; without dynamic sampling, a step has one round."""
        return (self.groups.round_prompts if self.groups is not None else None) or self.prompts_per_step

    @property
    def round_key(self) -> str:
        """Key that sets the number of prompts of a round."""
        is_own = self.groups is not None and self.groups.round_prompts is not None
        return "rollout.groups.round_prompts" if is_own else "rollout.prompts_per_step"
