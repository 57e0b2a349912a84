"""Tensors of a checkpoint, each accounted for (`account`) and read in the dtype that was asked for."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ppoctl.convert.hugging_face import Spec, Weights
from ppoctl.convert.tensor_accounting import account, not_part_of, not_tied
from ppoctl.convert.tensors import EMBEDDING, LM_HEAD, VALUE_HEAD, Role
from ppoctl.model.shape import ModelShape

ROUTER_BIAS = "e_score_correction_bias"
"""End of the name of the bias that chooses between experts and is no weight: float32 in a model of any dtype."""


@dataclass
class Accounted:
    """The model of a folder in one role, every tensor in one dtype or each in its own.

    Raises EnvironmentProblemError naming the first tensor that is missing, not expected, of another shape, quantised,
    or an output layer that is not the embedding although the configuration ties it.
    """

    given: Weights
    folder: Path
    shape: ModelShape
    role: Role
    dtype: torch.dtype | None = None
    """Dtype that floating-point tensors are cast to; None: nothing is cast."""
    notes: list[str] = field(default_factory=list)
    """Notes for people on what is left out or made up."""
    specs: dict[str, Spec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        found = account(self.given.specs, self.folder, self.shape, self.role)
        if found.must_be_tied and not torch.equal(self.given.tensor(LM_HEAD), self.given.tensor(EMBEDDING)):
            raise not_tied(self.folder)
        for name in found.must_be_zero:
            if self.given.tensor(name).any():
                raise not_part_of(name, self.folder, self.role)
        self.notes += found.notes
        for part in found.parts:
            made_up = found.made_up and part.name == VALUE_HEAD
            dtype = self.given.specs[EMBEDDING if made_up else part.name].dtype
            is_cast = self.dtype is not None and not part.name.endswith(ROUTER_BIAS)
            self.specs[part.name] = Spec(part.shape, self.dtype if is_cast and self.dtype else dtype)

    def tensor(self, name: str) -> Tensor:
        spec = self.specs[name]
        if name not in self.given.specs:
            return torch.zeros(spec.shape, dtype=spec.dtype)
        return self.given.tensor(name).to(spec.dtype)
