"""Engines that only count and hold the weights that they receive: for tests of the fleet and of restoring engines."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppoctl.core.batch.records import State
from ppoctl.core.errors import PpoctlError, ProcessLostError
from ppoctl.core.measured import ProcessUsage
from ppoctl.core.ports import SamplingParams
from ppoctl.engines.vllm.engine import GenerationOutput, GenerationRequest
from ppoctl.engines.vllm.fleet import CompletedRequest, Fleet
from ppoctl.engines.weights.bucket import Bucket, NamedTensors, bucket_of, flatten
from ppoctl.engines.weights.canary import Canary, CanaryScores
from ppoctl.engines.weights.device_sharing import DeviceSharing
from ppoctl.engines.weights.sending import NamedWeights, Part
from ppoctl.engines.weights.sync import EngineSide, Sync, TrainerSide
from ppoctl.models.convert.checksum import LoadedWeight, SentChecksums, checksum_of

CANARY = Canary.of("float32", max_model_len=64, tolerance=None)
STATE = State("actor", 1, 1, "lineage")
NEXT = State("actor", 2, 2, "next")
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=8)
EVERYONE = ("actor", "critic", "generator")
"""Roles that are offloaded in turn."""


@dataclass
class Answered:
    host: "CountingHost"
    answer: Any

    def answers(self) -> list[Any]:
        if isinstance(self.answer, Exception):
            self.host.close()
            raise self.answer
        return [self.answer]


@dataclass
class CountingHost:
    """An engine that finishes `speed` requests per call, in order."""

    speed: int
    dies_in: list[int] = field(default_factory=list)
    """Calls of `advance`, over its whole life, in which it dies."""
    dies_at: list[str] = field(default_factory=list)
    """Other methods at which it dies, once each."""
    error: PpoctlError | None = None
    """Raised by `advance` instead."""
    misses: PpoctlError | None = None
    """Raised when it receives weights."""
    log: list[str] = field(default_factory=list)
    in_place: bool = True
    open: list[GenerationRequest] = field(default_factory=list)
    drew: list[str] = field(default_factory=list)
    calls: int = 0
    most_open: int = 0
    held: dict[str, Tensor] = field(default_factory=dict)
    scores: float = 0.0
    """Log-prob of each token of the canary's prompt."""
    decodes: float = 0.0
    """Log-prob of each generated token after the first."""
    first_token: int = 0
    """The first generated token."""
    spoils: bool = False
    """Whether loaded weights differ from those sent."""
    peak_bytes: int = 0
    is_complete: bool = False
    """Whether it holds all weights of a transfer."""

    def begin(self, method: str, *arguments: Any) -> Answered:
        if method != "take_usage":
            self.log.append(method)
        if method in self.dies_at:
            self.dies_at.remove(method)
            return Answered(self, ProcessLostError("an engine died"))
        return Answered(self, getattr(self, f"_{method}")(*arguments))

    def close(self) -> None:
        self.log.append("close")
        self.open, self.held, self.is_complete = [], {}, False

    def _advance(
        self, requests: Sequence[GenerationRequest], params: SamplingParams
    ) -> list[GenerationOutput] | Exception:
        assert params == PARAMS
        self.calls += 1
        self.open += requests
        self.most_open = max(self.most_open, len(self.open))
        if self.error is not None:
            return self.error
        if self.calls in self.dies_in:
            return ProcessLostError("an engine died")
        ended, self.open = self.open[: self.speed], self.open[self.speed :]
        self.drew += [draw.id for draw in ended]
        return [GenerationOutput(draw.id, (draw.seed,), (float(self.held["a"][0]),), "stop", ()) for draw in ended]

    def _abort(self) -> int:
        """Drop the requests, each of which has two tokens."""
        dropped, self.open = 2 * len(self.open), []
        return dropped

    def _take_usage(self) -> ProcessUsage:
        return ProcessUsage(self.peak_bytes, 0.0)

    def _vocab_size(self) -> int:
        return 100

    def _score(self, tokens: tuple[int, ...], num_tokens: int) -> CanaryScores:
        generated = (self.first_token, *range(1, num_tokens))
        return CanaryScores((self.scores,) * (len(tokens) - 1), generated, (0.0, *(self.decodes,) * (num_tokens - 1)))

    def _takes_weights(self) -> bool:
        return self.in_place

    def _sleep(self) -> None:
        self.held, self.is_complete = {}, False

    def _restart(self, folder: str) -> list[LoadedWeight]:
        [file] = Path(folder).iterdir()
        self.log.append(file.name)
        self._take([("a", torch.load(file))])
        return self._end_weights()

    def _holds_weights(self) -> bool:
        return self.is_complete

    def _begin_weights(self) -> None:
        self.is_complete = False

    def _take_weights(self, bucket: Bucket) -> Exception | None:
        self._take(bucket.tensors())
        return self.misses

    def _take(self, tensors: NamedTensors) -> None:
        self.held |= {name: tensor + self.spoils for name, tensor in tensors}

    def _end_weights(self) -> list[LoadedWeight]:
        self.is_complete = True
        return [LoadedWeight(name, checksum_of(tensor), None) for name, tensor in self.held.items()]


def tensor_at(state: State) -> Tensor:
    """Return the only weight of the model: the number of updates."""
    return torch.full((3,), float(state.updates))


@dataclass
class OneTensorTrainer:
    """A stand-in for the trainer, which must not be called for a state that it has left."""

    sharing: DeviceSharing
    left: list[str]
    """Records when it is offloaded."""
    keeps: bool = True
    """Whether its buckets are in lasting memory."""
    has_moved_on: bool = False
    frozen: dict[str, Tensor] = field(default_factory=dict)
    """Weights that never change, in addition to "a"."""

    def at(self, state: State) -> TrainerSide:
        """Return the trainer at a state. Its methods are looked up at the call, so that a test can replace them."""
        assert not self.has_moved_on
        self.reach(state)
        return TrainerSide(
            lambda: self.weights(state),
            lambda tokens: self.score(state, tokens),
            lambda folder: self.export(state, folder),
        )

    def reach(self, state: State) -> None:
        """Do nothing instead of bringing a trainer to the state."""

    def weights(self, state: State) -> NamedWeights:
        assert not self.has_moved_on
        tensors = {"constant": list(self.frozen.items()), "changing": [("a", tensor_at(state))]}

        def buckets(parts: Sequence[Part]) -> Iterator[Bucket]:
            for part in filter(tensors.get, parts):
                named = tensors[part]
                yield bucket_of(named, flatten(named)) if self.keeps else bucket_of(named)

        names = (*self.frozen, "a")
        return NamedWeights(state, names, buckets, lambda: (), lambda parts: iter(()), frozenset(self.frozen))

    def score(self, state: State, tokens: tuple[int, ...]) -> list[float]:
        assert not self.has_moved_on
        self.sharing.acquire("actor", lambda: self.left.append("leave"))
        return [0.0] * (len(tokens) - 1)

    def export(self, state: State, folder: Path) -> SentChecksums:
        assert not self.has_moved_on
        torch.save(tensor_at(state), folder / state.stamp)
        return SentChecksums({"a": checksum_of(tensor_at(state))})


@dataclass
class FleetBench:
    """A fleet, and the objects at both ends of it."""

    fleet: Fleet
    messages: list[str]
    trainer: OneTensorTrainer

    def sync_again(self, state: State) -> None:
        """Transfer this state, to which the trainer is brought."""
        self.trainer.has_moved_on = False
        self.fleet.prepare(state)


def bench_of(
    *engines: CountingHost,
    sharing: DeviceSharing | None = None,
    exports: Callable[[], Path] | None = None,
) -> FleetBench:
    messages: list[str] = []
    sharing = sharing or DeviceSharing()
    trainer = OneTensorTrainer(sharing, [])
    side = EngineSide(engines, first_done=list, sharing=sharing, exports=exports)
    return FleetBench(Fleet(side, Sync(trainer.at, side, CANARY), 8, messages.append), messages, trainer)


def fleet_of(*engines: CountingHost, sharing: DeviceSharing | None = None) -> tuple[Fleet, list[str]]:
    bench = bench_of(*engines, sharing=sharing)
    return bench.fleet, bench.messages


def requests(count: int) -> list[GenerationRequest]:
    return [GenerationRequest(f"d{number}", (1, 2), number) for number in range(count)]


def generate_all(fleet: Fleet, count: int) -> list[CompletedRequest]:
    fleet.open(PARAMS)
    try:
        fleet.submit(requests(count))
        return [one for finished in iter(fleet.finished, []) for one in finished]
    finally:
        fleet.abort()


def run(fleet: Fleet, count: int) -> dict[str, int]:
    """Return the number of sends by request; every request must finish once, with its own output."""
    fleet.prepare(STATE)
    finished = generate_all(fleet, count)
    assert sorted(one.finished.tokens[0] for one in finished) == list(range(count))
    return {one.finished.id: one.sends for one in finished}
