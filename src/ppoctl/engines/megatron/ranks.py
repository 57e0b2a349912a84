"""How a trainer reaches the processes of its role: directly where there is one, through an executor where there are
more. Every rank is asked the same at the same time, because their answers meet in collectives."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ppoctl.engines.megatron.rank import MegatronRank


@runtime_checkable
class Ranks(Protocol):
    """The processes of one role."""

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """What the method of each rank returns, in the order of the ranks. An error of any rank is raised."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights of the role's model under Hugging Face names; each is valid until the next one is taken."""
        ...


class ThisProcess:
    """One rank, here."""

    def __init__(self, rank: MegatronRank) -> None:
        self.rank = rank

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return [getattr(self.rank, method)(*arguments)]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Views of the parameters, except where Megatron's fused layout interleaves them."""
        return self.rank.weights()
