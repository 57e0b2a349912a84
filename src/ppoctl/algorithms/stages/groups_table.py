"""Table `rollout.groups`: dynamic sampling, which generates until a step has enough groups to learn from."""

from typing import Annotated, Literal

from ppoctl.core.recipe_table import RESULTS, SPEED, AtLeastOne, OrMixed, Table


class MeanBounds(Table):
    """Bounds of the mean over the responses to a prompt, so that groups are neither too easy nor too hard. The bounds
    are included, and responses without a score are not in the mean; a group needs one score. `keep = "mixed"` in
    place of the table keeps the groups whose responses are not all equal.

    Formula: min <= mean(x) <= max, over the responses that have a score; x as `by` selects
    Source: PRIME (arXiv:2502.01456), online prompt filtering
    Default of: OpenRLHF (0 and 1, which it excludes)
    Figures: groups/prompts_per_kept
    """

    min: Annotated[float, RESULTS]
    """Lowest mean of a group that is kept."""
    max: Annotated[float, RESULTS]
    """Highest mean of a group that is kept."""


class GroupsTable(Table):
    """Dynamic sampling (DAPO). A step generates and scores round after round, and keeps the groups (the responses to
    one prompt) from which the actor can learn, until it has `prompts_per_step` groups. By default, a group is kept if
    its scores are not all equal; a group with fewer than two scores is dropped. Kept groups are the first in the
    order of the prompts; further groups of the last round are dropped. Each round takes the next prompts of the data,
    so the prompts of a step depend on all rounds before it. `plan` prints the least and the most that a step costs.
    Metrics of responses and `reward/score_mean` have one value for all rounds of a step; `reward/shaped_mean` and
    the advantages describe the kept responses. With GRPO, the advantages of a dropped group would be 0. With a critic
    they would not: the advantage of an equal group is the difference from the values. With GDPO they are 0 only if
    groups are kept by their components: equal scores may be sums of different components. If an epoch ends within a
    step, a prompt may be in two rounds; its two groups are kept or dropped separately, and GRPO then compares all of
    its kept responses with each other.

    Formula: keep = "mixed": max(x) > min(x); keep = { min, max }: min <= mean(x) <= max; x = score, shaped reward or
        pass (0 or 1) of each response to the prompt that has a score; components: for x = the score or any component
    Source: DAPO (Yu et al. 2025, arXiv:2503.14476), section 3.2
    Default of: all systems (off). NeMo-RL has it in GRPO but not in PPO, and fails if there are too few groups; verl
        generates a new prompt for each dropped group, without a limit; OpenRLHF keeps groups whose mean is between
        two bounds, excluding the bounds
    Figures: groups/rounds, groups/prompts_per_kept, groups/all_right_frac, groups/all_wrong_frac
    """

    keep: Annotated[MeanBounds | None, OrMixed] = None
    """Groups that are kept. "mixed": those whose responses are not all equal; { min, max }: those whose mean is
    within these bounds."""
    by: Annotated[Literal["score", "shaped", "pass", "components"], RESULTS] = "score"
    """Number of each response that `keep` compares. score: as the scorer returned it; shaped: after reward shaping,
    so that responses of other lengths differ if their length is penalized; pass: 1 if the score is at least
    `eval.pass_score`, else 0; components: the score and each component of `reward.kind = "sum"`, for `gdpo`, which
    learns from a group that differs in any of them."""
    round_prompts: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Number of prompts of a round (gen_batch_size in verl). More prompts than a step requires make a second
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
    overlap_rounds: Annotated[bool, SPEED] = False
    """Whether the engines generate the next round while the scores of this one are computed. If the step then has
    enough groups, this generation is cancelled, and its tokens were generated for nothing. It pays if scores are slow
    and most steps need further rounds. Reward models and sums of rewards score a round after its generation; other
    scorers score its responses as they end, and complete scores of a cancelled round that have begun."""
