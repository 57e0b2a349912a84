"""vLLM's LLMEngine behind the few verbs the generator needs; the only file that touches its API."""

import gc
import logging
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ppoctl.engines.vllm.arguments import engine_arguments
from ppoctl.engines.vllm.detokenizer import Detokenizer
from ppoctl.engines.vllm.environment import prepare_environment, store_in_memory
from ppoctl.engines.vllm.log import where_it_says_more, write_logs_alone
from ppoctl.engines.vllm.settings import VllmSettings
from ppoctl.errors import EnvironmentProblemError, OutOfMemoryError, PpoctlError, WeightSyncError
from ppoctl.machine.device import on_gpu
from ppoctl.ports import SamplingParams
from ppoctl.recipe.generator_limits import too_long_a_window, unread_router_bias
from ppoctl.weights.bucket import NamedTensors
from ppoctl.weights.canary import CanaryScores
from ppoctl.weights.checksum import LoadedWeight
from ppoctl.weights.receiving import ReceivingEngine

FEWEST_STEPS, MOST_STEPS = 16, 64
"""Engine steps of one `advance`. In between, an engine answers when `ENOUGH` has ended. Steps and not seconds, so
that the tensor ranks of an engine do the same."""
FLUSH_FRACTION = 1 / 8
"""Share of its draws that an engine tells the driver of at once. While long responses are drawn hardly any end, and a
driver of hundreds of engines has no time to ask each of them every few tokens."""


@dataclass(frozen=True)
class GenerationRequest:
    """One response to draw. The prompt's ids must be in the vocabulary: nobody checks them here."""

    id: str
    prompt: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class GenerationOutput:
    """A draw that ended."""

    id: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: str
    """vLLM's: "stop", "length", or something that must not happen ("abort", "error", "repetition")."""
    prompt_logprobs: tuple[float, ...]
    """Log-probs of prompt tokens 1..; empty unless asked for."""


class Engine(ReceivingEngine):
    """A running engine in this process, or one tensor rank of it; tensor ranks must be called alike. vLLM behaves as
    if the process were its own, so it should be: it reseeds all random numbers, and ends all process groups."""

    def __init__(self, settings: VllmSettings, *, folder: str | None = None) -> None:
        """Starts vLLM: about 2 s for a small model. It begins on the weights of `folder` where there is one, and says
        so when it is to restart on it. Otherwise it begins with random weights, which the first transfer replaces.
        Raises RecipeError, EnvironmentProblemError or OutOfMemoryError."""
        self._settings = settings
        self._detokenizer = Detokenizer(settings.model, settings.eos_token_ids)
        self._syncs = 0
        self._open: set[str] = set()
        self._is_asleep = False
        self._began_on = folder if folder is not None and Path(folder).is_dir() else None
        self._has_weights = self._began_on is not None
        self._llm = started(settings, load_format="dummy") if self._began_on is None else self._on(self._began_on)

    def write_log_into(self, folder: Path | None) -> None:
        """See `log.write_logs_alone`, whose folder was not known when the engine was made."""
        self._settings = replace(self._settings, logs=folder)
        write_logs_alone(self._settings)

    def vocab_size(self) -> int:
        return int(self._llm.model_config.get_vocab_size())

    def takes_weights(self) -> bool:
        """False for mixtures of experts. On a CPU vLLM repacks experts when it starts; what is loaded
        afterwards does not reach the copies it computes with, silently. Whether it does on a GPU, which fuses them
        into one tensor of all experts, cannot be read back tensor by tensor (`weights`)."""
        return not self._llm.model_config.is_moe

    def restart(self, folder: str) -> list[LoadedWeight]:
        began_on, self._began_on = self._began_on, None
        if began_on != folder:
            self.close()
            self._is_asleep = False
            self._llm = self._on(folder)
        self._has_weights = True
        from ppoctl.engines.vllm import loader

        return loader.last_read()

    def _on(self, folder: str) -> Any:
        there = replace(self._settings, model=folder)
        prepare_environment(there)  # before the loader, which imports vLLM
        with _third_party_quiet():
            from ppoctl.engines.vllm import loader
        loader.register()
        return started(there, load_format=loader.FORMAT)

    def sleep(self) -> None:
        """Free the device: weights, keys and values are forgotten. It wakes when it gets weights. On a CPU vLLM stops
        scheduling, and frees nothing."""
        if not self._is_asleep:
            self._llm.sleep(level=2)
            self._is_asleep = True

    def begin_weights(self) -> None:
        if self._is_asleep:
            self._llm.wake_up()
            self._is_asleep = False
        if self._llm.has_unfinished_requests():
            raise WeightSyncError("the generator was asked for new weights while it is drawing samples")
        self._llm.collective_rpc("start_weight_update")

    def load(self, tensors: NamedTensors) -> None:
        self._llm.collective_rpc("update_weights", args=({"tensors": tensors},))

    def tensor_rank(self) -> int:
        # The default group of a process that is alone with its engine is vLLM's: the tensor ranks.
        return torch.distributed.get_rank()

    def end_weights(self) -> list[LoadedWeight]:
        self._llm.collective_rpc("finish_weight_update")
        (loaded,) = self._llm.collective_rpc("ppoctl_loaded_weights")
        self._syncs += 1
        self._has_weights = True
        if not self._llm.reset_prefix_cache():
            raise WeightSyncError("the generator kept keys and values of the old weights: its cache is in use")
        return list(loaded)

    def advance(self, draws: Sequence[GenerationRequest], params: SamplingParams) -> list[GenerationOutput]:
        """Queue these, go on with all that are queued for some steps, and say which ended."""
        for draw in draws:
            self._add(draw, params)
        finished: list[GenerationOutput] = []
        enough = FLUSH_FRACTION * self._llm.get_num_unfinished_requests()
        for steps in range(1, MOST_STEPS + 1):
            if not self._llm.has_unfinished_requests():
                break
            finished += self.step()
            if finished and steps >= FEWEST_STEPS and len(finished) >= enough:
                break
        return finished

    def _add(self, draw: GenerationRequest, params: SamplingParams) -> None:
        from vllm import SamplingParams as VllmParams
        from vllm.sampling_params import RequestOutputKind

        # Only stop strings need text inside the engine; they are found by vLLM's incremental detokeniser.
        stops = list(params.stop_strings)
        self._llm.output_processor.tokenizer = self._detokenizer.tokenizer if stops else None
        drawn = VllmParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=-1 if params.top_k is None else params.top_k,
            min_p=params.min_p,
            max_tokens=params.new_tokens(len(draw.prompt)),
            # vLLM leaves out the ends that the model folder names too, which is where ours are from.
            min_tokens=params.min_new_tokens,
            seed=draw.seed,
            stop=stops,
            stop_token_ids=[*self._settings.eos_token_ids, *params.stop_token_ids],
            # Otherwise the ids in the model folder end a response too.
            ignore_eos=True,
            logprobs=0,
            detokenize=bool(stops),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._queue(draw.id, draw.prompt, drawn)

    def score(self, tokens: tuple[int, ...], draws: int) -> CanaryScores:
        """Log-probs of a prompt in one pass, and of `draws` tokens that are drawn after it, greedily, as samples are:
        over the paged cache, whatever ends a response. Nothing else may be running."""
        from vllm import SamplingParams as VllmParams
        from vllm.sampling_params import RequestOutputKind

        scored = VllmParams(
            temperature=0.0,
            max_tokens=draws,
            ignore_eos=True,
            prompt_logprobs=0,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._queue("score", tokens, scored)
        try:
            while True:
                for finished in self.step():
                    return CanaryScores(finished.prompt_logprobs, finished.tokens, finished.logprobs)
        finally:
            self.abort()

    def _queue(self, id: str, prompt: Sequence[int], params: Any) -> None:
        if not self._has_weights:
            raise WeightSyncError("the generator was asked for tokens before it was sent weights")
        if self._is_asleep:
            raise WeightSyncError("the generator has forgotten its weights in sleep, and was asked to use them")
        # The salt keeps cached keys and values of one set of weights from ever matching a request of another, even
        # if resetting the prefix cache should fail.
        request = {"prompt_token_ids": list(prompt), "cache_salt": f"sync-{self._syncs}"}
        self._llm.add_request(id, request, params)
        self._open.add(id)

    def step(self) -> list[GenerationOutput]:
        """One forward pass over the running requests; those that ended with it."""
        try:
            outputs = self._llm.step()
        except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
            raise generation_error(self._settings, error) from error
        finished = [_finished(output) for output in outputs if output.finished]
        self._open.difference_update(one.id for one in finished)
        return finished

    def abort(self) -> None:
        """Forget all requests, finished or not."""
        self._llm.abort_request(list(self._open))
        self._open.clear()
        # One more pass lets the scheduler drop what it had in flight, so that the next load finds it idle.
        while self._llm.engine_core.engine_core.scheduler.has_requests():
            self._llm.step()

    def close(self) -> None:
        """Free the engine, and all process groups of this process."""
        gc.freeze()  # vLLM collects, unfreezes and collects again: once is enough for it
        end(self._llm)
        del self._llm
        gc.collect()


def end(llm: Any) -> None:
    """Shut vLLM's engine down, and all process groups of this process."""
    llm.engine_core.engine_core.shutdown()


def started(settings: VllmSettings, **options: Any) -> Any:
    """vLLM's LLMEngine; `options` are arguments of its own, in place of ours. Raises RecipeError,
    EnvironmentProblemError or OutOfMemoryError."""
    prepare_environment(settings)
    with _threads_kept(), _third_party_quiet():
        import vllm.v1.engine.llm_engine  # noqa: F401 - loads most of vLLM

        gc.freeze()  # vLLM collects five times while it starts, and what is imported is most of the heap
        with store_in_memory():
            llm = _start(settings, **options)
    # vLLM would otherwise shut down, process groups included, whenever this object happens to be collected.
    llm.engine_core._finalizer.detach()
    return llm


@contextmanager
def _threads_kept() -> Iterator[None]:
    """Context that leaves the number of threads as it was, and settable: vLLM puts a function that warns in place of
    `torch.set_num_threads`."""
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
    """vLLM's reasons come as ValueErrors of many origins; the text tells them apart."""
    table, text = settings.table, str(error)
    if "KV cache" in text or isinstance(error, torch.OutOfMemoryError):
        key = "gpu_memory_frac" if on_gpu() else "kv_cache_mib"
        return OutOfMemoryError(
            f"vLLM has no room for one sequence of {settings.max_model_len} tokens: {text}",
            hint=f"raise `generator.{key}` (now {getattr(table, key)}) or lower `rollout.max_new_tokens`",
        )
    if "Free memory on device" in text:
        return OutOfMemoryError(
            f"vLLM has less of the GPU's memory than its share: {text}",
            hint=f"lower `generator.gpu_memory_frac` (now {table.gpu_memory_frac}), or have the trainers leave: "
            """--set 'cluster.offload=["actor", "critic"]'""",
        )
    if "max_model_len" in text:
        return too_long_a_window(settings.model, settings.max_model_len)
    if "e_score_correction_bias" in text:
        return unread_router_bias(settings.model)
    return EnvironmentProblemError(
        f"vLLM could not start on `{settings.key}` `{settings.model}`: {_in_words(error)}",
        hint=where_it_says_more(settings),
    )


def generation_error(settings: VllmSettings, error: Exception) -> Exception:
    """What vLLM's own error in a forward pass is to a person; one of memory stays what it is."""
    if isinstance(error, torch.OutOfMemoryError):
        return error
    return EnvironmentProblemError(
        f"vLLM failed while it computed with `{settings.key}` `{settings.model}`: {_in_words(error)}",
        hint=where_it_says_more(settings),
    )


def _in_words(error: Exception) -> str:
    """An error of others on one line; one without a text says where it is from."""
    text = next(iter(str(error).splitlines()), "")
    if not text:
        last = traceback.extract_tb(error.__traceback__)[-1:]
        text = "".join(f"no words, from {frame.filename}:{frame.lineno}" for frame in last) or "no words"
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
    """Silence what vLLM and torch say about each other while vLLM is imported and started."""
    triton = logging.getLogger("torch._library.triton")
    level = triton.level
    # "Triton not available": on a CPU it is left out on purpose.
    triton.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.script_method` is deprecated")
        warnings.filterwarnings("ignore", message=r"`torch\.distributed\.reduce_op` is deprecated")
        try:
            yield
        finally:
            triton.setLevel(level)
