"""A reward model's scores equal transformers' for every family, layout and set of labels."""

from collections.abc import Callable
from pathlib import Path

import megatron_lab as lab
import pytest
import torch
from rank_pool import RankPool
from transformers import AutoModelForSequenceClassification

from ppoctl.algorithms.role_table import ByTokens
from ppoctl.core.errors import RecipeError
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.engines.megatron.rank import MegatronRank
from ppoctl.engines.megatron.rank_settings import TrainerSettings
from ppoctl.engines.megatron.ranks import ThisProcess
from ppoctl.engines.megatron.reward_model import MegatronRewardModel

Model = Callable[[str], Path]
TEXTS = [(5, 9, 2, 77, 31), (8,), (3, 3, 60, 14, 2, 2, 90, 41, 17), (64, 12)]
BATCHING = ByTokens(max_tokens_per_microbatch=11)


@pytest.fixture
def reward(model: Model, tmp_path: Path) -> Callable[..., Path]:
    """Return a reward model made from a language model of this kind, with these labels."""

    def made(kind: str, *labels: str) -> Path:
        torch.manual_seed(1)
        named = {"id2label": dict(enumerate(labels)), "label2id": {name: n for n, name in enumerate(labels)}}
        its = AutoModelForSequenceClassification.from_pretrained(
            model(kind), **named if labels else {"num_labels": 1}
        )
        with torch.no_grad():
            its.score.weight.normal_()
        its.save_pretrained(tmp_path / kind)
        return tmp_path / kind

    return made


def theirs(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return transformers' logits. [text label]"""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype, **lab.EAGER).eval()
    model.config.pad_token_id = 0
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.tensor([text])).logits for text in TEXTS]).float()


def settings(folder: Path, label: str | None = None, parallel: ParallelTable | None = None) -> TrainerSettings:
    table = parallel or ParallelTable()
    return TrainerSettings("reward", str(folder), torch.float32, BATCHING, table, label=label)


def alone(folder: Path, label: str | None = None) -> torch.Tensor:
    model = MegatronRewardModel(ThisProcess(MegatronRank(settings(folder, label))))
    model.start()
    return torch.tensor(model.scores(TEXTS))


@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "llama"])
def test_reward_model_scores_match_transformers(reward: Callable[..., Path], kind: str) -> None:
    folder = reward(kind)
    wanted = theirs(folder)[:, 0]
    assert wanted.std() > 0.1
    torch.testing.assert_close(alone(folder), wanted, atol=1e-5, rtol=1e-5)


def test_multi_label_score_is_probability_of_chosen_label(reward: Callable[..., Path]) -> None:
    folder = reward("qwen2", "bad", "so-so", "good")
    wanted = theirs(folder).softmax(-1)
    for number, label in enumerate(("bad", "so-so", "good")):
        torch.testing.assert_close(alone(folder, label), wanted[:, number], atol=1e-5, rtol=1e-5)


def test_multi_label_reward_model_requires_valid_label(reward: Callable[..., Path]) -> None:
    folder = reward("qwen2", "bad", "good")
    with pytest.raises(RecipeError, match=r"has 2 labels .`bad`, `good`., but `label` names none"):
        alone(folder)
    with pytest.raises(RecipeError, match=r"`label` is `fine`; the reward model .* has `bad`, `good`"):
        alone(folder, "fine")


@pytest.mark.parametrize(
    "layout", [{"tensor": 2}, {"tensor": 2, "sequence": True}, {"pipeline": 2, "data": 2}, {"context": 2}]
)
def test_reward_model_scores_do_not_depend_on_layout(
    reward: Callable[..., Path], pool: RankPool, layout: dict[str, int]
) -> None:
    folder = reward("qwen2", "bad", "good")
    pool.open(settings(folder, "good", ParallelTable(**layout)))
    model = MegatronRewardModel(pool)
    model.start()
    torch.testing.assert_close(
        torch.tensor(model.scores(TEXTS)), theirs(folder).softmax(-1)[:, 1], atol=1e-5, rtol=1e-5
    )


def test_reward_model_is_offloaded_and_reloaded(reward: Callable[..., Path]) -> None:
    rank = MegatronRank(settings(reward("llama")))
    model = MegatronRewardModel(ThisProcess(rank))
    model.start()
    before = model.scores(TEXTS)
    rank.offload()
    assert not any(weight.untyped_storage().nbytes() for weight in rank._reference.weights())
    assert model.scores(TEXTS) == before
