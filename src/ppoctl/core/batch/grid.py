"""Mapping between the response grid and packed sequences. Only this file and `Sequences.input_lengths` shift
positions by one token.

The N packed tokens are the prompts and responses of some rows, concatenated without padding. The number of packed
tokens that predict a response token is n. The output for response token r of a row (its log-prob, its entropy, the
value of the state before it) is read at the position of the token *before* it: the last prompt token for r = 0, and
response token r - 1 after that. The last response token predicts nothing and is not packed.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ppoctl.core.batch.sequences import Sequences


@dataclass(frozen=True)
class Packed:
    """Sequences without padding. Ids are int64, as models require."""

    tokens: Int[Tensor, " N"]
    """Input ids: each sequence without its last token."""
    seq_lengths: tuple[int, ...]
    """Input tokens of each row; the sum is N."""
    at: Int[Tensor, " N"]
    """Index of each of these tokens among the input tokens of all rows of the sequences."""
    read_at: Int[Tensor, " n"]
    """Packed positions whose output is read, row by row."""
    targets: Int[Tensor, " n"]
    """The response id that each position in `read_at` predicts."""
    row: Int[Tensor, " n"]
    """Index of each target's row among the packed rows."""
    column: Int[Tensor, " n"]
    """Response position of each target."""
    num_columns: int
    """Width R of the grid."""

    def to_grid(self, values: Float[Tensor, " n"]) -> Float[Tensor, "m R"]:
        """Return per-token outputs on the response grid of the packed rows; 0 at positions without a token.
        Differentiable."""
        grid = torch.zeros(len(self.seq_lengths), self.num_columns, dtype=values.dtype, device=values.device)
        return grid.index_put((self.row.to(values.device), self.column.to(values.device)), values)


def pack(sequences: Sequences, rows: Int[Tensor, " m"]) -> Packed:
    """Return the given rows as one packed input, in the given order."""
    starts = torch.cumsum(sequences.prompt_lengths, 0) - sequences.prompt_lengths
    inputs = sequences.input_lengths
    first_inputs = torch.cumsum(inputs, 0) - inputs
    segments: list[Tensor] = []
    read_at: list[Tensor] = []
    targets: list[Tensor] = []
    seq_lengths: list[int] = []
    offset = 0
    for row in rows.tolist():
        prompt_length, length = int(sequences.prompt_lengths[row]), int(sequences.lengths[row])
        start = int(starts[row])
        response = sequences.tokens[row, :length].long()
        segments += [sequences.prompt_tokens[start : start + prompt_length], response[:-1]]
        read_at.append(torch.arange(length) + (offset + prompt_length - 1))
        targets.append(response)
        seq_lengths.append(prompt_length + length - 1)
        offset += seq_lengths[-1]
    lengths = sequences.lengths[rows]
    return Packed(
        tokens=torch.cat(segments),
        seq_lengths=tuple(seq_lengths),
        at=torch.cat([torch.arange(int(inputs[row])) + first_inputs[row] for row in rows.tolist()]),
        read_at=torch.cat(read_at),
        targets=torch.cat(targets),
        row=torch.repeat_interleave(torch.arange(len(rows)), lengths),
        column=torch.cat([torch.arange(int(n)) for n in lengths]),
        num_columns=int(sequences.tokens.shape[1]),
    )
