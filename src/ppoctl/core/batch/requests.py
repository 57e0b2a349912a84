"""Requests for responses, the responses, and their stream. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

from ppoctl.core.batch.episodes import Episode, ToolCall
from ppoctl.core.batch.prompts import Prompt


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a stream. `temperature == 0` is greedy decoding."""

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a response, in addition to the model's own end tokens."""
    min_new_tokens: int = 0
    """Minimum number of response tokens. Before that number, end tokens are masked and stop strings are ignored."""
    max_window_tokens: int | None = None
    """Maximum length of prompt and response together; None: the window of the engine."""
    special_tokens: Literal["keep", "drop"] = "keep"
    """Whether the text of a response contains special tokens. End tokens and padding are always removed."""
    returns_experts: bool = False
    """Whether samples have the experts that the generator's routers chose."""

    def new_tokens(self, prompt_tokens: int) -> int:
        """Return the maximum number of response tokens after a prompt of this length."""
        if self.max_window_tokens is None:
            return self.max_new_tokens
        return min(self.max_new_tokens, self.max_window_tokens - prompt_tokens)

    def limited(self, max_new_tokens: int | None, *, is_continued: bool) -> "SamplingParams":
        """Return the parameters of a request with these fields of a `SampleRequest`."""
        if max_new_tokens is None and not is_continued:
            return self
        most = self.max_new_tokens if max_new_tokens is None else max_new_tokens
        fewest = 0 if is_continued else min(self.min_new_tokens, most)
        return replace(self, max_new_tokens=most, min_new_tokens=fewest)


@dataclass(frozen=True)
class SampleRequest:
    """Request for one response. `key` is unique within the rollout. `seed` makes the sample independent of all other
    samples."""

    key: str
    prompt_tokens: tuple[int, ...]
    seed: int
    prompt: Prompt | None = None
    """Prompt of the request, which its environment reads; None: the generator receives only the ids."""
    max_new_tokens: int | None = None
    """Maximum number of tokens; None: that of the stream's `SamplingParams`."""
    is_continued: bool = False
    """Whether the response continues a response, so that `min_new_tokens` does not apply to it."""
    earlier_tokens: tuple[int, ...] = ()
    """Last tokens of `prompt_tokens` that belong to the response: an earlier request generated them. The text of the
    sample begins with them."""


@dataclass(frozen=True)
class Sample:
    """One finished response. If an end token was sampled, the end token is the last of `tokens` and is in the
    loss."""

    key: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probs of the sampled tokens under the distribution that they were sampled from, filters included."""
    terminated: bool
    """Whether the model ended the response; False: the length limit truncated it."""
    text: str
    """Decoded text, without the token or string that ended the response, and without padding. It contains the other
    special tokens, unless `SamplingParams.special_tokens` drops them."""
    stamp: str
    """`State.stamp` of the actor whose weights generated the response."""
    sends: int = 1
    """Number of times the request was sent to an engine: 2 if the first engine died while generating."""
    calls: tuple[ToolCall, ...] = ()
    """Tool calls in the response, if the engine parses them."""
    malformed: str = ""
    """Why the response contains a tool call that cannot be read; empty: it contains no such call."""
    episode: Episode | None = None
    """The turns of the response; None: it has one turn and no environment. `tokens` and `logprobs` then contain the
    observations too, with log-probs of 0, and `terminated` is False if a limit ended the episode."""
    prompt_tokens: tuple[int, ...] | None = None
    """Ids of the prompt, if the environment added messages to it; None: those of the request."""
    experts: bytes = b""
    """Experts that the generator's routers chose: one byte for each token of prompt and response but the last, for
    each layer with experts, for each chosen expert, in this order. Empty: not requested."""


@runtime_checkable
class Stream(Protocol):
    """Requests to one actor state, all with the same `SamplingParams`.

    Tokens are a function of weights, prompt, seed and params, independent of the other requests. On a GPU, the other
    requests change how logits are rounded, so this holds only if no two tokens are nearly equally likely
    (docs/gpu.md, Decoding).
    """

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Start these requests; other requests may be running. Raises DataError if a prompt is longer than the
        context window; no request is then started."""
        ...

    def finished(self) -> Sequence[Sample]:
        """Wait until at least one request has finished, and return the samples that were not returned before, in any
        order.

        Returns an empty sequence if no request is open.
        """
        ...

    def poll(self) -> Sequence[Sample]:
        """Wait until at least one engine has replied, and return the samples that finished and were not returned
        before, which may be none.

        An engine replies at the latest after a fixed number of tokens per request, so that a caller can submit
        further requests while long responses are generated. Returns an empty sequence at once if no request is open.
        """
        ...

    def close(self) -> None:
        """Abort the open requests. This method may be called again."""
        ...
