"""Log-probs, entropies and values of some sequences by transformers, from a Hugging Face folder, in float32."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils import logging

from ppoctl.batch.sequences import Sequences
from ppoctl.convert.tensors import VALUE_HEAD, Role
from ppoctl.errors import EnvironmentProblemError
from ppoctl.model.shape import ModelShape


class TransformersModel:
    """The model of a folder as transformers loads it, with nothing else. `rounded_to`: weights are rounded to that
    dtype first. Raises EnvironmentProblemError when a tensor is missing or has no place, or the output layer is not
    tied as the configuration says."""

    def __init__(self, folder: Path, shape: ModelShape, role: Role, rounded_to: torch.dtype | None) -> None:
        quiet: Any = logging
        quiet.disable_progress_bar()
        quiet.set_verbosity_error()  # what it would say of missing tensors is asked for below
        is_critic = role == "critic"
        kind: Any = AutoModelForSequenceClassification if is_critic else AutoModelForCausalLM
        settings = {"num_labels": 1} if is_critic else {}
        try:
            self._model, info = kind.from_pretrained(
                folder,
                dtype=torch.float32,
                attn_implementation="eager",  # the other ones leave out what they cannot do, such as caps of scores
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                **settings,
            )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise EnvironmentProblemError(f"transformers cannot load `{folder}`: {first}") from error
        missing = sorted(set(info["missing_keys"]) - {VALUE_HEAD})
        if missing:
            raise EnvironmentProblemError(f"transformers does not find `{missing[0]}` in `{folder}`")
        if not is_critic:
            self._require_tied_as(shape.tied_embeddings, folder)
        self._model.eval()
        if rounded_to is not None:
            round_parameters(self._model, rounded_to)

    def score(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Log-probs of the response tokens and entropies of their distributions, [B R] each, sequences padded to one
        length; the first token of a sequence is its prompt."""
        ids, attended = _padded(sequences)
        with torch.no_grad():
            logits = self._model(input_ids=ids, attention_mask=attended).logits[:, :-1].float()
            logprobs = logits.log_softmax(-1)
            chosen = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
            return chosen, -(logprobs.exp() * logprobs).sum(-1)

    def values(self, sequences: Sequences, head: Tensor) -> Tensor:
        """Values before the response tokens under a head [1 hidden], given what lies below it. [B R]"""
        ids, attended = _padded(sequences)
        with torch.no_grad():
            below = getattr(self._model, self._model.base_model_prefix)
            hidden = below(input_ids=ids, attention_mask=attended).last_hidden_state[:, :-1]
            values: Tensor = hidden.float() @ head[0].float()
            return values

    def _require_tied_as(self, tied: bool, folder: Path) -> None:  # noqa: FBT001 - says itself
        embedding, output = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        if (embedding.weight is output.weight) != tied:
            found = "ties" if not tied else "does not tie"
            raise EnvironmentProblemError(f"transformers {found} the output layer of `{folder}` to its embedding")


def round_parameters(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Round parameters to their values in `dtype`; their own dtype stays."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))


def _padded(sequences: Sequences) -> tuple[Tensor, Tensor]:
    rows = sequences.unpadded()
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    attended = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return ids, attended
