"""Try the user's functions of a reward on a few rows, before a run imports its libraries, which takes half a minute.

The start of a run tries the whole reward again, with the tokens of the model. Imports no torch.
"""

from contextlib import closing
from itertools import islice

from ppoctl.core.batch.prompts import Prompt
from ppoctl.core.batch.scorer_metrics import require_own_names
from ppoctl.core.batch.scores import Finish
from ppoctl.data.chat import ChatTemplate
from ppoctl.data.index import read_set
from ppoctl.data.rows import single_tables
from ppoctl.data.template import PromptTemplate
from ppoctl.data.tokenizer import light_tokenizer
from ppoctl.models.folder import local_folder
from ppoctl.recipe.schema import Recipe
from ppoctl.rewards.environment_reward import AsOneTurn
from ppoctl.rewards.probe import probe, probed_rows, require_sound
from ppoctl.rewards.python_reward import PythonScorer

_ROWS = 100
"""Number of rows of each source among which a row of each scorer is looked for."""


def require_usable(recipe: Recipe) -> None:
    """Raise RewardError if a function of the reward cannot be imported or called, or returns no score for any answer
    to one of the first rows; or if the metric function of evaluations cannot be called. Without `tokenizer.json`,
    rewards are tried only by the start of a run."""
    if recipe.eval.metrics is not None:
        recipe.eval.metrics.require_sound()
    functions = [scorer for scorer in recipe.reward.singles if isinstance(scorer, PythonScorer)]
    if not functions:
        return
    prompts = _first_prompts(recipe)
    rows = probed_rows(recipe.reward, prompts)
    for table in functions:
        # Each row of a sum has all of its parts; `choose` returns the case of a row.
        own = [row for row in rows if recipe.reward.of_row(row.fields) in (table, recipe.reward)]
        with closing(table.open()) as scorer:
            tried = scorer if recipe.environment is None else AsOneTurn(scorer)
            probed = probe(tried, table, own, _word_ids)
            require_sound(probed, table)
            require_own_names(score for row in probed for score in row.scores.values())


def _word_ids(text: str, finish: Finish) -> tuple[int, ...]:
    """Return one number for each word and for the end token: functions that score tokens need only their number."""
    return tuple(range(len(text.split()) + (finish == "terminated")))


def _first_prompts(recipe: Recipe) -> list[Prompt]:
    """Return the prompts of the first training rows; none if the model has no `tokenizer.json`."""
    folder = local_folder(recipe.model.path)
    tokenizer = None if folder is None else light_tokenizer(folder)
    if folder is None or tokenizer is None:
        return []
    renderer, prompts = PromptTemplate(tokenizer, ChatTemplate.of_folder(folder)), list[Prompt]()
    for source, (name, table) in single_tables(recipe.data.train, name="train").items():
        rows = list(islice(read_set(table, name=name, source=source).first_rows(), _ROWS))
        rendered = renderer.render(rows, table, name=name)
        prompts += (
            Prompt(row.id, prompt.token_ids, prompt.text, row.answer, prompt.messages, row.fields)
            for row, prompt in zip(rows, rendered, strict=True)
        )
    return prompts
