"""Construction of the real components: Megatron-Core trainers, vLLM engines and scorer processes."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

import torch

from ppoctl.algorithms.role_model import model_of, reward_models
from ppoctl.algorithms.roles import POLICY, head_of
from ppoctl.core.activity import loading, preparing
from ppoctl.core.batch.scorer_metrics import require_own_names
from ppoctl.core.batch.scores import Finish
from ppoctl.core.key_path import dotted
from ppoctl.core.ports import Dialogue, Environments, Generator, Scorer
from ppoctl.data.chat import ChatTemplate
from ppoctl.data.rows import require_enough
from ppoctl.data.source import PromptSource
from ppoctl.data.template import PromptTemplate
from ppoctl.data.tokenizer import load_tokenizer
from ppoctl.data.tokenizer_check import require_ids_as_stored
from ppoctl.models.folder import model_folder
from ppoctl.models.head import Head
from ppoctl.recipe.schema import Recipe
from ppoctl.rewards.environment_reward import AsOneTurn
from ppoctl.rewards.probe import Encode, ProbeRow, probe, probed_rows, require_sound
from ppoctl.rewards.reward_rows import RowCheck
from ppoctl.run.wire.components import Components
from ppoctl.run.wire.placed_processes import Placed, Say, place
from ppoctl.run.wire.prestart import cpu_threads, vllm_settings
from ppoctl.run.wire.reward_models import RewardModelsOf, settings_of
from ppoctl.run.wire.sources import reward_digest

if TYPE_CHECKING:
    from ppoctl.engines.vllm.vllm_settings import VllmSettings
    from ppoctl.engines.weights.sync import TrainerAt


def read_prompts(recipe: Recipe, clock: datetime | None = None) -> PromptSource:
    """Return the source of all prompts of the recipe, rendered and checked. `clock` is the local time that chat
    templates of the run read; None: now."""
    template = _template(recipe, clock)
    folder = model_folder(recipe.model.path)
    if (folder / "tokenizer.json").is_file():
        require_ids_as_stored(folder, lambda text: template.token_ids([text])[0][len(template.opening) :])
    with preparing("reading data"):
        return prompt_source(recipe, template)


def prompt_source(recipe: Recipe, template: PromptTemplate) -> PromptSource:
    """Return the source of all prompts of the recipe, rendered with a template. Raises DataError."""
    rollout = recipe.rollout
    source = PromptSource.load(
        recipe.data,
        template,
        max_prompt_tokens=rollout.max_prompt_tokens,
        prompts_per_round=rollout.prompts_per_round,
        seed=recipe.seed,
        environment_of=recipe.environment_of,
    )
    require_enough(source.order.epoch_rows, rollout.prompts_per_round, rollout.round_key)
    return source


def _template(recipe: Recipe, clock: datetime | None) -> PromptTemplate:
    with loading("the tokenizer"):
        tokenizer = load_tokenizer(recipe.model.path)
        return PromptTemplate(tokenizer, ChatTemplate.of_folder(model_folder(recipe.model.path), clock))


def place_roles(recipe: Recipe) -> Placed:
    """Return the placement of trained roles, generator (vLLM) and reward models. This function starts no process."""
    with loading("Megatron-Core"):
        from ppoctl.engines.megatron.factory import trainer_settings

    trained = {role: trainer_settings(recipe, role) for role in recipe.trained}
    return place(recipe, {**trained, **{dotted(key): settings_of(recipe, key) for key in reward_models(recipe)}})


def open_scorer(recipe: Recipe, prompt_source: PromptSource, placed: Placed) -> Scorer:
    """Return the scorer, after checking that gold answers score higher than wrong, empty and truncated answers.

    Raises RewardError if some rows cannot be scored, or if the metric function of evaluations cannot be called.
    """
    if recipe.reward.reads_truth or len(recipe.reward.singles) > 1:
        for key, sets in prompt_source.rows.items():
            check = RowCheck(recipe.reward, key)
            for row, times in (rows_and_counts for rows in sets for rows_and_counts in rows.different_rows()):
                check.see(row.id, row.answer, row.fields, times)
            check.require()
    if recipe.eval.metrics is not None:
        recipe.eval.metrics.require_sound()
    with preparing("trying the reward"), opened_and_probed(recipe, prompt_source, placed) as (scorer, probed):
        require_sound(probed, recipe.reward)
        require_own_names(score for row in probed for score in row.scores.values())
    return scorer


@contextmanager
def opened_and_probed(
    recipe: Recipe, prompt_source: PromptSource, placed: Placed
) -> Iterator[tuple[Scorer, list[ProbeRow]]]:
    """Context with the scorer and the scores of the probe answers. The scorer is closed if the context fails.

    Reward models are offloaded after the probe, because the engines that start later require free devices.
    """
    models = RewardModelsOf(recipe, placed.rewards, prompt_source.clock)
    scorer = recipe.reward.open(models)
    with closed_if_it_fails(scorer):
        rows = probed_rows(recipe.reward, prompt_source.train)
        probed = probe(tried_scorer(recipe, scorer), recipe.reward, rows, encoder(recipe))
        models.leave()
        yield scorer, probed


def tried_scorer(recipe: Recipe, scorer: Scorer) -> Scorer:
    """Return the scorer of answers that are tried before a run."""
    return scorer if recipe.environment is None else AsOneTurn(scorer)


def encoder(recipe: Recipe) -> Encode:
    """Return a function that maps a text to the ids that the text would have as a response of the policy."""
    from ppoctl.models.end_tokens import end_token_ids
    from ppoctl.models.folder import model_folder

    tokenizer, end = load_tokenizer(recipe.model.path), end_token_ids(model_folder(recipe.model.path))[:1]

    def encode(text: str, finish: Finish) -> tuple[int, ...]:
        readable = text.encode(errors="replace").decode()  # the library `tokenizers` rejects lone surrogates
        ids = tokenizer(readable, add_special_tokens=False, verbose=False)["input_ids"]
        return (*ids, *(end if finish == "terminated" else ()))

    return encode


@contextmanager
def closed_if_it_fails(opened: Scorer | Components | Placed) -> Iterator[None]:
    """Context that closes `opened` if the block fails. After the block, the owner of `opened` closes it."""
    try:
        yield
    except BaseException:
        opened.close()
        raise


def set_threads(recipe: Recipe) -> None:
    """Set the number of CPU threads of this process."""
    threads = cpu_threads(recipe)
    # For child processes, which inherit it. This process has loaded torch already, so it needs the call.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)


def open_engines(
    recipe: Recipe, prompt_source: PromptSource, digests: Mapping[str, str], *, is_profiled: bool = False
) -> Components:
    """Return the components of a run: trainers and engines without a loaded state, and a scorer that was checked.

    `digests` are the digests of the sources of the run. Only reward models are loaded here; everything else is loaded
    on first use. With `is_profiled`, engines record a profile from their first request on.
    """
    placed = place_roles(recipe)
    with closed_if_it_fails(placed):
        scorer = open_scorer(recipe, prompt_source, placed)
        with closed_if_it_fails(scorer):
            return build_engines(recipe, prompt_source, scorer, placed, digests, is_profiled=is_profiled)


def build_engines(
    recipe: Recipe,
    prompt_source: PromptSource,
    scorer: Scorer,
    placed: Placed,
    digests: Mapping[str, str],
    *,
    is_profiled: bool = False,
) -> Components:
    """Return the components of a run with this placement and scorer; see `open_engines`."""
    from ppoctl.engines.megatron.factory import trainer_settings
    from ppoctl.engines.megatron.trainer import MegatronActor, MegatronCritic, trainer_side
    from ppoctl.models.folder import model_folder

    settings = replace(vllm_settings(recipe, model_folder(recipe.model.path)), is_profiled=is_profiled)
    environments, eval_environments, dialogue = _conversations(recipe, prompt_source.clock)
    of_head: dict[Head, type[MegatronActor | MegatronCritic]] = {"token": MegatronActor, "value": MegatronCritic}
    trainers = {
        role: of_head[head_of(role)](trainer_settings(recipe, role), ranks) for role, ranks in placed.trained.items()
    }
    policy = trainers[POLICY]
    assert isinstance(policy, MegatronActor), "the policy has a token head"
    return Components(
        trainers=trainers,
        generator=lambda actor_at, say, logs: _generator(
            replace(settings, logs=logs), placed, trainer_side(policy, actor_at), say
        ),
        scorer=scorer,
        prompts=prompt_source,
        # One digest covers the files of all models; each role has its own dtype.
        source_digests={role: source_digest(recipe, role, digests["model"]) for role in recipe.trained},
        environments=environments,
        eval_environments=eval_environments,
        dialogue=dialogue,
        reward_digest=reward_digest(digests),
        rows={name: counts.as_dict() for name, counts in prompt_source.counts.items()},
        close_trainers=placed.close,
        prestart=placed.prestart,
        processes=placed.processes,
    )


def _conversations(
    recipe: Recipe, clock: datetime | None
) -> tuple[Environments | None, Environments | None, Dialogue | None]:
    """Return the environments of rollouts and of evaluations, which are the same if their tables are equal, and the
    dialogue that they require. Processes start when the first episode is opened."""
    tables = recipe.environment, recipe.eval_environment
    if tables == (None, None):
        return None, None, None
    from ppoctl.data.dialogue import TemplateDialogue
    from ppoctl.environments.environment_pool import EnvironmentPool
    from ppoctl.models.end_tokens import end_token_ids
    from ppoctl.models.folder import model_folder

    training, evaluation = (None if table is None else EnvironmentPool(table) for table in tables)
    dialogue = TemplateDialogue(_template(recipe, clock), end_token_ids(model_folder(recipe.model.path)))
    return training, training if tables[0] == tables[1] else evaluation, dialogue


def source_digest(recipe: Recipe, role: str, of_model: str) -> str:
    """Return the digest of the first weights of a role: of the model, and of a value head on the policy's model."""
    digest, head = f"{of_model}:{model_of(recipe, role).dtype}", recipe.value_head
    return digest if head is None or role != POLICY else f"{digest}:{head.kind} head, {head.layers_copied} layers"


def _generator(settings: "VllmSettings", placed: Placed, trainer_at: "TrainerAt", notify: Say) -> Generator:
    from ppoctl.engines.vllm.generator import VllmGenerator

    return VllmGenerator(settings, trainer_at, placed.generator(settings, notify), notify)
