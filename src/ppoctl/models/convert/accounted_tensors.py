"""Tensors of a checkpoint, each accounted for (`account`), and read in the requested dtype."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ppoctl.models.convert.hugging_face import Spec, Weights
from ppoctl.models.convert.tensor_accounting import account, not_part_of, not_tied
from ppoctl.models.convert.tensors import EMBEDDING, LM_HEAD, VALUE_HEAD
from ppoctl.models.head import Head
from ppoctl.models.shape import ModelShape

ROUTER_BIAS = "e_score_correction_bias"
"""Suffix of the name of the bias for expert selection. The bias is not a weight: it is float32 in a model of any
dtype."""


@dataclass
class Accounted:
    """Weights of a model folder, read for one head. All tensors are cast to one dtype, or each keeps its dtype.

    Raises EnvironmentProblemError that names the first tensor that is missing, unexpected, of another shape or
    quantized, or an output layer that differs from the embedding although the configuration ties them.
    """

    given: Weights
    folder: Path
    shape: ModelShape
    head: Head
    dtype: torch.dtype | None = None
    """Dtype that floating-point tensors are cast to; None: no cast."""
    notes: list[str] = field(default_factory=list)
    """Notes for users about tensors that are left out or created as zeros."""
    specs: dict[str, Spec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        accounted = account(self.given.specs, self.folder, self.shape, self.head)
        if accounted.must_be_tied and not torch.equal(self.given.tensor(LM_HEAD), self.given.tensor(EMBEDDING)):
            raise not_tied(self.folder)
        for name in accounted.must_be_zero:
            if self.given.tensor(name).any():
                raise not_part_of(name, self.folder, self.head)
        self.notes += accounted.notes
        for part in accounted.parts:
            made_up = accounted.made_up and part.name == VALUE_HEAD
            dtype = self.given.specs[EMBEDDING if made_up else part.name].dtype
            is_cast = self.dtype is not None and not part.name.endswith(ROUTER_BIAS)
            self.specs[part.name] = Spec(part.shape, self.dtype if is_cast and self.dtype else dtype)

    def tensor(self, name: str) -> Tensor:
        spec = self.specs[name]
        if name not in self.given.specs:
            return torch.zeros(spec.shape, dtype=spec.dtype)
        return self.given.tensor(name).to(spec.dtype)
