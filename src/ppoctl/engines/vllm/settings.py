"""Settings that an engine is started with."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ppoctl.recipe.schema import GeneratorTable


@dataclass(frozen=True)
class VllmSettings:
    """Settings that are fixed for the life of an engine."""

    model: str
    """Hugging Face folder (config, first weights, tokenizer) or hub id."""
    dtype: Literal["float32", "bfloat16"]
    max_model_len: int
    """Longest prompt plus the maximum number of new tokens of any request, including evaluation. At least 3, which
    the canary requires."""
    eos_token_ids: tuple[int, ...]
    """A response ends with any of these ids and with no other, regardless of the model folder."""
    table: GeneratorTable
    sleeps: bool = False
    """Whether the engine sleeps between rollouts, so that other roles can use its device."""
    logs: Path | None = None
    """Folder in which each engine writes vLLM's log. None: no log."""
    key: str = "model.path"
    """Recipe key that names the model."""
    seed: int = 0
    """Seed of the engine. No sample depends on it, since every request has a seed."""
