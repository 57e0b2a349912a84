"""The `Generator` port on vLLM: prepare a state, generate from it, stream the samples."""

import math
from collections.abc import Callable, Sequence

from ppoctl.core.batch.records import State
from ppoctl.core.errors import DataError, NonFiniteError, PpoctlError, RecipeError
from ppoctl.core.ports import Sample, SampleRequest, SamplingParams
from ppoctl.data.response_text import ResponseText
from ppoctl.engines.vllm.engine import GenerationRequest
from ppoctl.engines.vllm.fleet import CompletedRequest, Fleet
from ppoctl.engines.vllm.vllm_settings import VllmSettings
from ppoctl.engines.weights.canary import Canary
from ppoctl.engines.weights.sync import EngineSide, Sync, TrainerAt
from ppoctl.recipe.generator_limits import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE


class VllmGenerator:
    """A `ports.Generator`: vLLM engines in separate processes. The first `prepare` starts them."""

    def __init__(
        self, settings: VllmSettings, trainer_at: TrainerAt, side: EngineSide, notify: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._text = ResponseText(settings.model, settings.eos_token_ids)
        canary = Canary.of(settings.dtype, settings.max_model_len, settings.table.canary_tolerance)
        self._fleet = Fleet(side, Sync(trainer_at, side, canary), settings.seqs_per_engine, notify)
        self._stamp = ""
        self._stream: VllmStream | None = None

    def prepare(self, state: State) -> None:
        """See `ports.Generator`."""
        self._require_no_stream()
        self._fleet.prepare(state)
        self._stamp = state.stamp

    def open(self, params: SamplingParams) -> "VllmStream":
        """See `ports.Generator`. Greedy samples report the log-probs at temperature 1. Raises RecipeError for a
        temperature that vLLM would change or reject."""
        self._require_no_stream()
        if params.temperature != 0 and not LOWEST_TEMPERATURE <= params.temperature <= HIGHEST_TEMPERATURE:
            raise RecipeError(
                f"vLLM does not support temperature `{params.temperature}`",
                hint=f"set it between {LOWEST_TEMPERATURE} and {HIGHEST_TEMPERATURE}, or to 0 (greedy)",
            )
        vocab_size = self._fleet.vocab_size() if params.stop_token_ids else 0
        if wrong := [token for token in params.stop_token_ids if not 0 <= token < vocab_size]:
            raise RecipeError(
                f"`rollout.stop_token_ids` contains id {wrong[0]}, but the model's vocabulary has {vocab_size} ids",
                hint=f"use ids below {vocab_size}",
            )
        self._fleet.open(params)
        self._stream = VllmStream(self._fleet, self._text, params, self._stamp, self._settings.max_model_len)
        return self._stream

    def close(self) -> None:
        """See `ports.Generator`. A later `prepare` starts new engines."""
        if self._stream is not None:
            self._stream.lose()
        self._fleet.close()

    def _require_no_stream(self) -> None:
        if self._stream is not None and self._stream.is_open:
            raise PpoctlError("the generator's previous stream is still open; close it first")


class VllmStream:
    """A `ports.Stream` on the engines of a fleet."""

    def __init__(self, fleet: Fleet, text: ResponseText, params: SamplingParams, stamp: str, window: int) -> None:
        self._fleet = fleet
        self._text = text
        self._params = params
        self._stamp = stamp
        self._window = window
        self._requests: dict[str, tuple[SampleRequest, SamplingParams]] = {}
        """Each request that the stream had, with its parameters, by key."""
        self._lost = 0
        """Number of requests that were open when the generator was closed."""
        self.is_open = True

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """See `ports.Stream`. Raises DataError, also for a token id outside the vocabulary. Raises ValueError for a
        negative seed, or if the stream already had a request with the same key."""
        self._require_open()
        had = dict(self._requests)
        for request in requests:
            params = self._params.limited(request.max_new_tokens, is_continued=request.is_continued)
            self._check(request, params)
            if request.key in had:
                raise ValueError(f"two requests have the key `{request.key}`")
            had[request.key] = request, params
        self._requests = had
        self._fleet.submit([_generation_request(request) for request in requests])

    def finished(self) -> Sequence[Sample]:
        """See `ports.Stream`. Raises NonFiniteError if log-probs are not finite."""
        self._require_open()
        return [self._sample(completed) for completed in self._fleet.finished()]

    def poll(self) -> Sequence[Sample]:
        """See `ports.Stream`. Raises the errors of `finished`."""
        self._require_open()
        return [self._sample(completed) for completed in self._fleet.poll()]

    def close(self) -> None:
        """See `ports.Stream`."""
        if self.is_open:
            self.is_open = False
            self._fleet.abort()

    def lose(self) -> None:
        """Mark the stream as ended, before the generator closes its engines."""
        if self.is_open:
            self.is_open = False
            self._lost = self._fleet.open_requests

    def _require_open(self) -> None:
        if not self.is_open:
            why = f"the generator was closed with {self._lost} samples unfinished" if self._lost else "it is closed"
            raise PpoctlError(f"this stream returns no more samples: {why}")

    def _check(self, request: SampleRequest, params: SamplingParams) -> None:
        length, new = len(request.prompt_tokens), 1 if params.max_window_tokens else params.max_new_tokens
        if not 1 <= length <= self._window - new:
            raise DataError(
                f"the prompt of `{request.key}` has {length} tokens; with {new} new tokens it must fit into the "
                f"generator's window of {self._window}",
                hint="raise `rollout.max_prompt_tokens` or remove the prompt from the data",
            )
        if request.seed < 0:
            raise ValueError(f"seed of `{request.key}` is negative: {request.seed}")
        # vLLM without a tokenizer does not check ids. An invalid id would raise an error on a CPU, and corrupt the
        # CUDA context on a GPU.
        vocab_size = self._fleet.vocab_size()
        wrong = [token for token in request.prompt_tokens if not 0 <= token < vocab_size]
        if wrong:
            raise DataError(
                f"the prompt of `{request.key}` contains id {wrong[0]}, but the model's vocabulary has only "
                f"{vocab_size} ids",
                hint="the data were tokenized for another model: check `model.path`",
            )

    def _sample(self, completed: CompletedRequest) -> Sample:
        finished = completed.finished
        if finished.reason not in ("stop", "length"):
            raise PpoctlError(f"vLLM ended sample `{finished.id}` with `{finished.reason}`")
        if not all(map(math.isfinite, finished.logprobs)):
            raise NonFiniteError(f"sample `{finished.id}` has a log-prob that is not finite with {self._stamp}")
        request, params = self._requests[finished.id]
        return Sample(
            key=finished.id,
            tokens=finished.tokens,
            logprobs=finished.logprobs,
            terminated=finished.reason == "stop",
            text=self._text.text((*request.earlier_tokens, *finished.tokens), params),
            stamp=self._stamp,
            sends=completed.sends,
            calls=finished.parsed.calls,
            malformed=finished.parsed.malformed,
            experts=finished.experts,
        )


def _generation_request(request: SampleRequest) -> GenerationRequest:
    return GenerationRequest(
        request.key, request.prompt_tokens, request.seed, request.max_new_tokens, request.is_continued
    )
