"""The tensors of a checkpoint, each of them accounted for: part of the model, known to be left out, or refused.

What is left out or made up is said in `notes`.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ppoctl.convert.hugging_face import Spec, Weights
from ppoctl.convert.shape import ModelShape
from ppoctl.convert.tensors import EMBEDDING, LM_HEAD, ROPE_CONSTANTS, VALUE_HEAD, Role, placements
from ppoctl.errors import EnvironmentProblemError
from ppoctl.recipe.assets import read_config

ROUTER_BIAS = "e_score_correction_bias"
"""End of the name of what chooses between experts and is no weight: float32 in a model of any dtype."""
VALUE_BIAS = "score.bias"
"""Of a ...ForTokenClassification; the critic's head has none."""


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
    """What floating-point tensors are cast to; None: nothing is cast."""
    notes: list[str] = field(default_factory=list)
    specs: dict[str, Spec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        missing = []
        for placement in placements(self.shape, self.role):
            spec = self.given.specs.get(placement.name)
            if spec is None and placement.name == VALUE_HEAD and not self._should_have_a_head():
                self.notes.append(f"`{VALUE_HEAD}` is not in `{self.folder}`: the value head is zero")
                spec = Spec(placement.shape, self.given.specs[EMBEDDING].dtype)
            if spec is None:
                missing.append(placement.name)
                continue
            self._require_fitting(placement.name, spec, placement.shape)
            kept = self.dtype is None or placement.name.endswith(ROUTER_BIAS)
            self.specs[placement.name] = spec if kept or self.dtype is None else Spec(spec.shape, self.dtype)
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            hint = "fetch the model again" if missing != [LM_HEAD] else "a critic has none: add --role critic"
            raise EnvironmentProblemError(f"tensor `{missing[0]}`{more} missing from `{self.folder}`", hint=hint)
        others = sorted(self.given.specs.keys() - self.specs.keys())
        constants = [name for name in others if name.endswith(ROPE_CONSTANTS)]
        if constants:
            more = f" and {len(constants) - 1} more" if len(constants) > 1 else ""
            self.notes.append(f"`{constants[0]}`{more} left out: config.json says what they are")
        for name in others:
            if name not in constants:
                self._require_known(name)

    def tensor(self, name: str) -> Tensor:
        spec = self.specs[name]
        if name not in self.given.specs:
            return torch.zeros(spec.shape, dtype=spec.dtype)
        return self.given.tensor(name).to(spec.dtype)

    def _should_have_a_head(self) -> bool:
        """Whether config.json names a class with a head: then one that is missing was lost, and is not to be zero."""
        classes = read_config(self.folder).get("architectures") or ()
        return any(name.endswith(("ForSequenceClassification", "ForTokenClassification")) for name in classes)

    def _require_fitting(self, name: str, spec: Spec, shape: tuple[int, ...]) -> None:
        if spec.shape != shape:
            says = f"has shape {list(spec.shape)}; config.json says {list(shape)}"
            raise EnvironmentProblemError(f"tensor `{name}` in `{self.folder}` {says}")
        if not spec.dtype.is_floating_point or spec.dtype.itemsize < 2:
            raise EnvironmentProblemError(
                f"tensor `{name}` in `{self.folder}` is {spec.dtype}; quantised models cannot be trained"
            )

    def _require_known(self, name: str) -> None:
        if name == LM_HEAD and self.role == "critic":
            self.notes.append(f"`{name}` is left out: a critic has a value head instead")
        elif name == LM_HEAD and self.shape.tied_embeddings:
            self._require_tied()
            self.notes.append(f"`{name}` is left out: it is `{EMBEDDING}` again")
        elif name == VALUE_BIAS and self.role == "critic" and not self.given.tensor(name).any():
            self.notes.append(f"`{name}` is left out: it is zero")
        else:
            hint = "name the configuration that belongs to it, or another role"
            hint = (
                "a critic's: add --role critic" if name in (VALUE_HEAD, VALUE_BIAS) and self.role == "actor" else hint
            )
            raise EnvironmentProblemError(
                f"tensor `{name}` in `{self.folder}` is not part of the {self.role}", hint=hint
            )

    def _require_tied(self) -> None:
        if not torch.equal(self.given.tensor(LM_HEAD), self.given.tensor(EMBEDDING)):
            raise EnvironmentProblemError(
                f"`{LM_HEAD}` in `{self.folder}` is not `{EMBEDDING}`, although config.json ties them",
                hint='if the output layer is its own, write `"tie_word_embeddings": false` into config.json',
            )
