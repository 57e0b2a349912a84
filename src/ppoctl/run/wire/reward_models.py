"""Reward models of a recipe. Each has its own tokenizer in this process; its ranks may be in other processes."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING

from ppoctl.algorithms.role_model import reward_model_of, reward_models
from ppoctl.algorithms.sizes import reward_tokens
from ppoctl.core.batch.scores import RewardModel, ScoreRequest
from ppoctl.core.key_path import KeyPath, dotted
from ppoctl.core.machine.device import on_gpu
from ppoctl.data.reward_text import RewardText
from ppoctl.models.folder import model_folder
from ppoctl.models.labels import label_number
from ppoctl.models.shape_reader import read_shape
from ppoctl.plan.memory.scoring import VLLM_TEXTS, cache_bytes, step_tokens
from ppoctl.recipe.schema import Recipe
from ppoctl.rewards.model_reward import ModelScorer
from ppoctl.rewards.scorer_table import ScorerTable

if TYPE_CHECKING:
    from ppoctl.engines.megatron.rank_settings import TrainerSettings
    from ppoctl.engines.megatron.ranks import Ranks
    from ppoctl.engines.megatron.reward_model import MegatronRewardModel
    from ppoctl.engines.vllm.pooling import PoolingSettings, VllmRewardModel


def settings_of(recipe: Recipe, key: KeyPath) -> "TrainerSettings | PoolingSettings":
    """Return the settings of each process of the reward model at this key. Raises MissingAssetError if the model
    folder is missing."""
    from ppoctl.engines.megatron.factory import reward_settings
    from ppoctl.engines.vllm.pooling import PoolingSettings
    from ppoctl.engines.vllm.vllm_settings import VllmSettings

    table = reward_models(recipe)[key]
    if table.engine == "megatron":
        return reward_settings(recipe, key)
    folder = model_folder(table.path)
    shape = read_shape(folder)
    max_tokens = reward_tokens(table, shape)
    engine = VllmSettings(
        model=str(folder),
        dtype=table.dtype,
        max_model_len=max_tokens,
        eos_token_ids=(),
        table=recipe.generator,
        sleeps="reward" in recipe.cluster.offload,
        key=f"{dotted(key)}.path",
        trained=tuple(recipe.trained),
    )
    return PoolingSettings(
        role=dotted(key),
        engine=engine,
        step_tokens=step_tokens(max_tokens),
        step_texts=VLLM_TEXTS,
        cache_bytes=cache_bytes(shape, reward_model_of(recipe, key).weight_bytes, max_tokens),
        label=label_number(folder, table.label, dotted(key)),
    )


class PlacedRewardModel:
    """Reward model (`batch.scores.RewardModel`) whose ranks load the model on the first call of `scores`."""

    def __init__(self, table: ModelScorer, key: str, ranks: "Ranks", clock: datetime | None = None) -> None:
        """`key` is the key of the table, and `clock` the local time that the chat template reads (None: now)."""
        self._table, self._key, self._ranks, self._clock = table, key, ranks, clock

    def tokens(self, request: ScoreRequest) -> tuple[int, ...]:
        """Return the ids of the text that the model reads. Raises ValueError if there is no text or the text is too
        long."""
        return self._text.tokens(request)

    def scores(self, texts: Sequence[tuple[int, ...]]) -> list[float]:
        """Return the score of each text, at its last token."""
        return self._started.scores(texts)

    @cached_property
    def _text(self) -> RewardText:
        folder = model_folder(self._table.path)
        tokens = reward_tokens(self._table, read_shape(folder))
        return RewardText(folder, self._table.template, tokens, self._key, self._clock)

    @cached_property
    def _started(self) -> "MegatronRewardModel | VllmRewardModel":
        from ppoctl.engines.megatron.reward_model import MegatronRewardModel
        from ppoctl.engines.vllm.pooling import VllmRewardModel

        is_vllm = self._table.engine == "vllm"
        model = VllmRewardModel(self._ranks.call) if is_vllm else MegatronRewardModel(self._ranks)
        model.start()
        return model


class RewardModelsOf:
    """Reward model of each table, on the ranks that were placed for it (`rewards.scorer_table.RewardModels`)."""

    def __init__(self, recipe: Recipe, ranks: Mapping[str, "Ranks"], clock: datetime | None = None) -> None:
        """`ranks` are by table key; `clock` as in `PlacedRewardModel`."""
        self._ranks = ranks
        self._models = [
            (table, PlacedRewardModel(table, dotted(key), ranks[dotted(key)], clock))
            for key, table in reward_models(recipe).items()
        ]

    def __call__(self, table: ScorerTable) -> RewardModel:
        """Return the model of a table of the recipe."""
        return next(model for known, model in self._models if known is table)

    def leave(self) -> None:
        """Offload all models, so that an engine that starts finds its GPU free. Each model is reloaded on its next
        use."""
        if on_gpu():  # on a CPU, offloading would only copy within the same memory
            for ranks in self._ranks.values():
                ranks.call("offload")
