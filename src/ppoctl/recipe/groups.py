"""Table `rollout.groups`: dynamic sampling, which generates until a step has enough groups to learn from."""

from typing import Annotated, Literal

from ppoctl.recipe_table import RESULTS, AtLeastOne, OrMixed, Table


class MeanBounds(Table):
    """Bounds of the mean over the responses to a prompt, for groups that are neither too easy nor too hard.

    Formula: min <= mean(x) <= max, over the responses that have a score; x as `by` selects
    Source: Prime (arXiv:2502.01456), section 3.4, which keeps prompts of medium accuracy
    Default of: OpenRLHF (0 and 1, which it excludes)
    Figures: groups/prompts_per_kept
    """

    min: Annotated[float, RESULTS]
    """Lowest mean of a group that is kept."""
    max: Annotated[float, RESULTS]
    """Highest mean of a group that is kept."""


class GroupsTable(Table):
    """Dynamic sampling (DAPO). A step generates and scores round after round, and keeps the groups (the responses to
    one prompt) from which the actor can learn, until it has `prompts_per_step` groups. Kept groups are the first in
    the order of the prompts; further groups of the last round are dropped. Each round takes the next prompts of the
    data, so the prompts of a step depend on all rounds before it. Only generation and scoring run in every round;
    `plan` prints the least and the most that a step costs. `reward/score_mean` and the metrics of the responses
    describe all generated responses, `reward/shaped_mean` and the advantages only the kept ones. With GRPO, a dropped
    group would have had an advantage of 0. With a critic it would not: the advantages of a group of equal scores are
    the differences from the values. If a prompt is in two rounds of a step, because an epoch ended, its two groups
    are kept or dropped separately, and GRPO then compares all of its kept responses with each other.

    Formula: keep = "mixed": max(x) > min(x); keep = { min, max }: min <= mean(x) <= max; x = score, shaped reward or
        pass (0 or 1) of each response to the prompt that has a score
    Source: DAPO (Yu et al. 2025, arXiv:2503.14476), section 3.2
    Default of: all systems (off). NeMo-RL has it in GRPO but not in PPO, and fails if there are too few groups; verl
        generates a new prompt for each dropped group, without a limit; OpenRLHF keeps groups whose mean is between
        two bounds, excluding the bounds
    Figures: groups/rounds, groups/prompts_per_kept, groups/all_right_frac, groups/all_wrong_frac
    """

    keep: Annotated[MeanBounds | None, OrMixed] = None
    """Groups that are kept. "mixed": not all responses with a score are equal, so a group with fewer than two scores
    is dropped. { min, max }: the mean is within the bounds, which are included; a group needs one score."""
    by: Annotated[Literal["score", "shaped", "pass"], RESULTS] = "score"
    """Number of each response that `keep` compares. score: as the scorer returned it; shaped: after reward shaping,
    so that responses of other lengths differ if their length is penalized; pass: 1 if the score is at least
    `eval.pass_score`, else 0."""
    round_prompts: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Number of prompts of a round (verl's `data.gen_batch_size`). More prompts than a step requires make a second
    round rare. Absent: `rollout.prompts_per_step`."""
    max_rounds: Annotated[int, RESULTS, AtLeastOne] = 10
    """Maximum number of rounds of a step."""
    when_short: Annotated[Literal["fail", "use_fewer"], RESULTS] = "fail"
    """Treatment of a step that has too few groups after the last round. fail: the run stops with exit 4, and a resume
    continues from these rounds; use_fewer: the step trains on the groups that there are, at least one. The last
    minibatch is then smaller, and losses are divided by what is there."""
    critic_sees: Annotated[Literal["kept", "all"], RESULTS] = "kept"
    """Responses that the critic trains on. kept: those of the kept groups; all: every generated response, so that the
    critic also learns the values of prompts that are too easy or too hard. With "all", critic-only steps have one
    round, and values and log-probs are computed for all generated responses, not only for the kept ones."""
