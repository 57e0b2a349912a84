"""Engines that share one request queue: an engine with free capacity takes the next requests, so that no engine waits
for a slow one.

queue --> engine 0: advance(requests) --> finished --> returned as they arrive
      --> engine 1: advance(requests) --> ...
      <-- requests of an engine that died; it is restarted and restored from the published weights
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, TypeVar

from ppoctl.core.batch.records import State
from ppoctl.core.errors import HangError, PpoctlError, ProcessLostError
from ppoctl.core.measured import MEASUREMENTS
from ppoctl.core.ports import SamplingParams
from ppoctl.engines.vllm.engine import GenerationOutput, GenerationRequest
from ppoctl.engines.weights.engine_calls import EngineHandle, EngineLostError, call_engines
from ppoctl.engines.weights.sync import GENERATOR, EngineSide, Published, Sync

Result = TypeVar("Result")

MAX_SENDS = 2
"""Number of engines that may die with the same request. Then the request is not sent again: it may be the cause."""
QUEUE_FACTOR = 1.25
"""Number of requests that are assigned to an engine, as a multiple of the number that it decodes at once. The engine
thus has the next request in its queue when a request finishes."""


@dataclass(frozen=True)
class CompletedRequest:
    """A finished request."""

    finished: GenerationOutput
    sends: int
    """Number of engines that the request was sent to: more than one if an engine died."""


@dataclass
class _EngineSlot:
    """One engine, and the requests that are assigned to this engine."""

    engine: EngineHandle
    is_verified: bool = False
    """Whether the engine holds the published weights. False after the engine died or slept."""
    requests: dict[str, GenerationRequest] = field(default_factory=dict)
    reply: Any = None
    """The pending `Reply` of `advance`. None: no call is pending."""


class Fleet:
    """Engines of one generator. The first `prepare` starts them. There is only one stream of requests at a time."""

    def __init__(self, side: EngineSide, sync: Sync, seqs_together: int, notify: Callable[[str], None]) -> None:
        self._side = side
        self._sync = sync
        self._capacity = ceil(seqs_together * QUEUE_FACTOR)
        self._notify = notify
        self._slots = [_EngineSlot(engine) for engine in side.engines]
        self._published: Published | None = None
        self._queue: deque[GenerationRequest] = deque()
        self._answered: deque[_EngineSlot] = deque()
        """Engines whose replies have arrived but are not processed yet."""
        self._sends: dict[str, int] = {}
        self._vocab_size: int | None = None

    def prepare(self, state: State) -> None:
        """Load the weights of `state` into all engines that do not hold them. Raises WeightSyncError."""
        if self._has_published(state):
            self._side.sharing.acquire(GENERATOR, self._sleep)
            self._restore()
            return
        # The trainer comes first: to build, load or update it takes memory that the engines would otherwise occupy.
        trainer = self._sync.trainer_at(state)
        self._side.sharing.acquire(GENERATOR, self._sleep)
        self._drop()
        with self._side.sharing.keep_all():
            self._published = self._retried(lambda engines: self._sync.prepare(engines, trainer, state), self._slots)
        self._side.sharing.acquire(GENERATOR, self._sleep)  # offloads the trainer, which has sent the weights

    def _has_published(self, state: State) -> bool:
        published = self._published
        # A replayed update has the same lineage, but on a GPU not exactly the same numbers.
        if published is None or (published.state.identity, published.state.replay) != (state.identity, state.replay):
            return False
        return published.can_restore or all(slot.is_verified for slot in self._slots)

    def _drop(self) -> None:
        """Mark the weights of all engines as unknown."""
        if self._published is not None:
            self._published.drop()
        self._published = None
        for slot in self._slots:
            slot.is_verified = False

    def _restore(self) -> None:
        """Load the last prepared state into the engines that died or slept. The trainer may be at another state by
        now."""
        published, lost = self._published, [slot for slot in self._slots if not slot.is_verified]
        assert published is not None, "no state was prepared"
        if lost:
            self._retried(lambda engines: self._sync.restore(engines, published), lost)

    def _retried(self, transfer: Callable[[Sequence[EngineHandle]], Result], slots: Sequence[_EngineSlot]) -> Result:
        """Run `transfer`, and run it again each time an engine dies, at most as often as there are engines. Then mark
        the engines as verified."""
        tries_left = len(slots)
        while True:
            try:
                with MEASUREMENTS.transfer():
                    result = transfer([slot.engine for slot in slots])
            except EngineLostError as error:
                if tries_left == 0:
                    raise
                tries_left -= 1
                self._notify(f"{error.message}; restarting")
                # The trainer is on the device to send weights, so a new engine would not have enough memory.
                self._side.sharing.offload_others(GENERATOR)
            else:
                for slot in slots:
                    slot.is_verified = True
                return result

    def _sleep(self) -> None:
        """Free the devices for other roles. The engines discard their weights. The weights of the next state usually
        replace them anyway."""
        for slot, asleep in [(slot, slot.engine.begin("sleep")) for slot in self._slots if slot.is_verified]:
            slot.is_verified = False
            try:
                asleep.answers()
            except ProcessLostError as error:  # no request is lost, and the next requests restart the engine
                self._notify(error.message)
                slot.engine.close()

    def vocab_size(self) -> int:
        if self._vocab_size is None:
            self._vocab_size = int(call_engines([self._slots[0].engine], "vocab_size")[0])
        return self._vocab_size

    def open(self, params: SamplingParams) -> None:
        """Prepare to generate from the last prepared state."""
        self._side.sharing.acquire(GENERATOR, self._sleep)
        self._restore()
        self._params = params
        self._sends.clear()

    def submit(self, draws: Sequence[GenerationRequest]) -> None:
        """Add requests with unique ids. Idle engines receive requests immediately."""
        self._queue.extend(draws)
        self._sends.update(dict.fromkeys((request.id for request in draws), 0))
        self._dispatch()

    def finished(self) -> list[CompletedRequest]:
        """Wait until at least one request has finished, and return the finished requests. The list is empty if no
        request is open.

        Tokens do not depend on which engine generated them. Requests of an engine that dies return to the queue.
        Raises ProcessLostError if a request was on two engines that died. Raises HangError, which names the open
        requests, if an engine does not reply in time.
        """
        while self.open_requests:
            if completed := self.poll():
                return completed
        return []

    def poll(self) -> list[CompletedRequest]:
        """Wait until at least one engine has replied, and return the requests that this engine has finished, which
        may be none. Raises the errors of `finished`."""
        if not self.open_requests:
            return []
        self._dispatch()
        if not self._answered:
            self._answered.extend(self._wait_for_replies())
        # One engine at a time: an error of the next engine must not lose the outputs of this engine.
        outputs = self._finished(self._answered.popleft())
        return [CompletedRequest(output, self._sends[output.id]) for output in outputs]

    @property
    def open_requests(self) -> int:
        """Number of requests that were submitted and have not finished."""
        return len(self._queue) + sum(len(slot.requests) for slot in self._slots)

    def close(self) -> None:
        """End all engines. A later `prepare` restarts them."""
        self._clear()
        self._drop()
        self._sync.close()
        for slot in self._slots:
            slot.engine.close()

    def _dispatch(self) -> None:
        """Give each idle engine an equal fraction of the open requests, up to the engine's capacity."""
        per_engine = ceil(self.open_requests / len(self._slots))
        for slot in self._slots:
            if slot.reply is not None:
                continue
            free = min(per_engine, self._capacity) - len(slot.requests)
            requests = [self._queue.popleft() for _ in range(min(free, len(self._queue)))]
            for request in requests:
                slot.requests[request.id] = request
                self._sends[request.id] += 1
            if slot.requests:
                slot.reply = slot.engine.begin("advance", requests, self._params)

    def _wait_for_replies(self) -> list[_EngineSlot]:
        """Wait until at least one engine replies, and return the engines that did."""
        waiting = {id(slot.reply): slot for slot in self._slots if slot.reply is not None}
        done = self._side.first_done([slot.reply for slot in waiting.values()])
        return [waiting[id(reply)] for reply in done]

    def _finished(self, slot: _EngineSlot) -> list[GenerationOutput]:
        """Return the requests that this engine has finished. If the engine died, restart it and return an empty
        list."""
        reply, slot.reply = slot.reply, None
        try:
            outputs: list[GenerationOutput] = reply.answers()[0]
        except Exception as error:
            # After any error the engine has ended.
            lost, slot.requests, slot.is_verified = list(slot.requests.values()), {}, False
            if isinstance(error, HangError):
                samples = ", ".join(request.id for request in lost[:8])
                raise HangError(f"{error.message}\n  {len(lost)} samples: {samples}", hint=error.hint) from error
            is_restorable = self._published is not None and self._published.can_restore
            if not isinstance(error, ProcessLostError) or not is_restorable or self._sends_of(lost) >= MAX_SENDS:
                raise
            self._notify(f"{error.message}; restarting, and its {len(lost)} samples are generated again")
            self._queue.extendleft(reversed(lost))
            self._restore()
            return []
        for output in outputs:
            slot.requests.pop(output.id)
        return outputs

    def _sends_of(self, requests: Sequence[GenerationRequest]) -> int:
        return max((self._sends[request.id] for request in requests), default=0)

    def abort(self) -> None:
        """Drop all requests in all engines, and report the tokens that they had. If there are none, report the memory
        peaks of the engines."""
        busy = [slot for slot in self._slots if slot.requests or slot.reply is not None]
        if not busy:
            self._measure()
        under_way = [slot.reply for slot in busy if slot.reply is not None]
        self._clear()
        try:
            dropped = call_engines([slot.engine for slot in busy], "abort")
            lost = [len(output.tokens) for reply in under_way for output in reply.answers()[0]]
            MEASUREMENTS.add_aborted(sum(dropped) + sum(lost))
        except PpoctlError:  # another error, which ends the stream, is already being raised
            for slot in busy:
                slot.is_verified = False

    def _measure(self) -> None:
        """Report the memory peaks of all engines that run. An engine that dies meanwhile has lost no sample."""
        for slot, usage in [(slot, slot.engine.begin("take_usage")) for slot in self._slots if slot.is_verified]:
            try:
                MEASUREMENTS.add_engine(usage.answers())
            except PpoctlError as error:
                slot.is_verified = False
                self._notify(error.message)

    def _clear(self) -> None:
        """Mark all requests as closed, even if engines still compute them."""
        self._queue.clear()
        self._answered.clear()
        for slot in self._slots:
            slot.reply = None
            slot.requests.clear()
