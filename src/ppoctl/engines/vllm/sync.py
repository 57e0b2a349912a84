"""Bringing engines to a state: its weights in buckets, then proof that each engine holds and computes the same."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ppoctl.batch.records import State
from ppoctl.engines.link import meeting
from ppoctl.engines.vllm.canary import Tolerance, canary_tokens
from ppoctl.engines.vllm.hosts import ROLE, Host, Hosts
from ppoctl.engines.vllm.settings import VllmSettings
from ppoctl.engines.vllm.weights import Sent, compare
from ppoctl.errors import ProcessLostError, SenderLostError, WeightSyncError
from ppoctl.ports import Departed, Link, NamedWeights, Promise, Sender


@dataclass(frozen=True)
class TrainerSide:
    """What is asked of the trainer."""

    weights: Callable[[State], NamedWeights]
    score: Callable[[State, tuple[int, ...]], list[float]]
    """Its log-probs (temperature 1, float32) of tokens 1.. of a sequence under that state."""
    export: Callable[[State, Path], None]
    """Writes the weights as a Hugging Face model into an existing empty folder."""


class EngineLostError(ProcessLostError):
    """It was an engine that died, and not a process of the trainer, which nothing here could bring back."""


class Sync:
    """Sends weights, and proves that they arrived."""

    def __init__(self, settings: VllmSettings, trainer: TrainerSide, hosts: Hosts) -> None:
        self.settings = settings
        self.trainer = trainer
        self.hosts = hosts

    def bring(self, engines: Sequence[Host], state: State) -> None:
        """Have these engines hold the weights of `state`. Raises WeightSyncError where they do not afterwards."""
        if all(ask(engines, "takes_weights")):
            self._send(engines, state)
        else:
            self._restart(engines, state)
        self._ask_the_canary(engines, state)

    def _restart(self, engines: Sequence[Host], state: State) -> None:
        """Where weights cannot change in place: started anew on an export. What each engine read of it must be what
        the trainer holds, tensor by tensor; that it computes with what it read only the canary says."""
        weights = self.trainer.weights(state)
        sent = hand_over((), weights)
        with TemporaryDirectory(prefix="ppoctl-export-", dir=self.hosts.exports) as folder:
            self.trainer.export(state, Path(folder))
            self.hosts.turns.clear_for(ROLE)  # an engine takes its share of the memory when it starts
            read = ask(engines, "restart", folder)
        for held in read:
            compare(weights.names, sent, held)

    def _send(self, engines: Sequence[Host], state: State) -> None:
        """In place, in buckets, and compared tensor by tensor."""
        weights = self.trainer.weights(state)
        if weights.state != state:
            raise WeightSyncError(f"the trainer gave the weights of `{weights.state.stamp}`, not of `{state.stamp}`")
        try:
            sent = hand_over(engines, weights) if self.hosts.broadcasts is None else self._broadcast(engines, weights)
            arrived = ask(engines, "end_weights")
        except BaseException:
            # They have half of the weights and wait for the rest: whoever asks next gets a fresh one.
            for engine in engines:
                engine.close()
            raise
        for held in arrived:
            compare(weights.names, sent, held)

    def _broadcast(self, engines: Sequence[Host], weights: NamedWeights) -> Sent:
        """Straight from processes of the trainer to those of the engines, one sender after the other."""
        ask(engines, "begin_weights")
        sent = Sent()
        for sender in weights.senders():
            sent.add(self._over_a_link(engines, sender).prints)
        return sent

    def _over_a_link(self, engines: Sequence[Host], sender: Sender) -> Departed:
        how, plan, ranks = self.hosts.broadcasts, sender.plan(), self.settings.table.tensor
        assert how is not None
        try:
            with meeting(how.host(), how.timeout_s) as address:
                link = Link(address, 1 + ranks * len(engines), how.timeout_s)
                sending = sender.begin(link)
                receiving = [
                    engine.begin("receive_weights", link, 1 + ranks * number, plan)
                    for number, engine in enumerate(engines)
                ]
                self._hear(sending, receiving)
            wait(receiving)  # of a broken link, which is now left by those who still waited for the others
        except EngineLostError:
            for engine in engines:
                engine.close()  # with its end of the link, so that the sender notices
            sending.answers()  # a loss of the trainer's is what has really happened
            raise
        departed: Departed = sending.answers()[0]
        return departed

    def _hear(self, sending: Promise, receiving: Sequence[Promise]) -> None:
        """Until all have answered, or the sender says that the link broke. Raises what one of them raises."""
        waiting = [sending, *receiving]
        while waiting:
            for promise in self.hosts.first_done(waiting):
                waiting.remove(promise)
                if promise is not sending:
                    wait([promise])
                elif not sending.answers()[0].arrived:
                    return

    def _ask_the_canary(self, engines: Sequence[Host], state: State) -> None:
        (vocab_size, *_) = ask(engines, "vocab_size")
        tokens = canary_tokens(vocab_size, self.settings.max_model_len)
        tolerance = Tolerance.of(self.settings.dtype, self.settings.table.canary_tolerance)
        scores = [engine.begin("score", tokens) for engine in engines]
        expected = self.trainer.score(state, tokens)
        for found in wait(scores):
            tolerance.check(found, expected)


def hand_over(engines: Sequence[Host], weights: NamedWeights) -> Sent:
    """Bucket by bucket: one is loaded while the trainer makes the next. To no engine: only their checksums."""
    ask(engines, "begin_weights")
    sent, on_the_way, buckets = Sent(), list[Any](), iter(weights.buckets())
    try:
        for bucket in buckets:
            sent.add(bucket.prints)
            wait(on_the_way)
            on_the_way = [engine.begin("take_weights", bucket) for engine in engines]
        wait(on_the_way)
    except SenderLostError:
        next(buckets, None)  # who asks the ranks hears which of them it was
        raise
    return sent


def ask(engines: Sequence[Host], method: str, *arguments: Any) -> list[Any]:
    """What each engine answers; its tensor ranks say the same."""
    return wait([engine.begin(method, *arguments) for engine in engines])


def wait(promises: Sequence[Any]) -> list[Any]:
    """What each engine answered. Raises EngineLostError, once all have been heard, naming each that has died; or
    SenderLostError from an engine that could not read."""
    answers, lost = [], []
    for promise in promises:
        try:
            answers.append(promise.answers()[0])
        except SenderLostError:
            raise
        except ProcessLostError as error:
            lost.append(error)
    if lost:
        raise EngineLostError("; ".join(error.message for error in lost), hint=lost[0].hint) from lost[0]
    return answers
