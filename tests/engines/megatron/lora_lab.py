"""Models with adapters for the tests of the Megatron trainer, and the same models by peft."""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import megatron_lab as lab
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppoctl.algorithms.role_table import BySequences
from ppoctl.engines.megatron.rank_settings import TrainerSettings
from ppoctl.engines.megatron.trainer import MegatronActor, MegatronTrainer
from ppoctl.models.convert.adapters import adapters
from ppoctl.models.convert.tensors import Placement
from ppoctl.models.convert.torch_dist import TorchDist
from ppoctl.models.lora import Lora
from ppoctl.models.trainable import Trainable

if TYPE_CHECKING:
    from peft import PeftModel

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


def adapted(*targets: str, rank: int = 3, alpha: float = 5.0, freeze: tuple[str, ...] = ()) -> Trainable:
    """Return adapters of these projections; none named: of all."""
    return Trainable(freeze=freeze, lora=Lora(rank, alpha, targets or None))


ALL = adapted()


def started(folder: Path, trainable: Trainable, role: str = "actor", **changes: Any) -> MegatronTrainer:
    """Return a started trainer in this process."""
    how: dict[str, Any] = {"dtype": torch.float32, "batching": BySequences(microbatch_seqs=2, logits_chunk_tokens=5)}
    return lab.started(TrainerSettings(role, str(folder), trainable=trainable, **{**how, **changes}))


def started_actor(folder: Path, trainable: Trainable, **changes: Any) -> MegatronActor:
    actor = started(folder, trainable, **changes)
    assert isinstance(actor, MegatronActor)
    return actor


def placements_of(trainer: MegatronTrainer) -> list[Placement]:
    """Return the matrices of all adapters."""
    found = adapters(trainer.source[1], trainer.settings.trainable)
    return [each for adapter in found for each in (adapter.a, adapter.b)]


def parameters_of(trainer: MegatronTrainer) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of the only rank by peft's names."""
    [stage] = lab.rank_of(trainer).models
    named = dict(stage.named_parameters())
    return {each.name: named[each.parameter] for each in placements_of(trainer)}


def set_matrices(trainer: MegatronTrainer, seed: int = 11) -> dict[str, Tensor]:
    """Give all matrices of a float32 model in this process random values, and return copies."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, parameter in parameters_of(trainer).items():
        value = 0.2 * torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(value)
        found[name] = value
    return found


def peft_model(model: PreTrainedModel, lora: Lora, matrices: dict[str, Tensor], **more: Any) -> "PeftModel":
    """Return peft's model with these adapters, in float64."""
    from peft import LoraConfig, get_peft_model  # takes seconds, and no rank needs it

    base = copy.deepcopy(model)
    if hasattr(base.config, "num_experts_per_tok"):
        base.set_experts_implementation("eager")  # the grouped product has no float64
    more = {**peft_targets(base, lora), **more}
    made = get_peft_model(base, LoraConfig(r=lora.rank, lora_alpha=lora.alpha, **more))  # type: ignore[arg-type]
    own = matrices_in(made)
    assert own.keys() == matrices.keys()
    with torch.no_grad():
        for name, matrix in own.items():
            matrix.copy_(matrices[name])
    return made.double().eval()


def peft_targets(model: PreTrainedModel, lora: Lora) -> dict[str, Any]:
    """Return the settings of peft for these targets. In a mixture of experts, they name all linear projections of
    transformers' model, whose routed experts are fused tensors. peft takes an MLP of the name `gate_proj` for the
    experts unless its weight is named."""
    if not hasattr(model.config, "num_experts_per_tok"):
        return {"target_modules": "all-linear" if lora.targets is None else list(lora.targets)}
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    every = [name for name in sorted(linear) if "_proj" in name and lora.is_target(name.rpartition(".")[2])]
    weights = [f"{name}.weight" for name in every if ".mlp." in name]
    return {"target_modules": [name for name in every if ".mlp." not in name], "target_parameters": weights}


def matrices_in(made: "PeftModel") -> dict[str, torch.nn.Parameter]:
    """Return the adapters' parameters of peft's model by the names in its files."""
    named = {name.removeprefix("base_model.model."): each for name, each in made.named_parameters()}
    return {name.replace(".default", ""): each for name, each in named.items() if ".lora_" in name}


def saved(trainer: MegatronTrainer, folder: Path) -> TorchDist:
    folder.mkdir()
    lab.save(trainer, folder)
    return TorchDist(folder)


def matrices_of(trainer: MegatronTrainer, state: TorchDist, prefix: str = "") -> dict[str, Tensor]:
    """Return the matrices of a saved state by peft's names, or, with a prefix, moments of the optimizer."""
    return {each.name: state.read(prefix + each.parameter) for each in placements_of(trainer)}
