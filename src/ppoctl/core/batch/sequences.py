"""Sequences: token ids of prompts and responses, the input of models for scoring and training."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Sequences:
    """B prompts with T tokens in total, each with one response on the left-justified response grid [B, R]."""

    is_sent_once: ClassVar[bool] = True
    """Whether the object is sent to another process only once, even if several calls have it as an argument."""

    prompt_tokens: Int[Tensor, " T"]
    """All prompts, concatenated; int32."""
    prompt_lengths: Int[Tensor, " B"]
    tokens: Int[Tensor, "B R"]
    """Response ids, including the end token; int32, 0 beyond `lengths`."""
    lengths: Int[Tensor, " B"]
    """Number of response positions with a token, masked out or not; at least 1."""
    experts: Int[Tensor, "N E"] | None = None
    """Experts of each of the N input tokens (each sequence without its last token), row by row: E numbers, those of
    the first layer with experts first; int16. -1, or None: the router chooses."""

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "tokens"):
            require(getattr(self, name).dtype == torch.int32, f"{name} are int32")
        require(int(self.prompt_lengths.sum()) == self.prompt_tokens.numel(), "prompt lengths add up")
        require(bool((self.lengths >= 1).all()), "every response has a token")
        require(not bool(self.tokens[~self.present].any()), "ids beyond the length are 0")
        if self.experts is not None:
            require(len(self.experts) == int(self.input_lengths.sum()), "every input token has experts")

    @property
    def num_seqs(self) -> int:
        """Number of sequences, B."""
        return int(self.tokens.shape[0])

    @property
    def input_lengths(self) -> Int[Tensor, " B"]:
        """Number of tokens of each row that a model reads: prompt + response - 1."""
        return self.prompt_lengths + self.lengths - 1

    @property
    def present(self) -> Bool[Tensor, "B R"]:
        """Mask of the positions that have a token, masked out or not."""
        return torch.arange(self.tokens.shape[1])[None, :] < self.lengths[:, None]

    def unpadded(self) -> list[Int[Tensor, " S"]]:
        """Return the ids of each full sequence, prompt then response, int64."""
        prompts = torch.split(self.prompt_tokens, self.prompt_lengths.tolist())
        return [
            torch.cat([prompt, row[:length]]).long()
            for prompt, row, length in zip(prompts, self.tokens, self.lengths.tolist(), strict=True)
        ]


def one_sequence(tokens: tuple[int, ...]) -> Sequences:
    """Return these tokens as one row: the first is the prompt, the others are the response."""
    ids = torch.tensor(tokens, dtype=torch.int32)
    return Sequences(ids[:1], torch.tensor([1]), ids[None, 1:], torch.tensor([len(tokens) - 1]))


def require(condition: bool, invariant: str) -> None:  # noqa: FBT001 - reads as a sentence at the call
    """Raise ValueError with the invariant of the record, unless the condition is true."""
    if not condition:
        raise ValueError(f"record violates an invariant: {invariant}")
