"""Tables that `[environment]` accepts: each kind of environment with the limits of an episode."""

from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import Field

from ppoctl.core.recipe_table import RESULTS, Table, joined
from ppoctl.environments.choose_environment import SINGLE, ChooseEnvironment
from ppoctl.environments.environment_table import EnvironmentTable, EpisodeTable


class NoEnvironment(Table):
    """Evaluations without an environment, although training has one."""

    kind: Annotated[Literal["none"], RESULTS]
    """Responses of one turn."""


def _with_limits(kind: type[EnvironmentTable]) -> Any:
    """Return a table class with the keys of a kind and the limits of an episode."""
    return joined(f"{kind.__name__.removesuffix('Environment')}Episodes", kind, EpisodeTable)


KINDS: tuple[type[EpisodeTable], ...] = (*map(_with_limits, SINGLE), ChooseEnvironment)

if TYPE_CHECKING:
    EnvironmentOf = EpisodeTable
    EvalEnvironment = EpisodeTable | NoEnvironment
else:
    EnvironmentOf = Annotated[Union[KINDS], Field(discriminator="kind")]  # noqa: UP007 - known at run time
    EvalEnvironment = Annotated[Union[(*KINDS, NoEnvironment)], Field(discriminator="kind")]
