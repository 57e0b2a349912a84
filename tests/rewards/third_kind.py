"""An additional kind of reward, in one file and the line below `if __name__`.

python third_kind.py FOLDER   reads a recipe with this kind, probes it on FOLDER/rows.jsonl, scores, and prints JSON
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from ppoctl.core.batch.scores import ScoreRequest
from ppoctl.core.recipe_table import RESULTS
from ppoctl.rewards import reward_kinds
from ppoctl.rewards.function import RewardValue, ScorerSpec
from ppoctl.rewards.scorer_table import ProcessScorer


class FewWordsScorer(ProcessScorer):
    """Reward 1 if the response has at most the number of words that the row and the recipe allow."""

    kind: Annotated[Literal["few_words"], RESULTS]
    """Reward for short responses; no ground truth."""
    at_most: Annotated[int, RESULTS] = 5
    """Maximum number of words."""

    @property
    def scores_by(self) -> ScorerSpec:
        return ScorerSpec("third_kind:score", {"at_most": self.at_most})


def score(request: ScoreRequest, *, at_most: int) -> RewardValue:
    allowed: Any = request.fields["limits.words"]
    assert request.messages[-1].content.startswith("Say ")
    assert request.truth is None
    return RewardValue(float(len(request.response.split()) <= min(at_most, allowed)))


RECIPE = """
[data.train]
format = "columns"
path   = "{folder}/rows.jsonl"
prompt = "q"
fields = ["limits.words"]
[reward]
kind    = "few_words"
workers = 2
"""


def main(folder: Path) -> dict[str, Any]:
    from ppoctl.core.batch.prompts import Prompt
    from ppoctl.core.errors import RecipeError
    from ppoctl.data.framing import Framing
    from ppoctl.data.rows import read_rows
    from ppoctl.recipe.loading.load import load
    from ppoctl.rewards.probe import probe, require_sound

    file = folder / "few_words.toml"
    file.write_text(RECIPE.format(folder=folder))
    quickstart = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
    recipe = load([quickstart, file]).recipe
    train = recipe.data.train
    framing = Framing(train, name="train")
    prompts = [
        Prompt(row.id, (), "", row.answer, framing.chat(row), row.fields) for row in read_rows(train, name="train")
    ]
    scorer = recipe.reward.open()
    try:
        probed = probe(scorer, recipe.reward, prompts, lambda text, _: tuple(range(len(text.split()))))
        requests = [
            ScoreRequest.about(prompts[0], text, "terminated") for text in ("yes", "yes it is", "a b c d e f")
        ]
        futures = [scorer.submit(request) for request in requests]
        scores = [future.result().value for future in futures]
    finally:
        scorer.close()
    require_sound(probed, recipe.reward)
    return {
        "reward": recipe.reward.model_dump(exclude_none=True),
        "probed": [f"{row.id.split('-')[0]}: {row.describe()}" for row in probed],
        "scores": scores,
        "unknown": _refused(lambda: load([quickstart, file], ["reward.kind=nonsense"]), RecipeError).split(", ")[0],
    }


def _refused(do: Any, kind: type[Exception]) -> str:
    try:
        do()
    except kind as error:
        return str(error)
    return "not refused"


if __name__ == "__main__":
    reward_kinds.SCORERS = (FewWordsScorer, *reward_kinds.SCORERS)
    sys.modules["third_kind"] = sys.modules["__main__"]
    print(json.dumps(main(Path(sys.argv[1]))))
