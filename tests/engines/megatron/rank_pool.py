"""Long-lived processes that become the ranks of one layout after another, because importing torch and Megatron takes
longer than most of the tests. A `Ranks` like any other, over pipes.

    pool.open(settings)  ->  MegatronTrainer(settings, pool)  ->  pool.open(other settings)
"""

import faulthandler
import gc
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from receivers import Awaited
from torch import Tensor

from ppoctl.core.recipe_table import ParallelTable
from ppoctl.engines.megatron import process_group
from ppoctl.engines.megatron.parameter_shards import parts_in
from ppoctl.engines.megatron.process_group import GroupTimeouts, RankInfo
from ppoctl.engines.megatron.rank import MegatronRank
from ppoctl.engines.megatron.rank_settings import TrainerSettings
from ppoctl.engines.megatron.ranks import ManyProcesses
from ppoctl.engines.weights.bucket import tensors_of
from ppoctl.engines.weights.loopback import environment
from ppoctl.engines.weights.sending import RankSource

TIMEOUT_S = 120.0
BUCKET_BYTES = 20_000
"""A bucket has about one expert of the tiny models."""


class RankServer:
    """One process, with the rank that it was last told to become."""

    def __init__(self) -> None:
        self.rank: MegatronRank | None = None

    def join(self, place: RankInfo) -> None:
        process_group.join(place, GroupTimeouts(TIMEOUT_S, TIMEOUT_S))

    def open(self, settings: TrainerSettings) -> None:
        """Become a rank of the groups that this process has joined."""
        self._forget()
        self.rank = MegatronRank(settings)

    def leave(self) -> None:
        self._forget()
        if torch.distributed.is_initialized():
            process_group.leave()
        gc.collect()  # models refer to their groups in cycles, and each group holds dozens of gloo threads

    def _forget(self) -> None:
        if self.rank is not None:
            for module in (module for stage in self.rank._stages for module in stage.modules()):
                if isinstance(module, MoELayer):
                    # The dispatcher keeps the last tokens with their graph, whose hooks hold the model: a cycle
                    # through torch's own nodes, which is never collected.
                    del module.token_dispatcher
            self.rank = None

    def call(self, method: str, *arguments: Any) -> Any:
        assert self.rank is not None
        return getattr(self.rank, method)(*arguments)

    def examine(self, look: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a function of the rank."""
        assert self.rank is not None
        return look(self.rank, *arguments)

    def gradients(self) -> list[tuple[str, Tensor]]:
        """Return the contents of the gradient buffers after the last update, under Hugging Face names. A frozen
        parameter has no buffer; its gradient is shown as zeros."""
        assert self.rank is not None
        found = []
        for model in self.rank.models:
            buffers = {
                name: parameter.main_grad if parameter.requires_grad else torch.zeros_like(parameter)
                for name, parameter in model.named_parameters()
            }
            found += [(part.name, part.read(model.pg_collection).clone()) for part in parts_in(buffers, model)]
        return found if self._is_first() else []

    def forget_gradient(self, rank: int, only: str) -> None:
        """Plant a defect: gradients of this rank's parameters with `only` in their names are dropped before they are
        reduced."""
        assert self.rank is not None
        if torch.distributed.get_rank() != rank:
            return
        for stage in self.rank.stages:
            reduce = stage.finish_grad_sync

            def dropping(*arguments: Any, _stage: Any = stage, _reduce: Any = reduce, **settings: Any) -> None:
                for name, parameter in _stage.named_parameters():
                    if only in name and parameter.requires_grad:
                        parameter.main_grad.zero_()
                _reduce(*arguments, **settings)

            stage.finish_grad_sync = dropping

    def _is_first(self) -> bool:
        assert self.rank is not None
        return self.rank.groups.tp.rank() == 0 and self.rank.groups.dp.rank() == 0


class Team:
    """Processes that become the ranks of one layout after another."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        self._processes = []
        self._pipes: list[Connection] = []
        self._joined: tuple[object, ...] = ()
        """Sizes that determine the groups of the present ranks; empty: they have none, or a rank has failed."""
        self.ranks: list[Connection] = []
        """The pipes of the processes in use."""
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()  # so that a death is the end of the pipe
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def join(self, layout: ParallelTable) -> None:
        """Join the groups of a layout; if they are those of the last layout, they stay."""
        sizes = layout.tensor, layout.pipeline, layout.context, layout.data, layout.expert, layout.expert_tensor
        wanted = (*sizes, layout.virtual_pipeline, layout.distributed_optimizer)
        if wanted == self._joined:
            return
        self.ranks = self._pipes
        self.call_all([("leave",)] * len(self._pipes))
        self.ranks = self._pipes[: layout.world_size]
        address = f"127.0.0.1:{_free_port()}"
        self.call_all([("join", RankInfo(rank, len(self.ranks), address)) for rank in range(len(self.ranks))])
        self._joined = wanted

    def lose(self) -> None:
        """Note that a rank has failed: the next layout gets new groups."""
        self._joined = ()

    def call_all(self, calls_by_rank: Sequence[tuple[Any, ...]]) -> list[Any]:
        for pipe, question in zip(self.ranks, calls_by_rank, strict=True):
            pipe.send(question)
        answers = [pipe.recv() for pipe in self.ranks]
        for went_well, answer in answers:
            if not went_well:
                self.lose()
                raise answer
        return [answer for _, answer in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            process.kill()


class RankPool:
    """Teams for the layouts of a test session. A layout of one rank has a process of its own: most tests compare it
    with another layout, whose groups then remain."""

    def __init__(self, size: int) -> None:
        _import_once()
        self._size = size
        self._teams: dict[bool, Team] = {}
        """Whether it has one process alone -> team."""
        self.parallel = ParallelTable()
        self.places: Sequence[str] = ()
        """Nodes that the ranks report; empty: all on one node."""
        self.engine_nodes: Collection[str] = ("here",)

    def open(self, settings: TrainerSettings) -> None:
        """Create the ranks of this layout."""
        self.parallel, is_single = settings.parallel, settings.parallel.world_size == 1
        if is_single in self._teams and not self._teams[is_single].is_alive:
            self._teams.pop(is_single).close()
        if is_single not in self._teams:
            self._teams[is_single] = Team(1 if is_single else self._size)
        self._team = self._teams[is_single]
        self._team.join(settings.parallel)
        self._call_all("open", replace(settings))

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return self._call_all("call", method, *arguments)

    def examine(self, look: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return the result of a function in each process; the function must be importable there."""
        return self._call_all("examine", look, *arguments)

    def call_ranks(self, ranks: Sequence[int], method: str, *arguments: Any) -> list[Any]:
        """Implement `Executor`."""
        return self.begin(method, *arguments, ranks=ranks).answers()

    def begin(self, method: str, *arguments: Any, ranks: Sequence[int]) -> Awaited:
        """Implement `Executor`."""
        pipes = [self._team.ranks[rank] for rank in ranks]
        for pipe in pipes:
            pipe.send(("call", method, *arguments))
        return Awaited(pipes, [f"rank {rank}" for rank in ranks], self._team.lose)

    def nodes(self) -> Sequence[str]:
        """Implement `Executor`."""
        return self.places or ["here"] * len(self._team.ranks)

    def weights(self) -> RankSource:
        return ManyProcesses(self, self.parallel, BUCKET_BYTES, lambda: self.engine_nodes).weights()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Return copies of all weights."""
        return tensors_of(self.weights().buckets())

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of all stages; of a tied embedding the first copy."""
        return dict(reversed([pair for stage in self._call_all("gradients") for pair in stage]))

    def forget_gradient(self, rank: int, only: str = "") -> None:
        self._call_all("forget_gradient", rank, only)

    def close(self) -> None:
        for team in self._teams.values():
            team.close()

    def _call_all(self, method: str, *arguments: Any) -> list[Any]:
        return self._team.call_all([(method, *arguments)] * len(self._team.ranks))


def _import_once() -> None:
    """Make the fork server import torch, Megatron and transformers' models. It does not get our `sys.path` (Python
    3.11 does not pass it on), and does not report failed imports."""
    multiprocessing.set_forkserver_preload(["ppoctl.recipe.schema", "layout_lab"])
    with environment("PYTHONPATH", os.pathsep.join(filter(None, sys.path))):
        forkserver.ensure_running()


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # the imports are half a million objects, which each collection would visit
    server = RankServer()
    while True:
        try:
            method, *arguments = pipe.recv()
        except EOFError:
            return
        # If a collective hangs: print the stack and die, so that the caller gets an error.
        faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)
        try:
            pipe.send((True, getattr(server, method)(*arguments)))
        except Exception as error:  # noqa: BLE001 - the caller raises it
            error.add_note(traceback.format_exc())
            pipe.send((False, error))
        faulthandler.cancel_dump_traceback_later()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
