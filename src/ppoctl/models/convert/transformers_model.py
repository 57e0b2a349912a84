"""Log-probs, entropies and values of sequences, computed by transformers from a Hugging Face folder, in float32."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils import logging

from ppoctl.core.batch.sequences import Sequences
from ppoctl.core.errors import EnvironmentProblemError
from ppoctl.models.convert.tensors import VALUE_HEAD
from ppoctl.models.head import Head
from ppoctl.models.shape import ModelShape


class TransformersModel:
    """The model of a folder, loaded by transformers alone, with weights rounded to the dtype `rounded_to` (None: not
    rounded). Raises EnvironmentProblemError if a tensor is missing, or if tying of the output layer does not match
    the configuration."""

    def __init__(self, folder: Path, shape: ModelShape, head: Head, rounded_to: torch.dtype | None) -> None:
        quiet: Any = logging
        quiet.disable_progress_bar()
        quiet.set_verbosity_error()  # missing tensors are checked below instead
        has_value_head = head == "value"
        kind: Any = AutoModelForSequenceClassification if has_value_head else AutoModelForCausalLM
        settings = {"num_labels": 1} if has_value_head else {}
        try:
            self._model, info = kind.from_pretrained(
                folder,
                dtype=torch.float32,
                # Other implementations silently skip features that they do not support, such as capped scores.
                attn_implementation="eager",
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
        if not has_value_head:
            self._require_tied_as(shape.tied_embeddings, folder)
        self._model.eval()
        if rounded_to is not None:
            round_parameters(self._model, rounded_to)

    def score(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Return log-probs of the response tokens and entropies of their distributions, [B R] each, padded to one
        length. The first token of a sequence is its prompt."""
        ids, attended = _padded(sequences)
        with torch.no_grad():
            logits = self._model(input_ids=ids, attention_mask=attended).logits[:, :-1].float()
            logprobs = logits.log_softmax(-1)
            chosen = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
            return chosen, -(logprobs.exp() * logprobs).sum(-1)

    def values(self, sequences: Sequences, head: Tensor) -> Tensor:
        """Return the values before the response tokens, [B R], computed by a head [1 hidden] on the model's hidden
        states."""
        ids, attended = _padded(sequences)
        with torch.no_grad():
            below = getattr(self._model, self._model.base_model_prefix)
            hidden = below(input_ids=ids, attention_mask=attended).last_hidden_state[:, :-1]
            values: Tensor = hidden.float() @ head[0].float()
            return values

    def _require_tied_as(self, tied: bool, folder: Path) -> None:  # noqa: FBT001 - the name explains it
        embedding, output = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        if (embedding.weight is output.weight) != tied:
            does = "ties" if not tied else "does not tie"
            raise EnvironmentProblemError(f"transformers {does} the output layer of `{folder}` to its embedding")


def round_parameters(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Round parameters to values of `dtype`, without changing their own dtype."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))


def _padded(sequences: Sequences) -> tuple[Tensor, Tensor]:
    rows = sequences.unpadded()
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    attended = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return ids, attended
