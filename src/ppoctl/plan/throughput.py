"""Tokens per second, model FLOPs utilisation (MFU), memory peak and waits of the stages that compute with a model.

    MFU = FLOPs of the passes / seconds / (FLOP/s of a device x devices of the role)

FLOPs are those of `plan/flops.py` for the real lengths of the sequences: matrix products and attention of all layers,
and the output layer at the response tokens; the backward pass costs twice the forward pass. Recomputed activations
and elementwise operations are not counted, but their time is (PaLM, arXiv:2204.02311, appendix B). The rate of a GPU
is the published rate of dense products; the rate of a CPU is measured once, as the best of a few products.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from ppoctl.algorithms.choose import generating_stages
from ppoctl.algorithms.forward_specs import LOGPROBS
from ppoctl.algorithms.generation_specs import PARTIAL_ROLLOUT, ROLLOUT
from ppoctl.algorithms.kl_use import kl_use
from ppoctl.algorithms.role_model import model_of, shared_layers
from ppoctl.algorithms.update_specs import ACTOR_UPDATE
from ppoctl.core import metric_registry
from ppoctl.core.machine.matrix_rate import MatrixRate, matrix_rate
from ppoctl.core.measured import Measured, MeasuredPass, added
from ppoctl.core.speed_metrics import (
    MISMATCH_EXPERTS_DIFFER_FRAC,
    POLICY_EXPERT_LOAD_MAX,
    POLICY_EXPERT_LOAD_MAX_AT_K,
    POLICY_EXPERTS_UNUSED_FRAC,
    POLICY_ROUTER_AUX_LOSS,
)
from ppoctl.models.shape import ModelShape
from ppoctl.plan.flops import row_work
from ppoctl.plan.memory.assumptions import GIB
from ppoctl.plan.shared_sizes import shapes_of
from ppoctl.recipe.parallel import layouts
from ppoctl.recipe.schema import Recipe


@dataclass
class StageMeter:
    """Metrics of the passes of a stage, for the models and devices of a recipe."""

    recipe: Recipe
    rate: Callable[[str], MatrixRate | None] = matrix_rate
    """Returns the rate of matrix products of a dtype; None: unknown."""

    def metrics(self, stage: str, kind: str, during: Measured) -> dict[str, float]:
        """Return the metrics of a stage that computes with a model, and the transfer of a rollout. `kind` is that of
        the stage's record."""
        name = stage.partition(".")[0]
        if kind in (ROLLOUT.kind, PARTIAL_ROLLOUT.kind):
            if name not in self._generating:
                return {}
            usage = self._usage(name, during.engine_peak_bytes, during.moved_s)
            return {metric_registry.TIME_TRANSFER_S.name: during.transfer_s, **usage}
        peak_bytes = max((measured.peak_bytes for measured in during.passes), default=0)
        found = {**self._rates(name, during), **self._usage(name, peak_bytes, during.moved_s)}
        if name == ACTOR_UPDATE.name:
            found |= expert_loads(during) | router_aux_loss(during)
        return found | experts_differ(during) if name == first_replay(self.recipe) else found

    def _usage(self, stage: str, peak_bytes: int, moved_s: float) -> dict[str, float]:
        """Return the memory peak if it is known, and, if any role is offloaded, the wait."""
        memory, wait = metric_registry.usage_metrics(stage)
        if metric_registry.find(memory) is None:
            return {}
        found = {wait: moved_s} if self.recipe.cluster.offload else {}
        return {**found, memory: peak_bytes / GIB} if peak_bytes else found

    def _rates(self, stage: str, during: Measured) -> dict[str, float]:
        """Return tokens per second and MFU."""
        rate, mfu = metric_registry.pass_metrics(stage)
        passes, seconds = during.passes, sum(measured.seconds for measured in during.passes)
        if metric_registry.find(mfu) is None or seconds <= 0:
            return {}
        found = {rate: sum(measured.tokens for measured in passes) / seconds}
        peaks = [self._peak(measured.role) for measured in passes]
        possible = [peak * measured.seconds for peak, measured in zip(peaks, passes, strict=True) if peak is not None]
        if self._shapes is not None and len(possible) == len(passes):
            found[mfu] = sum(map(self.flops, passes)) / sum(possible)
        return found

    def _peak(self, role: str) -> float | None:
        """Return the FLOP/s of all devices of a role; None: unknown."""
        rate = self.rate(model_of(self.recipe, role).dtype)
        # Without a GPU, a driver that joins a cluster does not know the devices of the ranks.
        if rate is None or (rate.is_of_all_ranks and self.recipe.cluster.ray_address is not None):
            return None
        return rate.flops_s * (1 if rate.is_of_all_ranks else layouts(self.recipe)[role].world_size)

    def flops(self, measured: MeasuredPass) -> float:
        """Return the FLOPs of the passes: a sum over their tokens, pairs and outputs."""
        parts = {"train": ("update",), "forward": ("forward", "added"), "reference": ("forward",)}[measured.kind]
        found = sum(self._flops(measured, part) for part in parts)
        if measured.with_reference:
            shares = shared_layers(self.recipe) > 0 and kl_use(self.recipe).is_estimated
            found += self._flops(measured, "top" if shares else "forward")
        return found

    def _flops(self, measured: MeasuredPass, part: str) -> float:
        """Return the FLOPs of this part of `RowWork`, from those of sequences of three known sizes."""
        assert self._shapes is not None, "the caller has looked"
        role = measured.role
        one, two, output = (
            getattr(row_work(self.recipe, role, self._shapes[role], tokens, outputs), part)
            for tokens, outputs in ((1, 0), (2, 0), (0, 1))
        )
        pair = two - 2 * one  # a sequence of one token has one pair, of two tokens three
        return float((one - pair) * measured.tokens + pair * measured.pairs + output * measured.outputs)

    @cached_property
    def _generating(self) -> frozenset[str]:
        return generating_stages(self.recipe)

    @cached_property
    def _shapes(self) -> Mapping[str, ModelShape] | None:
        return shapes_of(self.recipe)


def first_replay(recipe: Recipe) -> str:
    """Return the name of the first stage to which experts are given (`actor.router_replay`)."""
    is_of_old_logprobs = recipe.actor.router_replay == "generator" and recipe.ppo.old_logprobs == "trainer"
    return LOGPROBS.name if is_of_old_logprobs else ACTOR_UPDATE.name


def experts_differ(during: Measured) -> dict[str, float]:
    """Return the fraction of given experts that the routers would not have chosen; no metric if none were given."""
    others, given = (sum(counts) for counts in zip((0, 0), *(each.replayed for each in during.passes), strict=True))
    return {MISMATCH_EXPERTS_DIFFER_FRAC.name: others / given} if given else {}


def router_aux_loss(during: Measured) -> dict[str, float]:
    """Return the mean balance loss of layers and minibatches; no metric without such a loss."""
    loss, number = (sum(each) for each in zip((0, 0), *(each.router_aux_loss for each in during.passes), strict=True))
    return {POLICY_ROUTER_AUX_LOSS.name: loss / number} if number else {}


def expert_loads(during: Measured) -> dict[str, float]:
    """Return how unequally tokens are routed to experts: the largest ratio of a load to the mean load of its layer,
    in each layer and in all, and the fraction of all experts without a token. No metrics without experts."""
    total = added(measured.expert_loads for measured in during.passes)
    layers = {layer: counts for layer, counts in total.items() if any(counts)}
    if not layers:
        return {}
    largest = {layer: len(counts) * max(counts) / sum(counts) for layer, counts in layers.items()}
    experts = [count for counts in layers.values() for count in counts]
    return {
        POLICY_EXPERT_LOAD_MAX.name: max(largest.values()),
        POLICY_EXPERTS_UNUSED_FRAC.name: experts.count(0) / len(experts),
        **{POLICY_EXPERT_LOAD_MAX_AT_K.name.format(k=layer): ratio for layer, ratio in largest.items()},
    }
