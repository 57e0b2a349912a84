"""Measured bytes of a rank's tensors: what it holds, what a forward pass keeps, and the peak of a call."""

import inspect
import pickle
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import megatron_lab as lab
import torch
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ppoctl.algorithms.stages.objective import LossInputs, Term, Terms
from ppoctl.core.ports import Minibatch, OutputRequest, TokenOutputs, Totals
from ppoctl.engines.megatron import attention, optimizer
from ppoctl.engines.megatron.capped_attention import CappedAttention
from ppoctl.engines.megatron.host_optimizer import HostAdamW
from ppoctl.engines.megatron.latent_attention import LatentAttention
from ppoctl.engines.megatron.low_rank import Adapters
from ppoctl.engines.megatron.megatron_model import PackedModel
from ppoctl.engines.megatron.packed_input import PackedInput, RopeTables
from ppoctl.engines.megatron.rank import MegatronRank
from ppoctl.engines.weights.sending import SenderRanks
from ppoctl.models.rope import Rope


def storages(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Yield the bytes of each storage once, even if several tensors share it."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def held(rank: MegatronRank) -> dict[str, int]:
    """Return the bytes in memory between calls, by component."""
    weights = storages([weight for model in rank.models for weight in model.parameters()])
    buffers = storages(list(optimizer.gradient_buffers(rank.stages)))
    groups = rank.optimizer.param_groups
    main = storages([parameter for group in groups for parameter in group["params"]])
    chained = getattr(rank.optimizer, "chained_optimizers", [rank.optimizer])
    states = [state for one in chained for state in one.optimizer.state.values()]
    moments = storages([state[name] for state in states for name in ("exp_avg", "exp_avg_sq")])
    return {
        "weights": sum(weights.values()),
        "gradients": sum(buffers.values()),
        "main_weights": sum(size for place, size in main.items() if place not in weights),
        "moments": sum(moments.values()),
    }


def kept(rank: MegatronRank, rollouts: lab.TrainerBatch) -> dict[str, int]:
    """Return the bytes that one microbatch of all rows keeps for its backward pass, by component."""
    known = storages([weight for model in rank.models for weight in model.parameters()])
    known |= storages([buffer for model in rank.models for buffer in model.buffers()])
    known |= storages(list(optimizer.gradient_buffers(rank.stages)))
    alive: list[Tensor] = []  # so that no address is used twice
    found: dict[str, int] = {}
    adapted: dict[int, str] = {}
    hooks = [
        module.register_forward_pre_hook(partial(_note_input, adapted, name.rpartition(".")[0]))
        for model in rank.models
        for name, module in model.named_modules()
        if isinstance(module, Adapters)
    ]

    def pack(tensor: Tensor) -> Tensor:
        for place, size in storages([tensor]).items():
            if place not in known:
                callers = _callers()
                component = _component(callers)
                if component is not None and _of(Adapters.forward) in callers:
                    component = adapted.get(place, "adapters")
                if component is None:
                    continue
                known[place] = size
                found[component] = found.get(component, 0) + size
                alive.append(tensor)
        return tensor

    def make_tables(model: PackedModel, packed: PackedInput, rope: Rope) -> RopeTables:
        tables = PackedModel._rope_tables(model, packed, rope)
        for place, size in storages([tables.cos, tables.sin]).items():  # they remain, saved or not
            known[place] = size
            found["ends"] = found.get("ends", 0) + size
        alive.extend([tables.cos, tables.sin])
        return tables

    for model in rank.models:
        model._rope_tables = partial(make_tables, model)
    objective = _objective(rank, rollouts)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        rank.update(rollouts, [_minibatch(rollouts, objective)], objective)
    for model in rank.models:
        del model._rope_tables
    for hook in hooks:
        hook.remove()
    return {**found, "logits": objective.logits}


def _note_input(adapted: dict[int, str], layer: str, _: Any, given: tuple[Tensor, ...]) -> None:
    """Note the component of the input of a linear layer with adapters, unless the pass is repeated later: nothing
    then keeps the input, and another tensor may get its place."""
    if not torch.is_grad_enabled():
        return
    of_last = {"linear_proj": "attention", "linear_fc2": "experts" if "experts" in layer else "mlp"}
    adapted |= dict.fromkeys(storages(given), of_last.get(layer.rpartition(".")[2], "projections"))


def _callers() -> set[tuple[str, str]]:
    """Return file and function of all callers. (`traceback` reads their source too, which takes far longer.)"""
    found, frame = set(), sys._getframe(1)
    while frame is not None:
        found.add((frame.f_code.co_filename.rpartition("/")[2], frame.f_code.co_name))
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _of(function: Callable[..., Any]) -> tuple[str, str]:
    """Return file and function as `_callers` names them."""
    code = inspect.unwrap(function).__code__
    return code.co_filename.rpartition("/")[2], code.co_name


def on_host(rank: MegatronRank) -> dict[str, int]:
    """Return the host memory of an optimizer on the host, by component."""
    chained = getattr(rank.optimizer, "chained_optimizers", [rank.optimizer])
    adams = [one.optimizer for one in chained if isinstance(one.optimizer, HostAdamW)]
    return {
        "host_optimizer": sum(adam._memory.bytes.nbytes for adam in adams),
        "host_staging": sum(adam._staging._memory.bytes.nbytes for adam in adams),
    }


def gather_buffer(rank: MegatronRank) -> int:
    """Return the buffer into which sequence parallelism gathers."""
    return sum(storages(list(get_global_memory_buffer().buffer.values())).values())


def forget_gather_buffer(rank: MegatronRank) -> None:
    """Drop the buffer of an earlier model of this process."""
    get_global_memory_buffer().buffer.clear()


def route_evenly(rank: MegatronRank) -> None:
    """Make the router choose experts in turn, independent of its weights, as `plan` assumes."""
    for model in rank.models:
        for router in (module for module in model.modules() if isinstance(module, TopKRouter)):
            router.gating = partial(_in_turn, router, router.gating)


def _in_turn(router: TopKRouter, gating: Any, hidden: Tensor) -> Tensor:
    logits: Tensor = gating(hidden)
    places = torch.arange(logits[..., 0].numel())[:, None] * 2 + torch.arange(router.topk)
    chosen = torch.zeros(len(places), router.num_experts).scatter(1, places % router.num_experts, 1.0)
    return logits + (chosen.view(logits.shape) - 0.5).to(logits.dtype) * 60


def pickled_bucket(rank: MegatronRank) -> int:
    """Return the bytes of the reply with the first bucket of weights."""
    rank.open_weights(2**20, SenderRanks(storing=frozenset({0})))
    return len(pickle.dumps(rank.next_weights()))


def peak(rank: MegatronRank, rollouts: lab.TrainerBatch, call: str) -> int:
    """Return the peak bytes during the call, beyond those before it."""
    objective = _objective(rank, rollouts)
    with _Live() as live:
        if call == "update":
            rank.update(rollouts, [_minibatch(rollouts, objective)], objective)
        else:
            rank.forward(rollouts, OutputRequest(values=rank.settings.value_head is not None))
    return live.peak


def _minibatch(rollouts: lab.TrainerBatch, objective: "_Watched") -> Minibatch:
    minibatch = lab.minibatch(rollouts)
    return replace(minibatch, totals=objective.inner.totals(minibatch.rows))


def _objective(rank: MegatronRank, rollouts: lab.TrainerBatch) -> "_Watched":
    if rank.settings.role != "actor":
        return _Watched(lab.value_objective(rollouts))
    policy = lab.policy_objective(rollouts)
    if rank.settings.value_head is None:
        return _Watched(policy)
    both = (*policy.terms, Term(SquaredValue(), rollouts.mask))
    return _Watched(Terms(both, replace(policy.request, values=True)))


@dataclass(frozen=True)
class SquaredValue:
    """The square of each value of a value head on the policy's model."""

    needs_entropy: bool = False

    def __call__(self, outputs: LossInputs, mask: Tensor) -> Tensor:
        assert outputs.values is not None
        return torch.where(mask, outputs.values**2, 0.0)


class _Watched:
    """An objective that finds the chunk of logits behind its outputs: it is part of the graph, not of the saved
    tensors."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.request = inner.request
        self.logits = 0

    def __call__(self, rows: Tensor, said: TokenOutputs, totals: Totals) -> Tensor:
        nodes, seen = [said.primary.grad_fn], set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if hasattr(node, "last_logits"):
                self.logits = sum(buffer.untyped_storage().nbytes() for buffer in node.last_logits)
                break
            nodes += [parent for parent, _ in node.next_functions]
        return self.inner(rows, said, totals)


def _component(names: set[tuple[str, str]]) -> str | None:
    """Return the component of a saved tensor with these callers; None: recomputed in the backward pass."""
    if ("random.py", "backward") in names:
        return None
    if ("random.py", "checkpoint") in names:  # recomputation starts from it
        return "projections" if ("transformer_layer.py", "forward") in names else "inputs"
    if _of(attention.apply_rope) in names:
        return "ends"  # the tables
    if _of(attention._per_piece) in names or _of(CappedAttention._attend_piece) in names:
        return "attention"
    if ("moe_layer.py", "forward") in names:
        return "projections" if _is_input_of_experts(names) else "experts"
    if ("attention.py", "get_query_key_value_tensors") in names and ("functional.py", "rms_norm") in names:
        return "attention"  # norms over heads
    if ("functional.py", "rms_norm") in names:
        return "norms" if ("transformer_layer.py", "forward") in names else "ends"
    if ("modules.py", "_forward_impl") in names:
        return "mlp" if ("mlp.py", "forward") in names else "attention"
    if ("mlp.py", "glu") in names or _of(bias_swiglu_impl) in names:
        return "mlp"
    if ("layers.py", "linear_with_grad_accumulation_and_async_allreduce") in names:
        return "projections"
    return "projections" if _of(LatentAttention.forward) in names else "ends"


def _is_input_of_experts(names: set[tuple[str, str]]) -> bool:
    """Return whether this is the input of the router, or of the first product of the shared MLP."""
    of_product = ("layers.py", "linear_with_grad_accumulation_and_async_allreduce") in names
    is_last = ("modules.py", "_forward_impl") in names
    beside = ("shared_experts.py", "forward") in names and of_product and not is_last
    return beside or ("router.py", "gating") in names


class _Live(TorchDispatchMode):
    """Counts the bytes of live storages that were created while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in inputs and storage._cdata not in self._known:
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        place, size = storage._cdata, storage.nbytes()
        self._known.add(place)
        self.now += size
        self.peak = max(self.peak, self.now)

        def gone() -> None:
            self._known.discard(place)
            self.now -= size

        weakref.finalize(storage, gone)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in _tensors(part)]
    if isinstance(value, dict):
        return _tensors(list(value.values()))
    return []
