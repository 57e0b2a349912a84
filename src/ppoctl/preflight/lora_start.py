"""Check of the peft adapter that a role starts from (`train.lora.start`)."""

from ppoctl.convert.peft_folder import PeftFolder, require_fits
from ppoctl.model.folder import local_folder
from ppoctl.model.shape_reader import read_shape
from ppoctl.preflight.model import find_model
from ppoctl.recipe.role_model import lora_starts, model_of, trainable_of
from ppoctl.recipe.roles import head_of
from ppoctl.recipe.schema import Recipe


def require_start(recipe: Recipe, role: str, key: str) -> None:
    """Raise an error if a role cannot start from its adapter: no folder, not a plain LoRA, another model, or other
    settings than those of the recipe. `key`: of the folder. Without the model of the role, which is reported as
    missing, only the folder is checked."""
    start = lora_starts(recipe)[role]
    adapter = PeftFolder(find_model(start, key))
    model = local_folder(model_of(recipe, role).path)
    if model is not None and (model / "config.json").is_file():
        require_fits(
            adapter, trainable_of(recipe, role), read_shape(model), head_of(role), key.removesuffix(".start")
        )
