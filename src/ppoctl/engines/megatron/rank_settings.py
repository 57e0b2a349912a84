"""Settings of a trained role or a reward model, from which each of its processes creates the model."""

from dataclasses import dataclass, field
from typing import Literal

import torch

from ppoctl.algorithms.role_table import BySequences, ByTokens, Kernels, Recompute
from ppoctl.algorithms.roles import head_of
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.engines.megatron.megatron_config import UNBALANCED, RouterBalance
from ppoctl.engines.megatron.process_group import COLLECTIVE_S
from ppoctl.models.head import Head, SharedValueHead
from ppoctl.models.model import Model, ReferenceKind, reference_kind
from ppoctl.models.shape import ModelShape
from ppoctl.models.trainable import Trainable


@dataclass(frozen=True)
class TrainerSettings:
    """Settings from which each process of a role creates its model."""

    role: str
    """Role of a trained model. For a reward model: the key of its recipe table, which is `reward` or begins with
    `reward`."""
    model: str
    """Hugging Face folder or hub id, or a Megatron folder with its config.json: initial weights."""
    dtype: torch.dtype
    """dtype of weights and activations: float32 or bfloat16."""
    batching: BySequences | ByTokens
    parallel: ParallelTable = field(default_factory=ParallelTable)
    recompute: Recompute = "none"
    kernels: Kernels = "plain"
    reshardable: str = "full"
    """Layouts in which saved states of a distributed optimizer can be loaded: "full" or "dp"."""
    device: str | None = None
    """torch device. None: this process's GPU, or the CPU if there is no GPU."""
    collective_s: float = COLLECTIVE_S
    """Seconds that ranks wait for each other in a collective (`process_group.GroupTimeouts`)."""
    reference: str | None = None
    """Model of the reference, like `model`; None: the same model."""
    label: str | None = None
    """Label whose probability is a reward model's score. None: the head has one output."""
    trainable: Trainable = field(default_factory=Trainable)
    """The parameters that train. All others are frozen."""
    seed: int = 0
    """Seed of the initial matrices of adapters."""
    adapters: str | None = None
    """Folder with the initial matrices of adapters. None: they start as peft's default."""
    value_head: SharedValueHead | None = None
    """Value head on the policy's model; None: there is none."""
    optimizer_on: Literal["device", "cpu"] = "device"
    """Place of main weights and moments, and of the optimizer step."""
    balance: RouterBalance = UNBALANCED
    """How the load of experts is balanced."""

    @property
    def head(self) -> Head:
        """Head of the model."""
        return head_of(self.role)

    def model_in(self, shape: ModelShape) -> Model:
        """Return the description of the model, whose source has this shape."""
        return Model(shape, self.head, self.trainable, self.value_head, self.reference_kind)

    @property
    def reference_kind(self) -> ReferenceKind | None:
        """Kind of the reference; None: a critic or a reward model has none."""
        if self.head == "value":
            return None
        return reference_kind(self.trainable, is_initial=self.reference in (None, self.model))

    @property
    def is_reward_model(self) -> bool:
        """Whether the model is a reward model, which is never trained."""
        return self.role.partition(".")[0] == "reward"
