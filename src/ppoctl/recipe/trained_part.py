"""Recipe tables about the part of a model that trains, and about a value head on the actor's model."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator

from ppoctl.model.head import SharedValueHead, ValueHeadKind
from ppoctl.recipe_table import RESULTS, AtLeastOne, KindOr, NotNegative, OrAll, Table


class TopLayersTable(Table):
    """Training of the last layers only. The embedding and the layers below them are frozen.

    Source: trlX (`num_layers_unfrozen`, whose NeMo path trains one layer more than it says and freezes the final norm
        and the output layer too)
    Default of: all systems (all layers train); trlX's examples train 2 layers
    """

    top_layers: Annotated[int, RESULTS, AtLeastOne]
    """Number of last layers that train, together with the final norm and the output layer. An output layer that is
    tied to the embedding is frozen with it. A value head always trains."""


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

Train = Annotated[TopLayersTable | None, OrAll]
"""Layers that train; None, which is written "all": every layer."""

PatternsOrOne = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
"""Validator of a list of patterns that may be written as one pattern."""
