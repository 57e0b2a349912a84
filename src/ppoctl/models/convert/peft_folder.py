"""A folder with a peft adapter: `adapter_config.json` and `adapter_model.safetensors`.

Imports torch only when a tensor is read.

    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight      names in the file
                     model.layers.3.self_attn.q_proj.lora_A.weight      names here, as in `convert.adapters`
    base_model.model.score.weight                                       the value head of a critic, saved whole
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppoctl.core.errors import EnvironmentProblemError, RecipeError, quoted
from ppoctl.models.convert.adapters import Adapter, adapters, projection_of, projections
from ppoctl.models.convert.headers import TRAINABLE, read_header, unreadable
from ppoctl.models.convert.peft_config import ALL_LINEAR, CONFIG, HEADS, PeftConfig, PeftTargets, read_peft_config
from ppoctl.models.convert.tensors import VALUE_HEAD, Placement, placements
from ppoctl.models.head import Head
from ppoctl.models.lora import Lora
from ppoctl.models.shape import ModelShape
from ppoctl.models.trainable import Trainable

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."


def is_peft_folder(folder: Path) -> bool:
    """Whether the folder looks like a peft adapter without a model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


class PeftFolder:
    """An adapter as peft wrote it. Raises EnvironmentProblemError if the adapter is not a plain LoRA, or if its files
    are missing, pickled or damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: PeftConfig = read_peft_config(folder)
        self._file = folder / WEIGHTS
        if not self._file.is_file():
            raise EnvironmentProblemError(
                f"the adapter in `{folder}` has no `{WEIGHTS}`; pickles are not read",
                hint="save it again with peft: save_pretrained(..., safe_serialization=True)",
            )
        found = read_header(self._file)
        for name in found:
            if not name.startswith(PREFIX):
                raise self._unfit(name, "is not named as peft names tensors of LoRA")
        self.headers = {name.removeprefix(PREFIX): header for name, header in found.items()}
        """Shape and dtype of each tensor."""

    @property
    def has_head(self) -> bool:
        """Whether the folder has a value head."""
        return VALUE_HEAD in self.headers

    def tensor(self, name: str) -> "Tensor":
        """Return a tensor, in the dtype of the file. Raises EnvironmentProblemError if it cannot be read."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._file, framework="pt") as file:
                tensor: Tensor = file.get_tensor(f"{PREFIX}{name}")
                return tensor
        except (SafetensorError, OSError) as error:
            raise unreadable(self._file, error) from error

    def adapters(self, shape: ModelShape, head: Head) -> tuple[Adapter, ...]:
        """Return the adapters of a model of this shape that the folder has, in layer order.

        Raises EnvironmentProblemError that names the first tensor that is missing, of another shape, quantized, or of
        a module that cannot have an adapter.
        """
        everything = adapters(shape, Trainable(lora=Lora(self.config.rank, self.config.alpha)))
        found = tuple(each for each in everything if self.config.is_target(_module(each.base)))
        expected = {matrix.name: matrix.shape for each in found for matrix in (each.a, each.b)}
        for name, wanted in expected.items():
            self._require(name, wanted)
        if head == "value" and self.has_head:
            expected[VALUE_HEAD] = (1, shape.hidden_size)
            self._require(VALUE_HEAD, expected[VALUE_HEAD])
        for name in sorted(self.headers.keys() - expected.keys()):
            why = "is part of a critic" if name == VALUE_HEAD else "is of a module that has no adapter in ppoctl"
            raise self._unfit(
                name, f"{why}: only projections of attention and MLP have one, routed experts and heads do not"
            )
        for name in self.config.modules_to_save:
            if name not in HEADS or head == "token":
                raise self._unfit(name, f"is trained whole (`modules_to_save` in {CONFIG})")
        return found

    def _require(self, name: str, shape: tuple[int, ...]) -> None:
        header = self.headers.get(name)
        if header is None:
            raise self._unfit(name, f"is missing, although {CONFIG} implies it")
        if header.shape != shape:
            raise self._unfit(name, f"has shape {list(header.shape)}, but the model implies {list(shape)}")
        if header.kind not in TRAINABLE:
            raise self._unfit(name, f"is {header.kind}, which cannot be trained")

    def _unfit(self, name: str, why: str) -> EnvironmentProblemError:
        return EnvironmentProblemError(
            f"`{name}` of the adapter in `{self.folder}` {why}",
            hint=f"name an adapter of this model that has {CONFIG} and {WEIGHTS} as peft wrote them: "
            f"ls -la {quoted(self.folder)}",
        )


def require_fits(folder: PeftFolder, trainable: Trainable, shape: ModelShape, head: Head, key: str) -> None:
    """Raise RecipeError unless a role whose model has this shape and head can start from the adapter: rank, alpha and
    targets must be equal. `key`: of the table in the recipe, such as `actor.train.lora`. Raises also the errors of
    `PeftFolder.adapters`."""
    wanted = trainable.lora
    assert wanted is not None
    has = folder.adapters(shape, head)
    of_recipe = adapters(shape, trainable)
    values: dict[str, tuple[Any, Any]] = {
        "rank": (folder.config.rank, wanted.rank),
        "alpha": (folder.config.alpha, wanted.alpha),
        "targets": (_targets(has, shape), _targets(of_recipe, shape)),
    }
    differing = {name: pair for name, pair in values.items() if pair[0] != pair[1]}
    if differing:
        raise _other_settings(folder, differing, key)
    others = {_module(each.base) for each in has} ^ {_module(each.base) for each in of_recipe}
    if others:
        module = min(others)
        has_it = any(_module(each.base) == module for each in has)
        says = "has an adapter" if has_it else "has no adapter"
        raise RecipeError(
            f"`{key}.start` is `{folder.folder}`, which {says} for `{module}`, unlike the recipe",
            hint=f"adapt the same layers: set `{key.split('.')[0]}.freeze` as when the adapter was trained",
        )


def _other_settings(folder: PeftFolder, differing: Mapping[str, tuple[Any, Any]], key: str) -> RecipeError:
    its = " and ".join(f"{name} `{_shown(pair[0])}`" for name, pair in differing.items())
    ours = " and ".join(f"`{key}.{name}` is `{_shown(pair[1])}`" for name, pair in differing.items())
    settings = (f"--set {quoted(f'{key}.{name}={_shown(pair[0])}')}" for name, pair in differing.items())
    return RecipeError(
        f"`{key}.start` is `{folder.folder}`, an adapter with {its}, but {ours}", hint=" ".join(settings)
    )


def _shown(value: Any) -> str:
    if not isinstance(value, tuple):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return json.dumps(value)


def _targets(found: Iterable[Adapter], shape: ModelShape) -> tuple[str, ...] | str:
    """Return the targets as a recipe writes them."""
    names = {each.projection for each in found}
    return ALL_LINEAR if names == {projection_of(each) for each in projections(shape)} else tuple(sorted(names))


def peft_targets(found: Iterable[Adapter], shape: ModelShape) -> PeftTargets:
    """Return what peft's file of these adapters names: projections by their names, or by full names if peft would
    adapt other modules of such a name.

    In a mixture of experts, MLPs and shared experts are named by their weights (`target_parameters`, since peft
    0.17). peft 0.21 takes every name that ends with `gate_proj`, `up_proj` or `down_proj` for the fused routed
    experts of transformers 5, also the full name of another module.
    """
    adapted = list(found)
    by_weight = [each.base.name for each in adapted if shape.experts is not None and ".mlp." in each.base.name]
    modules = [_module(each.base) for each in adapted if each.base.name not in by_weight]
    names = sorted({each.rpartition(".")[2] for each in modules})
    ends = [_module(each).rpartition(".")[2] for each in placements(shape, "token") if each.name.endswith(".weight")]
    return PeftTargets(names if sum(ends.count(name) for name in names) == len(modules) else modules, by_weight)


def _module(weight: Placement) -> str:
    return weight.name.removesuffix(".weight")
