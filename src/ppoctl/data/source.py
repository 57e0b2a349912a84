"""Prompts of each step, a pure function of (seed, step). There is no loader, so there is no loader state.

prompts in order of use:   | epoch 0: a permutation of all rows | epoch 1: another one | ...
step s (from 1) takes positions (s - 1) * prompts_per_step ... s * prompts_per_step - 1, over epoch borders too
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ppoctl.batch.prompts import Prompt, Prompts
from ppoctl.data.index import RowSet, digest_of, read_set
from ppoctl.data.order import Order, SourceShare
from ppoctl.data.prompt_set import Counts, Mixed, PromptSet
from ppoctl.data.rows import require_enough, require_in_an_epoch, single_tables, tables_of
from ppoctl.data.template import PromptTemplate
from ppoctl.recipe.schema import DataTable, RolloutTable


@dataclass(frozen=True)
class PromptSource:
    """Prompts of a run: the training set's by step, the evaluation sets' by name."""

    train: Sequence[Prompt]
    evaluations: Mapping[str, Sequence[Prompt]]
    seed: int
    prompts_per_step: int
    digests: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 digests that `run.json` remembers: of `data.train`, `data.eval.NAME` and `tokenizer`."""
    counts: Mapping[str, Counts] = field(default_factory=dict)
    """Numbers of rows by the keys of their tables: `data.train`, `data.eval.NAME`, `data.train.sources.NAME`."""
    rows: Mapping[str, tuple[RowSet, ...]] = field(default_factory=dict)
    """Rows of each set's sources, read and not rendered: of `data.train`, `data.eval.NAME`."""
    shares: tuple[SourceShare, ...] = ()
    """Shares of the training set's sources; empty: it has one."""

    @classmethod
    def load(cls, data: DataTable, rollout: RolloutTable, template: PromptTemplate, *, seed: int) -> "PromptSource":
        """Read and check all datasets of a recipe. Raises DataError."""
        most = rollout.max_prompt_tokens
        sets = {
            name: {
                source: PromptSet(read_set(single, name=its, source=source), single, template, most)
                for source, (its, single) in single_tables(table, name=name).items()
            }
            for name, table in tables_of(data).items()
        }
        joined = {name: Mixed(tuple(inside.values())) for name, inside in sets.items()}
        found = cls(
            train=joined.pop("train"),
            evaluations={name.removeprefix("eval."): prompts for name, prompts in joined.items()},
            seed=seed,
            prompts_per_step=rollout.prompts_per_step,
            digests={
                **{
                    f"data.{name}": digest_of({source: each.rows for source, each in inside.items()})
                    for name, inside in sets.items()
                },
                "tokenizer": template.digest,
            },
            counts={f"data.{each.rows.name}": each.counts for inside in sets.values() for each in inside.values()},
            rows={f"data.{name}": tuple(each.rows for each in inside.values()) for name, inside in sets.items()},
            shares=tuple(SourceShare(len(each), each.weight) for each in sets["train"].values()),
        )
        for each in sets["train"].values():
            require_in_an_epoch(each.rows.name, len(each), each.weight)
        require_enough(found.order.epoch_rows, rollout.prompts_per_step)
        return found

    @property
    def order(self) -> Order:
        """Order in which the training set's rows come."""
        return Order(self.shares or (SourceShare(len(self.train)),), self.seed)

    def prompts_for(self, step: int) -> Prompts:
        """Prompts of one step, counted from 1. Ids are unique within a step: a prompt that comes twice (before and
        after an epoch border, or by its weight) is `ID` and `ID#2`."""
        assert step >= 1, "steps count from 1"
        order, chosen = self.order, list[Prompt]()
        seen: dict[str, int] = {}
        first = (step - 1) * self.prompts_per_step
        for position in range(first, first + self.prompts_per_step):
            prompt = self.train[order.row(position)]
            seen[prompt.id] = times = seen.get(prompt.id, 0) + 1
            chosen.append(prompt if times == 1 else replace(prompt, id=f"{prompt.id}#{times}"))
        return Prompts(step, tuple(chosen))

    def evaluation_sets(self) -> dict[str, Prompts]:
        """All rows of each evaluation set, in the dataset's order, as step 0."""
        return {name: Prompts(0, tuple(prompts)) for name, prompts in self.evaluations.items()}
