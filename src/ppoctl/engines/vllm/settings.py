"""What the engine is started with."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ppoctl.recipe.schema import GeneratorTable


@dataclass(frozen=True)
class VllmSettings:
    """Everything that is fixed for the life of an engine."""

    model: str
    """Hugging Face folder (config, first weights, tokenizer) or hub id."""
    dtype: Literal["float32", "bfloat16"]
    max_model_len: int
    """Longest prompt plus most new tokens of any request, evaluation included; at least 3 (the canary's need)."""
    eos_token_ids: tuple[int, ...]
    """A response ends with any of them, and with no other id, whatever the model folder says."""
    table: GeneratorTable
    sleeps: bool = False
    """Whether it leaves its device to other roles between rollouts."""
    logs: Path | None = None
    """Folder in which each engine writes what vLLM says; absent: nowhere."""
    key: str = "model.path"
    """Key of the recipe that names the model."""
    seed: int = 0
    """Seed of the engine; no sample depends on it, as every request brings its own."""
