"""Digest of the frozen weights of a role: does the model that completes a saved state still have the same weights?

The digest is computed from full tensors under Hugging Face names, in the dtype of the role, so that it depends
neither on the layout nor on the format of the model.
"""

import hashlib
from collections.abc import Mapping

from ppoctl.models.convert.checksum import TensorChecksum


def frozen_digest(checksums: Mapping[str, TensorChecksum]) -> str:
    """Return the SHA-256 (hex) over one line per tensor, in the order of the names: name, shape, dtype, checksum.

    `checksums`: of exactly the tensors that `convert.tensors.frozen_names` lists.
    """
    digest = hashlib.sha256()
    for name, checksum in sorted(checksums.items()):
        digest.update(f"{name} {list(checksum.shape)} {checksum.dtype} {checksum.value:#x}\n".encode())
    return digest.hexdigest()
