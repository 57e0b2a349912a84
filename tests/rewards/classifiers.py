"""Tiny text classifiers of Hugging Face's format, with a tokenizer of single letters."""

import string
from pathlib import Path

import torch
from transformers import DistilBertConfig, DistilBertForSequenceClassification, DistilBertTokenizerFast

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
MAX_TOKENS = 24


def classifier(folder: Path, *labels: str) -> Path:
    """Write a random DistilBERT with these labels, which reads the first `MAX_TOKENS` tokens of a text."""
    folder.mkdir(parents=True)
    letters = [*string.ascii_lowercase, *string.digits, *string.punctuation]
    tokens = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters)]
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", "utf-8")
    tokenizer = DistilBertTokenizerFast.from_pretrained(folder, model_max_length=MAX_TOKENS)
    sizes = {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": MAX_TOKENS}
    names = {"id2label": dict(enumerate(labels)), "label2id": {label: n for n, label in enumerate(labels)}}
    torch.manual_seed(3)
    config = DistilBertConfig(vocab_size=len(tokens), initializer_range=0.4, **sizes, **names)
    DistilBertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
