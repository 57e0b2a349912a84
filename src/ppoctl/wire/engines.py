"""The real engines: Megatron-Core, vLLM and child processes, plugged into the sockets."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ppoctl.data.source import PromptSource
from ppoctl.data.template import PromptTemplate, load_tokenizer
from ppoctl.ports import Generator, Scorer
from ppoctl.recipe.role_model import model_of
from ppoctl.recipe.schema import Recipe
from ppoctl.rewards.probe import probe, require_sound
from ppoctl.wire.processes import Placed, Say, place
from ppoctl.wire.sockets import Sockets

if TYPE_CHECKING:
    from ppoctl.engines.vllm import VllmSettings
    from ppoctl.weights.sync import TrainerSide

PROBED_ROWS = 4
"""Gold answers are tried on so many rows before the first step."""


def read_questions(recipe: Recipe) -> PromptSource:
    """All prompts of the recipe, rendered and checked."""
    template = PromptTemplate(load_tokenizer(recipe.model.path))
    return PromptSource.load(recipe.data, recipe.rollout, template, seed=recipe.seed)


def open_scorer(recipe: Recipe, questions: PromptSource) -> Scorer:
    """The reward's scorer, after gold answers have won over wrong, empty and truncated ones."""
    scorer = recipe.reward.open()
    with closed_if_it_fails(scorer):
        require_sound(probe(scorer, recipe.reward, questions.train[:PROBED_ROWS]))
    return scorer


@contextmanager
def closed_if_it_fails(opened: Scorer | Sockets) -> Iterator[None]:
    """Context of what is done between opening something and handing it on."""
    try:
        yield
    except BaseException:
        opened.close()
        raise


def set_threads(recipe: Recipe) -> None:
    """Set the CPU threads of this process, of trainer and generator alike."""
    threads = recipe.cluster.threads or len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)


def build_engines(recipe: Recipe, questions: PromptSource, scorer: Scorer, *, model_digest: str) -> Sockets:
    """Real engines, none of them at a state yet. Nothing heavy is built before it is first asked."""
    from ppoctl.engines.megatron.factory import trainer_settings
    from ppoctl.engines.megatron.trainer import MegatronActor, MegatronCritic, trainer_side
    from ppoctl.model.folder import model_folder

    of_actor, of_critic = (trainer_settings(recipe, role) for role in ("actor", "critic"))
    placed = place(recipe, of_actor, of_critic)
    settings = _vllm_settings(recipe, str(model_folder(recipe.model.path)))
    actor = MegatronActor(of_actor, placed.actor)
    return Sockets(
        actor=actor,
        critic=MegatronCritic(of_critic, placed.critic),
        generator=lambda actor_at, say, logs: _generator(
            replace(settings, logs=logs), placed, trainer_side(actor, actor_at), say
        ),
        scorer=scorer,
        questions=questions,
        # The digest is of both models' files. A dtype is the role's own.
        source_digests={role: f"{model_digest}:{model_of(recipe, role).dtype}" for role in ("actor", "critic")},
        close_trainers=placed.close,
    )


def _vllm_settings(recipe: Recipe, folder: str) -> "VllmSettings":
    from ppoctl.engines.vllm import VllmSettings
    from ppoctl.model.end_tokens import end_token_ids

    new_tokens = max(recipe.rollout.max_new_tokens, recipe.eval.max_new_tokens or 0)
    return VllmSettings(
        model=folder,
        dtype=recipe.model.dtype,
        max_model_len=recipe.rollout.max_prompt_tokens + new_tokens,
        eos_token_ids=end_token_ids(Path(folder)),
        table=recipe.generator,
        sleeps="generator" in recipe.cluster.offload,
    )


def _generator(settings: "VllmSettings", placed: Placed, trainer: "TrainerSide", say: Say) -> Generator:
    from ppoctl.engines.vllm import VllmGenerator

    return VllmGenerator(settings, trainer, placed.generator(settings, say), say)
