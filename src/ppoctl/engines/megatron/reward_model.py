"""A reward model on Megatron-Core: the critic's model without optimizer, gradients and saved states. Its weights
never change."""

from collections.abc import Sequence
from itertools import chain

import torch

from ppoctl.core.batch.sequences import Sequences
from ppoctl.core.ports import OutputRequest
from ppoctl.engines.megatron.microbatches import RankOutputs, merge
from ppoctl.engines.megatron.ranks import Ranks


class MegatronRewardModel:
    """The part of a reward model (`batch.scores.RewardModel`) that computes scores of token ids."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def start(self) -> None:
        """Load the weights. Raises EnvironmentProblemError or RecipeError if the source is missing, broken, not
        supported, or not a reward model."""
        self.ranks.call("start_frozen")

    def scores(self, texts: Sequence[tuple[int, ...]]) -> list[float]:
        """Return the head's output at the last token of each text."""
        shares: list[RankOutputs | None] = self.ranks.call("reference_forward", read_whole(texts), OutputRequest())
        outputs = merge([share for share in shares if share is not None])
        return [float(score) for score in outputs.primary[:, 0]]


def read_whole(texts: Sequence[Sequence[int]]) -> Sequences:
    """Return texts as sequences with one response token each. The response token has id 0 and is not read by the
    model: the output at the position before it is the output at the text's last token."""
    lengths = torch.tensor([len(text) for text in texts])
    ids = torch.tensor(list(chain.from_iterable(texts)), dtype=torch.int32)
    one = torch.ones(len(texts), dtype=torch.int64)
    return Sequences(ids, lengths, torch.zeros((len(texts), 1), dtype=torch.int32), one)
