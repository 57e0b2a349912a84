"""A reward that a reward model computes. The model has its own tokenizer, and a head in place of the output layer for
logits. The model is never trained.

    prompt, response --its own template--> text --its own tokenizer--> ids --its head, at the last id--> score

The recipe imports this module, so this module must not open the model: `ppoctl.run.wire` opens it when it assigns
devices.
"""

from typing import Annotated, Literal

from ppoctl.core.batch.scores import Scorer
from ppoctl.core.recipe_table import RESULTS, AtLeastOne, ParallelTable
from ppoctl.rewards.scorer_table import RewardModels, ScorerTable, no_models

USUAL_TOKENS = 4096
"""Default maximum number of tokens of a text, if the model has at least that many positions."""


class ModelScorer(ScorerTable):
    """Score that the head of a reward model computes at the last token of prompt and response, or the probability of
    one of the model's labels."""

    kind: Annotated[Literal["model"], RESULTS]
    """A reward model scores the responses."""
    path: Annotated[str, RESULTS]
    """Hugging Face folder (a relative path starts at the recipe file) or hub id of a ...ForSequenceClassification
    model, or a folder that `ppoctl convert-ckpt` wrote from a trained critic. A run cannot change its reward
    models."""
    label: Annotated[str | None, RESULTS] = None
    """Label whose probability is the score; absent: the head has one output, which is the score."""
    template: Annotated[Literal["own", "text"], RESULTS] = "own"
    """Text that the model reads. own: the reward model's chat template over the messages, with the response as the
    assistant's turn; text: the prompt as the actor reads it, followed by the response."""
    max_tokens: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Maximum number of tokens of one text, and of one batch of texts. A longer text has no score. Absent: the number
    of positions of the model, at most 4096."""
    dtype: Annotated[Literal["float32", "bfloat16"], RESULTS] = "bfloat16"
    """Dtype of weights and activations."""
    engine: Annotated[Literal["megatron", "vllm"], RESULTS] = "megatron"
    """Engine that runs the model. megatron: Megatron-Core, in the same way as the critic; vllm: vLLM as a classifier,
    in one process. The head computes in float32."""
    parallel: ParallelTable | None = None
    """Parallel layout; absent: one process."""

    def open(self, models: RewardModels = no_models) -> Scorer:
        """Return a scorer that collects texts and scores them together with the model."""
        from ppoctl.rewards.batched_model import CollectingScorer

        return CollectingScorer(models(self))
