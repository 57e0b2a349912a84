"""The head of a model: the output layer after the last hidden state."""

from typing import Literal

Head = Literal["token", "value"]
"""token: one logit per id of the vocabulary, as in a language model. value: one number per token, as in a critic or a
reward model."""
