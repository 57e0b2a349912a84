"""A first check of the trainer and the engine on one GPU, part by part, without Ray or a network. The part
`pair` needs two GPUs.

    python benchmarks/gpu_first.py [PART ...] [--out FOLDER] [--minutes 9] [--part-limit 120] [--tiny]

Each part runs in a child process with a time limit, so that a crash or hang does not end the others. The screen has
one line per part, and at the end a table of results: `ok`, `not ok` with the reasons (`gpu_verdicts.py`), or
`skipped` with the reason. If anything is wrong the exit code is 1. The folder gets `lines.jsonl` (all measurements),
`profile.txt` (the kernels that take longest), `output-PART.txt`, `traceback-PART.txt` (the stacks of a part that
failed, crashed or hung), and `memory-PART.pickle` if a GPU ran out of memory.

Without a named part all parts run. They require torch, megatron-core, transformers and the imports of ppoctl; the
engine's parts are skipped without vLLM. `--tiny` is a dry run with tiny models, which works on a CPU: it checks that
every part still finds what it measures. Without a GPU and without `--tiny`, parts that would take hours are skipped.
"""

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from gpu_parts.runner import Options, run
from gpu_parts.table import PART_LIMIT_S, PARTS


def main() -> int:
    """Run the named parts, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=" ".join(PARTS))
    parser.add_argument("--out", type=Path, help="folder of all files; absent: a new temporary one")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="parts that no longer fit are skipped")
    longer = ", ".join(f"{part.name} {part.limit_s:.0f}" for part in PARTS.values() if part.limit_s > PART_LIMIT_S)
    parser.add_argument(
        "--part-limit",
        type=float,
        metavar="SECONDS",
        help=f"most seconds of every part; absent: {PART_LIMIT_S:.0f}, but {longer}",
    )
    parser.add_argument("--tiny", action="store_true", help="a dry run, which a CPU can do")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the running part
    if unknown := set(args.parts) - PARTS.keys():
        parser.error(f"no part has the name {', '.join(sorted(unknown))}; the parts are: {' '.join(PARTS)}")
    out = args.out or Path(tempfile.mkdtemp(prefix="gpu_first_"))
    parts = [PARTS[name] for name in args.parts or PARTS]
    return run(parts, Options(out, args.tiny, args.part_limit, args.minutes * 60))


if __name__ == "__main__":
    sys.exit(main())
