"""Recipe tables about the part of a model that trains, and about a value head on the actor's model."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Tag

from ppoctl.core.recipe_table import (
    RESULTS,
    Array,
    AtLeastOne,
    KindOr,
    NotNegative,
    OrAll,
    OrAllLinear,
    Positive,
    Table,
)
from ppoctl.models.head import SharedValueHead, ValueHeadKind
from ppoctl.models.lora import Lora
from ppoctl.models.trainable import Trainable


class TopLayersTable(Table):
    """Training of the last layers only. The embedding and the layers below them are frozen.

    Source: trlX (`num_layers_unfrozen`, whose NeMo path trains one layer more than it says and freezes the final norm
        and the output layer too)
    Default of: all systems (all layers train); trlX's examples train 2 layers
    """

    top_layers: Annotated[int, RESULTS, AtLeastOne]
    """Number of last layers that train, together with the final norm and the output layer. An output layer that is
    tied to the embedding is frozen with it. A value head always trains."""

    def trainable(self, freeze: tuple[str, ...]) -> Trainable:
        """Return the parameters that train, of which these patterns freeze some."""
        return Trainable(self.top_layers, freeze)


class LoraTable(Table):
    """Low-rank adapters. Each projection that is a target has two matrices, which train: A starts as peft's default,
    B at zero. The weights of the model are frozen. The reference is the same model without the adapters.

    Formula: y = W x + (alpha / rank) B A x; A: [rank, inputs], uniform in +-1 / sqrt(inputs); B: [outputs, rank]
    Source: Hu et al. 2021 (arXiv:2106.09685), section 4.1; peft (initial values, names of targets)
    Default of: NeMo-RL (rank 8, alpha 32); peft (8 and 8); verl (off; alpha 16)
    Figures: policy/merge_error
    """

    rank: Annotated[int, RESULTS, AtLeastOne] = 8
    """Number of rows of A and columns of B (peft's `r`)."""
    alpha: Annotated[float, RESULTS, Positive] = 32.0
    """Numerator of the factor alpha / rank (peft's `lora_alpha`)."""
    targets: Annotated[tuple[str, ...] | None, RESULTS, Array, OrAllLinear] = None
    """Projections that have an adapter, by the names of the Hugging Face model, such as `q_proj` (peft's
    `target_modules`). "all-linear": every projection of attention, MLPs and shared experts. Routed experts and
    routers have no adapters, also if a name such as `gate_proj` is that of their projections too."""
    start: Annotated[str | None, RESULTS] = None
    """Folder or hub id of a peft adapter with the initial matrices; it must have this rank, alpha and these targets.
    The reference remains the model without an adapter. Absent: the initial values above."""


class AdaptersTable(Table):
    """Training of adapters instead of weights."""

    lora: LoraTable
    """Low-rank adapters, which train in place of the weights."""

    def trainable(self, freeze: tuple[str, ...]) -> Trainable:
        """Return the parameters that train. A projection that these patterns freeze has no adapter."""
        lora = self.lora
        return Trainable(freeze=freeze, lora=Lora(lora.rank, lora.alpha, lora.targets))


class ValueHeadTable(Table):
    """A value head on the actor's model, in place of a critic with a model of its own. One forward pass computes
    log-probs and values, and one update with a joint loss trains both.

    Formula: loss = policy loss + ppo.value_loss.coef x value loss
    Source: Schulman et al. 2017 (arXiv:1707.06347), eq. 9; trlX
    Default of: trlX, TRL's first PPO trainer; verl, NeMo-RL and OpenRLHF have a critic of its own
    Figures: value/loss, value/explained_variance
    """

    on: Annotated[Literal["actor"], RESULTS]
    """Model that the value head is on."""
    head: Annotated[ValueHeadKind, RESULTS] = "linear"
    """Layers of the value head. linear: one layer, hidden -> 1, that starts at zero. mlp: hidden -> 2 x hidden, ReLU,
    -> 1, whose last layer starts at zero (trlX, which initializes both layers at random)."""
    layers_copied: Annotated[int, RESULTS, NotNegative] = 0
    """Number of last layers, with the final norm, of which the value head has copies of its own, which start equal
    and train apart (trlX's `num_value_layers_unfrozen`)."""

    @property
    def shape(self) -> SharedValueHead:
        """The value head without the recipe."""
        return SharedValueHead(self.head, self.layers_copied)


BY_ON = Discriminator(KindOr("own model", "on"))
"""Discriminator of the tables of `[critic]`: a table without `on` is a role with a model of its own."""


def _trained_kind(value: Any) -> str | None:
    keys = value if isinstance(value, dict) else getattr(type(value), "model_fields", None)
    return None if keys is None else "lora" if "lora" in keys else "top layers"


Train = Annotated[
    Annotated[
        Annotated[TopLayersTable, Tag("top layers")] | Annotated[AdaptersTable, Tag("lora")],
        Discriminator(_trained_kind),
    ]
    | None,
    OrAll,
]
"""What trains: the last layers or adapters; None, which is written "all": every layer."""

PatternsOrOne = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
"""Validator of a list of patterns that may be written as one pattern."""
