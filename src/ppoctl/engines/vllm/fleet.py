"""Engines that share one queue: whoever has room takes the next draws, so that none waits for a slow one.

queue --> engine 0: advance(draws) --> finished --> out, as they come
      --> engine 1: advance(draws) --> ...
      <-- draws of an engine that died; it is started again and restored from what was published
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, TypeVar

from ppoctl.batch.records import State
from ppoctl.engines.vllm.engine import GenerationOutput, GenerationRequest
from ppoctl.errors import HangError, PpoctlError, ProcessLostError
from ppoctl.ports import SamplingParams
from ppoctl.weights.engine_calls import EngineHandle, EngineLostError, call_engines
from ppoctl.weights.sync import GENERATOR, EngineSide, Published, Sync

Brought = TypeVar("Brought")

MAX_SENDS = 2
"""A draw that has been with so many engines when they died is not sent to another: it may be what kills them."""
QUEUE_FACTOR = 1.25
"""Draws an engine is given, as a multiple of those it decodes together: the next are there when one ends."""


@dataclass(frozen=True)
class CompletedRequest:
    """A draw that ended."""

    finished: GenerationOutput
    sends: int
    """How many engines it was sent to: more than one where an engine died."""


@dataclass
class _EngineSlot:
    """One engine and what it has been given."""

    engine: EngineHandle
    is_proven: bool = False
    """Whether it holds what was published; False where it has died, or forgot it in sleep."""
    requests: dict[str, GenerationRequest] = field(default_factory=dict)
    answer: Any = None
    """`Reply`, while it advances."""


class Fleet:
    """Engines of one generator, started by the first `prepare`; one stream of draws at a time."""

    def __init__(self, side: EngineSide, sync: Sync, seqs_together: int, notify: Callable[[str], None]) -> None:
        self._side = side
        self._sync = sync
        self._capacity = ceil(seqs_together * QUEUE_FACTOR)
        self._say = notify
        self._seats = [_EngineSlot(engine) for engine in side.engines]
        self._published: Published | None = None
        self._queue: deque[GenerationRequest] = deque()
        self._answered: deque[_EngineSlot] = deque()
        """Engines whose answers have come and are not looked at yet."""
        self._sends: dict[str, int] = {}
        self._vocab_size: int | None = None

    def prepare(self, state: State) -> None:
        """Have all engines hold the weights of `state`; costs nothing where they do. Raises WeightSyncError."""
        if self._has_published(state):
            self._side.sharing.acquire(GENERATOR, self._leave)
            self._restore()
            return
        # First: a trainer that is built, loaded or updated takes memory that the engines would have by then.
        trainer = self._sync.trainer_at(state)
        self._side.sharing.acquire(GENERATOR, self._leave)
        self._drop()
        with self._side.sharing.keep_all():
            self._published = self._retried(lambda engines: self._sync.prepare(engines, trainer, state), self._seats)
        self._side.sharing.acquire(GENERATOR, self._leave)  # the trainer, which sent them, leaves

    def _has_published(self, state: State) -> bool:
        published = self._published
        # A repeated update is the same state by lineage, and on a GPU still not the same numbers.
        if published is None or (published.state.identity, published.state.replay) != (state.identity, state.replay):
            return False
        return published.can_restore or all(seat.is_proven for seat in self._seats)

    def _drop(self) -> None:
        """Mark every engine as at no known state."""
        if self._published is not None:
            self._published.drop()
        self._published = None
        for seat in self._seats:
            seat.is_proven = False

    def _restore(self) -> None:
        """Bring engines that died or slept to the state that was prepared last; the trainer may be elsewhere by
        now."""
        published, lost = self._published, [seat for seat in self._seats if not seat.is_proven]
        assert published is not None, "no state was prepared"
        if lost:
            self._retried(lambda engines: self._sync.restore(engines, published), lost)

    def _retried(self, bring: Callable[[Sequence[EngineHandle]], Brought], seats: Sequence[_EngineSlot]) -> Brought:
        """Try again when an engine dies meanwhile, as often as there are engines. They are proven when it is done."""
        tries_left = len(seats)
        while True:
            try:
                brought = bring([seat.engine for seat in seats])
            except EngineLostError as error:
                if tries_left == 0:
                    raise
                tries_left -= 1
                self._say(f"{error.message}; started again")
                self._side.sharing.offload_others(GENERATOR)  # the trainer, which was about to send
            else:
                for seat in seats:
                    seat.is_proven = True
                return brought

    def _leave(self) -> None:
        """For the roles that share the engines' devices. Engines forget their weights, which most often the next
        state replaces anyway."""
        for seat, asleep in [(seat, seat.engine.begin("sleep")) for seat in self._seats if seat.is_proven]:
            seat.is_proven = False
            try:
                asleep.answers()
            except ProcessLostError as error:  # whose draws are done: the next ones start it again
                self._say(error.message)
                seat.engine.close()

    def vocab_size(self) -> int:
        if self._vocab_size is None:
            self._vocab_size = int(call_engines([self._seats[0].engine], "vocab_size")[0])
        return self._vocab_size

    def open(self, params: SamplingParams) -> None:
        """Get ready to draw from the state that was prepared last."""
        self._side.sharing.acquire(GENERATOR, self._leave)
        self._restore()
        self._params = params
        self._sends.clear()

    def submit(self, draws: Sequence[GenerationRequest]) -> None:
        """Begin to draw these too, each with an id of its own; engines that wait for work are given it at once."""
        self._queue.extend(draws)
        self._sends.update(dict.fromkeys((draw.id for draw in draws), 0))
        self._dispatch()

    def finished(self) -> list[CompletedRequest]:
        """Draws that have ended, at least one; none when none is open.

        Tokens do not depend on which engine drew them. Draws of an engine that dies go back into the queue. Raises
        ProcessLostError when a draw was with two engines that died, HangError naming what was being drawn.
        """
        while self.open_requests:
            self._dispatch()
            if not self._answered:
                self._answered.extend(self._that_answered())
            # One at a time: an error of the next must not cost what this one has finished.
            if found := self._finished(self._answered.popleft()):
                return [CompletedRequest(ended, self._sends[ended.id]) for ended in found]
        return []

    @property
    def open_requests(self) -> int:
        """Draws that were submitted and have not ended."""
        return len(self._queue) + sum(len(seat.requests) for seat in self._seats)

    def close(self) -> None:
        """End all engines. A later `prepare` starts them again."""
        self._forget()
        self._drop()
        self._sync.close()
        for seat in self._seats:
            seat.engine.close()

    def _dispatch(self) -> None:
        """Each engine that waits gets its even part of what is open, up to what it has room for."""
        even = ceil(self.open_requests / len(self._seats))
        for seat in self._seats:
            if seat.answer is not None:
                continue
            room = min(even, self._capacity) - len(seat.requests)
            draws = [self._queue.popleft() for _ in range(min(room, len(self._queue)))]
            for draw in draws:
                seat.requests[draw.id] = draw
                self._sends[draw.id] += 1
            if seat.requests:
                seat.answer = seat.engine.begin("advance", draws, self._params)

    def _that_answered(self) -> list[_EngineSlot]:
        """Wait for whichever engine answers first."""
        waiting = {id(seat.answer): seat for seat in self._seats if seat.answer is not None}
        done = self._side.first_done([seat.answer for seat in waiting.values()])
        return [waiting[id(reply)] for reply in done]

    def _finished(self, seat: _EngineSlot) -> list[GenerationOutput]:
        """What this engine has finished; nothing where it died, and is started again."""
        reply, seat.answer = seat.answer, None
        try:
            found: list[GenerationOutput] = reply.answers()[0]
        except Exception as error:
            # Whatever it was, that engine is gone.
            lost, seat.requests, seat.is_proven = list(seat.requests.values()), {}, False
            if isinstance(error, HangError):
                samples = ", ".join(draw.id for draw in lost[:8])
                raise HangError(f"{error.message}\n  {len(lost)} samples: {samples}", hint=error.hint) from error
            is_restorable = self._published is not None and self._published.can_restore
            if not isinstance(error, ProcessLostError) or not is_restorable or self._sends_of(lost) >= MAX_SENDS:
                raise
            self._say(f"{error.message}; started again, and its {len(lost)} samples are drawn again")
            self._queue.extendleft(reversed(lost))
            self._restore()
            return []
        for ended in found:
            seat.requests.pop(ended.id)
        return found

    def _sends_of(self, draws: Sequence[GenerationRequest]) -> int:
        return max((self._sends[draw.id] for draw in draws), default=0)

    def abort(self) -> None:
        """Leave no draw behind in any engine."""
        busy = [seat for seat in self._seats if seat.requests or seat.answer is not None]
        self._forget()
        try:
            call_engines([seat.engine for seat in busy], "abort")
        except PpoctlError:  # what stops the stream is on its way already
            for seat in busy:
                seat.is_proven = False

    def _forget(self) -> None:
        """Nothing is open, whatever engines go on with."""
        self._queue.clear()
        self._answered.clear()
        for seat in self._seats:
            seat.answer = None
            seat.requests.clear()
