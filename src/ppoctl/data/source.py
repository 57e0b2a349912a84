"""Prompts of each step. They are a pure function of seed and batch, so that a resumed run needs no loader state.

prompts in order of use:   | epoch 0: a permutation of all rows | epoch 1: another one | ...
batch b (from 0) has positions b * prompts_per_round ... (b + 1) * prompts_per_round - 1, also across epochs
step s (from 1) uses batch s - 1; if steps have several rounds, `Carry.batch` gives the batch of each round
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from ppoctl.core.batch.prompts import Prompt, Prompts
from ppoctl.data.index import RowSet, digest_of, read_set
from ppoctl.data.order import Order, SourceShare
from ppoctl.data.prompt_set import Counts, Mixed, PromptSet
from ppoctl.data.row_tables import DataTable
from ppoctl.data.rows import require_in_an_epoch, single_tables, tables_of
from ppoctl.data.template import PromptTemplate
from ppoctl.data.template_arguments import EnvironmentOf, no_environment


@dataclass(frozen=True)
class PromptSource:
    """Prompts of a run: training prompts by step, evaluation prompts by set."""

    train: Sequence[Prompt]
    evaluations: Mapping[str, Sequence[Prompt]]
    seed: int
    prompts_per_round: int
    digests: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 digests of `data.train`, `data.eval.NAME` and `tokenizer`, which `run.json` records."""
    counts: Mapping[str, Counts] = field(default_factory=dict)
    """Table (`data.train`, `data.eval.NAME`, `data.train.sources.NAME`) -> numbers of rows of the table."""
    rows: Mapping[str, tuple[RowSet, ...]] = field(default_factory=dict)
    """Set (`data.train`, `data.eval.NAME`) -> rows of the sources of the set, not rendered."""
    shares: tuple[SourceShare, ...] = ()
    """Rows and weights of the sources of the training set; empty: the training set is not a mix."""
    clock: datetime | None = None
    """Local time that chat templates read; None: the time at which they are rendered."""
    reads_clock: bool = False
    """Whether the chat template of the model reads the time."""

    @classmethod
    def load(
        cls,
        data: DataTable,
        template: PromptTemplate,
        *,
        max_prompt_tokens: int,
        prompts_per_round: int,
        seed: int,
        environment_of: EnvironmentOf = no_environment,
    ) -> "PromptSource":
        """Read and check all data sets of a recipe. Raises DataError."""
        sets = {
            name: {
                source: PromptSet(
                    read_set(single, name=key, source=source),
                    single,
                    template,
                    max_prompt_tokens,
                    environment_of(name),
                )
                for source, (key, single) in single_tables(table, name=name).items()
            }
            for name, table in tables_of(data).items()
        }
        joined = {name: Mixed(tuple(sources.values())) for name, sources in sets.items()}
        prompt_source = cls(
            train=joined.pop("train"),
            evaluations={name.removeprefix("eval."): prompts for name, prompts in joined.items()},
            seed=seed,
            prompts_per_round=prompts_per_round,
            digests={
                **{
                    f"data.{name}": digest_of({source: prompts.rows for source, prompts in sources.items()})
                    for name, sources in sets.items()
                },
                "tokenizer": template.digest,
            },
            counts={
                f"data.{prompts.rows.name}": prompts.counts
                for sources in sets.values()
                for prompts in sources.values()
            },
            rows={
                f"data.{name}": tuple(prompts.rows for prompts in sources.values()) for name, sources in sets.items()
            },
            shares=tuple(SourceShare(len(prompts), prompts.weight) for prompts in sets["train"].values()),
            clock=template.chat_template.clock,
            reads_clock=template.chat_template.reads_clock,
        )
        for prompts in sets["train"].values():
            require_in_an_epoch(prompts.rows.name, len(prompts), prompts.weight)
        return prompt_source

    @property
    def order(self) -> Order:
        """Order of the rows of the training set."""
        return Order(self.shares or (SourceShare(len(self.train)),), self.seed)

    def prompts_for(self, step: int, batch: int | None = None) -> Prompts:
        """Return a batch of prompts for one step, counted from 1. Without `batch`, every step uses one batch.

        Ids are unique within a batch. A prompt may occur twice, because an epoch ends within the batch or because of
        the weight of its source. Such a prompt has the ids `ID` and `ID#2`.
        """
        assert step >= 1, "steps count from 1"
        order, chosen = self.order, list[Prompt]()
        seen: dict[str, int] = {}
        first = (step - 1 if batch is None else batch) * self.prompts_per_round
        for position in range(first, first + self.prompts_per_round):
            prompt = self.train[order.row(position)]
            seen[prompt.id] = times = seen.get(prompt.id, 0) + 1
            chosen.append(prompt if times == 1 else replace(prompt, id=f"{prompt.id}#{times}"))
        return Prompts(step, tuple(chosen))

    def evaluation_sets(self) -> dict[str, Prompts]:
        """Return all prompts of each evaluation set, in file order, with step 0."""
        return {name: Prompts(0, tuple(prompts)) for name, prompts in self.evaluations.items()}
