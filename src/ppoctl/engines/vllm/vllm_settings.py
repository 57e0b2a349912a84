"""Settings with which an engine is started."""

from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Literal

from ppoctl.algorithms.roles import POLICY
from ppoctl.recipe.schema import GeneratorTable


@dataclass(frozen=True)
class VllmSettings:
    """Settings that are fixed for the life of an engine."""

    model: str
    """Hugging Face folder (config, first weights, tokenizer) or hub id."""
    dtype: Literal["float32", "bfloat16"]
    max_model_len: int
    """Number of tokens of the longest prompt plus the maximum number of new tokens, for rollouts and evaluations. The
    canary requires at least 3."""
    eos_token_ids: tuple[int, ...]
    """Ids that end a response. No other id ends a response, even if the model folder lists it."""
    table: GeneratorTable
    sleeps: bool = False
    """Whether the engine sleeps between rollouts, so that other roles can use its device."""
    logs: Path | None = None
    """Folder in which each engine writes vLLM's log. None: no log is written."""
    key: str = "model.path"
    """Recipe key that contains the path of the model."""
    seed: int = 0
    """Seed of the engine. No sample depends on this seed, since every request has a seed."""
    trained: tuple[str, ...] = (POLICY,)
    """Roles that the recipe trains."""
    is_profiled: bool = False
    """Whether the engine records a profile, from its first request on."""
    returns_experts: bool = False
    """Whether the engine returns the experts that its routers choose, for requests that ask for them."""
    call_format: str | None = None
    """Format of tool calls, by the name of vLLM's parser. None: responses are not parsed."""

    @property
    def seqs_per_engine(self) -> int:
        """Maximum number of sequences that one engine decodes at the same time."""
        return ceil(self.table.max_concurrent_seqs / self.table.engines_per_gpu)
