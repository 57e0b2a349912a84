"""A reward that a model gives: one with a head in place of logits, and a tokenizer of its own. It never changes.

    prompt, response --its own template--> text --its own tokenizer--> ids --its head, at the last of them--> score

The recipe imports this file, so the model itself is opened by whoever places it (`ppoctl.wire`).
"""

from typing import Annotated, Literal

from ppoctl.batch.scores import Scorer
from ppoctl.recipe_table import RESULTS, AtLeastOne, ParallelTable
from ppoctl.rewards.table import RewardModels, ScorerTable, no_models

USUAL_TOKENS = 4096
"""Most tokens of a text where the table does not say, and the model has as many positions."""


class ModelScorer(ScorerTable):
    """Score that the head of a reward model gives at the last token of the prompt with its response, or the
    probability of one of its labels."""

    kind: Annotated[Literal["model"], RESULTS]
    """A reward model scores."""
    path: Annotated[str, RESULTS]
    """Hugging Face folder (a relative path starts at the recipe file) or hub id of a ...ForSequenceClassification, or
    a folder that `ppoctl convert-ckpt` made of a trained critic. A run keeps its reward models."""
    label: Annotated[str | None, RESULTS] = None
    """Label whose probability is the score; absent: the head has one output, which is the score."""
    template: Annotated[Literal["own", "text"], RESULTS] = "own"
    """What the model reads. own: its own chat template over the messages, with the response as the assistant's turn;
    text: the prompt as the actor reads it, and the response behind it."""
    max_tokens: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Most tokens of a text, and of all texts that are read at once; a longer text has no score. Absent: as many as
    the model has positions, at most 4096."""
    dtype: Annotated[Literal["float32", "bfloat16"], RESULTS] = "bfloat16"
    """Dtype of weights and activations."""
    engine: Annotated[Literal["megatron", "vllm"], RESULTS] = "megatron"
    """What runs the model. megatron: Megatron-Core, as it runs the critic; vllm: vLLM, as it runs classifiers, in one
    process. The head computes in float32."""
    parallel: ParallelTable | None = None
    """Parallel layout; absent: one process."""

    def open(self, models: RewardModels = no_models) -> Scorer:
        """A scorer that collects texts and has the model score them together."""
        from ppoctl.rewards.batched_model import CollectingScorer

        return CollectingScorer(models(self))
