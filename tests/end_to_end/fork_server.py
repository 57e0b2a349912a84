"""Forks commands as `python -m MODULE WORDS` would start them, without seconds of imports: `python -m
end_to_end.fork_server FD`.

This process has imported torch, Megatron-Core and vLLM, but not Ray (see `ray_forks`); it holds no engine, process
group or second thread, and only forks. A child behaves like a new interpreter: arguments, folder, environment and
both output streams are those of the request, and it ends as any interpreter does, so exit code, stdout, stderr and
death by a signal are those of a separate process. Errors of the imports themselves (their order, their warnings)
cannot show here: CI therefore runs one complete command of `test_command_line.py` as a real `python -m ppoctl`.
"""

import gc
import importlib
import json
import os
import runpy
import socket
import sys
import warnings
from dataclasses import dataclass

import ray_forks
from vllm_prepared_once import prepare_once

HEAVY = (
    "ppoctl.run.run_commands",
    "ppoctl.show.report.shown_sample",
    "ppoctl.engines.megatron.factory",
    "transformers",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.model_executor.models.qwen2",
)
"""Everything else that commands import, they import themselves, which only takes time. (MLflow would start a
thread.)"""
HEAVY_ON_A_CPU = ("vllm.v1.worker.cpu_worker",)

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Importing numpy otherwise starts a thread for each further core, and importing pyarrow one of its allocator."""


@dataclass(frozen=True)
class Request:
    """A command line as typed: `words[0]` is the module."""

    words: list[str]
    folder: str
    environment: dict[str, str]
    streams: list[int]
    """File descriptors that become stdout and stderr."""


def preload() -> None:
    """Import what the engines import. The caller may fork afterwards: nothing has been started or computed.

    Must run in an environment with `ONE_THREAD`.
    """
    import psutil
    import torch

    from ppoctl.engines.vllm.log import write_log
    from ppoctl.engines.vllm.vllm_environment import prepare_environment
    from ppoctl.engines.vllm.vllm_settings import VllmSettings
    from ppoctl.engines.vllm.vllm_start import third_party_quiet
    from ppoctl.recipe.schema import GeneratorTable

    ray_forks.hide_ray()
    settings = VllmSettings("", "float32", 3, (), GeneratorTable())
    write_log(settings, "")
    prepare_environment(settings)
    with third_party_quiet():
        for name in HEAVY if torch.cuda.is_available() else HEAVY + HEAVY_ON_A_CPU:
            importlib.import_module(name)
        prepare_once()
        importlib.import_module("vllm.platforms").current_platform.register_triton_kernel_overrides()
    # A thread or a device that exists now would be missing, or broken, in every child.
    assert psutil.Process().num_threads() == 1
    assert not torch.distributed.is_initialized()
    assert not torch.cuda.is_initialized()
    # Garbage collection in children then leaves the pages of the imports untouched, so they stay shared.
    gc.freeze()


def serve(channel: socket.socket) -> Request | None:
    """Fork a child for each request, one at a time, and report its process id and its end.

    Returns twice: in every child with its request, and in the server with None when the channel is closed.
    """
    while (request := _receive(channel)) is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            channel.close()
            return request
        for stream in request.streams:
            os.close(stream)
        channel.sendall(f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        channel.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    return None


def _receive(channel: socket.socket) -> Request | None:
    text, streams, _, _ = socket.recv_fds(channel, 1 << 16, 2)
    while text and not text.endswith(b"\n"):
        text += channel.recv(1 << 16)
    return Request(**json.loads(text), streams=list(streams)) if text else None


def become(request: Request) -> None:
    """Become the requested process; end with the interpreter."""
    for number, stream in enumerate(request.streams, start=1):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    sys.path[0] = request.folder
    sys.argv[1:] = request.words[1:]
    if request.words[0] == "ppoctl":  # a drill does so in each of its attempts
        ray_forks.start()
        ray_forks.show_ray()
    runpy.run_module(request.words[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        preload()
        received = serve(requests)
    if received is None:
        os._exit(0)  # at once: nothing has been started
    become(received)
