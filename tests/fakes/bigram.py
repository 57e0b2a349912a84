"""A trainer whose model is one table: logits of the next token (actor) or the value of the token (critic). The table
of an actor with a value head has the values in an additional column."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ppoctl.core.batch.codec import digest
from ppoctl.core.batch.digest import FileDigest
from ppoctl.core.batch.grid import pack
from ppoctl.core.batch.sequences import Sequences
from ppoctl.core.errors import NonFiniteError
from ppoctl.core.ports import Minibatch, MinibatchResult, Objective, OutputRequest, TokenOutputs

RoleCallback = Callable[[str, int], None]
"""Callback with (role, number): number of the minibatch that was trained, or of the half file that was written."""


def ignore_call(role: str, number: int) -> None:
    """Do nothing."""


VOCABULARY = 12
END = 1
EXPERT_SHIFT = 0.5


def initial_table(role: str, *, value_head: bool = False) -> Tensor:
    if role != "actor":
        return torch.zeros(VOCABULARY, dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(VOCABULARY, VOCABULARY, generator=generator) * 0.5
    return torch.cat([logits, torch.zeros(VOCABULARY, 1)], dim=1) if value_head else logits


def filtered_logs(logits: Tensor, sampled: Tensor | None, request: OutputRequest) -> Tensor:
    """Return log-probs over the ids that the filters keep, including the sampled ids. [n V]"""
    x = logits / max(request.temperature, 1e-6)
    if not request.is_filtered:
        return torch.log_softmax(x, -1)
    probs = x.detach().softmax(-1)
    likely, order = probs.sort(dim=-1, descending=True, stable=True)
    likely = likely.where(likely >= request.min_p * likely[:, :1], 0.0)
    likely[:, request.top_k or VOCABULARY :] = 0.0
    before = likely.cumsum(-1) - likely
    is_kept = (before < request.top_p * likely.sum(-1, keepdim=True)) & (likely > 0)
    kept = torch.zeros_like(is_kept).scatter(1, order, is_kept)
    if sampled is not None:
        kept |= probs >= probs.gather(1, sampled[:, None])
    return torch.log_softmax(x.masked_fill(~kept, -1e9), -1)


def without_ends(logits: Tensor, early: Tensor, sampled: Tensor | None, request: OutputRequest) -> Tensor:
    """Return logits in which early positions cannot end a response, except by the sampled id. [n V]"""
    ends = torch.zeros(logits.shape, dtype=torch.bool)
    ends[:, [END, *request.stop_token_ids]] = True
    if sampled is not None:
        ends.scatter_(1, sampled[:, None], value=False)
    return logits.masked_fill(ends & early[:, None], -1e9)


class BigramSaving:
    """An asynchronous save that writes half a file on every `looks`-th poll, and the rest when it is finished. A
    drill therefore has a known state of the disk at each moment."""

    def __init__(self, folder: Path, content: dict[str, bytes], looks: float, on_half: Callable[[int], None]) -> None:
        self.folder = folder
        self.looks = looks
        self.on_half = on_half
        self.digests = {name: FileDigest(digest(data), len(data)) for name, data in content.items()}
        self.halves = [
            (name, half)
            for name, data in content.items()
            for half in (data[: len(data) // 2], data[len(data) // 2 :])
        ]
        self.looked = 0
        self.done = 0
        self.failure: OSError | None = None

    def is_written(self) -> bool:
        self.looked += 1
        try:
            if self.looked % self.looks == 0:
                self._write_half()
        except OSError as error:
            self.failure = error
        return self.done == len(self.halves) or self.failure is not None

    def finish(self) -> dict[str, FileDigest]:
        if self.failure is not None:
            raise self.failure
        self.write_rest()
        return self.digests

    def write_rest(self) -> None:
        while self.done < len(self.halves):
            self._write_half()

    def _write_half(self) -> None:
        if self.done == len(self.halves):
            return
        name, half = self.halves[self.done]
        with (self.folder / name).open("ab") as file:
            file.write(half)
        self.done += 1
        self.on_half(self.done)


class BigramTrainer:
    """Actor and critic in one class; the role decides what the table means. AdamW is written out, with Megatron's
    gradient clipping."""

    def __init__(
        self,
        role: str,
        *,
        on_minibatch: RoleCallback = ignore_call,
        on_file: RoleCallback = ignore_call,
        looks: float = 1,
        value_head: bool = False,
        merge_error: float | None = None,
    ) -> None:
        self.role = role
        self.merge_error = merge_error
        self.value_head = value_head
        self.on_minibatch = on_minibatch
        self.on_file = on_file
        self.looks = looks
        self.table = torch.full_like(initial_table(role, value_head=value_head), float("nan"))
        self.moments = torch.zeros(2, *self.table.shape)
        self.count = 0
        self.starts = 0
        self.loads = 0

    def start(self) -> None:
        self.starts += 1
        self.table = initial_table(self.role, value_head=self.value_head)
        self.moments = torch.zeros(2, *self.table.shape)
        self.count = 0

    def save(self, folder: Path, *, in_background: bool) -> "BigramSaving":
        content = {
            "table.bin": self.table.numpy().tobytes(),
            "moments.bin": self.moments.numpy().tobytes(),
            "count.json": json.dumps(self.count).encode(),
        }
        saving = BigramSaving(folder, content, self.looks, lambda number: self.on_file(self.role, number))
        if not in_background:
            saving.write_rest()
        return saving

    def save_weights(self, folder: Path) -> None:
        (folder / "table.bin").write_bytes(self.table.numpy().tobytes())

    def load(self, folder: Path) -> None:
        self.loads += 1
        shape = self.table.shape
        self.table = _tensor(folder / "table.bin").reshape(shape)
        self.moments = _tensor(folder / "moments.bin").reshape(2, *shape)
        self.count = json.loads((folder / "count.json").read_text())

    def logprobs(self, sequences: Sequences, request: OutputRequest) -> TokenOutputs:
        with torch.no_grad():
            return self._outputs(sequences, torch.arange(sequences.num_seqs), self.table, request)

    def reference_logprobs(self, sequences: Sequences, request: OutputRequest) -> Tensor:
        with torch.no_grad():
            return self._outputs(sequences, torch.arange(sequences.num_seqs), initial_table("actor"), request).primary

    def values(self, sequences: Sequences) -> Tensor:
        with torch.no_grad():
            return self._outputs(sequences, torch.arange(sequences.num_seqs), self.table, OutputRequest()).primary

    def update(
        self, sequences: Sequences, minibatches: Sequence[Minibatch], objective: Objective
    ) -> list[MinibatchResult]:
        results: list[MinibatchResult] = []
        for minibatch in minibatches:
            results.append(self._step(sequences, minibatch, objective))
            self.on_minibatch(self.role, len(results))
        return [*results[:-1], *(replace(last, merge_error=self.merge_error) for last in results[-1:])]

    def _step(self, sequences: Sequences, minibatch: Minibatch, objective: Objective) -> MinibatchResult:
        table = self.table.clone().requires_grad_()
        outputs = self._outputs(sequences, minibatch.rows, table, objective.request)
        loss = objective(minibatch.rows, outputs, minibatch.totals)
        loss.backward()  # type: ignore[no-untyped-call]
        assert table.grad is not None
        norm = table.grad.norm()
        if not bool(torch.isfinite(norm)):
            raise NonFiniteError(f"gradient of the {self.role} is `{float(norm)}`")
        limit = minibatch.step.grad_clip
        clipped = table.grad * min(1.0, limit / (float(norm) + 1e-6)) if limit > 0 else table.grad
        self._adam(clipped, minibatch)
        return MinibatchResult(float(loss.detach()), float(norm), outputs.map(Tensor.detach))

    def _adam(self, gradient: Tensor, minibatch: Minibatch) -> None:
        step = minibatch.step
        self.count += 1
        self.moments[0].lerp_(gradient, 1 - step.beta1)
        self.moments[1].lerp_(gradient**2, 1 - step.beta2)
        mean = self.moments[0] / (1 - step.beta1**self.count)
        scale = (self.moments[1] / (1 - step.beta2**self.count)).sqrt() + step.eps
        self.table = self.table * (1 - step.lr * step.weight_decay) - step.lr * mean / scale

    def _outputs(self, sequences: Sequences, rows: Tensor, table: Tensor, request: OutputRequest) -> TokenOutputs:
        packed = pack(sequences, rows)
        before = packed.tokens[packed.read_at]
        experts = experts_in(table)[packed.tokens[packed.at.argsort()]].short() if request.experts else None
        if self.role != "actor":
            return TokenOutputs(packed.to_grid(table[before]))
        early = packed.column < request.min_new_tokens
        logits = table[before][:, :VOCABULARY]
        if sequences.experts is not None:
            given, own = sequences.experts[packed.at[packed.read_at]].long(), experts_in(table)[before]
            is_other = (given >= 0) & (given != own)
            given = torch.where(given >= 0, given, own)
            logits = logits + torch.zeros_like(logits).scatter(1, given, EXPERT_SHIFT * is_other.float())
        logs = filtered_logs(without_ends(logits, early, packed.targets, request), packed.targets, request)
        chosen = logs.gather(1, packed.targets[:, None])[:, 0]
        entropy = packed.to_grid(-(logs.exp() * logs).sum(-1)) if request.entropy else None
        others = torch.log_softmax(initial_table("actor")[before] / request.temperature, -1)
        full_kl = packed.to_grid((logs.exp() * (logs - others)).sum(-1)) if request.full_kl else None
        frozen = packed.to_grid(others.gather(1, packed.targets[:, None])[:, 0]) if request.reference else None
        values = packed.to_grid(table[before][:, VOCABULARY]) if request.values else None
        return TokenOutputs(packed.to_grid(chosen), entropy, full_kl, values, frozen, experts)


def experts_in(table: Tensor) -> Tensor:
    """Return the expert that the router of this table chooses for each token: `[ids 1]`. It changes with the table;
    a given expert that the router would not choose changes one logit."""
    return (table[:, :VOCABULARY].detach().sum(dim=1, keepdim=True) * 1000).long() % 4


def _tensor(path: Path) -> Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32).clone()
