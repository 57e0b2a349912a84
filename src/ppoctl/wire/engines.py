"""The real engines: Megatron-Core, vLLM and child processes, plugged into the sockets."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ppoctl.activity import loading, preparing
from ppoctl.batch.scores import Finish
from ppoctl.data.source import PromptSource
from ppoctl.data.template import PromptTemplate, load_tokenizer
from ppoctl.ports import Generator, Scorer
from ppoctl.recipe.origins import dotted
from ppoctl.recipe.parallel import reward_models
from ppoctl.recipe.role_model import model_of
from ppoctl.recipe.schema import Recipe
from ppoctl.rewards.probe import Encode, ProbeRow, probe, probed_rows, require_sound
from ppoctl.rewards.rows import RowCheck
from ppoctl.stages.reward import require_own_names
from ppoctl.wire.components import Components
from ppoctl.wire.prestart import cpu_threads, vllm_settings
from ppoctl.wire.processes import Placed, Say, place
from ppoctl.wire.reward_models import RewardModelsOf, settings_of
from ppoctl.wire.sources import reward_digest

if TYPE_CHECKING:
    from ppoctl.engines.vllm.settings import VllmSettings
    from ppoctl.weights.sync import TrainerAt


def read_questions(recipe: Recipe) -> PromptSource:
    """All prompts of the recipe, rendered and checked."""
    with loading("the tokenizer"):
        template = PromptTemplate(load_tokenizer(recipe.model.path))
    with preparing("reading data"):
        return PromptSource.load(recipe.data, recipe.rollout, template, seed=recipe.seed)


def place_roles(recipe: Recipe) -> Placed:
    """Where actor, critic, generator and reward models run. Nothing is started."""
    with loading("Megatron-Core"):
        from ppoctl.engines.megatron.factory import trainer_settings

    trained = {role: trainer_settings(recipe, role) for role in ("actor", "critic")}
    return place(recipe, {**trained, **{dotted(key): settings_of(recipe, key) for key in reward_models(recipe)}})


def open_scorer(recipe: Recipe, questions: PromptSource, placed: Placed) -> Scorer:
    """The reward's scorer, after gold answers have won over wrong, empty and truncated ones. Raises RewardError where
    some rows cannot be scored, and where the metric function of evaluations cannot be called."""
    if len(recipe.reward.singles) > 1:
        for key, sets in questions.rows.items():
            check = RowCheck(recipe.reward, key)
            for row, times in (found for rows in sets for found in rows.different_rows()):
                check.see(row.id, row.answer, row.fields, times)
            check.require()
    if recipe.eval.metrics is not None:
        recipe.eval.metrics.require_sound()
    with preparing("trying the reward"), opened_and_probed(recipe, questions, placed) as (scorer, probed):
        require_sound(probed, recipe.reward)
        require_own_names(score for row in probed for score in row.scores.values())
    return scorer


@contextmanager
def opened_and_probed(
    recipe: Recipe, questions: PromptSource, placed: Placed
) -> Iterator[tuple[Scorer, list[ProbeRow]]]:
    """The reward's scorer, and what it said of the answers that it was tried on; closed if the context fails. Reward
    models have then left the devices, so that engines which start find them free."""
    models = RewardModelsOf(recipe, placed.rewards)
    scorer = recipe.reward.open(models)
    with closed_if_it_fails(scorer):
        probed = probe(scorer, recipe.reward, probed_rows(recipe.reward, questions.train), encoder(recipe))
        models.leave()
        yield scorer, probed


def encoder(recipe: Recipe) -> Encode:
    """The way from a text to the ids that the actor's response would have."""
    from ppoctl.model.end_tokens import end_token_ids
    from ppoctl.model.folder import model_folder

    tokenizer, end = load_tokenizer(recipe.model.path), end_token_ids(model_folder(recipe.model.path))[:1]

    def encode(text: str, finish: Finish) -> tuple[int, ...]:
        readable = text.encode(errors="replace").decode()  # tokenizers takes no lone surrogates
        ids = tokenizer(readable, add_special_tokens=False, verbose=False)["input_ids"]
        return (*ids, *(end if finish == "terminated" else ()))

    return encode


@contextmanager
def closed_if_it_fails(opened: Scorer | Components | Placed) -> Iterator[None]:
    """Context of what is done between opening something and handing it on."""
    try:
        yield
    except BaseException:
        opened.close()
        raise


def set_threads(recipe: Recipe) -> None:
    """Set the CPU threads of this process."""
    threads = cpu_threads(recipe)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)


def open_engines(recipe: Recipe, questions: PromptSource, digests: Mapping[str, str]) -> Components:
    """Real engines, none of them at a state yet, and a scorer that was tried; `digests` of what the run is made from.
    Nothing heavy is built before it is first asked, but for reward models."""
    placed = place_roles(recipe)
    with closed_if_it_fails(placed):
        scorer = open_scorer(recipe, questions, placed)
        with closed_if_it_fails(scorer):
            return build_engines(recipe, questions, scorer, placed, digests)


def build_engines(
    recipe: Recipe, questions: PromptSource, scorer: Scorer, placed: Placed, digests: Mapping[str, str]
) -> Components:
    """Real engines where they are placed, with this scorer; see `open_engines`."""
    from ppoctl.engines.megatron.factory import trainer_settings
    from ppoctl.engines.megatron.trainer import MegatronActor, MegatronCritic, trainer_side
    from ppoctl.model.folder import model_folder

    of_actor, of_critic = (trainer_settings(recipe, role) for role in ("actor", "critic"))
    settings = vllm_settings(recipe, model_folder(recipe.model.path))
    actor = MegatronActor(of_actor, placed.actor)
    return Components(
        actor=actor,
        critic=MegatronCritic(of_critic, placed.critic),
        generator=lambda actor_at, say, logs: _generator(
            replace(settings, logs=logs), placed, trainer_side(actor, actor_at), say
        ),
        scorer=scorer,
        prompts=questions,
        # The digest is of both models' files. A dtype is the role's own.
        source_digests={role: f"{digests['model']}:{model_of(recipe, role).dtype}" for role in ("actor", "critic")},
        reward_digest=reward_digest(digests),
        rows={name: counts.as_dict() for name, counts in questions.counts.items()},
        close_trainers=placed.close,
        prestart=placed.prestart,
    )


def _generator(settings: "VllmSettings", placed: Placed, trainer_at: "TrainerAt", notify: Say) -> Generator:
    from ppoctl.engines.vllm.generator import VllmGenerator

    return VllmGenerator(settings, trainer_at, placed.generator(settings, notify), notify)
