"""A reward model on Megatron-Core: a critic's model without optimizer, gradients and states, which never changes."""

from collections.abc import Sequence
from itertools import chain

import torch

from ppoctl.batch.sequences import Sequences
from ppoctl.engines.megatron.microbatches import RankOutputs, merge
from ppoctl.engines.megatron.ranks import Ranks
from ppoctl.ports import OutputRequest


class MegatronRewardModel:
    """The part of a `ports.RewardModel` that computes."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def start(self) -> None:
        """Load the weights. Raises EnvironmentProblemError or RecipeError where the source is missing, broken, not
        supported, or no reward model."""
        self.ranks.call("start_frozen")

    def scores(self, texts: Sequence[tuple[int, ...]]) -> list[float]:
        """What the head says at the last token of each text."""
        shares: list[RankOutputs | None] = self.ranks.call("reference_forward", read_whole(texts), OutputRequest())
        found = merge([share for share in shares if share is not None])
        return [float(score) for score in found.primary[:, 0]]


def read_whole(texts: Sequence[Sequence[int]]) -> Sequences:
    """Texts as sequences of which a model says what it makes of all their tokens: each has one response token, of id
    0, which no model reads; what is said in front of it is said at the text's last token."""
    lengths = torch.tensor([len(text) for text in texts])
    ids = torch.tensor(list(chain.from_iterable(texts)), dtype=torch.int32)
    one = torch.ones(len(texts), dtype=torch.int64)
    return Sequences(ids, lengths, torch.zeros((len(texts), 1), dtype=torch.int32), one)
