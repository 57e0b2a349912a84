"""Base classes of all kinds of environment, and the tables that `[environment]` and `[eval.environment]` accept.

    EnvironmentTable    answers turns            a kind is one file of this package, and one line in `kinds`
    EpisodeTable        + limits of an episode   accepted by `[environment]`; `kinds` derives one from each kind

The recipe imports these tables, so slow imports happen only when an environment is opened.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from ppoctl.core.batch.episodes import EpisodeLimits
from ppoctl.core.batch.prompts import Json
from ppoctl.core.recipe_table import RESULTS, SPEED, AtLeastOne, Positive, Table
from ppoctl.rewards.function import ScorerSpec

CallFormat = Literal["hermes", "llama3_json", "mistral", "deepseek_v3"]
"""Formats of tool calls, by the names of vLLM's parsers."""


class OnFailure(Table):
    """Treatment of an episode whose environment fails. It is counted in `reward.max_error_frac` in any case."""

    score: Annotated[float | None, RESULTS] = None
    """Score of the episode. Absent: it has no score, and is left out of training."""


class EnvironmentTable(Table):
    """Keys of one kind of environment. Each kind adds `kind`, with its own literal."""

    has_state: ClassVar[bool] = True
    """Whether an answer may depend on earlier turns. A lost environment with state receives the recorded turns
    again."""

    seconds: Annotated[float, SPEED, Positive] = 30.0
    """Time limit of one answer in seconds. At the limit the environment's process is killed, and the episode ends
    with the reason `timeout`. Other episodes of the process are opened again in another process."""
    workers: Annotated[int, SPEED, AtLeastOne] = 8
    """Number of processes. A process holds the environments of several episodes, and answers one turn at a time: set
    it to the number of answers that you want to wait for in parallel."""

    @property
    def kinds(self) -> Mapping[tuple[str, ...], "EnvironmentTable"]:
        """Environments that this table consists of, by their keys below the table; only this one if it chooses among
        no others."""
        return {(): self}

    @property
    def answers_by(self) -> ScorerSpec:
        """The environment as a function that a child process imports, with the options that the table sets."""
        raise NotImplementedError

    def of_row(self, fields: Mapping[str, Json]) -> "EnvironmentTable":  # noqa: ARG002 - subclasses read it
        """Return the environment of a row with these fields. Raises DataError if the row has no environment."""
        return self

    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """Return the JSON schemas of the tools, for the chat template; empty: no tools. May start a process that
        imports the user's file."""
        return ()

    def require_there(self, key: str = "environment") -> None:
        """Raise MissingAssetError if this machine lacks a requirement of the environment, and RecipeError if its file
        has changed since the recipe was read. `key` is the key of this table."""


class EpisodeTable(EnvironmentTable):
    """Limits of an episode: the keys that every environment has."""

    turns: Annotated[int, RESULTS, AtLeastOne]
    """Maximum number of turns of the actor. The environment answers the last one too; if it does not end the episode,
    the response is truncated."""
    tokens: Annotated[int, RESULTS, AtLeastOne]
    """Maximum number of tokens of an episode after the prompt, generated and observed. An observation that does not
    fit, or a turn that reaches the limit, ends the episode as a truncated response. `rollout.max_new_tokens` limits
    the generated tokens alone."""
    tokens_per_turn: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Maximum number of tokens of one turn. A turn that reaches it ends the episode as a truncated response. Absent:
    no separate limit."""
    call_format: Annotated[CallFormat | None, RESULTS] = None
    """Format of the tool calls in a turn (vLLM's `--tool-call-parser`). Absent: the format of the model's family."""
    on_failure: OnFailure = OnFailure()
    """Treatment of an episode whose environment fails."""

    @property
    def limits(self) -> EpisodeLimits:
        """The limits of an episode."""
        return EpisodeLimits(self.turns, self.tokens, self.tokens_per_turn)
