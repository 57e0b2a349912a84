"""vLLM engines inside the tests' process, next to trainers and other engines.

vLLM assumes that the process contains nothing else, as in a job. Its start reseeds torch, numpy and random, and
replaces `torch.set_num_threads` by a function that warns. Sampling uses torch's global generator even for seeded
requests, and a shutdown destroys every process group. In one process, many tests share the seconds of its imports.
"""

import gc
import importlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed

from ppoctl.engines.vllm import vllm_start
from ppoctl.engines.vllm.engine import Engine
from ppoctl.engines.vllm.vllm_settings import VllmSettings
from ppoctl.engines.weights.engine_calls import CompletedReply


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restore random states, grad mode, default dtype and thread count after the block."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    cpu_state = torch.random.get_rng_state()
    cuda_state = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state)
        torch.random.set_rng_state(cpu_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


class Tenancy:
    """The engines in this process, and the owner of torch's default process group.

    vLLM's own state is global to the process, so this object is too (`TENANCY`). An engine uses the trainer's default
    group if there is one; otherwise vLLM creates a group, and the last engine to close destroys it.
    """

    def __init__(self) -> None:
        self.engines: list[Any] = []
        """vLLM's objects of the engines that were started in this process and have not been closed."""
        self._made_default_group = False
        self.has_frozen = False
        """Whether the objects of vLLM's imports were taken out of garbage collections."""

    def enter(self) -> None:
        """Prepare for an engine that is about to start."""
        if not self.engines:
            self._made_default_group = not torch.distributed.is_initialized()

    @contextmanager
    def leaving(self, llm: Any) -> Iterator[None]:
        """Shut down one engine in the block, without destroying process groups that others use."""
        engine_core: Any = importlib.import_module("vllm.v1.engine.core")
        # Engines are compared by identity: a test's fake of an engine is not among them.
        self.engines[:] = [other for other in self.engines if other is not llm]
        tear_down = engine_core.cleanup_dist_env_and_memory
        destroy = torch.distributed.destroy_process_group

        def destroy_own(group: Any = None) -> None:
            if group is not None and group is not torch.distributed.group.WORLD:
                destroy(group)

        if self.engines:
            # The other engines still use vLLM's groups.
            engine_core.cleanup_dist_env_and_memory = lambda: None
        elif not self._made_default_group:
            torch.distributed.destroy_process_group = destroy_own
        try:
            yield
        finally:
            engine_core.cleanup_dist_env_and_memory = tear_down
            torch.distributed.destroy_process_group = destroy


TENANCY = Tenancy()


def engines_are_guests() -> None:
    """Patch vLLM for all engines that this process creates from now on."""
    if vllm_start.started is not _started_as_a_guest:
        vllm_start.started = _started_as_a_guest
        vllm_start.end = _ended_as_a_guest


_started, _end = vllm_start.started, vllm_start.end


def _started_as_a_guest(settings: VllmSettings, **options: Any) -> Any:
    TENANCY.enter()
    with undisturbed():
        llm = _started(settings, **options)
    TENANCY.engines.append(llm)
    if not TENANCY.has_frozen:
        # vLLM collects garbage at each start and end. With all imports, that takes seconds.
        TENANCY.has_frozen = True
        gc.collect()
        gc.freeze()
    return llm


def _ended_as_a_guest(llm: Any) -> None:
    with undisturbed(), TENANCY.leaving(llm), _frozen():
        _end(llm)


@contextmanager
def _frozen() -> Iterator[None]:
    """Keep the imports out of garbage collection: vLLM's end includes all objects again, and each of its three
    collections then takes a second."""
    unfreeze, gc.unfreeze = gc.unfreeze, lambda: None
    try:
        yield
    finally:
        gc.unfreeze = unfreeze


class Here:
    """Handle of an engine in this process (`weights.engine_calls.EngineHandle`): a call ends before `begin`
    returns."""

    def __init__(self, settings: VllmSettings) -> None:
        self.settings = settings
        self.engine: Engine | None = None
        self._replaced: dict[str, Callable[..., Any]] = {}

    def begin(self, method: str, *arguments: Any) -> CompletedReply:
        with undisturbed():
            if self.engine is None:
                self.engine = Engine(self.settings)
            replaced = self._replaced.get(method)
            called = getattr(self.engine, method) if replaced is None else partial(replaced, self.engine)
            return CompletedReply([called(*arguments)])

    @contextmanager
    def replacing(self, method: str, replacement: Callable[..., Any]) -> Iterator[None]:
        """Context in which calls of a method reach this function instead, with the engine as its first argument."""
        self._replaced[method] = replacement
        try:
            yield
        finally:
            del self._replaced[method]

    def close(self) -> None:
        if self.engine is not None:
            engine, self.engine = self.engine, None
            engine.close()
