"""A device that counts bytes. Roles of the bigram model take memory on it as the real roles do; the real device
sharing, fleet and ranks decide which of them are on it together."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fakes.bigram import VOCABULARY, BigramSaving, BigramTrainer, RoleCallback, ignore_call
from fakes.components import BigramGenerator, EvenScorer, FakeStream
from ppoctl.core.batch.records import State
from ppoctl.core.batch.scores import Score, ScoreRequest
from ppoctl.core.batch.sequences import Sequences
from ppoctl.core.ports import Minibatch, MinibatchResult, Objective, OutputRequest, SamplingParams, TokenOutputs
from ppoctl.engines.megatron.ranks import Ranks
from ppoctl.engines.vllm.fleet import Fleet
from ppoctl.engines.weights.bucket import Bucket, bucket_of, flatten
from ppoctl.engines.weights.canary import CanaryScores
from ppoctl.engines.weights.engine_calls import CompletedReply
from ppoctl.engines.weights.sending import NamedWeights, Part, SenderRanks
from ppoctl.models.convert.checksum import LoadedWeight, SentChecksums, checksum_of
from ppoctl.plan.memory.assumptions import FRAGMENTS_FRAC
from ppoctl.plan.memory.trainer_memory import RankBytes

TABLE = "table"
"""Name of the only tensor that is sent."""


@dataclass
class CountedDevice:
    """Bytes that are taken now, and the peak of each stage."""

    always: int
    """Bytes that are always taken: contexts, communicators, graphs."""
    stage: str = ""
    """Current stage of the run, in the names of `plan`."""
    held: dict[tuple[str, str], int] = field(default_factory=dict)
    """Bytes by owner and name."""
    peaks: dict[str, int] = field(default_factory=dict)
    """Peak bytes by stage."""
    at_peak: dict[str, dict[tuple[str, str], int]] = field(default_factory=dict)
    """`held` at that peak, by stage."""

    def put(self, owner: str, name: str, size: int) -> None:
        self.held[owner, name] = size
        total = self.always + sum(self.held.values())
        if total > self.peaks.get(self.stage, 0):
            self.peaks[self.stage], self.at_peak[self.stage] = total, dict(self.held)

    def free(self, owner: str, *names: str) -> None:
        """Free the owner's allocations with these names, or all of them without names."""
        for key in [key for key in self.held if key[0] == owner and (not names or key[1] in names)]:
            del self.held[key]

    @contextmanager
    def during(self, stage: str) -> Iterator[None]:
        """Count allocations in this block under `stage`, for work that `plan` lists as a separate stage."""
        before, self.stage = self.stage, stage
        try:
            yield
        finally:
            self.stage = before


class CountingRank:
    """A rank of a trained role. Each call allocates what `MegatronRank` has on the device during that call."""

    def __init__(self, device: CountedDevice, role: str, has: RankBytes, buckets: Sequence[int] = ()) -> None:
        """Take `buckets`: the bytes of each bucket of weights that the rank sends."""
        self.device, self.role, self.has, self.buckets = device, role, has, buckets
        self.table = torch.zeros(())
        training = has.gradients + has.main_weights + has.moments - has.host_optimizer
        self._sizes = {"weights": has.weights, "training": training, "reference": has.reference}
        self._left: list[int] = []
        self._shares = False

    def start(self) -> None:
        with self.device.during(f"{self.role}_load"):
            self._have("weights", "training")

    load = start

    def begin_save(self) -> None:
        with self.device.during(f"{self.role}_save"):
            self._have("weights", "training")

    def update(self) -> None:
        with self.device.during(f"{self.role}_update"):
            self._have("weights", "training")
            self._work(self.has.update)

    def forward(self) -> None:
        self._have("weights")
        self._work(self.has.forward)

    def reference_forward(self) -> None:
        self._have("reference")
        self._work(self.has.forward)

    def offload(self) -> None:
        self.device.free(self.role)

    def open_weights(self, max_bytes: int, senders: SenderRanks, parts: Sequence[Part]) -> None:
        self._have("weights")
        self._left, self._shares = list(self.buckets), bool(senders.sharing)

    def next_weights(self) -> Bucket | None:
        """Return the next bucket: gathered, then copied into one of two buffers. The last one contains the table."""
        self.device.free(self.role, "gathered")
        if not self._left:
            return None
        size = self._left.pop(0)
        self.device.put(self.role, "gathered", size)
        if self._shares:
            self.device.put(self.role, f"piece {len(self._left) % 2}", max(self.buckets))
        tensors = [] if self._left else [(TABLE, self.table)]
        return bucket_of(tensors, flatten(tensors))

    def _have(self, *parts: str) -> None:
        self.device.free(self.role, "gathered", "piece 0", "piece 1")
        for part in parts:
            self.device.put(self.role, part, self._sizes[part])

    def _work(self, size: int) -> None:
        self.device.put(self.role, "at work", size + int(FRAGMENTS_FRAC * size))
        self.device.free(self.role, "at work")


class CountingRewardRank:
    """A rank of a reward model."""

    def __init__(self, device: CountedDevice, role: str, has: RankBytes) -> None:
        self.device, self.role, self.has = device, role, has

    def scores(self) -> None:
        stage = self.device.stage
        with self.device.during("eval_scores" if stage == "eval" else stage):
            self.device.put(self.role, "weights", self.has.weights)
            self.device.put(self.role, "at work", self.has.forward + int(FRAGMENTS_FRAC * self.has.forward))
            self.device.free(self.role, "at work")

    def offload(self) -> None:
        self.device.free(self.role)


class CountingEngine:
    """A `weights.engine_calls.EngineHandle` that allocates its bytes when it starts and frees them in sleep."""

    def __init__(self, device: CountedDevice, share: int, buckets: Sequence[int]) -> None:
        """Take `share`: the bytes of weights and cache together."""
        self.device, self.share, self.buckets = device, share, buckets
        self.table = torch.zeros(())
        self._is_running = False
        self._num_taken = 0

    def begin(self, method: str, *arguments: Any) -> CompletedReply:
        if not self._is_running:
            self._is_running = True
            self._wake()
        return CompletedReply([getattr(self, f"_{method}")(*arguments)])

    def close(self) -> None:
        self._is_running = False
        self.device.free("generator")

    def _wake(self) -> None:
        self.device.put("generator", "share", self.share)

    def _sleep(self) -> None:
        self.device.free("generator")

    def _takes_weights(self) -> bool:
        return True

    def _vocab_size(self) -> int:
        return VOCABULARY

    def _begin_weights(self) -> None:
        self._wake()
        self._num_taken = 0

    def _take_weights(self, bucket: Bucket) -> None:
        self.device.put("generator", "arriving", self.buckets[self._num_taken])
        self._num_taken += 1
        for _, tensor in bucket.tensors():
            self.table = tensor.clone()
        self.device.free("generator", "arriving")

    def _end_weights(self) -> list[LoadedWeight]:
        return [LoadedWeight(TABLE, checksum_of(self.table), None)]

    def _score(self, tokens: tuple[int, ...], draws: int) -> CanaryScores:
        logs = torch.log_softmax(self.table, -1)
        generated = [tokens[-1]]
        for _ in range(draws):
            generated.append(int(logs[generated[-1]].argmax()))

        def scores(ids: Sequence[int]) -> tuple[float, ...]:
            return tuple(float(logs[before, after]) for before, after in pairwise(ids))

        return CanaryScores(scores(tokens), tuple(generated[1:]), scores(generated))


class CountedTrainer(BigramTrainer):
    """The bigram actor or critic, which calls its ranks as `MegatronTrainer` does."""

    def __init__(
        self,
        role: str,
        ranks: Ranks,
        rank: CountingRank,
        on_minibatch: RoleCallback = ignore_call,
        *,
        value_head: bool = False,
    ) -> None:
        super().__init__(role, on_minibatch=on_minibatch, value_head=value_head)
        self.ranks, self.rank = ranks, rank

    def start(self) -> None:
        self.ranks.call("start")
        super().start()

    def load(self, folder: Path) -> None:
        self.ranks.call("load")
        super().load(folder)

    def save(self, folder: Path, *, in_background: bool) -> BigramSaving:
        self.ranks.call("begin_save")
        return super().save(folder, in_background=in_background)

    def save_weights(self, folder: Path) -> None:
        self.export(folder)

    def export(self, folder: Path) -> SentChecksums:
        self.rank.table, sent = self.table[..., :VOCABULARY].contiguous(), SentChecksums()
        for bucket in self.ranks.weights().buckets():
            sent.add(bucket.checksums)
        super().save_weights(folder)
        return sent

    def update(
        self, sequences: Sequences, minibatches: Sequence[Minibatch], objective: Objective
    ) -> list[MinibatchResult]:
        self.ranks.call("update")
        return super().update(sequences, minibatches, objective)

    def logprobs(self, sequences: Sequences, request: OutputRequest) -> TokenOutputs:
        self.ranks.call("forward")
        return super().logprobs(sequences, request)

    def reference_logprobs(self, sequences: Sequences, request: OutputRequest) -> Tensor:
        self.ranks.call("reference_forward")
        return super().reference_logprobs(sequences, request)

    def values(self, sequences: Sequences) -> Tensor:
        self.ranks.call("forward")
        return super().values(sequences)

    def weights(self, state: State) -> NamedWeights:
        """Return the named weights; see `MegatronActor.weights`."""
        self.rank.table, source = self.table[..., :VOCABULARY].contiguous(), self.ranks.weights()
        return NamedWeights(state, (TABLE,), source.buckets_for_engines, source.senders, source.buckets_to_keep)


class CountedGenerator(BigramGenerator):
    """Samples from the table that the engine of a real fleet received."""

    def __init__(self, fleet: Fleet, engine: CountingEngine) -> None:
        self.fleet, self.engine = fleet, engine
        self.num_generated = 0
        self.stream = None

    def prepare(self, state: State) -> None:
        assert self.stream is None or self.stream.is_closed
        self.fleet.prepare(state)
        self.state = state

    def open(self, params: SamplingParams) -> FakeStream:
        self.fleet.open(params)
        self.table = self.engine.table
        return super().open(params)

    def close(self) -> None:
        self.fleet.close()


class CountedScorer(EvenScorer):
    """Puts a reward model on the device for each score."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks

    def _score(self, request: ScoreRequest) -> Score:
        self.ranks.call("scores")
        return super()._score(request)
