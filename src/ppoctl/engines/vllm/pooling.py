"""A reward model in vLLM: a pooling engine, and the classes with which scorers call the engine's process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from ppoctl.core.machine.device import on_gpu
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.engines.child.process import ChildFactory, ChildProcess
from ppoctl.engines.vllm import vllm_start
from ppoctl.engines.vllm.log import write_log
from ppoctl.engines.vllm.vllm_settings import VllmSettings


@dataclass(frozen=True)
class PoolingSettings:
    """Settings with which the engine of a reward model starts."""

    role: str
    """Recipe key of the model's table."""
    engine: VllmSettings
    step_tokens: int
    """Maximum number of tokens in one engine step. No text may be longer."""
    step_texts: int
    """Maximum number of texts in one engine step."""
    cache_bytes: int
    """Size of the KV cache, which holds the texts of one engine step."""
    label: int | None = None
    """Index of the label whose probability is the score. None: the head has one output, which is the score."""

    @property
    def parallel(self) -> ParallelTable:
        """Parallelism of the model: one process holds the complete model."""
        return ParallelTable()


class PoolingEngine:
    """A reward model in this process. `start` starts vLLM."""

    def __init__(self, settings: PoolingSettings) -> None:
        self._settings = settings
        self._llm: Any = None
        self._is_asleep = False

    def start(self) -> None:
        """Start vLLM. That takes about 2 s for a small model. Raises EnvironmentProblemError or OutOfMemoryError."""
        engine = self._settings.engine
        self._llm = vllm_start.started_from_folder(
            replace(engine, table=engine.table.model_copy(update={"tensor": 1, "engines_per_gpu": 1})),
            witnessed=False,
            runner="pooling",
            max_num_seqs=self._settings.step_texts,
            cudagraph_capture_sizes=None,
            max_num_batched_tokens=self._settings.step_tokens,
            kv_cache_memory_bytes=self._settings.cache_bytes,
            enable_prefix_caching=False,
            enable_chunked_prefill=False,
            # The weights never change, so nothing of the weight transfer is set up.
            worker_extension_cls="",
            weight_transfer_config=None,
            logprobs_mode="raw_logprobs",
        )

    def scores(self, texts: Sequence[tuple[int, ...]]) -> list[float]:
        """Return the head's output at the last token of each text, or the probability of the label."""
        from vllm import PoolingParams

        if self._is_asleep:
            self._llm.wake_up()
            self._is_asleep = False
        outputs: dict[int, torch.Tensor] = {}
        try:
            for number, text in enumerate(texts):
                params = PoolingParams(task="classify", use_activation=False)
                self._llm.add_request(str(number), {"prompt_token_ids": list(text)}, params)
            while self._llm.has_unfinished_requests():
                outputs.update((int(row.request_id), row.outputs.data) for row in self._llm.step() if row.finished)
        except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
            raise vllm_start.generation_error(self._settings.engine, error) from error
        heads = torch.stack([outputs[number].flatten().float() for number in range(len(texts))])
        label = self._settings.label
        return [float(score) for score in (heads[:, 0] if label is None else heads.softmax(1)[:, label])]

    def leave(self) -> None:
        """Offload the weights to the host, so that other roles can use the device memory. Does nothing on a CPU."""
        if self._llm is not None and on_gpu() and self._settings.engine.sleeps and not self._is_asleep:
            self._llm.sleep(level=1)
            self._is_asleep = True

    def close(self) -> None:
        """Free the engine. May be called twice, and before `start`."""
        llm, self._llm = self._llm, None
        if llm is not None:
            vllm_start.end(llm)


class OwnPooling:
    """Implementation of `engines.megatron.ranks.Ranks` by one engine in a separate process on this machine."""

    def __init__(self, settings: PoolingSettings, threads: int) -> None:
        target = ChildFactory("ppoctl.engines.vllm.pooling:open_pooling", (settings,), threads)
        self._child = ChildProcess(f"vLLM for `{settings.role}`", target)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the engine, and return its result in a list."""
        return [self._child.call(method, *arguments)]

    def weights(self) -> NoReturn:
        """Raise TypeError: a reward model never changes, so it sends no weights."""
        raise TypeError("a reward model sends no weights")

    def close(self) -> None:
        """End the engine. May be called twice."""
        self._child.close()


def open_pooling(settings: PoolingSettings) -> PoolingEngine:
    """Create the engine of a reward model in this process."""
    write_log(settings.engine, settings.role)
    return PoolingEngine(settings)


@dataclass(frozen=True)
class OpenPooling:
    """Factory of the engine of a reward model, in the calling process."""

    settings: PoolingSettings

    def __call__(self, rank: int, world_size: int, address: str) -> PoolingEngine:  # noqa: ARG002 - a single rank
        return open_pooling(self.settings)


class VllmRewardModel:
    """The part of a `batch.scores.RewardModel` that computes scores of token ids."""

    def __init__(self, call: Callable[..., list[Any]]) -> None:
        """`call` runs a method of the `PoolingEngine` in its process, and returns a list with one result."""
        self._call = call

    def start(self) -> None:
        """Load the weights."""
        self._call("start")

    def scores(self, texts: Sequence[tuple[int, ...]]) -> list[float]:
        """Return the head's output at the last token of each text."""
        (scores,) = self._call("scores", list(texts))
        return list(scores)
