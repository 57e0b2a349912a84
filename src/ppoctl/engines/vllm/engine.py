"""A class with the few methods of vLLM's LLMEngine that the generator requires. Only this file uses the API of
LLMEngine."""

import gc
import json
import logging
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ppoctl.core.errors import EnvironmentProblemError, OutOfMemoryError, PpoctlError, WeightSyncError
from ppoctl.core.machine.device import on_gpu
from ppoctl.core.machine.torch_profile import ProfiledProcess
from ppoctl.core.ports import SamplingParams
from ppoctl.data.response_text import ResponseText
from ppoctl.engines.vllm.arguments import engine_arguments
from ppoctl.engines.vllm.log import log_location, write_logs_alone
from ppoctl.engines.vllm.tool_calls import NO_CALLS, ParsedCalls, VllmToolCalls, parsed_calls
from ppoctl.engines.vllm.vllm_environment import prepare_environment, store_in_memory
from ppoctl.engines.vllm.vllm_settings import VllmSettings
from ppoctl.engines.weights.bucket import NamedTensors
from ppoctl.engines.weights.canary import CanaryScores
from ppoctl.engines.weights.receiving import ReceivingEngine
from ppoctl.models.convert.checksum import LoadedWeight
from ppoctl.recipe.generator_limits import too_long_a_window, unread_router_bias

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


class Engine(ReceivingEngine, ProfiledProcess):
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
        self._llm = started(settings, load_format="dummy") if self._source is None else self._start_from(self._source)
        form = settings.call_format
        self._tool_calls = None if form is None else VllmToolCalls(form, self._text.tokenizer, settings.model)

    def write_log_into(self, folder: Path | None) -> None:
        """Write the log into a folder. The folder was not known when the engine was created (see
        `log.write_logs_alone`)."""
        self._settings = replace(self._settings, logs=folder)
        write_logs_alone(self._settings)

    def vocab_size(self) -> int:
        return int(self._llm.model_config.get_vocab_size())

    def takes_weights(self) -> bool:
        """Whether weights can be loaded in place. False for mixtures of experts. On a CPU, vLLM repacks experts at
        startup: weights that are loaded later do not reach the copies with which vLLM computes, and vLLM raises no
        error. On a GPU, vLLM fuses all experts into one tensor. This tensor cannot be read back expert by expert
        (`weights`), so the load could not be verified."""
        return not self._llm.model_config.is_moe

    def restart(self, folder: str) -> list[LoadedWeight]:
        source, self._source = self._source, None
        if source != folder:
            self.close()
            self._is_asleep = False
            self._llm = self._start_from(folder)
        self._has_weights = True
        from ppoctl.engines.vllm import loader

        return loader.last_read()

    def _start_from(self, folder: str) -> Any:
        return started_from_folder(replace(self._settings, model=folder), witnessed=True)

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
        for steps in range(1, MOST_STEPS + 1):
            if not self._llm.has_unfinished_requests():
                break
            finished += [self._parsed(output, params) for output in self.step()]
            if finished and steps >= FEWEST_STEPS and len(finished) >= enough:
                break
        return finished

    def _parsed(self, output: GenerationOutput, params: SamplingParams) -> GenerationOutput:
        """Return the output with its tool calls."""
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
            raise generation_error(self._settings, error) from error
        finished = [_finished(output) for output in outputs if output.finished]
        self._open.difference_update(output.id for output in finished)
        return finished

    def abort(self) -> None:
        """Drop all requests, finished or not."""
        self._llm.abort_request(list(self._open))
        self._open.clear()
        # The scheduler drops running requests in one more pass. Otherwise it would still be busy at the next weight
        # load.
        while self._llm.engine_core.engine_core.scheduler.has_requests():
            self._llm.step()

    def close(self) -> None:
        """Free the engine and all process groups of this process."""
        end(self._llm)
        del self._llm
        # vLLM collects garbage during its shutdown, when `self._llm` still refers to the engine.
        gc.collect()


def end(llm: Any) -> None:
    """Shut down vLLM's engine and all process groups of this process."""
    llm.engine_core.engine_core.shutdown()


def started(settings: VllmSettings, **options: Any) -> Any:
    """Return vLLM's LLMEngine; `options` override our engine arguments. Raises RecipeError, EnvironmentProblemError
    or OutOfMemoryError."""
    prepare_environment(settings)
    with _threads_kept(), _third_party_quiet():
        import vllm.v1.engine.llm_engine  # noqa: F401 - loads most of vLLM

        gc.freeze()  # vLLM collects garbage five times during startup, mostly among imported modules
        with store_in_memory():
            llm = _start(settings, **options)
    # Otherwise vLLM shuts down, and destroys all process groups, when this object is garbage-collected.
    llm.engine_core._finalizer.detach()
    return llm


def started_from_folder(settings: VllmSettings, *, witnessed: bool, **options: Any) -> Any:
    """Return what `started` returns; vLLM loads the files of `settings.model` that a trainer would read. `witnessed`:
    with a checksum of each tensor (`loader.last_read`)."""
    prepare_environment(settings)  # before the loader is imported: it imports vLLM, which reads the variables
    with _third_party_quiet():
        from ppoctl.engines.vllm import loader
    loader.register()
    return started(settings, load_format=loader.WITNESSED if witnessed else loader.FOLDER, **options)


@contextmanager
def _threads_kept() -> Iterator[None]:
    """Context that restores the number of threads and the function `torch.set_num_threads`. vLLM replaces this
    function by a function that only warns."""
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = set_threads
        set_threads(threads)


def _start(settings: VllmSettings, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    try:
        args = EngineArgs(**{**engine_arguments(settings), **options})
        return LLMEngine.from_engine_args(args, usage_context=UsageContext.LLM_CLASS)
    except Exception as error:
        raise _start_error(settings, error) from error


def _start_error(settings: VllmSettings, error: Exception) -> PpoctlError:
    """Return the ppoctl error for vLLM's startup error. vLLM raises ValueError for many reasons, which only the
    message distinguishes."""
    table, text = settings.table, str(error)
    if "KV cache" in text or "for the cache blocks" in text or isinstance(error, torch.OutOfMemoryError):
        key = "gpu_memory_frac" if on_gpu() else "kv_cache_mib"
        return OutOfMemoryError(
            f"vLLM does not have enough memory for one sequence of {settings.max_model_len} tokens: {text}",
            hint=f"raise `generator.{key}` (now {getattr(table, key)}) or lower `rollout.max_new_tokens`",
        )
    if "Free memory on device" in text:
        return OutOfMemoryError(
            f"the GPU has less free memory than vLLM's fraction of it: {text}",
            hint=f"lower `generator.gpu_memory_frac` (now {table.gpu_memory_frac}), or offload the trainers: "
            f"--set 'cluster.offload={json.dumps(settings.trained)}'",
        )
    if "Error in memory profiling" in text:
        return EnvironmentProblemError(
            f"another process took or freed memory of the GPU while vLLM measured it: {_one_line(error)}",
            hint="nvidia-smi  # start runs on one GPU one after the other",
        )
    if "max_model_len" in text:
        return too_long_a_window(settings.model, settings.max_model_len)
    if "e_score_correction_bias" in text:
        return unread_router_bias(settings.model)
    return EnvironmentProblemError(
        f"vLLM could not start with `{settings.key}` `{settings.model}`: {_one_line(error)}",
        hint=log_location(settings),
    )


def generation_error(settings: VllmSettings, error: Exception) -> Exception:
    """Return the ppoctl error for vLLM's error in a forward pass. Out-of-memory errors are returned unchanged."""
    if isinstance(error, torch.OutOfMemoryError):
        return error
    return EnvironmentProblemError(
        f"vLLM failed while it computed with `{settings.key}` `{settings.model}`: {_one_line(error)}",
        hint=log_location(settings),
    )


def _one_line(error: Exception) -> str:
    """Return a library's error in one line. For an error without a message, return the file and line that raised
    it."""
    text = next(iter(str(error).splitlines()), "")
    if not text:
        last = traceback.extract_tb(error.__traceback__)[-1:]
        text = "".join(f"no message, from {frame.filename}:{frame.lineno}" for frame in last) or "no message"
    return f"{type(error).__name__}: {text}"


def _finished(output: Any) -> GenerationOutput:
    (completion,) = output.outputs
    tokens = tuple(int(token) for token in completion.token_ids)
    rows = completion.logprobs or ()
    prompt_rows = list(zip(output.prompt_logprobs or (), output.prompt_token_ids, strict=False))[1:]
    return GenerationOutput(
        id=str(output.request_id),
        tokens=tokens,
        logprobs=tuple(float(row[token].logprob) for row, token in zip(rows, tokens, strict=True)),
        reason=str(completion.finish_reason),
        prompt_logprobs=tuple(float(row[token].logprob) for row, token in prompt_rows),
    )


@contextmanager
def _third_party_quiet() -> Iterator[None]:
    """Context that silences warnings of vLLM and torch about each other while vLLM is imported and started."""
    triton = logging.getLogger("torch._library.triton")
    level = triton.level
    # The warning is "Triton not available": CPU installations do not include Triton.
    triton.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.script_method` is deprecated")
        warnings.filterwarnings("ignore", message=r"`torch\.distributed\.reduce_op` is deprecated")
        try:
            yield
        finally:
            triton.setLevel(level)
