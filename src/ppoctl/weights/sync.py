"""Preparing engines for a state, as the driver does it: send the weights, then have each engine prove that it holds
and computes the same. An engine that dies later is restored from what was published then, and proven against it.

    trainer's ranks (sending)    -- buckets, or one broadcast -->    engines' processes (receiving)
         checksums               -------- require_equal --------     read back
         log-probs               -------- Canary.check ---------     log-probs

    Published: checksums, log-probs, and where the bytes are     -->     an engine that is started again
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ppoctl.batch.records import State
from ppoctl.engines.device_sharing import DeviceSharing
from ppoctl.errors import SenderLostError, WeightSyncError
from ppoctl.weights.broadcast_groups import BroadcastWay, Links
from ppoctl.weights.bucket import Bucket
from ppoctl.weights.canary import Canary, CanaryScores
from ppoctl.weights.checksum import LoadedWeight, SentChecksums, require_equal
from ppoctl.weights.engine_calls import EngineHandle, EngineLostError, Reply, call_engines, wait
from ppoctl.weights.sending import NamedWeights, PipelineRankSender, SendReport

GENERATOR = "generator"
"""Role of the engines where roles share devices (`engines.turns`)."""


@dataclass(frozen=True)
class TrainerSide:
    """The trainer at one state, as a sync calls it. No call brings it to another state, so none builds a model, loads
    or updates while engines have the device."""

    weights: Callable[[], NamedWeights]
    score: Callable[[tuple[int, ...]], list[float]]
    """Log-probs (temperature 1, float32) of tokens 1.. of a sequence."""
    export: Callable[[Path], SentChecksums]
    """Writes the weights as a Hugging Face model into an existing empty folder: checksums of what was written."""


TrainerAt = Callable[[State], TrainerSide]
"""Brings the trainer to a state, which takes the memory of a whole trainer: weights, gradients and optimizer."""


@dataclass(frozen=True)
class EngineSide:
    """All engines of the generator, and how weights reach them."""

    engines: Sequence[EngineHandle]
    first_done: Callable[[Sequence[Any]], Sequence[Reply]]
    """Waits until at least one of these replies has come, well or not, and returns those that have."""
    broadcast: BroadcastWay | None = None
    """Absent: engines are handed weights bucket by bucket."""
    sharing: DeviceSharing = field(default_factory=DeviceSharing)
    """Turns that the engines take with roles on the same devices."""
    exports: Callable[[], Path] | None = None
    """Says an existing folder that all engines see, where an export lasts; absent: it goes once engines are on it,
    and one that dies then ends the job."""
    begin_on: Callable[[EngineHandle, str], None] | None = None
    """Ends an engine, whose next process then begins on the weights of a folder; absent: an engine that starts anew
    does so in its process."""


@dataclass(frozen=True)
class Published:
    """What a transfer leaves behind: an engine that dies is restored from it and proven against it, wherever the
    trainer is by then."""

    state: State
    names: tuple[str, ...]
    """All Hugging Face names."""
    sent: SentChecksums
    canary: tuple[int, ...]
    """Token ids of the prompt that both sides score."""
    expected: CanaryScores
    """The trainer's log-probs of it, and of what an engine drew after it."""
    buckets: Sequence[Bucket]
    """Contents that last; none where engines start on a folder."""
    folder: Path | None
    """Export on which engines start that cannot take weights."""
    drop: Callable[[], None]
    """Removes what is no object of the driver."""

    @property
    def can_restore(self) -> bool:
        """False where an export went when it was loaded."""
        return self.folder is not None or (bool(self.buckets) and all(bucket.contents for bucket in self.buckets))


@dataclass
class Sync:
    """Sends weights to engines, proves that they arrived, and restores engines without the trainer."""

    trainer_at: TrainerAt
    side: EngineSide
    canary: Canary
    _links: Links = field(default_factory=Links, init=False)

    def close(self) -> None:
        """Engines are about to end."""
        self._links.close()

    def prepare(self, engines: Sequence[EngineHandle], trainer: TrainerSide, state: State) -> Published:
        """Have these engines hold the weights of the trainer, which is at `state`. Raises WeightSyncError where they
        do not afterwards, and EngineLostError when one of them dies."""
        in_place = all(call_engines(engines, "takes_weights"))
        weights = trainer.weights()
        if weights.state != state:
            raise WeightSyncError(f"the trainer gave the weights of `{weights.state.stamp}`, not of `{state.stamp}`")
        with ExitStack() as kept:
            buckets, folder = list[Bucket](), None
            if in_place:
                sent, buckets = self._send(engines, weights)
            else:
                sent, folder = self._export(engines, trainer, weights, kept)
            (vocab_size, *_) = call_engines(engines, "vocab_size")
            tokens = self.canary.tokens(vocab_size)
            expected = self._checked(engines, trainer, tokens)
            return Published(state, weights.names, sent, tokens, expected, buckets, folder, kept.pop_all().close)

    def restore(self, engines: Sequence[EngineHandle], published: Published) -> None:
        """Have these engines, which were started again, hold what was published. The trainer is not asked. Raises
        WeightSyncError, EngineLostError, and SenderLostError where the bytes are gone."""
        if published.folder is not None:
            loaded = self._restarted(engines, published.folder)
        else:
            with _closed_if_it_fails(engines):
                hand_over(engines, published.buckets)
                loaded = call_engines(engines, "end_weights")
        _require_all_equal(published.names, published.sent, loaded)
        for found in call_engines(engines, "score", published.canary, self.canary.num_drawn):
            self.canary.check(found, published.expected)

    def _send(self, engines: Sequence[EngineHandle], weights: NamedWeights) -> tuple[SentChecksums, list[Bucket]]:
        """Change weights in place, in buckets, and compare what each engine then holds: what was sent, and what of
        it lasts."""
        with _closed_if_it_fails(engines):
            if self.side.broadcast is None:
                sent, buckets = hand_over(engines, weights.buckets())
                loaded = call_engines(engines, "end_weights")
            else:
                sent = self.broadcast(engines, weights, self.side.broadcast)
                reading_back = [engine.begin("end_weights") for engine in engines]
                buckets = [bucket.lasting() for bucket in weights.to_keep()]
                loaded = wait(reading_back)
        _require_all_equal(weights.names, sent, loaded)
        return sent, buckets

    def _export(
        self, engines: Sequence[EngineHandle], trainer: TrainerSide, weights: NamedWeights, kept: ExitStack
    ) -> tuple[SentChecksums, Path | None]:
        """Start engines anew on a folder, where weights cannot change in place. What each engine read of it must be
        what the trainer holds; that it computes with what it read only the canary says."""
        parent = None if self.side.exports is None else self.side.exports()
        folder = Path(kept.enter_context(TemporaryDirectory(prefix="ppoctl-export-", dir=parent)))
        sent = trainer.export(folder)
        self.side.sharing.offload_others(GENERATOR)  # an engine takes its share of the memory when it starts
        _require_all_equal(weights.names, sent, self._restarted(engines, folder))
        if parent is None:
            kept.close()
            return sent, None
        return sent, folder

    def _restarted(self, engines: Sequence[EngineHandle], folder: Path) -> list[list[LoadedWeight]]:
        if self.side.begin_on is not None:
            for engine in engines:
                self.side.begin_on(engine, str(folder))
        return call_engines(engines, "restart", str(folder))

    def broadcast(self, engines: Sequence[EngineHandle], weights: NamedWeights, way: BroadcastWay) -> SentChecksums:
        """Send straight from processes of the trainer to those of the engines, one sender after the other."""
        call_engines(engines, "begin_weights")
        sent = SentChecksums()
        for sender in weights.senders():
            sent.add(self._broadcast_from(sender, engines, way).checksums)
        return sent

    def _broadcast_from(
        self, sender: PipelineRankSender, engines: Sequence[EngineHandle], way: BroadcastWay
    ) -> SendReport:
        plan, ranks = sender.plan(), way.engine_ranks
        group = self._links.group(sender, engines, way)
        try:
            sending = sender.begin(group)
            receiving = [
                engine.begin("receive_weights", group, 1 + ranks * number, plan)
                for number, engine in enumerate(engines)
            ]
            self._hear(sending, receiving)
            if not sending.answers()[0].arrived:
                self._links.end(sender)  # which lets go those that still wait for others
            wait(receiving)
        except EngineLostError:
            self._links.end(sender)
            for engine in engines:
                engine.close()  # which breaks the group, so that the sender notices
            sending.answers()  # a loss of the trainer's is what has really happened
            raise
        except BaseException:
            self._links.end(sender)
            raise
        report: SendReport = sending.answers()[0]
        return report

    def _hear(self, sending: Reply, receiving: Sequence[Reply]) -> None:
        """Wait until all have answered, or the sender says that the group broke. Raises what an answer raises."""
        waiting = [sending, *receiving]
        while waiting:
            for reply in self.side.first_done(waiting):
                waiting.remove(reply)
                if reply is not sending:
                    wait([reply])
                elif not sending.answers()[0].arrived:
                    return

    def _checked(
        self, engines: Sequence[EngineHandle], trainer: TrainerSide, tokens: tuple[int, ...]
    ) -> CanaryScores:
        """What the trainer says of the canary, once each engine has said the same. Engines most often draw the same
        tokens, and the trainer scores them once."""
        expected: dict[tuple[int, ...], CanaryScores] = {}
        for found in call_engines(engines, "score", tokens, self.canary.num_drawn):
            if found.sampled not in expected:
                scored = tuple(trainer.score(tokens + found.sampled))
                last = len(tokens) - 1
                expected[found.sampled] = CanaryScores(scored[:last], found.sampled, scored[last:])
            self.canary.check(found, expected[found.sampled])
        return next(iter(expected.values()))


@contextmanager
def _closed_if_it_fails(engines: Sequence[EngineHandle]) -> Iterator[None]:
    """Engines that have half of the weights wait for the rest: whoever asks next gets a fresh one."""
    try:
        yield
    except BaseException:
        for engine in engines:
            engine.close()
        raise


def _require_all_equal(names: Sequence[str], sent: SentChecksums, loaded: Iterable[Sequence[LoadedWeight]]) -> None:
    for of_engine in loaded:
        require_equal(names, sent, of_engine)


def hand_over(engines: Sequence[EngineHandle], buckets: Iterable[Bucket]) -> tuple[SentChecksums, list[Bucket]]:
    """Have engines load weights bucket by bucket: one is loaded while the trainer makes the next. What was sent, and
    the buckets with the contents that last."""
    call_engines(engines, "begin_weights")
    sent, lasting, loading, rest = SentChecksums(), list[Bucket](), list[Reply](), iter(buckets)
    try:
        for bucket in rest:
            sent.add(bucket.checksums)
            lasting.append(bucket.lasting())
            wait(loading)
            loading = [engine.begin("take_weights", bucket) for engine in engines]
        wait(loading)
    except SenderLostError:
        next(rest, None)  # the call to the ranks says which of them it was
        raise
    return sent, lasting
