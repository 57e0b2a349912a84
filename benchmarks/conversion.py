"""Memory and seconds of `convert-ckpt` on a synthetic model of several GB, in both directions.

    PYTHONPATH=src:tests python benchmarks/conversion.py [--layers 24] [--hidden 2048]

The model has random bfloat16 weights, written one tensor at a time. Each direction runs in a separate process with
all checks of files (comparing model outputs needs the complete model in memory and is skipped). Prints the bytes of
the model, of one layer and of the largest tensor; and per direction the peak memory above that of the process before,
and seconds. Exit 1 if a direction takes more than one layer, the largest tensor and one output shard of 1 GiB.

Measured on two busy cores: model 3.26 GB (24 layers of 84 MB, embedding and output layer 623 MB each); to Megatron
1,334 MB and 25.9 s, to Hugging Face 1,332 MB and 34.2 s: twice the largest tensor, plus the imports.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from convert import big_model


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    args = parser.parse_args()
    hidden, ffn = args.hidden, 5 * args.hidden // 2
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": args.layers,
        "vocab_size": 152_000,
    }
    layer = 2 * hidden * (2 * hidden + hidden // 2 + 3 * ffn)
    largest = 2 * hidden * sizes["vocab_size"]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        total = big_model.write_model(root / "model", torch.bfloat16, 2**30, **sizes)
        print(f"model {total / 1e9:.2f} GB, layer {layer / 1e6:.0f} MB, largest tensor {largest / 1e6:.0f} MB")
        worst = 0
        for to, source, out in (("megatron", "model", "there"), ("hf", "there", "back")):
            command = [sys.executable, big_model.__file__, str(root / source), str(root / out), to]
            started = time.monotonic()
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            report = json.loads(done.stdout)
            worst = max(worst, report["peak"])
            seconds = time.monotonic() - started
            print(
                f"to {to}: peak {report['peak'] / 1e6:.0f} MB, {seconds:.1f} s, {report['digests']} tensors compared"
            )
    return int(worst > layer + largest + 2**30)


if __name__ == "__main__":
    sys.exit(main())
