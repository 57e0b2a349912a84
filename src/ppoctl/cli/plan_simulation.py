"""`ppoctl plan RECIPE --simulate`: a step on more and more GPUs."""

from typing import TYPE_CHECKING

from ppoctl.cli import render

if TYPE_CHECKING:
    from ppoctl.recipe.schema import Recipe
    from ppoctl.recipe.simulate import SimulatedStep

H200_GIB = 141.0

_SECONDS = [
    ("weights to the engines", "weights_s"),
    ("rollout, engines", "rollout_s"),
    ("engines, waiting for the driver", "asking_s"),
    ("samples, driver's Python", "samples_s"),
    ("reward", "reward_s"),
    ("values and log-probs", "forward_s"),
    ("critic update", "critic_update_s"),
    ("actor update", "actor_update_s"),
    ("rollouts to ranks, answers", "data_s"),
    ("records committed", "commit_s"),
    ("states saved, per step", "save_s"),
    ("step", "step_s"),
    ("of it, work of all GPUs", "scaling_s"),
]


_WORK = {"rollout_s", "forward_s", "critic_update_s", "actor_update_s"}


def show(recipe: "Recipe", gpu_gib: float | None, *, as_json: bool) -> None:
    """Print the simulation. Raises RecipeError when the model is not known here."""
    from ppoctl.errors import RecipeError
    from ppoctl.recipe.assets import model_config
    from ppoctl.recipe.memory.estimate import with_totals
    from ppoctl.recipe.memory.families import decoder_of
    from ppoctl.recipe.simulate import Units, simulate

    decoder = decoder_of(model_config(recipe))
    if decoder is None:
        raise RecipeError(
            f"`model.path = {recipe.model.path}` is no local folder of a known family: nothing to simulate with",
            hint="name a folder with the model's config.json: --set model.path=FOLDER",
        )
    same = simulate(recipe, decoder, gpu_gib=gpu_gib or H200_GIB)
    if not same:
        raise RecipeError(
            "no number of GPUs from 8 to 1,024 holds whole copies of actor, critic and engines as they are laid out",
            hint="lay them out over powers of two: `tensor`, `pipeline` and `context` of each role",
        )
    growing = simulate(recipe, decoder, gpu_gib=gpu_gib or H200_GIB, growing=True)
    if as_json:
        render.json(
            {"same_step": with_totals(same), "growing_step": with_totals(growing), "units": with_totals(Units())}
        )
        return
    render.heading(f"{recipe.name}: the same step on more GPUs")
    render.table(_rows(same), _headers(same))
    render.line()
    render.heading("a step that grows with the GPUs")
    render.table(_rows(growing), _headers(growing))
    render.line()
    render.heading("units")
    render.table([("", name, f"{value:g}", means) for name, value, means in Units().described()])


def _headers(steps: "list[SimulatedStep]") -> list[str]:
    return ["", "GPUs", *(f"{step.gpus:,}" for step in steps)]


def _rows(steps: "list[SimulatedStep]") -> list[list[str]]:
    rows = [["sequences", *(f"{step.sequences:,}" for step in steps)]]
    rows.append(["data ranks of the actor", *(f"{step.data_ranks:,}" for step in steps)])
    rows.append(["engines", *(f"{step.engines:,}" for step in steps)])
    for name, key in (("driver", "driver_bytes"), ("put into its object store", "object_bytes")):
        rows.append([name, *(render.size(getattr(step, key)) for step in steps)])
    for name, key in (("sent to other nodes", "sent_bytes"), ("weights sent to other nodes", "sent_weights_bytes")):
        rows.append([name, *(render.size(getattr(step, key)) for step in steps)])
    rows += [[name, *(_seconds(getattr(step, key)) for step in steps)] for name, key in _SECONDS]
    rows.append(["largest of the rest", *(_largest(step) for step in steps)])
    return [["", *row] for row in rows]


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 10 else f"{value:.2g} s" if value else "-"


def _largest(step: "SimulatedStep") -> str:
    """The longest of what is not work of all GPUs."""
    rest = [(name, key) for name, key in _SECONDS if key in step.costs and key not in _WORK]
    name, _ = max(rest, key=lambda row: step.costs[row[1]])
    return name.split(",")[0].split(" to ")[0]
