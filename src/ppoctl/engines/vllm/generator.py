"""The `Generator` port on vLLM: be at a state, draw, stream."""

import math
from collections.abc import Callable, Iterator, Sequence

from ppoctl.batch.records import State
from ppoctl.engines.vllm.engine import Draw
from ppoctl.engines.vllm.fleet import Drawn, Fleet
from ppoctl.engines.vllm.settings import VllmSettings
from ppoctl.engines.vllm.tokens import Detokenizer
from ppoctl.errors import DataError, NonFiniteError, PpoctlError, RecipeError
from ppoctl.ports import Sample, SampleRequest, SamplingParams
from ppoctl.weights.canary import Canary
from ppoctl.weights.sync import EngineSide, Sync, TrainerSide

_COLDEST, _HOTTEST = 0.01, 2.0
"""vLLM raises temperatures between 0 and the first to it, silently, and refuses those above the second."""


class VllmGenerator:
    """Engines that are started by the first `generate`, in this process or in others."""

    def __init__(
        self, settings: VllmSettings, trainer: TrainerSide, side: EngineSide, say: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._detokenizer = Detokenizer(settings.model, settings.eos_token_ids)
        canary = Canary.of(settings.dtype, settings.max_model_len, settings.table.canary_tolerance)
        self._fleet = Fleet(side, Sync(trainer, side, canary), settings.table.max_concurrent_seqs, say)
        self._streaming = False
        self._closings = 0

    def be_at(self, state: State) -> None:
        """See `ports.Generator`."""
        self._fleet.be_at(state)

    def generate(self, requests: Sequence[SampleRequest], params: SamplingParams, *, at: State) -> Iterator[Sample]:
        """See `ports.Generator`. Greedy samples report the log-probs of the untempered distribution.

        Requests are checked now, everything else happens as the iterator is read. One stream at a time: read it to
        the end or close it before the next. Raises DataError, RecipeError (a temperature vLLM would change or
        refuse), WeightSyncError, NonFiniteError (the weights give log-probs that are not finite).
        """
        self._check(requests, params)
        return self._stream(tuple(requests), params, at)

    def close(self) -> None:
        """See `ports.Generator`. A later `generate` starts fresh engines."""
        self._closings += 1
        self._fleet.close()

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
        closings = self._closings
        try:
            self._fleet.be_at(at)
            _require_ids_below(self._fleet.vocab_size(), requests)
            by_key = {request.key: request for request in requests}
            draws = [Draw(request.key, request.prompt_tokens, request.seed) for request in requests]
            left = len(draws)
            for drawn in self._fleet.draw(draws, params, at):
                left -= 1
                yield self._sample(by_key[drawn.finished.id], drawn, params, at)
                if self._closings != closings:
                    raise PpoctlError(f"the generator was closed with {left} samples still to draw")
        finally:
            self._streaming = False

    def _sample(self, request: SampleRequest, drawn: Drawn, params: SamplingParams, at: State) -> Sample:
        finished = drawn.finished
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
            sends=drawn.sends,
        )


def _require_ids_below(vocab_size: int, requests: Sequence[SampleRequest]) -> None:
    """vLLM started without a tokenizer does not look; the embedding would fail on a CPU and poison the GPU."""
    for request in requests:
        wrong = [token for token in request.prompt_tokens if not 0 <= token < vocab_size]
        if wrong:
            raise DataError(
                f"prompt of `{request.key}` has id {wrong[0]}; the model's vocabulary has {vocab_size}",
                hint="the data were tokenised for another model: check `model.path`",
            )
