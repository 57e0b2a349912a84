"""Implementations of the ports of actor and critic. They call all ranks of the role and merge the ranks' outputs."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ppoctl.core.batch.digest import FileDigest, flushed_digest
from ppoctl.core.batch.records import State
from ppoctl.core.batch.sequences import Sequences, one_sequence
from ppoctl.core.clock import WORK
from ppoctl.core.errors import StorageError, quoted
from ppoctl.core.measured import MEASUREMENTS, MeasuredPass, PassKind
from ppoctl.core.ports import Actor, Minibatch, MinibatchResult, Objective, OutputRequest, TokenOutputs
from ppoctl.engines.megatron.microbatches import RankExperts, RankOutputs, RankStepResult, merge, merge_experts
from ppoctl.engines.megatron.rank_settings import TrainerSettings
from ppoctl.engines.megatron.ranks import Ranks
from ppoctl.engines.weights.sending import NamedWeights
from ppoctl.engines.weights.sync import TrainerAt, TrainerSide
from ppoctl.models.convert.adapters import constant_names
from ppoctl.models.convert.checksum import SentChecksums
from ppoctl.models.convert.destination import flush_all
from ppoctl.models.convert.frozen_base import FrozenBase, read_frozen_base, write_frozen_base
from ppoctl.models.convert.frozen_digest import frozen_digest
from ppoctl.models.convert.hugging_face import Spec
from ppoctl.models.convert.model_files import Companions
from ppoctl.models.convert.safetensors_writer import SHARD_BYTES, SafetensorsWriter
from ppoctl.models.convert.tensors import placements, weight_names
from ppoctl.models.folder import model_folder
from ppoctl.models.shape import ModelShape
from ppoctl.models.shape_reader import read_shape

LOOK_EVERY_S = 0.2
"""Minimum interval between two calls that check whether ranks have written a state."""


class MegatronSaving:
    """A `ports.Saving`: each rank writes its shard, and this process adds the model's config.json and, if a part of
    the model is frozen, the source of that part (frozen.json)."""

    def __init__(self, ranks: Ranks, folder: Path, companions: Companions, base: FrozenBase | None) -> None:
        self.ranks, self.folder, self.companions, self.base = ranks, folder, companions, base
        self._looked = time.monotonic()

    def is_written(self) -> bool:
        if time.monotonic() - self._looked < LOOK_EVERY_S:
            return False
        self._looked = time.monotonic()
        return all(self.ranks.call("is_saved"))

    def finish(self) -> dict[str, FileDigest]:
        """Finish the save, and return the files of all ranks and of this process, which other programs need to load
        the state. Raises StorageError."""
        files = {name: digest for files in self.ranks.call("finish_save") for name, digest in files.items()}
        try:
            # The config is written last, because Megatron-Core requires an empty folder.
            added = [self.companions.write_config(self.folder)]
            if self.base is not None:
                added.append(write_frozen_base(self.folder, self.base))
            return {**files, **{file.name: flushed_digest(file) for file in added}}
        except OSError as error:
            raise StorageError(f"state cannot be written to `{self.folder}`: {error}") from error


class MegatronTrainer:
    """A `ports.Trainer`: the common base of actor and critic."""

    def __init__(self, settings: TrainerSettings, ranks: Ranks) -> None:
        self.settings = settings
        self.ranks = ranks
        self._frozen: FrozenBase | None = None

    def start(self) -> None:
        """Load weights from the model source and create a new optimizer.

        Raises EnvironmentProblemError or RecipeError if the source is missing, broken or not supported.
        """
        self.ranks.call("start")
        self._frozen = None
        self._frozen_base()
        self._companions.config()  # read now: a save writes a copy even if the source no longer exists

    def save(self, folder: Path, *, in_background: bool) -> "MegatronSaving":
        """Begin to write weights and optimizer into an existing empty folder. With `in_background`, copies of them
        are written. Raises StorageError."""
        self.ranks.call("begin_save", folder, in_background)
        return MegatronSaving(self.ranks, folder, self._companions, self._frozen_base())

    def load(self, folder: Path) -> None:
        """Restore weights and optimizer bit for bit as `save` wrote them, with any layout. Frozen weights are read
        from the model source. Raises StorageError, also if the frozen weights are not those of the saved state."""
        self.ranks.call("load", folder)
        saved, base = read_frozen_base(folder), self._frozen_base()
        if base is not None and (saved is None or saved.digest != base.digest):
            was = "" if saved is None else f", which was made from `{saved.model}`"
            raise StorageError(
                f"frozen weights of the {self.settings.role} in `{base.model}` are not those of the state in "
                f"`{folder}`{was}",
                hint=f"restore the files of the model with which the run started in {quoted(base.model)}",
            )
        self._companions.config()

    def _frozen_base(self) -> FrozenBase | None:
        """Return the source and the digest of the frozen weights, which never change; None: all weights train. The
        digest is computed once."""
        if self._frozen is None and not self.settings.trainable.is_all:
            checksums = {name: each for found in self.ranks.call("frozen_checksums") for name, each in found.items()}
            model = self.settings.model
            source = str(Path(model).absolute()) if Path(model).exists() else model
            trainable = self.settings.trainable
            self._frozen = FrozenBase(source, frozen_digest(checksums), trainable if trainable.lora else None)
        return self._frozen

    def save_weights(self, folder: Path) -> None:
        """Write only the weights into an existing empty folder, as a Hugging Face model."""
        self.export(folder)

    def export(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> SentChecksums:
        """Write the weights as `save_weights` does, into files of at most `shard_bytes` or of one tensor. Return
        checksums of the written tensors."""
        sent = SentChecksums()
        shape, companions = self.source[1], self._companions
        loaded: dict[str, Spec] = {}
        for rank_specs in self.ranks.call("weight_specs"):
            loaded |= {spec.name: Spec(spec.shape, spec.dtype) for spec in rank_specs}
        specs = {placement.name: loaded[placement.name] for placement in placements(shape, companions.head)}
        with closing(SafetensorsWriter(folder, specs, shard_bytes)) as writer:
            for bucket in self.ranks.weights().buckets():
                sent.add(bucket.checksums)
                for name, tensor in bucket.tensors():
                    writer.write(name, tensor)
            writer.finish()
        companions.write(folder)
        flush_all(folder)
        return sent

    def update(
        self, sequences: Sequences, minibatches: Sequence[Minibatch], objective: Objective
    ) -> list[MinibatchResult]:
        """Take one optimizer step per minibatch, in order.

        Raises NonFiniteError before the step if a minibatch's loss or gradient is not finite.
        """
        rows = torch.cat([minibatch.rows for minibatch in minibatches] or [torch.zeros(0, dtype=torch.int64)])
        with self._measured("train", sequences, rows, with_reference=objective.request.full_kl):
            by_rank: list[list[RankStepResult]] = self.ranks.call("update", sequences, minibatches, objective)
        return [_result(steps) for steps in zip(*by_rank, strict=True)]

    @contextmanager
    def _measured(
        self,
        kind: PassKind,
        sequences: Sequences,
        rows: Int[Tensor, " M"],
        *,
        with_reference: bool,
    ) -> Iterator[None]:
        """Context that measures passes over these rows of the sequences."""
        began = WORK.now()
        yield
        tokens = sequences.input_lengths[rows]
        measured = MeasuredPass(
            role=self.settings.role,
            kind=kind,
            tokens=int(tokens.sum()),
            pairs=int((tokens * (tokens + 1) // 2).sum()),
            outputs=int(sequences.lengths[rows].sum()),
            seconds=WORK.now() - began,
            with_reference=with_reference,
        )
        MEASUREMENTS.add_pass(measured, self.ranks.call("take_usage"))

    @cached_property
    def source(self) -> tuple[Path, ModelShape]:
        """Folder of the model source, and the shape of the model in it. Both are read at the first access."""
        folder = model_folder(self.settings.model)
        return folder, read_shape(folder)

    @cached_property
    def _companions(self) -> Companions:
        return Companions(self.source[0], self.settings.head, self.settings.dtype)

    def forward(self, method: str, sequences: Sequences, request: OutputRequest) -> TokenOutputs:
        """Return the outputs for all rows, merged from all ranks."""
        rows, both = torch.arange(sequences.num_seqs), request.reference or request.full_kl
        kind: PassKind = "reference" if method == "reference_forward" else "forward"
        with self._measured(kind, sequences, rows, with_reference=both):
            shares: list[RankOutputs | None] = self.ranks.call(method, sequences, request)
        outputs = merge([share for share in shares if share is not None])
        if not request.experts:
            return outputs
        chosen: list[RankExperts] = self.ranks.call("take_experts")
        return replace(outputs, experts=merge_experts(chosen))


class MegatronActor(MegatronTrainer):
    """A `ports.Actor`. The reference is in the same processes as the actor."""

    def logprobs(self, sequences: Sequences, request: OutputRequest) -> TokenOutputs:
        """Return the log-prob of each response token, and the other requested outputs."""
        return self.forward("forward", sequences, request)

    def reference_logprobs(self, sequences: Sequences, request: OutputRequest) -> Float[Tensor, "B R"]:
        """Return the log-prob of each response token under the reference, the frozen initial weights."""
        return self.forward("reference_forward", sequences, request).primary

    def weights(self, state: State) -> NamedWeights:
        """Return all weights, which will be sent to engines. `state` must be the actor's current state."""
        names, source = tuple(weight_names(self.source[1])), self.ranks.weights()
        constant = constant_names(self.settings.model_in(self.source[1]))
        return NamedWeights(
            state, names, source.buckets_for_engines, source.senders, source.buckets_to_keep, constant
        )


class MegatronCritic(MegatronTrainer):
    """A `ports.Critic`: the base model with a value head instead of the output layer."""

    def values(self, sequences: Sequences) -> Float[Tensor, "B R"]:
        """Return the value estimate V of the state before each response token."""
        return self.forward("forward", sequences, OutputRequest()).primary


def _result(steps: Sequence[RankStepResult]) -> MinibatchResult:
    """Return the result of one optimizer step, merged from the ranks."""
    outputs = merge([step.share for step in steps if step.share is not None])
    return MinibatchResult(steps[0].loss, steps[0].grad_norm, outputs, steps[0].merge_error)


@runtime_checkable
class Sender(Protocol):
    """The part of an actor that sends its weights (`MegatronActor`)."""

    def weights(self, state: State) -> NamedWeights: ...

    def export(self, folder: Path) -> SentChecksums: ...


def trainer_side(actor: Sender, actor_at: Callable[[State], Actor]) -> TrainerAt:
    """Return the function with which a weight sync gets the trainer at a state. `actor_at` brings the actor to a
    state (`ports.Models`)."""

    def at(state: State) -> TrainerSide:
        trainer = actor_at(state)

        def score(tokens: tuple[int, ...]) -> list[float]:
            outputs = trainer.logprobs(one_sequence(tokens), OutputRequest())
            return [float(value) for value in outputs.primary[0]]

        return TrainerSide(partial(actor.weights, state), score, actor.export)

    return at
