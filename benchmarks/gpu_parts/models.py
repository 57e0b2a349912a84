"""Models with random weights, which parts share, and a trainer rank on one of them."""

import gc
import shutil
import time
from pathlib import Path
from tempfile import mkdtemp

import torch

from gpu_parts.lines import JOB, notify
from gpu_parts.measure import BF16, CUDA, DEV, TINY, sync

MODELS = {
    "1.5b": {
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    # The shard of the 7B model that a rank of tensor = 4 has: its time without communication.
    "shard": {
        "vocab_size": 38016,
        "hidden_size": 3584,
        "intermediate_size": 4736,
        "num_hidden_layers": 28,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "vocab_size": 576,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
}
"""Configurations by the name that the lines have as `kind`."""
QUICKSTART = Path(__file__).resolve().parents[2] / "recipes/quickstart/model"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
"""Files in addition to a model's weights."""


def folder(kind):
    """Return a Hugging Face folder with random weights and the quickstart's tokenizer, which the first part that
    needs it makes. It gets its name when it is complete, because the process may be ended before."""
    kind = "tiny" if TINY else kind
    path = Path(JOB.models) / kind
    if not path.exists():
        from transformers import LlamaConfig, LlamaForCausalLM

        began = time.perf_counter()
        made = Path(mkdtemp(prefix=f"{kind}-", dir=JOB.models))
        with torch.device(DEV):
            model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=16384, **MODELS[kind])).to(BF16)
        model.save_pretrained(made)
        for name in TOKENIZER:
            shutil.copy(QUICKSTART / name, made)
        made.rename(path)
        del model
        if CUDA:
            torch.cuda.empty_cache()
        notify(JOB.part, model=kind, made_s=round(time.perf_counter() - began, 1))
    return path


def sequences_of(kind, count, shortest, longest):
    """Return sequences of this many tokens, of which a quarter is prompt."""
    import roofline

    shortest, longest = (8, 24) if TINY else (shortest, longest)
    return roofline.made_up_sequences(count, shortest, longest, MODELS["tiny" if TINY else kind]["vocab_size"])


def open_rank(kind, role="actor", *, most=16384, chunk=1024, **settings):
    """Return a started rank of a model with these `TrainerSettings`. `most` is the token cap of a microbatch, `chunk`
    that of logits at a time."""
    from ppoctl.algorithms.role_table import ByTokens
    from ppoctl.engines.megatron.rank import MegatronRank
    from ppoctl.engines.megatron.rank_settings import TrainerSettings

    batching = ByTokens(max_tokens_per_microbatch=64 if TINY else most, logits_chunk_tokens=chunk)
    rank = MegatronRank(TrainerSettings(role, str(folder(kind)), BF16, batching, **settings))
    start = time.perf_counter()
    rank.start()
    sync()
    notify("open", kind=kind, role=role, start_s=round(time.perf_counter() - start, 1))
    return rank


def update_flops(kind, sequences):
    """Return the FLOPs of an update of these sequences: a forward pass, and twice that for the backward; of the head
    only the response positions."""
    c = MODELS["tiny" if TINY else kind]
    inputs = (sequences.prompt_lengths + sequences.lengths - 1).double()
    per_token = 2 * (
        c["hidden_size"] * (c["num_attention_heads"] * 2 + 2 * c["num_key_value_heads"]) * c["head_dim"]
        + 3 * c["hidden_size"] * c["intermediate_size"]
    )
    pairs = float((inputs * (inputs + 1) / 2).sum())
    layers = c["num_hidden_layers"] * (
        per_token * float(inputs.sum()) + 4 * c["num_attention_heads"] * c["head_dim"] * pairs
    )
    return 3 * (layers + 2 * c["hidden_size"] * c["vocab_size"] * float(sequences.lengths.sum()))


def objective_of(sequences):
    """Return the cheapest possible loss."""
    import roofline

    from ppoctl.core.ports import OutputRequest

    return roofline.Objective(sequences.present, OutputRequest())


def minibatch_of(sequences):
    """Return all rows as one optimizer step."""
    import roofline

    from ppoctl.core.ports import Minibatch

    return Minibatch(torch.arange(sequences.num_seqs), (int(sequences.present.sum()),), roofline.STEP)


def close_rank(rank):
    """Release a rank's memory."""
    rank._stages.clear()
    rank._optimizer = None
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
