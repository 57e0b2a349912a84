"""Files of a model folder other than weights: configuration, generation configuration, tokenizer, chat template."""

import hashlib
import json
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppoctl.models.families import FAMILIES
from ppoctl.models.folder import NAMED_TEMPLATES, read_config
from ppoctl.models.head import Head

if TYPE_CHECKING:  # the digest is also computed on login nodes, without torch
    import torch

CONFIG = "config.json"
_COPIED = (
    "generation_config.json",
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    NAMED_TEMPLATES,
)


def companions_digest(folder: Path) -> str:
    """Return the digest of the names and contents of the files of a model other than weights. Chat templates with
    names are not among them, because the digest of the tokenizer covers them."""
    files = [path for path in (folder / CONFIG, *_copied(folder)) if path.is_file() and path.parent == folder]
    listing = (f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files)
    return hashlib.sha256("\n".join(listing).encode()).hexdigest()


@dataclass(frozen=True)
class Companions:
    """The files that accompany weights of a model with this head and dtype, built from the model in `source`."""

    source: Path
    head: Head
    dtype: "torch.dtype"

    def write(self, folder: Path) -> None:
        """Write the files into the folder of the weights. Raises OSError."""
        self.write_config(folder)
        for path in _copied(self.source):
            copy = folder / path.relative_to(self.source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)

    def write_config(self, folder: Path) -> Path:
        """Write config.json into the folder of the weights, and return its path. Raises OSError."""
        file = folder / CONFIG
        file.write_text(json.dumps(self.config(), indent=2, sort_keys=True) + "\n", "utf-8")
        return file

    def config(self) -> dict[str, Any]:
        """Return the config.json that names the class for these weights. A critic is the family's
        ...ForSequenceClassification with one label."""
        config = dict(self._source_config)
        for stale in ("torch_dtype", "auto_map", "num_labels", "id2label", "label2id"):
            config.pop(stale, None)
        config["dtype"] = str(self.dtype).removeprefix("torch.")
        family = FAMILIES[str(config["model_type"])]
        if self.head == "token":
            return config | {"architectures": [f"{family.classes}ForCausalLM"]}
        config |= {
            "architectures": [family.classifier or f"{family.classes}ForSequenceClassification"],
            "num_labels": 1,
        }
        return config | {"id2label": {"0": "value"}, "label2id": {"value": 0}}

    @cached_property
    def _source_config(self) -> dict[str, Any]:
        """Configuration of the source model. It is read only once, because a source in the folder of another run may
        be deleted during this run."""
        return read_config(self.source)


def _copied(folder: Path) -> list[Path]:
    return sorted({path for pattern in _COPIED for path in folder.glob(pattern) if path.is_file()})
