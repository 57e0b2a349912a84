"""Memory: checksums, memory that another process reads, and offloading."""

import multiprocessing
import time

import torch

from gpu_parts.lines import notify
from gpu_parts.measure import BF16, CUDA, DEV, TINY, fix_allocator, gib, seconds, sync


def prints():
    """Report checksums of tensors as large as a model's: time, memory besides the tensor, and equality with a CPU."""
    from ppoctl.models.convert.checksum import checksum_of

    shapes = [(64, 32)] * 3 if TINY else [(152064, 3584), (37888, 3584), (3584, 18944), (4608, 3584), (3584,)]
    for shape in shapes:
        tensor = torch.randn(shape, device=DEV, dtype=BF16)
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        took = seconds(lambda tensor=tensor: checksum_of(tensor))
        peak = gib(torch.cuda.max_memory_allocated() - before) if CUDA else None
        notify(
            "prints",
            shape=shape,
            ms=round(took * 1e3, 3),
            gb_s=round(tensor.nbytes / took / 1e9, 1),
            extra_gib=peak,
            same_on_cpu=checksum_of(tensor[:64]) == checksum_of(tensor[:64].cpu()),
        )


def _reader(connection):
    """Run the other process: open the memory that it receives, and answer with sums and seconds."""
    if CUDA:
        torch.cuda.init()
    while (shared := connection.recv()) is not None:
        try:
            start = time.perf_counter()
            found = shared.tensors()
            took = time.perf_counter() - start
            connection.send([(name, float(t.float().sum()), tuple(t.shape)) for name, t in found] + [took])
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
            connection.send(f"{type(error).__name__}: {error}")


def ipc():
    """Report memory of one process read by another on the same GPU, without and with expandable segments."""
    from ppoctl.engines.weights.sharing import SharedBuffers

    fix_allocator()
    for conf in ("expandable_segments:False", "expandable_segments:True"):
        if CUDA:
            torch.cuda.empty_cache()
            torch._C._accelerator_setAllocatorSettings(conf)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_reader, args=(theirs,), daemon=True)
        process.start()
        staging = SharedBuffers(DEV)
        size = 2**10 if TINY else 2**27
        for value in (1.0, 2.0, 3.0, 4.0):
            tensors = [
                ("a", torch.full((size,), value, dtype=BF16, device=DEV)),
                ("b", torch.tensor([value], device=DEV)),
            ]
            start = time.perf_counter()
            shared = staging.put(tensors)
            put = time.perf_counter() - start
            ours.send(shared)
            answer = ours.recv() if ours.poll(60) else "no answer in 60 s"
            right = isinstance(answer, list) and answer[0][1] == size * value and answer[1][1] == value
            notify(
                "ipc", conf=conf, right=right, put_ms=round(put * 1e3, 2), answer=answer if not right else answer[-1]
            )
        del staging, shared
        if CUDA:
            torch.cuda.empty_cache()
            notify("ipc", conf=conf, free_after=gib(torch.cuda.mem_get_info()[0]))
        ours.send(None)
        process.join(10)
    if CUDA:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def pinned():
    """Report the host memory and time of offloading and reloading a trainer's tensors, the first time and again."""
    from ppoctl.engines.megatron.offload import HostOffload

    sizes = [1000] * 3 if TINY else [152064 * 3584 * 2, *[37888 * 3584 * 2, 3584 * 18944 * 2, 33030144, 25690112] * 8]
    tensors = [torch.ones(size, dtype=torch.uint8, device=DEV) for size in sizes]
    host = HostOffload()
    for turn in range(3):
        sync()
        start = time.perf_counter()
        host.offload("x", tensors)
        sync()
        out = time.perf_counter() - start
        start = time.perf_counter()
        host.reload("x")
        sync()
        back = time.perf_counter() - start
        notify(
            "pinned",
            turn=turn,
            bytes=sum(sizes),
            host_bytes=host.bytes,
            out_gb_s=round(sum(sizes) / out / 1e9, 1),
            back_gb_s=round(sum(sizes) / back / 1e9, 1),
            right=all(bool(t.eq(1).all()) for t in tensors),
        )
