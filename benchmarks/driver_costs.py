"""Costs of the driver's one thread per token and byte: `PYTHONPATH=src python benchmarks/driver_costs.py`.

They are the unit costs of `benchmarks/simulate.py`. CPU time is measured, because other work on the machine disturbs
it less; the best of several runs counts.
"""

import argparse
import json
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from ppoctl.algorithms.stages.rollout import assemble, sample_requests
from ppoctl.core.batch import codec
from ppoctl.core.batch.prompts import Prompt, Prompts
from ppoctl.core.batch.records import Rollouts
from ppoctl.core.ports import Sample
from ppoctl.store.artifact import write_atomically
from ppoctl.store.finished_samples import decoded, encoded

ROWS, TOKENS = 64, 4096
TEXT = "word" * TOKENS
FINGERPRINT = "of the rollout"


def best(work: Callable[[], object], repeat: int) -> float:
    """Return the least CPU seconds of several runs."""
    seconds = []
    for _ in range(repeat):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)


def keep(data: bytes, part: Path) -> None:
    """Write finished samples as the store does, including the digest in the name and the disk."""
    codec.digest(data)
    write_atomically(part, data)


def recalled(part: Path) -> bytes:
    data = part.read_bytes()
    codec.digest(data)
    return data


def as_json(samples: Iterable[Sample]) -> bytes:
    """Return a sample as earlier versions wrote it, as JSON."""
    body = {"fingerprint": FINGERPRINT, "samples": [asdict(sample) for sample in samples]}
    return json.dumps(body, sort_keys=True).encode("ascii")


def of_json(data: bytes) -> list[Sample]:
    rows = json.loads(data)["samples"]
    return [Sample(**{**row, "tokens": tuple(row["tokens"]), "logprobs": tuple(row["logprobs"])}) for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description="What the driver's one thread costs.")
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    torch.set_num_threads(1)
    ids = torch.randint(150_000, (ROWS, TOKENS)).tolist()
    logprobs = (-torch.rand(ROWS, TOKENS)).tolist()
    prompts = Prompts(1, tuple(Prompt(f"p{row}", (1, 2, 3), "question", "answer") for row in range(ROWS)))
    requests = sample_requests(prompts, samples=1, seed=1)

    def finish() -> dict[str, Sample]:
        pairs = zip(requests, ids, logprobs, strict=True)
        return {
            request.key: Sample(request.key, tuple(map(int, row)), tuple(map(float, said)), False, TEXT, "stamp")
            for request, row, said in pairs
        }

    done = finish()
    samples = list(done.values())
    tensor, size = torch.randn(2**25), 2**27
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "part"
        found = {
            "samples made": best(finish, repeat),
            "kept over a crash": best(lambda: keep(encoded(samples, FINGERPRINT), part), repeat),
            "recalled after one": best(lambda: decoded(recalled(part), FINGERPRINT), repeat),
            "made a record": best(lambda: assemble(prompts, requests, done, samples=1), repeat),
            "kept as JSON, as it was": best(lambda: keep(as_json(samples), part), repeat),
            "recalled from JSON": best(lambda: of_json(recalled(part)), repeat),
        }
    for name, seconds in found.items():
        print(f"{name:<28} {seconds / (ROWS * TOKENS) * 1e6:6.3f} us per token")
    kept, again = found["kept over a crash"], found["recalled after one"]
    print(f"{'JSON over tensors, kept':<28} {found['kept as JSON, as it was'] / kept:6.1f} times")
    print(f"{'JSON over tensors, recalled':<28} {found['recalled from JSON'] / again:6.1f} times")
    rates = {
        "record encoded": (tensor.nbytes, lambda: codec.encode("record", {"grid": tensor}, {})),
        "digested (SHA-256)": (size, lambda: codec.digest(bytes(size))),
        "copied": (tensor.nbytes, tensor.clone),
    }
    for name, (num_bytes, work) in rates.items():
        print(f"{name:<28} {num_bytes / best(work, repeat) / 1e9:6.2f} GB/s")
    _print_rank_inputs(assemble(prompts, requests, done, samples=1))
    return 0


def _print_rank_inputs(rollouts: Rollouts) -> None:
    """Print the bytes of token ids, sent once a step, compared with complete rollouts in each of five calls: values,
    log-probs, the reference's, two updates. (Tensors that the objectives close over are sent in addition.)"""
    rollouts = replace(rollouts, texts=[f"{row:04}" * TOKENS for row in range(ROWS)])
    sequences_bytes, whole = (len(pickle.dumps(each)) for each in (rollouts.sequences, rollouts))
    each, times = sequences_bytes / (ROWS * TOKENS), 5 * whole / sequences_bytes
    print(f"{'sent to ranks in a step':<28} {each:6.2f} bytes per token; whole rollouts: {times:.0f} times that")


if __name__ == "__main__":
    sys.exit(main())
