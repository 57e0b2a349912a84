"""A class with the few methods of vLLM's LLMEngine that the generator requires. Only this file uses the API of
LLMEngine, and `vllm_start` starts it."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ppoctl.core.errors import PpoctlError, WeightSyncError
from ppoctl.core.machine.device import on_gpu
from ppoctl.core.machine.process_usage import MeasuredProcess, reset_peak
from ppoctl.core.machine.torch_profile import ProfiledProcess
from ppoctl.core.ports import SamplingParams
from ppoctl.data.response_text import ResponseText
from ppoctl.engines.vllm import vllm_start
from ppoctl.engines.vllm.log import write_logs_alone
from ppoctl.engines.vllm.tool_calls import NO_CALLS, ParsedCalls, VllmToolCalls, parsed_calls
from ppoctl.engines.vllm.vllm_settings import VllmSettings
from ppoctl.engines.weights.bucket import NamedTensors
from ppoctl.engines.weights.canary import CanaryScores
from ppoctl.engines.weights.receiving import ReceivingEngine
from ppoctl.models.convert.checksum import LoadedWeight
from ppoctl.models.folder import model_folder
from ppoctl.models.shape_reader import read_shape

FEWEST_STEPS, MOST_STEPS = 16, 64
"""Minimum and maximum number of engine steps of one `advance`. Between the two, `advance` returns when
`FLUSH_FRACTION` of the requests have finished. The limits are steps rather than seconds, so that all tensor ranks of
an engine return after the same step."""
FLUSH_FRACTION = 1 / 8
"""Fraction of an engine's requests that must finish before `advance` returns early. While long responses are
generated, few requests finish. A driver of hundreds of engines cannot poll each engine every few tokens."""


@dataclass(frozen=True)
class GenerationRequest:
    """One response to generate. The prompt's ids must be in the vocabulary. The engine does not check them."""

    id: str
    prompt: tuple[int, ...]
    seed: int
    max_new_tokens: int | None = None
    is_continued: bool = False


@dataclass(frozen=True)
class GenerationOutput:
    """A finished request."""

    id: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: str
    """vLLM's finish reason: "stop", "length", or a reason that must not occur ("abort", "error", "repetition")."""
    prompt_logprobs: tuple[float, ...]
    """Log-probs of prompt tokens 1..; empty unless requested."""
    parsed: ParsedCalls = NO_CALLS
    """Tool calls; none if the settings of the engine have no format."""
    experts: bytes = b""
    """See `Sample.experts`."""


class Engine(ReceivingEngine, ProfiledProcess, MeasuredProcess):
    """A running engine, or one tensor rank of an engine, in this process. All tensor ranks must receive the same
    calls. The process should have no other use: vLLM reseeds all random-number generators and destroys all process
    groups."""

    def __init__(self, settings: VllmSettings, *, folder: str | None = None) -> None:
        """Start vLLM, which takes about 2 s for a small model. If `folder` exists, the engine loads the weights in
        this folder, and reports them when `restart` is called with the same folder. Otherwise the engine starts with
        random weights, which the first transfer replaces. Raises RecipeError, EnvironmentProblemError or
        OutOfMemoryError."""
        self._settings = settings
        self._text = ResponseText(settings.model, settings.eos_token_ids)
        self._syncs = 0
        self._open: set[str] = set()
        self._is_asleep = False
        self._source = folder if folder is not None and Path(folder).is_dir() else None
        self._has_weights = self._source is not None
        if self._source is None:
            self._llm = vllm_start.started(settings, load_format="dummy")
            self._note_experts()
        else:
            self._start_from(self._source)
        form = settings.call_format
        self._tool_calls = None if form is None else VllmToolCalls(form, self._text.tokenizer, settings.model)
        reset_peak()  # the start of an engine is in no stage

    def write_log_into(self, folder: Path | None, number: int) -> None:
        """Write the log into a folder. Folder and index of the engine were not known when the engine was created (see
        `log.write_logs_alone`)."""
        self._settings = replace(self._settings, logs=folder)
        write_logs_alone(self._settings, number)

    def vocab_size(self) -> int:
        return int(self._llm.model_config.get_vocab_size())

    def takes_weights(self) -> bool:
        """Whether weights can be loaded in place and read back. False for a mixture of experts whose kernel changes
        the weights (`experts`)."""
        (takes,) = self._llm.collective_rpc("ppoctl_takes_weights")
        return bool(takes)

    def restart(self, folder: str) -> list[LoadedWeight]:
        source, self._source = self._source, None
        if source != folder:
            self.close()
            self._is_asleep = False
            self._start_from(folder)
        self._has_weights = True
        from ppoctl.engines.vllm import loader

        return loader.last_read()

    def _start_from(self, folder: str) -> None:
        self._llm = vllm_start.started_from_folder(replace(self._settings, model=folder), witnessed=True)
        self._note_experts()

    def _note_experts(self) -> None:
        if self._notes_experts:
            self._llm.collective_rpc("ppoctl_choose_experts")

    @property
    def _notes_experts(self) -> bool:
        """Whether the worker notes the experts, because vLLM does not return them (see `routed_experts`)."""
        return self._settings.returns_experts and not on_gpu()

    def holds_weights(self) -> bool:
        return self._has_weights

    def sleep(self) -> None:
        """Free the device: discard weights and KV cache. The engine wakes when it receives weights. On a CPU, vLLM
        stops scheduling, and frees no memory."""
        if not self._is_asleep:
            self._llm.sleep(level=2)
            self._is_asleep, self._has_weights = True, False

    def begin_weights(self) -> None:
        if self._is_asleep:
            self._llm.wake_up()
            self._is_asleep = False
        if self._llm.has_unfinished_requests():
            raise WeightSyncError("the generator cannot load new weights while it is generating samples")
        self._has_weights = False
        self._llm.collective_rpc("start_weight_update")

    def load(self, tensors: NamedTensors) -> None:
        self._llm.collective_rpc("update_weights", args=({"tensors": tensors},))

    def tensor_rank(self) -> int:
        # Only the engine runs in this process, so the default group consists of vLLM's tensor ranks.
        return torch.distributed.get_rank()

    def end_weights(self) -> list[LoadedWeight]:
        self._llm.collective_rpc("finish_weight_update")
        (loaded,) = self._llm.collective_rpc("ppoctl_loaded_weights")
        self._syncs += 1
        self._has_weights = True
        if not self._llm.reset_prefix_cache():
            raise WeightSyncError("the generator could not drop the KV cache of the old weights: it is in use")
        return list(loaded)

    def advance(self, draws: Sequence[GenerationRequest], params: SamplingParams) -> list[GenerationOutput]:
        """Queue new requests, run all queued requests for some steps, and return the finished requests."""
        if self._settings.is_profiled:
            self.begin_profile()
        for request in draws:
            self._add(request, params)
        finished: list[GenerationOutput] = []
        enough = FLUSH_FRACTION * self._llm.get_num_unfinished_requests()
        with _garbage_kept():
            for steps in range(1, MOST_STEPS + 1):
                if not self._llm.has_unfinished_requests():
                    break
                finished += [self._parsed(output, params) for output in self.step()]
                if finished and steps >= FEWEST_STEPS and len(finished) >= enough:
                    break
        return finished

    def _parsed(self, output: GenerationOutput, params: SamplingParams) -> GenerationOutput:
        """Return the output with its tool calls, and with experts only if they are requested."""
        if not params.returns_experts:
            output = replace(output, experts=b"")
        if self._tool_calls is None:
            return output
        text = self._text.marked_text(output.tokens, params)
        return replace(output, parsed=parsed_calls(self._tool_calls, text))

    def _add(self, request: GenerationRequest, params: SamplingParams) -> None:
        from vllm import SamplingParams as VllmParams
        from vllm.sampling_params import RequestOutputKind

        params = params.limited(request.max_new_tokens, is_continued=request.is_continued)
        # Only stop strings require text inside the engine. vLLM's incremental detokenizer finds the stop strings.
        stops = list(params.stop_strings)
        self._llm.output_processor.tokenizer = self._text.tokenizer if stops else None
        sampling = VllmParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=-1 if params.top_k is None else params.top_k,
            min_p=params.min_p,
            max_tokens=params.new_tokens(len(request.prompt)),
            # Until then, vLLM also masks the end tokens that the model folder lists. They are our end tokens.
            min_tokens=params.min_new_tokens,
            seed=request.seed,
            stop=stops,
            stop_token_ids=[*self._settings.eos_token_ids, *params.stop_token_ids],
            # Otherwise the end tokens listed in the model folder would also end a response.
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(stops),
            skip_special_tokens=params.special_tokens == "drop",
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._queue(request.id, request.prompt, sampling)

    def score(self, tokens: tuple[int, ...], draws: int) -> CanaryScores:
        """Return the log-probs of a prompt, and of `draws` tokens that are generated greedily after the prompt. The
        prompt is scored in one pass. The tokens are generated with the paged KV cache, as samples are, and end tokens
        are ignored. No other request may be running."""
        from vllm import SamplingParams as VllmParams
        from vllm.sampling_params import RequestOutputKind

        sampling = VllmParams(
            temperature=0.0,
            max_tokens=draws,
            ignore_eos=True,
            prompt_logprobs=0,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._queue("score", tokens, sampling)
        try:
            while True:
                for finished in self.step():
                    return CanaryScores(finished.prompt_logprobs, finished.tokens, finished.logprobs)
        finally:
            self.abort()

    def _queue(self, id: str, prompt: Sequence[int], params: Any) -> None:
        # A sleeping vLLM would accept the request and never finish it.
        if self._is_asleep:
            raise WeightSyncError("the generator was called while it sleeps and has no weights")
        if not self._has_weights:
            raise WeightSyncError("the generator was called before it received weights")
        # The salt differs after each weight transfer, so that no request can match the KV cache of older weights,
        # even if the prefix cache is not reset.
        request = {"prompt_token_ids": list(prompt), "cache_salt": f"sync-{self._syncs}"}
        self._llm.add_request(id, request, params)
        self._open.add(id)

    def step(self) -> list[GenerationOutput]:
        """Run one forward pass over the running requests, and return the requests that finished."""
        try:
            outputs = self._llm.step()
        except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
            raise vllm_start.generation_error(self._settings, error) from error
        finished = [_finished(output) for output in outputs if output.finished]
        self._open.difference_update(output.id for output in finished)
        if not self._settings.returns_experts or not finished:
            return finished
        experts = self._experts_of([output for output in outputs if output.finished])
        return [replace(output, experts=experts[output.id]) for output in finished]

    def _experts_of(self, ended: Sequence[Any]) -> dict[str, bytes]:
        """Return the experts of finished requests: request id -> `Sample.experts`."""
        if not self._notes_experts:
            layers = self._expert_layers
            return {str(each.request_id): each.outputs[0].routed_experts[:, layers].tobytes() for each in ended}
        tokens = {
            str(each.request_id): len(each.prompt_token_ids) + len(each.outputs[0].token_ids) - 1 for each in ended
        }
        (experts,) = self._llm.collective_rpc("ppoctl_take_experts", args=(tokens,))
        return dict(experts)

    @cached_property
    def _expert_layers(self) -> list[int]:
        """Layers with experts. vLLM's table has rows of all layers."""
        experts = read_shape(model_folder(self._settings.model)).experts
        assert experts is not None, "a rule requires experts"
        return [number for number, has_experts in enumerate(experts.layers) if has_experts]

    def abort(self) -> int:
        """Drop all requests, finished or not. Return the number of tokens that they had."""
        scheduler = self._llm.engine_core.engine_core.scheduler
        tokens = sum(request.num_output_tokens for request in scheduler.requests.values())
        self._llm.abort_request(list(self._open))
        self._open.clear()
        # The scheduler drops running requests in one more pass. Otherwise it would still be busy at the next weight
        # load.
        while scheduler.has_requests():
            self._llm.step()
        if self._notes_experts:
            self._llm.collective_rpc("ppoctl_drop_experts")
        return int(tokens)

    def close(self) -> None:
        """Free the engine and all process groups of this process."""
        vllm_start.end(self._llm)
        del self._llm
        # vLLM collects garbage during its shutdown, when `self._llm` still refers to the engine.
        gc.collect()


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Context without garbage collection. vLLM creates objects for every sequence and step, and the collector would
    search them again and again. It runs between two calls of `advance`."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _finished(output: Any) -> GenerationOutput:
    (completion,) = output.outputs
    return GenerationOutput(
        id=str(output.request_id),
        tokens=tuple(completion.token_ids),
        logprobs=_of_tokens(completion.logprobs, completion.token_ids),
        reason=str(completion.finish_reason),
        # The first token of a prompt has no log-prob.
        prompt_logprobs=_of_tokens(output.prompt_logprobs, output.prompt_token_ids[1:]),
    )


def _of_tokens(flat: Any, tokens: Sequence[int]) -> tuple[float, ...]:
    """Return the log-probs of these tokens from vLLM's `FlatLogprobs`: lists of numbers, where other requests get a
    table with an object for every token. A request for no other tokens (`logprobs=0`) has one entry per token."""
    if flat is None:
        return ()
    if flat.token_ids != list(tokens):
        raise PpoctlError("vLLM returned log-probs of other tokens than it generated")
    return tuple(flat.logprobs)
