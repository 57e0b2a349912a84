"""Experts that vLLM's routers choose for each token of a request.

On a GPU, vLLM returns them (`enable_return_routed_experts`, which its model runner V2 has). On a CPU vLLM has runner
V1 only, because V2 requires Triton. There the worker notes what each router chooses, through the same callback of the
routers that V2 uses.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer


class ChosenExperts:
    """Experts of the open requests of a worker with runner V1. Prefix caching must be off: the tokens of a cached
    prefix are not routed again."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._tables: dict[str, dict[int, Tensor]] = {}
        """Request, by vLLM's internal id -> layer with experts -> [positions, k] experts, uint8."""
        capturer: Any = self
        bind_routed_experts_capturer(runner.get_model(), capturer)

    def capture(self, layer_id: int, topk_ids: Tensor) -> None:
        """Note the experts `[N k]` of the N tokens that a router routes in this forward pass; vLLM calls this. If a
        token is computed again, after a preemption, its new experts replace the old."""
        batch, starts = self._runner.input_batch, self._runner.query_start_loc.np
        for number, id in enumerate(batch.req_ids):
            layers = self._tables.setdefault(id, {})
            if layer_id not in layers:
                size = (self._runner.max_model_len, topk_ids.shape[1])
                layers[layer_id] = torch.zeros(size, dtype=torch.uint8)
            first, rows = int(batch.num_computed_tokens_cpu[number]), topk_ids[starts[number] : starts[number + 1]]
            layers[layer_id][first : first + len(rows)] = rows

    def take(self, tokens: Mapping[str, int]) -> dict[str, bytes]:
        """Return and forget the experts of the first tokens of these requests: external id -> one byte for each
        token, layer with experts and chosen expert, in this order."""
        internal = {id.rpartition("-")[0]: id for id in self._tables}
        found = {}
        for id, count in tokens.items():
            layers = sorted(self._tables.pop(internal[id]).items())
            found[id] = torch.stack([table[:count] for _, table in layers], dim=1).numpy().tobytes()
        return found

    def clear(self) -> None:
        """Forget the experts of all requests."""
        self._tables.clear()
