"""Prompts of each step, a pure function of (seed, step). There is no loader, so there is no loader state.

prompts in order of use:   | epoch 0: a permutation of all rows | epoch 1: another one | ...
step s (from 1) takes positions (s - 1) * prompts_per_step ... s * prompts_per_step - 1, over epoch borders too
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ppoctl.batch.prompts import Prompt, Prompts
from ppoctl.batch.seeds import derive_seed
from ppoctl.data.rows import digest_of, read_datasets, require_enough
from ppoctl.data.template import PromptTemplate, require_fits
from ppoctl.recipe.schema import DataTable, RolloutTable


@dataclass(frozen=True)
class PromptSource:
    """Prompts of a run: the training set's by step, the evaluation sets' by name."""

    train: tuple[Prompt, ...]
    evaluations: Mapping[str, tuple[Prompt, ...]]
    seed: int
    prompts_per_step: int
    digests: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 digests that `run.json` remembers: of `data.train`, `data.eval.NAME` and `tokenizer`."""

    @classmethod
    def load(cls, data: DataTable, rollout: RolloutTable, template: PromptTemplate, *, seed: int) -> "PromptSource":
        """Read, render and check all datasets of a recipe. Raises DataError."""
        datasets = read_datasets(data)
        require_enough(len(datasets["train"]), rollout.prompts_per_step)
        prompts: dict[str, tuple[Prompt, ...]] = {}
        for name, rows in datasets.items():
            table = data.train if name == "train" else data.eval[name.removeprefix("eval.")]
            rendered = template.render(rows, table, name=name)
            require_fits(rows, rendered, max_prompt_tokens=rollout.max_prompt_tokens, name=name)
            prompts[name] = tuple(
                Prompt(row.id, prompt.token_ids, prompt.text, row.answer, prompt.messages, row.fields)
                for row, prompt in zip(rows, rendered, strict=True)
            )
        return cls(
            train=prompts.pop("train"),
            evaluations={name.removeprefix("eval."): rows for name, rows in prompts.items()},
            seed=seed,
            prompts_per_step=rollout.prompts_per_step,
            digests={
                **{f"data.{name}": digest_of(rows) for name, rows in datasets.items()},
                "tokenizer": template.digest,
            },
        )

    def prompts_for(self, step: int) -> Prompts:
        """Prompts of one step, counted from 1. Ids are unique within a step: a prompt that comes twice (before and
        after an epoch border) is `ID` and `ID#2`."""
        assert step >= 1, "steps count from 1"
        num_rows = len(self.train)
        chosen: list[Prompt] = []
        seen: dict[str, int] = {}
        first = (step - 1) * self.prompts_per_step
        for position in range(first, first + self.prompts_per_step):
            epoch, offset = divmod(position, num_rows)
            prompt = self.train[_permutation(self.seed, epoch, num_rows)[offset]]
            seen[prompt.id] = times = seen.get(prompt.id, 0) + 1
            chosen.append(prompt if times == 1 else replace(prompt, id=f"{prompt.id}#{times}"))
        return Prompts(step, tuple(chosen))

    def evaluation_sets(self) -> dict[str, Prompts]:
        """All rows of each evaluation set, in the dataset's order, as step 0."""
        return {name: Prompts(0, rows) for name, rows in self.evaluations.items()}


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, num_rows: int) -> tuple[int, ...]:
    """A random order of the rows. Sorting by hash depends on no library's generator, and so on no version of one.
    Cached because it costs some microseconds a row, and neighbouring steps share it."""
    return tuple(sorted(range(num_rows), key=lambda row: (derive_seed(seed, "prompts", epoch, row), row)))
