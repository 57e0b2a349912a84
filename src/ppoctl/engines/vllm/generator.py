"""The `Generator` port on vLLM: be at a state, draw, stream."""

import math
from collections.abc import Callable, Iterator, Sequence

from ppoctl.batch.records import State
from ppoctl.engines.vllm.canary import Tolerance, canary_tokens
from ppoctl.engines.vllm.engine import Engine, Finished
from ppoctl.engines.vllm.settings import VllmSettings
from ppoctl.engines.vllm.tokens import Detokenizer
from ppoctl.engines.vllm.weights import Departure, compare
from ppoctl.errors import DataError, NonFiniteError, PpoctlError, RecipeError, WeightSyncError
from ppoctl.ports import NamedWeights, Sample, SampleRequest, SamplingParams

_COLDEST, _HOTTEST = 0.01, 2.0
"""vLLM raises temperatures between 0 and the first to it, silently, and refuses those above the second."""


class VllmGenerator:
    """An engine in this process, started by the first `generate`.

    `weights(state)` is the trainer's, asked only when the engine is not at the state; `score(state, tokens)` is the
    trainer's log-probs (temperature 1, float32) of tokens 1.. of a sequence under that state, asked after each sync.
    """

    def __init__(
        self,
        settings: VllmSettings,
        *,
        weights: Callable[[State], NamedWeights],
        score: Callable[[State, tuple[int, ...]], list[float]],
    ) -> None:
        self._settings = settings
        self._weights = weights
        self._score = score
        self._detokenizer = Detokenizer(settings.model, settings.eos_token_ids)
        self._engine: Engine | None = None
        self._at: str | None = None
        self._streaming = False
        self._calls = 0

    def generate(self, requests: Sequence[SampleRequest], params: SamplingParams, *, at: State) -> Iterator[Sample]:
        """See `ports.Generator`. Greedy samples report the log-probs of the untempered distribution.

        Requests are checked now, everything else happens as the iterator is read. One stream at a time: read it to
        the end or close it before the next. Raises DataError, RecipeError (a temperature vLLM would change or
        refuse), WeightSyncError, NonFiniteError (the weights give log-probs that are not finite).
        """
        self._check(requests, params)
        return self._stream(tuple(requests), params, at)

    def close(self) -> None:
        """See `ports.Generator`. A later `generate` starts a fresh engine."""
        if self._engine is not None:
            engine, self._engine, self._at = self._engine, None, None
            engine.close()

    def _check(self, requests: Sequence[SampleRequest], params: SamplingParams) -> None:
        if params.temperature != 0 and not _COLDEST <= params.temperature <= _HOTTEST:
            raise RecipeError(
                f"temperature `{params.temperature}` is outside what vLLM samples with",
                hint=f"set it between {_COLDEST} and {_HOTTEST}, or to 0 (greedy)",
            )
        window = self._settings.max_model_len
        keys: set[str] = set()
        for request in requests:
            length = len(request.prompt_tokens)
            if not 1 <= length <= window - params.max_new_tokens:
                raise DataError(
                    f"prompt of `{request.key}` has {length} tokens; with {params.max_new_tokens} new ones it must "
                    f"fit the generator's window of {window}",
                    hint="raise `rollout.max_prompt_tokens` or leave the prompt out of the data",
                )
            if request.key in keys:
                raise ValueError(f"two requests have the key `{request.key}`")
            if request.seed < 0:
                raise ValueError(f"seed of `{request.key}` is negative: {request.seed}")
            keys.add(request.key)

    def _stream(self, requests: tuple[SampleRequest, ...], params: SamplingParams, at: State) -> Iterator[Sample]:
        if not requests:
            return
        if self._streaming:
            raise PpoctlError("the generator's previous stream is still open; read it to the end or close it")
        self._streaming = True
        engine: Engine | None = None
        open_requests: dict[str, SampleRequest] = {}
        try:
            engine = self._engine_at(at)
            _require_ids_below(engine.vocab_size, requests)
            self._calls += 1
            for index, request in enumerate(requests):
                id = f"{self._calls}-{index}"
                open_requests[id] = request
                engine.add(id, request.prompt_tokens, request.seed, params)
            while open_requests:
                if engine is not self._engine:
                    raise PpoctlError(f"the generator was closed with {len(open_requests)} samples still to draw")
                for finished in engine.step():
                    yield self._sample(open_requests.pop(finished.id), finished, params, at)
        finally:
            self._streaming = False
            if engine is not None and open_requests and engine is self._engine:
                engine.abort(open_requests)

    def _sample(self, request: SampleRequest, finished: Finished, params: SamplingParams, at: State) -> Sample:
        if finished.reason not in ("stop", "length"):
            raise PpoctlError(f"vLLM ended sample `{request.key}` with `{finished.reason}`")
        if not all(map(math.isfinite, finished.logprobs)):
            raise NonFiniteError(f"sample `{request.key}` has a log-prob that is not finite under {at.stamp}")
        return Sample(
            key=request.key,
            tokens=finished.tokens,
            logprobs=finished.logprobs,
            terminated=finished.reason == "stop",
            text=self._detokenizer.text(finished.tokens, params.stop_strings),
            stamp=at.stamp,
        )

    def _engine_at(self, state: State) -> Engine:
        """The engine, holding the state's weights. Costs nothing when it does already."""
        # A repeated update is the same state by lineage, and on a GPU still not the same numbers.
        wanted = f"{state.identity}+r{state.replay}"
        if self._engine is None:
            self._engine = Engine(self._settings, self._detokenizer)
        if self._at != wanted:
            # Until the proof is done the engine is at no state.
            self._at = None
            self._sync(self._engine, state)
            self._at = wanted
        return self._engine

    def _sync(self, engine: Engine, state: State) -> None:
        weights = self._weights(state)
        if weights.state != state:
            raise WeightSyncError(f"the trainer gave the weights of `{weights.state.stamp}`, not of `{state.stamp}`")
        departure = Departure(weights)
        held = engine.load(departure)
        compare(weights.names, departure, held)
        tokens = canary_tokens(engine.vocab_size, self._settings.max_model_len)
        tolerance = Tolerance.of(self._settings.dtype, self._settings.table.canary_tolerance)
        tolerance.check(engine.score(tokens), self._score(state, tokens))


def _require_ids_below(vocab_size: int, requests: Sequence[SampleRequest]) -> None:
    """vLLM started without a tokenizer does not look; the embedding would fail on a CPU and poison the GPU."""
    for request in requests:
        wrong = [token for token in request.prompt_tokens if not 0 <= token < vocab_size]
        if wrong:
            raise DataError(
                f"prompt of `{request.key}` has id {wrong[0]}; the model's vocabulary has {vocab_size}",
                hint="the data were tokenised for another model: check `model.path`",
            )
