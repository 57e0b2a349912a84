"""The reward of trlX's sentiment examples: the probability that a classifier gives to a positive review.

[reward]
kind     = "python"
function = "sentiment/reward.py:positive"
options  = { classifier = "FOLDER" }   # optional; default: DistilBERT, fine-tuned on IMDB
"""

from functools import cache


def positive(sample, classifier="lvwerra/distilbert-imdb", label="POSITIVE"):
    """Return the probability of the label for prompt and response, without the chat template. `classifier` is the
    folder or the hub id of a `...ForSequenceClassification`. A text is truncated to the length that it reads."""
    torch, tokenizer, model = _loaded(classifier)
    text = "".join(message.content for message in sample.messages) + sample.response
    # One text at a time: the rounding of a padded batch would depend on its other texts.
    tokens = tokenizer(text, truncation=True, return_tensors="pt")
    with torch.inference_mode():
        logits = model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).logits
    return logits.softmax(dim=-1)[0, model.config.label2id[label]].item()


@cache
def _loaded(classifier):
    """Load tokenizer and model, once in each scorer process, on the CPU: the GPUs belong to the roles of the run."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.set_num_threads(1)  # the key `workers` sets the number of scorer processes
    model = AutoModelForSequenceClassification.from_pretrained(classifier, dtype=torch.float32)
    return torch, AutoTokenizer.from_pretrained(classifier), model.eval()
