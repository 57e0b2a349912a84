"""States of roles that train adapters, written by the trainer: what reads them, and a role that starts from peft's
adapter."""

from dataclasses import replace
from pathlib import Path

import megatron_lab as lab
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from convert.test_conversion import run, same, weights
from convert.test_critic_start import opened, recipe
from convert.test_partial_states import exported, saved, trained
from convert.test_peft_adapters import ALL, ATTENTION, MLPS, Model, by_peft, loaded, logits
from ppoctl.algorithms.role_table import BySequences
from ppoctl.core.errors import RecipeError
from ppoctl.engines.megatron.rank_settings import TrainerSettings
from ppoctl.engines.megatron.trainer import MegatronTrainer
from ppoctl.models.convert.tensors import VALUE_HEAD
from ppoctl.models.convert.torch_dist import TorchDist
from ppoctl.models.lora import Lora
from ppoctl.models.trainable import Trainable

WIDER = Trainable(lora=Lora(4, 5.0, ("q_proj", "o_proj")))


def starting(base: Path, adapter: Path, trainable: Trainable, role: str = "actor") -> MegatronTrainer:
    """Return a trainer that starts from an adapter folder."""
    batching = BySequences(microbatch_seqs=2, logits_chunk_tokens=5)
    settings = TrainerSettings(role, str(base), torch.float32, batching, trainable=trainable)
    return lab.started(replace(settings, adapters=str(adapter)))


@pytest.mark.parametrize(
    ("kind", "trainable"),
    [
        ("qwen2-tied", ALL),
        pytest.param("deepseek-v3", ALL, marks=pytest.mark.slow),
        pytest.param("qwen2-moe", ALL, marks=pytest.mark.slow),
        pytest.param("qwen3-moe-mixed", MLPS, marks=pytest.mark.slow),
    ],
)
def test_converted_state_of_adapters_equals_the_export(
    model: Model, tmp_path: Path, kind: str, trainable: Trainable
) -> None:
    """Bit for bit as a model, and in the logits of peft as an adapter."""
    base = model(kind)
    actor = trained(base, trainable=trainable)
    state, expected = saved(actor, tmp_path / "state"), exported(actor, tmp_path / "export")
    assert all(".adapters." in key for key in TorchDist(state).tensors)
    report = run(state, "hf", tmp_path / "hf")
    assert report["verified"] is True
    assert same(weights(tmp_path / "hf"), expected)
    assert not same(expected, weights(base))
    run(state, "peft", tmp_path / "peft")
    judge = PeftModel.from_pretrained(loaded(base), tmp_path / "peft").eval()
    torch.testing.assert_close(logits(judge), logits(loaded(tmp_path / "export")), rtol=0, atol=2e-5)


def test_critic_starts_from_the_merged_weights_of_a_state(model: Model, tmp_path: Path) -> None:
    base = model("qwen2")
    first = trained(base, "critic", ALL)
    state, expected = saved(first, tmp_path / "state"), exported(first, tmp_path / "export")
    assert expected[VALUE_HEAD].any()
    second = opened(recipe(base, state, tmp_path))
    second.start()
    assert same(exported(second, tmp_path / "second"), expected)


@pytest.mark.parametrize(("kind", "trainable"), [("qwen2", ATTENTION), ("deepseek-v3", ALL)])
def test_role_starts_from_an_adapter_of_peft(model: Model, tmp_path: Path, kind: str, trainable: Trainable) -> None:
    """The trainer has peft's log-probs, and its state gives the same adapter back."""
    base = model(kind)
    judge, folder = by_peft(base, trainable, tmp_path / "peft")
    actor = starting(base, folder, trainable)
    exported(actor, tmp_path / "export")
    torch.testing.assert_close(logits(loaded(tmp_path / "export")), logits(judge), rtol=0, atol=2e-5)
    run(saved(actor, tmp_path / "state"), "peft", tmp_path / "again")
    file = "adapter_model.safetensors"
    assert same(load_file(tmp_path / "again" / file), load_file(folder / file))
    with pytest.raises(RecipeError, match=r"an adapter with rank `3`.*, but `actor\.train\.lora\.rank` is `4`"):
        starting(base, folder, WIDER)


def test_critic_starts_from_the_value_head_of_an_adapter(model: Model, tmp_path: Path) -> None:
    base = model("qwen2")
    first = trained(base, "critic", ALL)
    expected = exported(first, tmp_path / "export")
    run(saved(first, tmp_path / "state"), "peft", tmp_path / "peft")
    second = starting(base, tmp_path / "peft", ALL, "critic")
    assert same(exported(second, tmp_path / "second"), expected)
    classes = AutoModelForSequenceClassification
    judge = PeftModel.from_pretrained(classes.from_pretrained(base, num_labels=1, pad_token_id=0), tmp_path / "peft")
    theirs = classes.from_pretrained(tmp_path / "second", pad_token_id=0).eval()
    torch.testing.assert_close(logits(theirs), logits(judge.eval()), rtol=0, atol=2e-5)
