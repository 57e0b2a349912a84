"""The source of a model: a folder, or the hub."""

from pathlib import Path

from ppoctl.convert.headers import SAFETENSORS, has_weights
from ppoctl.errors import EnvironmentProblemError
from ppoctl.model.folder import local_folder


def model_folder(path: str, *, allow_pickle: bool = False) -> Path:
    """The folder with the model's files: `path` itself, or the local snapshot of a hub id (fetched where there is
    none yet; with `allow_pickle` its pytorch_model.bin too).

    Raises EnvironmentProblemError when there is neither.
    """
    found = local_folder(path)
    if found is not None and (Path(path).is_dir() or has_weights(found, SAFETENSORS)):
        return found
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise EnvironmentProblemError(f"model folder `{path}` does not exist", hint="check `model.path`")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        patterns = ["*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer.model", *["*.bin"] * allow_pickle]
        return Path(snapshot_download(path, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise EnvironmentProblemError(
            f"model `{path}` is neither a folder nor available from the hub: {error}", hint=f"hf download {path}"
        ) from error
