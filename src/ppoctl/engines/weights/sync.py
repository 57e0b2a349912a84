"""One transfer, from the driver's point of view: send the weights to the engines, then verify that each engine holds
the weights and computes the same log-probs. An engine that dies later is restored from the published weights and
verified against them.

    trainer's ranks (sending)    -- buckets, or one broadcast -->    engines' processes (receiving)
         checksums               -------- require_equal --------     read back
         log-probs               -------- Canary.check ---------     log-probs

    Published: checksums, log-probs, and locations of the bytes  -->     an engine that is restarted

Frozen weights (`sending.Part`) are sent once. Later transfers omit them if all engines still hold the weights of an
earlier transfer (`holds_weights`). The checksums and the locations of the first transfer (`_ConstantPart`) complete
the verification and `Published`. After any error, the next transfer sends everything.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ppoctl.core.batch.records import State
from ppoctl.core.errors import SenderLostError, WeightSyncError
from ppoctl.engines.weights.broadcast_groups import BroadcastWay, Links
from ppoctl.engines.weights.bucket import Bucket
from ppoctl.engines.weights.canary import Canary, CanaryScores
from ppoctl.engines.weights.device_sharing import DeviceSharing
from ppoctl.engines.weights.engine_calls import EngineHandle, EngineLostError, Reply, call_engines, wait
from ppoctl.engines.weights.sending import PARTS, NamedWeights, Part, PipelineRankSender, SendReport
from ppoctl.models.convert.checksum import LoadedWeight, SentChecksums, require_equal

GENERATOR = "generator"
"""Role of the engines if roles share devices (`weights.device_sharing`)."""


@dataclass(frozen=True)
class TrainerSide:
    """The calls that `Sync` makes to the trainer at one state. No call changes the state, so no call builds, loads or
    updates a model while engines use the device."""

    weights: Callable[[], NamedWeights]
    score: Callable[[tuple[int, ...]], list[float]]
    """Returns the log-probs (temperature 1, float32) of the tokens of a sequence from index 1 on."""
    export: Callable[[Path], SentChecksums]
    """Writes the weights as a Hugging Face model into an existing empty folder. Returns checksums of the written
    tensors."""


TrainerAt = Callable[[State], TrainerSide]
"""Function that brings the trainer to a state. It requires device memory for the weights, gradients and optimizer of
the trainer."""


@dataclass(frozen=True)
class EngineSide:
    """All engines of the generator, and how weights reach them."""

    engines: Sequence[EngineHandle]
    first_done: Callable[[Sequence[Any]], Sequence[Reply]]
    """Waits until at least one of these replies has arrived, with a result or an error. Returns the replies that have
    arrived."""
    broadcast: BroadcastWay | None = None
    """Settings of broadcasts. None: engines receive weights bucket by bucket, without a broadcast."""
    sharing: DeviceSharing = field(default_factory=DeviceSharing)
    """Device sharing between the engines and other roles."""
    exports: Callable[[], Path] | None = None
    """Returns an existing folder that all engines can read. An export is kept in this folder. None: an export is
    deleted once engines have loaded it. The job then ends if an engine dies later."""
    begin_on: Callable[[EngineHandle, str], None] | None = None
    """Ends an engine. The engine's next process then starts from the weights in this folder. None: an engine restarts
    within its process."""


@dataclass(frozen=True)
class Published:
    """The result of a transfer. An engine that dies is restored from the published weights and verified against them,
    without a call of the trainer."""

    state: State
    names: tuple[str, ...]
    """Hugging Face names of all weights."""
    sent: SentChecksums
    canary: tuple[int, ...]
    """Token ids of the prompt that both sides score."""
    expected: CanaryScores
    """The trainer's log-probs of the prompt and of the tokens that an engine generated after it."""
    buckets: Sequence[Bucket]
    """Buckets of all weights, with locations that last until the next transfer. Empty if engines start from a
    folder."""
    folder: Path | None
    """Export folder, for engines that cannot change weights in place."""
    drop: Callable[[], None]
    """Frees what garbage collection in the driver does not: the export folder."""

    @property
    def can_restore(self) -> bool:
        """Whether the bytes of the weights still exist. False if an export was deleted after it was loaded."""
        return self.folder is not None or (bool(self.buckets) and all(bucket.contents for bucket in self.buckets))


@dataclass(frozen=True)
class _ConstantPart:
    """The weights that never change, as a verified transfer sent them."""

    sent: SentChecksums
    buckets: Sequence[Bucket]
    """Buckets with locations that last until these weights are sent again."""


@dataclass
class Sync:
    """Transfer of weights to engines with verification, and restoration of engines without the trainer."""

    trainer_at: TrainerAt
    side: EngineSide
    canary: Canary
    _links: Links = field(default_factory=Links, init=False)
    _constant: _ConstantPart | None = field(default=None, init=False)
    """The constant part of the weights, if no transfer or restoration has failed since it was sent."""

    def close(self) -> None:
        """Close the process groups, before the engines end."""
        self._links.close()

    def prepare(self, engines: Sequence[EngineHandle], trainer: TrainerSide, state: State) -> Published:
        """Transfer the weights of the trainer, which is at `state`, to these engines. Raises WeightSyncError if the
        engines do not hold the weights afterwards, and EngineLostError if an engine dies."""
        in_place = all(call_engines(engines, "takes_weights"))
        weights = trainer.weights()
        if weights.state != state:
            raise WeightSyncError(f"the trainer returned weights of `{weights.state.stamp}`, not of `{state.stamp}`")
        with ExitStack() as kept:
            buckets, folder = list[Bucket](), None
            with self._constant_if_it_succeeds() as constant:
                if in_place:
                    sent, buckets = self._send(engines, weights, constant)
                else:
                    sent, folder = self._export(engines, trainer, weights, kept)
                (vocab_size, *_) = call_engines(engines, "vocab_size")
                tokens = self.canary.tokens(vocab_size)
                expected = self._checked(engines, trainer, tokens)
            is_kept = in_place and weights.constant
            self._constant = _constant_part(weights.constant, sent, buckets) if is_kept else None
            return Published(state, weights.names, sent, tokens, expected, buckets, folder, kept.pop_all().close)

    def restore(self, engines: Sequence[EngineHandle], published: Published) -> None:
        """Load the published weights into these restarted engines. The trainer is not called. Raises WeightSyncError,
        EngineLostError, and SenderLostError if the bytes no longer exist."""
        with self._constant_if_it_succeeds():
            if published.folder is not None:
                loaded = self._restarted(engines, published.folder)
            else:
                with _closed_if_it_fails(engines):
                    hand_over(engines, published.buckets)
                    loaded = call_engines(engines, "end_weights")
            _require_all_equal(published.names, published.sent, loaded)
            for scores in call_engines(engines, "score", published.canary, self.canary.num_drawn):
                self.canary.check(scores, published.expected)

    @contextmanager
    def _constant_if_it_succeeds(self) -> Iterator[_ConstantPart | None]:
        """Context with the constant part of the weights. After an error, an engine may hold wrong weights, so the
        next transfer must send everything."""
        constant, self._constant = self._constant, None
        yield constant
        self._constant = constant

    def _send(
        self, engines: Sequence[EngineHandle], weights: NamedWeights, constant: _ConstantPart | None
    ) -> tuple[SentChecksums, list[Bucket]]:
        """Change weights in place, and verify the weights that each engine then holds. `constant`: the constant part
        of an earlier transfer; it is not sent again if all engines still hold it. Returns the checksums of all
        weights, and the buckets with only the locations that last."""
        parts, sent, kept = PARTS, SentChecksums(), list[Bucket]()
        is_same = constant is not None and constant.sent.keys() == weights.constant
        if constant is not None and is_same and all(call_engines(engines, "holds_weights")):
            parts = ("changing",)
            sent.add(constant.sent)
            kept += constant.buckets
        with _closed_if_it_fails(engines):
            if self.side.broadcast is None:
                checksums, buckets = hand_over(engines, weights.buckets(parts))
                loaded = call_engines(engines, "end_weights")
            else:
                checksums = self.broadcast(engines, weights, self.side.broadcast, parts)
                reading_back = [engine.begin("end_weights") for engine in engines]
                buckets = [bucket.lasting() for bucket in weights.to_keep(parts)]
                loaded = wait(reading_back)
        sent.add(checksums)
        _require_all_equal(weights.names, sent, loaded)
        return sent, kept + buckets

    def _export(
        self, engines: Sequence[EngineHandle], trainer: TrainerSide, weights: NamedWeights, kept: ExitStack
    ) -> tuple[SentChecksums, Path | None]:
        """Export the weights to a folder, and restart engines that cannot change weights in place from this folder.
        The weights that each engine read must equal the trainer's weights. Only the canary checks that the engine
        computes with the weights that it read."""
        parent = None if self.side.exports is None else self.side.exports()
        folder = Path(kept.enter_context(TemporaryDirectory(prefix="ppoctl-export-", dir=parent)))
        sent = trainer.export(folder)
        # An engine reserves its fraction of GPU memory at startup. The reservation fails while another role is on the
        # device.
        self.side.sharing.offload_others(GENERATOR)
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

    def broadcast(
        self, engines: Sequence[EngineHandle], weights: NamedWeights, way: BroadcastWay, parts: Sequence[Part] = PARTS
    ) -> SentChecksums:
        """Send directly from processes of the trainer to processes of the engines, one sender after the other."""
        call_engines(engines, "begin_weights")
        sent = SentChecksums()
        for sender in weights.senders():
            sent.add(self._broadcast_from(sender, engines, way, parts).checksums)
        return sent

    def _broadcast_from(
        self, sender: PipelineRankSender, engines: Sequence[EngineHandle], way: BroadcastWay, parts: Sequence[Part]
    ) -> SendReport:
        plan, ranks = sender.plan(parts), way.engine_ranks
        if not plan:
            return SendReport({}, arrived=True)  # a pipeline rank without tensors of these parts
        group = self._links.group(sender, engines, way)
        try:
            sending = sender.begin(group, parts)
            receiving = [
                engine.begin("receive_weights", group, 1 + ranks * number, plan)
                for number, engine in enumerate(engines)
            ]
            self._wait_until_received(sending, receiving)
            if not sending.answers()[0].arrived:
                self._links.end(sender)  # unblocks members that still wait for other members
            wait(receiving)
        except EngineLostError:
            self._links.end(sender)
            for engine in engines:
                engine.close()  # breaks the group: otherwise the sender would wait until its timeout
            sending.answers()  # if a process of the trainer died too, its error is the cause and is raised
            raise
        except BaseException:
            self._links.end(sender)
            raise
        report: SendReport = sending.answers()[0]
        return report

    def _wait_until_received(self, sending: Reply, receiving: Sequence[Reply]) -> None:
        """Wait until all replies have arrived, or the sender reports that the group broke. Raises the error of a
        reply."""
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
        """Compare the canary scores of each engine with the trainer's scores, and return the trainer's scores.
        Engines usually generate the same tokens. The trainer scores equal tokens only once."""
        expected: dict[tuple[int, ...], CanaryScores] = {}
        for scores in call_engines(engines, "score", tokens, self.canary.num_drawn):
            if scores.sampled not in expected:
                scored = tuple(trainer.score(tokens + scores.sampled))
                last = len(tokens) - 1
                expected[scores.sampled] = CanaryScores(scored[:last], scores.sampled, scored[last:])
            self.canary.check(scores, expected[scores.sampled])
        return next(iter(expected.values()))


def _constant_part(names: frozenset[str], sent: SentChecksums, buckets: Sequence[Bucket]) -> _ConstantPart:
    """Return the part of a transfer with these names. No bucket has tensors of both parts."""
    checksums = SentChecksums({name: checksum for name, checksum in sent.items() if name in names})
    return _ConstantPart(checksums, [bucket for bucket in buckets if bucket.checksums.keys() <= names])


@contextmanager
def _closed_if_it_fails(engines: Sequence[EngineHandle]) -> Iterator[None]:
    """Context that closes the engines on an error: an engine with half of the weights would wait for the rest. The
    next call of an engine starts a new process."""
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
    """Load weights into engines bucket by bucket. One bucket is loaded while the trainer prepares the next. Returns
    the checksums, and the buckets with only the locations that last."""
    call_engines(engines, "begin_weights")
    sent, lasting, loading, rest = SentChecksums(), list[Bucket](), list[Reply](), iter(buckets)
    try:
        for bucket in rest:
            sent.add(bucket.checksums)
            lasting.append(bucket.lasting())
            wait(loading)  # the next request to the ranks overwrites the memory of the bucket before this one
            loading = [engine.begin("take_weights", bucket) for engine in engines]
        wait(loading)
    except SenderLostError:
        next(rest, None)  # a call to the ranks raises the error that names the rank that died
        raise
    return sent, lasting
