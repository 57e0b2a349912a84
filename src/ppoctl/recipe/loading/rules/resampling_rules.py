"""Rules about rows that are sampled again (PF-PPO). See `all_rules`."""

from collections.abc import Iterator

from ppoctl.algorithms.stages.resample_table import NoResampling
from ppoctl.core.finding import Finding, conflict
from ppoctl.core.key_path import KeyPath
from ppoctl.recipe.schema import Recipe

_KIND: KeyPath = ("ppo", "resample", "kind")
_OFF = "--set ppo.resample.kind=none"


def check_resampling_fits(recipe: Recipe) -> Iterator[Finding]:
    """Check the settings that resampling requires."""
    table, advantages = recipe.ppo.resample, recipe.ppo.advantages
    if isinstance(table, NoResampling):
        return
    if not advantages.trains_critic:
        yield conflict(
            "rows are sampled again only with a critic, but the advantages train none",
            (_KIND, ("ppo", "advantages", "kind")),
            _OFF,
        )
    if recipe.rollout.groups is not None:
        yield conflict(
            "the rows of chosen groups cannot be sampled again",
            (_KIND, ("rollout", "groups")),
            _OFF,
        )
    if table.order == "before_whitening" and not advantages.whiten:
        yield conflict(
            "rows are sampled before the advantages are whitened, but the advantages are not whitened",
            (("ppo", "resample", "order"), ("ppo", "advantages", "whiten")),
            "--set ppo.resample.order=after_whitening",
        )
