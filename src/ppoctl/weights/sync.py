"""Bringing engines to a state, as the driver does it: send the weights, then have each engine prove that it holds and
computes the same.

    trainer's ranks (sending)    -- buckets, or one broadcast -->    engines' processes (receiving)
         checksums               -------- require_equal --------     read back
         log-probs               -------- Canary.check ---------     log-probs
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ppoctl.batch.records import State
from ppoctl.engines.turns import NoTurns, Turns
from ppoctl.errors import SenderLostError, WeightSyncError
from ppoctl.weights.broadcast import BroadcastGroup, meeting
from ppoctl.weights.calls import EngineHandle, EngineLostError, Reply, ask, wait
from ppoctl.weights.canary import Canary
from ppoctl.weights.checksum import SentChecksums, require_equal
from ppoctl.weights.sending import NamedWeights, PipelineRankSender, SendReport

GENERATOR = "generator"
"""Role of the engines where roles share devices (`engines.turns`)."""


@dataclass(frozen=True)
class TrainerSide:
    """The trainer, as a sync asks it."""

    weights: Callable[[State], NamedWeights]
    score: Callable[[State, tuple[int, ...]], list[float]]
    """Log-probs (temperature 1, float32) of tokens 1.. of a sequence under that state."""
    export: Callable[[State, Path], None]
    """Writes the weights as a Hugging Face model into an existing empty folder."""


@dataclass(frozen=True)
class BroadcastWay:
    """How processes of the trainer and of engines form process groups."""

    host: Callable[[], str]
    """Address at which both find the driver, where they meet."""
    timeout_s: float
    """Seconds that a member waits for the others to come, and for each broadcast."""
    engine_ranks: int
    """Processes of each engine."""


@dataclass(frozen=True)
class EngineSide:
    """All engines of the generator, and how weights reach them."""

    engines: Sequence[EngineHandle]
    first_done: Callable[[Sequence[Any]], Sequence[Reply]]
    """Waits until at least one of these replies has come, well or not, and returns those that have."""
    broadcast: BroadcastWay | None = None
    """Absent: engines are handed weights bucket by bucket."""
    turns: Turns = field(default_factory=NoTurns)
    """Turns that the engines take with roles on the same devices."""
    exports: Path | None = None
    """An existing folder that all engines see; absent: they are on this machine, and any will do."""


class Sync:
    """Sends weights to engines, and proves that they arrived."""

    def __init__(self, trainer: TrainerSide, side: EngineSide, canary: Canary) -> None:
        self.trainer = trainer
        self.side = side
        self.canary = canary

    def bring(self, engines: Sequence[EngineHandle], state: State) -> None:
        """Have these engines hold the weights of `state`. Raises WeightSyncError where they do not afterwards, and
        EngineLostError when one of them dies."""
        if all(ask(engines, "takes_weights")):
            self._send(engines, state)
        else:
            self._restart(engines, state)
        self._ask_the_canary(engines, state)

    def _restart(self, engines: Sequence[EngineHandle], state: State) -> None:
        """Start engines anew on an export, where weights cannot change in place. What each engine read of it must be
        what the trainer holds; that it computes with what it read only the canary says."""
        weights = self.trainer.weights(state)
        sent = hand_over((), weights)
        with TemporaryDirectory(prefix="ppoctl-export-", dir=self.side.exports) as folder:
            self.trainer.export(state, Path(folder))
            self.side.turns.clear_for(GENERATOR)  # an engine takes its share of the memory when it starts
            read = ask(engines, "restart", folder)
        for loaded in read:
            require_equal(weights.names, sent, loaded)

    def _send(self, engines: Sequence[EngineHandle], state: State) -> None:
        """Change weights in place, in buckets, and compare what each engine then holds."""
        weights = self.trainer.weights(state)
        if weights.state != state:
            raise WeightSyncError(f"the trainer gave the weights of `{weights.state.stamp}`, not of `{state.stamp}`")
        way = self.side.broadcast
        try:
            sent = hand_over(engines, weights) if way is None else self.broadcast(engines, weights, way)
            arrived = ask(engines, "end_weights")
        except BaseException:
            # They have half of the weights and wait for the rest: whoever asks next gets a fresh one.
            for engine in engines:
                engine.close()
            raise
        for loaded in arrived:
            require_equal(weights.names, sent, loaded)

    def broadcast(self, engines: Sequence[EngineHandle], weights: NamedWeights, way: BroadcastWay) -> SentChecksums:
        """Send straight from processes of the trainer to those of the engines, one sender after the other."""
        ask(engines, "begin_weights")
        sent = SentChecksums()
        for sender in weights.senders():
            sent.add(self._broadcast_from(sender, engines, way).checksums)
        return sent

    def _broadcast_from(
        self, sender: PipelineRankSender, engines: Sequence[EngineHandle], way: BroadcastWay
    ) -> SendReport:
        plan, ranks = sender.plan(), way.engine_ranks
        try:
            with meeting(way.host(), way.timeout_s) as address:
                group = BroadcastGroup(address, 1 + ranks * len(engines), way.timeout_s)
                sending = sender.begin(group)
                receiving = [
                    engine.begin("receive_weights", group, 1 + ranks * number, plan)
                    for number, engine in enumerate(engines)
                ]
                self._hear(sending, receiving)
            # When the group broke: leaving the meeting has let go those that still waited for others to come.
            wait(receiving)
        except EngineLostError:
            for engine in engines:
                engine.close()  # which breaks the group, so that the sender notices
            sending.answers()  # a loss of the trainer's is what has really happened
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

    def _ask_the_canary(self, engines: Sequence[EngineHandle], state: State) -> None:
        (vocab_size, *_) = ask(engines, "vocab_size")
        tokens = self.canary.tokens(vocab_size)
        scores = [engine.begin("score", tokens) for engine in engines]
        expected = self.trainer.score(state, tokens)
        for found in wait(scores):
            self.canary.check(found, expected)


def hand_over(engines: Sequence[EngineHandle], weights: NamedWeights) -> SentChecksums:
    """Have engines load weights bucket by bucket: one is loaded while the trainer makes the next. Without engines,
    only the checksums are taken."""
    ask(engines, "begin_weights")
    sent, loading, buckets = SentChecksums(), list[Reply](), iter(weights.buckets())
    try:
        for bucket in buckets:
            sent.add(bucket.checksums)
            wait(loading)
            loading = [engine.begin("take_weights", bucket) for engine in engines]
        wait(loading)
    except SenderLostError:
        next(buckets, None)  # the call to the ranks says which of them it was
        raise
    return sent
