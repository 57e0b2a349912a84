"""Transfers from a trainer to vLLM as in a run: read back, and checked by the canary."""

import time

from gpu_parts.engines import WINDOW, settings_of
from gpu_parts.lines import notify
from gpu_parts.measure import TINY, fix_varlen
from gpu_parts.measure import sync as finished
from gpu_parts.models import QUICKSTART, minibatch_of, objective_of
from ppoctl.algorithms.role_table import ByTokens
from ppoctl.core.batch.records import State
from ppoctl.engines.megatron.factory import DTYPES
from ppoctl.engines.megatron.rank_settings import TrainerSettings
from ppoctl.engines.megatron.ranks import OpenRank, ThisProcess
from ppoctl.engines.megatron.trainer import MegatronActor, trainer_side
from ppoctl.engines.vllm.fleet import Fleet
from ppoctl.engines.vllm.own_process import OwnProcess
from ppoctl.engines.weights.canary import Canary, CanaryScores
from ppoctl.engines.weights.sync import EngineSide, Sync

START_DEADLINE_S = 60.0


def sync() -> None:
    """Report three transfers in each dtype, with an update of the trainer between them: seconds, and the gaps between
    the log-probs of both sides. A weight that differs, or a canary gap that is too large, is an error."""
    fix_varlen()
    for dtype in ("float32", "bfloat16"):
        engine = OwnProcess(settings_of(dtype), 1)
        try:
            _three_transfers(dtype, engine)
        finally:
            engine.close()


def _three_transfers(dtype: str, engine: OwnProcess) -> None:
    import roofline

    settings = TrainerSettings("actor", str(QUICKSTART), DTYPES[dtype], ByTokens(max_tokens_per_microbatch=4096))
    actor = MegatronActor(settings, ThisProcess(OpenRank(settings, START_DEADLINE_S)(0, 1, "")))
    actor.start()
    canary = Canary.of(dtype, WINDOW, None)
    side = trainer_side(actor, lambda _: actor)
    weights = Sync(side, EngineSide([engine], list), canary)
    fleet = Fleet(EngineSide([engine], list), weights, 8, lambda text: notify("sync", said=text))
    sequences = roofline.made_up_sequences(4 if TINY else 32, 16, 64, 500)
    for number in range(1, 4):
        actor.update(sequences, [minibatch_of(sequences)], objective_of(sequences))
        state = State("actor", number, number, f"{dtype} {number}")
        began = time.perf_counter()
        fleet.prepare(state)
        finished()
        took = time.perf_counter() - began
        tokens = canary.tokens(fleet.vocab_size())
        found: CanaryScores = engine.begin("score", tokens, canary.num_drawn).answers()[0]
        theirs = found.prompt + found.logprobs
        ours = side(state).score(tokens + found.sampled)
        gaps = [abs(one - other) for one, other in zip(theirs, ours, strict=True)]
        notify(
            "sync",
            dtype=dtype,
            transfer=number,
            s=round(took, 3),
            gap_max=float(f"{max(gaps):.3g}"),
            gap_mean=float(f"{sum(gaps) / len(gaps):.3g}"),
            right=len(gaps) == len(tokens) - 1 + canary.num_drawn,
        )
