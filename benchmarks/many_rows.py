"""Seconds and memory until a run's prompts are loaded, for a large data set.

    python benchmarks/many_rows.py            # 1.79 million rows that repeat 17,400 prompts, as in DAPO-Math
    python benchmarks/many_rows.py --rows 100000

Writes a parquet file in verl's format into a temporary folder. Then, in a separate process for `duplicates = "drop"`
and for `"keep"`, does what the start of a run does: reads, checks and counts the rows and gives the first step's
prompts. The tokenizer is a small byte-level one of Qwen's kind, made by this script, with a short version of
Qwen2.5's chat template.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROMPTS = 17_400
WORDS = ("the", "sum of all", "positive", "integers", "such that", "find", "let", "ratio", "$x^2 + y^2 = 25$")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(file: Path, rows: int) -> None:
    """Write a parquet file of this many rows, in groups of 100,000, in a shuffled order."""
    import pyarrow
    from pyarrow import parquet

    rng = random.Random(1)
    texts = [f"Problem {n}: {' '.join(rng.choices(WORDS, k=rng.randint(30, 120)))}?" for n in range(PROMPTS)]
    chat = pyarrow.list_(pyarrow.struct([("content", pyarrow.string()), ("role", pyarrow.string())]))
    truth = pyarrow.struct([("ground_truth", pyarrow.string()), ("style", pyarrow.string())])
    further = pyarrow.struct([("index", pyarrow.string())])
    schema = pyarrow.schema(
        {
            "data_source": pyarrow.string(),
            "prompt": chat,
            "ability": pyarrow.string(),
            "reward_model": truth,
            "extra_info": further,
        }.items()
    )
    with parquet.ParquetWriter(file, schema) as out:
        for start in range(0, rows, 100_000):
            numbers = [rng.randrange(PROMPTS) for _ in range(min(100_000, rows - start))]
            columns = [
                pyarrow.array(["math_dapo"] * len(numbers)),
                pyarrow.array([[{"content": texts[n], "role": "user"}] for n in numbers], chat),
                pyarrow.array(["MATH"] * len(numbers)),
                pyarrow.array([{"ground_truth": str(n), "style": "rule"} for n in numbers], truth),
                pyarrow.array([{"index": f"id-{n}"} for n in numbers], further),
            ]
            out.write_table(pyarrow.table(columns, schema=schema))


def start(file: Path, duplicates: str) -> dict[str, object]:
    """Load prompts as a start does; report the seconds and this process's peak memory."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from ppoctl.data.row_tables import DataTable, VerlRows
    from ppoctl.data.source import PromptSource
    from ppoctl.data.template import PromptTemplate

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    core.train_from_iterator([" ".join(WORDS)] * 10, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.chat_template = TEMPLATE
    before_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    began = time.perf_counter()
    data = DataTable(train=VerlRows(format="verl", path=str(file), duplicates=duplicates, long_prompts="drop"))
    template = PromptTemplate(tokenizer)
    prompts = PromptSource.load(data, template, max_prompt_tokens=2048, prompts_per_round=512, seed=1)
    loaded = time.perf_counter()
    prompts.prompts_for(1)
    return {
        "duplicates": duplicates,
        **prompts.counts["data.train"].as_dict(),
        "load_s": round(loaded - began, 1),
        "first_step_s": round(time.perf_counter() - loaded, 1),
        "cpu_s": round(time.process_time(), 1),
        "before_mib": round(before_mib),
        "most_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_790_000)
    parser.add_argument("--start", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start:
        print(json.dumps(start(Path(args.start[0]), args.start[1])))
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.parquet"
        write(file, args.rows)
        print(f"{file.stat().st_size / 2**20:.0f} MiB of parquet", flush=True)
        for duplicates in ("drop", "keep"):
            subprocess.run([sys.executable, __file__, "--start", str(file), duplicates], check=True)


if __name__ == "__main__":
    main()
