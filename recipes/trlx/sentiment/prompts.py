"""Write the prompts of trlX's sentiment examples: `python prompts.py $PPOCTL_DATA/imdb` (it requires `datasets`).

train.jsonl has the first four words of each review of IMDB, eval.jsonl the one prompt that the examples evaluate.
"""

import json
import sys
from pathlib import Path

EVALUATED = "I don't know much about Hungarian underground"


def first_words(review):
    """Return the first four words of a review, separated by single spaces."""
    return " ".join(review.split()[:4])


def write(prompts, file):
    """Write one row for each prompt."""
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), "utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    from datasets import load_dataset

    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    write(map(first_words, load_dataset("stanfordnlp/imdb", split="train+test")["text"]), folder / "train.jsonl")
    write([EVALUATED], folder / "eval.jsonl")
