"""Dynamic sampling from the paper (DAPO, arXiv:2503.14476, section 3.2), as loops over prompts and responses.

Written without imports from ppoctl. `tables` is a recipe as a user writes it, with every key of `rollout.groups`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class TextbookGroup:
    """Responses to one prompt: their scores (None: no score), their rewards after shaping, and the components of each
    response."""

    scores: Sequence[float | None]
    shaped: Sequence[float]
    components: Sequence[Sequence[float]]


def keeps(tables: Mapping[str, Any], group: TextbookGroup) -> bool:
    """Return whether the actor can learn from the group."""
    groups, numbers = tables["rollout"]["groups"], []
    for score, shaped in zip(group.scores, group.shaped, strict=True):
        if score is None:
            continue
        if groups["by"] == "pass":
            numbers.append(np.float32(np.float32(score) >= np.float32(tables["eval"]["pass_score"])))
        else:
            numbers.append(np.float32(score if groups["by"] == "score" else shaped))
    if groups["by"] == "components":
        rows = [parts for score, parts in zip(group.scores, group.components, strict=True) if score is not None]
        return len({tuple(parts) for parts in rows}) > 1
    if groups["keep"] == "mixed":
        return len(numbers) > 1 and min(numbers) < max(numbers)
    low, high = np.float32(groups["keep"]["min"]), np.float32(groups["keep"]["max"])
    return bool(numbers) and low <= np.float32(np.mean(np.float64(numbers))) <= high


def step(tables: Mapping[str, Any], prompts: Sequence[TextbookGroup]) -> tuple[list[int], int] | None:
    """Return the numbers of the prompts that the actor trains on, and the number of rounds; None: the step fails.
    `prompts` are the groups in the order of the data, as many as a step may use."""
    rollout, kept = tables["rollout"], []
    groups = rollout["groups"]
    per_round = groups["round_prompts"] or rollout["prompts_per_step"]
    for number in range(1, groups["max_rounds"] + 1):
        for prompt in range((number - 1) * per_round, number * per_round):
            if keeps(tables, prompts[prompt]):
                kept.append(prompt)
        if len(kept) >= rollout["prompts_per_step"]:
            return kept[: rollout["prompts_per_step"]], number
    return (kept, groups["max_rounds"]) if groups["when_short"] == "use_fewer" and kept else None
