"""Complete PPO steps next to TRL 1.12.0's (the last version with PPO) in one run: tokens/s, and time per stage.

    python benchmarks/vs_trl.py [--sizes 4m 10m] [--threads 1] [--dtype bfloat16] [--env FOLDER]

TRL runs in a separate environment that is made once in `--env`. Both sides run alternately in new processes, so that
other work on the machine slows both. Each process does a warm-up step that does not count. Exit 1 if the median
tokens/s, or tokens per CPU second, is below 2 times TRL's at 4M parameters or 3 times at 10M.

Equal on both sides: the weights (a random Qwen2 with a vocabulary of 40 letters), the set of prompts, the reward
(fraction of the letter a in the response, a function call on both sides), sequences per step and per microbatch, one
minibatch, epochs, the window of a response, KL to a reference in the reward, dtype, threads. Tokens are unmasked
response tokens. Tokens per CPU second are printed next to those of the wall time, because other work on the machine
disturbs them less. CPU seconds are those of all processes: vLLM has a process next to the driver. The lower ratio
decides. The learning rate is so small that the model does not change its response lengths.

A response ends when the model samples its end token, one of 41 equally likely tokens. The window truncates less than
one in a hundred responses, as a window should. The ratio comes from this: TRL generates every row up to the end of
the window and computes all of it in each pass; in ppoctl a response ends at its end token, and sequences are packed.
`--no-ragged --response-tokens 64 --prompt-tokens 64 64` removes the difference: every row has one length. The
expected ratio, if matrix products bound both sides, in forward passes over all tokens of the step (a backward counts
two): ppoctl 10 (generation, values, log-probs, reference, 3 actor, 3 critic), TRL 9 (it has the old log-probs from
generation): 0.9; with `--old-logprobs current` 9 and 9.

Differences, and which side they favour:
- TRL updates actor and critic in one backward pass with one optimizer, and its advantage code is a plain loop; ppoctl
  runs two passes and two optimizers, and clips gradients. Favours TRL a little.
- ppoctl commits every stage's record, flushes it to disk, and checks the generator's weights against the trainer's,
  as always. Favours TRL. Neither side saves models in the measured time (`--save-every 1`: ppoctl does, each step).
- TRL takes its old log-probs from the sampler's logits; ppoctl runs the trainer over the rollouts for them. Favours
  TRL. `--old-logprobs sampler` takes ppoctl's from the sampler, too. `--old-logprobs current` forces the update
  on-policy: ratios are 1 by construction, as they are anyway at one epoch and one minibatch; KL is then in the loss.
- 40 letters make the output layer nearly free on both sides (`--vocabulary` for more). TRL computes it for prompts
  and padding too and keeps its logits. Favours TRL.
- Each side shuffles the prompts and samples responses in its own way: tokens per second compensate for that.
- transformers differs: ppoctl's is this environment's, TRL's the version it was tested with. Which side this favours
  is unknown.
- In bfloat16 TRL's optimizer has no float32 main weights; ppoctl's has. Favours TRL.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from cpu_time import cpu_model, cpu_seconds_with_children

PINS = ("torch==2.13.0", "trl==1.12.0", "transformers==5.23.0", "accelerate==1.15.0", "datasets==5.2.0")
EXTRAS = ("pandas", "rich")
LETTERS = ".abcdefghijklmnopqrstuvwxyz0123456789+-="
TARGETS = {"4m": 2.0, "10m": 3.0}
SHAPES = {
    "4m": {"hidden_size": 256, "intermediate_size": 1024, "layers": 4, "heads": 8, "kv_heads": 4},
    "10m": {"hidden_size": 384, "intermediate_size": 1344, "layers": 5, "heads": 12, "kv_heads": 6},
}
RECIPE = """
name  = "vs-trl"
steps = {steps}
[model]
path  = "{model}"
dtype = "{dtype}"
[data.train]
format = "columns"
path   = "{prompts}"
prompt = "prompt"
answer = "answer"
[rollout]
prompts_per_step  = {batch}
max_prompt_tokens = {prompt_tokens}
max_new_tokens    = {response_tokens}
[reward]
kind = "exact_match"   # another scorer is put in its place
[ppo]
epochs         = {epochs}
minibatch_seqs = {batch}
old_logprobs   = "{old_logprobs}"
[ppo.advantages]
kind       = "gae"
gae_lambda = {gae_lambda}
[ppo.kl]
place     = "{kl_place}"
estimator = "{kl_estimator}"
coef      = {kl_coef}
[ppo.value_loss]
clip = {value_clip}
[actor]
optimizer = {{ lr = {lr} }}
batching  = {{ microbatch_seqs = {microbatch} }}
[critic]
optimizer = {{ lr = {lr} }}
batching  = {{ microbatch_seqs = {microbatch} }}
[checkpoint]
every_steps = {save_every}
[health]
truncated = {{ max = "off" }}
[tracking]
kind = "none"
[cluster]
threads = {threads}
"""


@dataclass
class CpuClock:
    """CPU seconds of all processes of the run at the end of each step; an observer of the run."""

    ends: list[float] = field(default_factory=list)

    def on_stage(self, step: int, stage: str) -> None:
        pass

    def on_moment(self, step: int, stage: str, moment: str) -> None:
        pass

    def on_progress(self, done: int, total: int, tokens: int) -> None:
        pass

    def on_committed(self, line: Mapping[str, Any]) -> None:
        if line["stage"] == "actor_update":
            self.ends.append(cpu_seconds_with_children())


def our_side(job: Mapping[str, Any], result: Path) -> None:
    """Run the job with ppoctl in this process, and write the values from its journal."""
    from dataclasses import replace

    from ppoctl.core.batch.scores import Score, ScoreRequest
    from ppoctl.recipe.loading.load import load
    from ppoctl.run import new_run, session
    from ppoctl.store.recorded_run import RecordedRun
    from ppoctl.store.resume_plan import plan_resume
    from ppoctl.store.run_paths import NUMBERS, RunPaths

    class ShareOfLetter:
        def submit(self, request: ScoreRequest) -> Future[Score]:
            future: Future[Score] = Future()
            future.set_result(Score(request.response.count("a") / job["response_tokens"], "ok"))
            return future

        def close(self) -> None:
            pass

    file = result.parent / "vs-trl.toml"
    file.write_text(RECIPE.format(**job), encoding="utf-8")
    recipe = load([file]).recipe
    components, digests = session.prepare(recipe, datetime.now())
    components.scorer.close()
    clock = CpuClock()
    paths = RunPaths(result.parent / "run")
    new_run.create(paths, recipe, digests, command="train")
    plugged = replace(components, scorer=ShareOfLetter())
    ended = session.attempt_run(
        session.OpenedRun(paths, {1: recipe}, plugged, plan_resume(RecordedRun(paths)), observers=(clock,))
    )
    lines = {(line["step"], line["stage"]): line for line in ended.lines if "stage" in line}
    steps = range(1, job["steps"] + 1)
    counted = steps[1:]
    ends = [lines[step, "actor_update"]["at"] for step in steps]
    lengths = [lines[step, "rollout"]["figures"]["rollout/response_tokens_mean"] for step in counted]
    stages = [stage for stage in NUMBERS if (1, stage) in lines and stage != "eval"]
    shutil.rmtree(paths.root)
    result.write_text(
        json.dumps(
            {
                "step_s": [b - a for a, b in pairwise(ends)],
                "cpu_s": [b - a for a, b in pairwise(clock.ends)],
                "tokens": [job["batch"] * length for length in lengths],
                "stages": {stage: [lines[step, stage]["seconds"] for step in counted] for stage in stages},
                "scores": [lines[step, "reward"]["figures"]["reward/score_mean"] for step in steps],
                "versions": session.versions(),
            }
        ),
        encoding="utf-8",
    )


def trl_python(folder: Path) -> Path:
    """Return the interpreter of TRL's environment, which is made if it does not exist."""
    python, stamp = folder / "bin" / "python", folder / "pins.json"
    pins = json.dumps([*PINS, *EXTRAS])
    if stamp.is_file() and stamp.read_text("utf-8") == pins:
        return python
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if uv is None:
        raise SystemExit("uv is needed to make TRL's environment: pip install uv")
    links = subprocess.run(["pip", "config", "get", "global.find-links"], capture_output=True, text=True, check=False)
    place = links.stdout.split()
    # A local folder of wheels includes torch for CPUs; otherwise torch's own index has it.
    source = [word for link in place for word in ("--find-links", link)] or ["--torch-backend", "cpu"]
    print(f"making TRL's environment in {folder}", flush=True)
    subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)], check=True)
    install = [uv, "pip", "install", "--quiet", "--python", str(python), *source, *PINS, *EXTRAS]
    subprocess.run(install, check=True)
    stamp.write_text(pins, encoding="utf-8")
    return python


def make_model(size: str, folder: Path, *, vocabulary: int, ragged: bool) -> int:
    """Write a random Qwen2 and a tokenizer with a token per letter; return the number of parameters.

    `vocabulary` words beyond the letters are "(1)", "(2)", ...: no prompt has them. With `ragged` the model can
    sample the end token, as often as any letter. Without, it can sample neither the end token nor padding: along one
    direction that all hidden states share, their rows point the opposite way.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    shape = SHAPES[size]
    pieces = [*LETTERS, *(f"({number})" for number in range(vocabulary - len(LETTERS)))]
    end, pad = len(pieces), len(pieces) + 1
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(pieces) + 2,
            hidden_size=shape["hidden_size"],
            intermediate_size=shape["intermediate_size"],
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["heads"],
            num_key_value_heads=shape["kv_heads"],
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            dtype="float32",
        )
    )
    with torch.no_grad():
        rows = model.get_input_embeddings().weight
        rows[:, 0] = 2.0
        rows[end if not ragged else pad :, 0] = -20.0
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}), encoding="utf-8")
    Qwen2Tokenizer(
        vocab={**{piece: id for id, piece in enumerate(pieces)}, "<end>": end, "<pad>": pad},
        merges=[],
        unk_token="<pad>",
        pad_token="<pad>",
        eos_token="<end>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    return sum(weights.numel() for weights in model.parameters())


def make_prompts(file: Path, rows: int, shortest: int, longest: int) -> None:
    """Return prompts of random letters. TRL needs a spare batch: if its prompts end exactly, its last update
    fails."""
    rng = random.Random(0)
    texts = ["".join(rng.choices(LETTERS, k=rng.randint(shortest, longest))) for _ in range(rows)]
    file.write_text("".join(json.dumps({"prompt": text, "answer": "a"}) + "\n" for text in texts), encoding="utf-8")


def run_side(command: Sequence[str], job: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Run one process of one side; its output goes to a file that is shown if it fails."""
    folder.mkdir(parents=True)
    job_file, result, log = folder / "job.json", folder / "result.json", folder / "log.txt"
    job_file.write_text(json.dumps(job), encoding="utf-8")
    env = {key: value for key, value in os.environ.items() if not key.startswith("PPOCTL_")}
    env |= {
        "OMP_NUM_THREADS": str(job["threads"]),
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    with log.open("w") as output:
        words = [*command, str(job_file), str(result)]
        ended = subprocess.run(words, env=env, stdout=output, stderr=output, cwd=folder, check=False)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text('utf-8')[-4000:]}")
    found: dict[str, Any] = json.loads(result.read_text("utf-8"))
    return found


@dataclass
class Side:
    """Measurements of the processes of one side, over all rounds."""

    step_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=dict)
    scores: list[list[float]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def add(self, found: Mapping[str, Any]) -> None:
        for name in ("step_s", "cpu_s", "tokens"):
            getattr(self, name).extend(found[name])
        for stage, seconds in found["stages"].items():
            self.stages.setdefault(stage, []).extend(seconds)
        self.scores.append(found["scores"])
        self.versions = found["versions"]

    def tokens_per(self, seconds: Sequence[float]) -> float:
        """Return the median over the steps."""
        return statistics.median(tokens / s for tokens, s in zip(self.tokens, seconds, strict=True))

    def describe(self, name: str) -> str:
        wall, cpu = self.tokens_per(self.step_s), self.tokens_per(self.cpu_s)
        steps = " ".join(f"{s:.2f}" for s in self.step_s)
        of_cpu = " ".join(f"{s:.2f}" for s in self.cpu_s)
        return f"  {name:6} {wall:8.0f} {cpu:12.0f}   wall {steps}   CPU {of_cpu}"

    def shares(self) -> str:
        """Return each stage's fraction of the steps' wall time; the rest is commits, saves, ledger and the loop."""
        whole = sum(self.step_s)
        shares = {stage: sum(seconds) / whole for stage, seconds in self.stages.items()}
        shares["rest"] = 1 - sum(shares.values())
        return "  ".join(f"{stage} {share:.1%}" for stage, share in shares.items())


def compare(size: str, options: argparse.Namespace, python: Path, folder: Path) -> bool:
    """Run both sides and print the results; return whether the target is met."""
    model, prompts = folder / "model", folder / "prompts.jsonl"
    parameters = make_model(size, model, vocabulary=options.vocabulary, ragged=options.ragged)
    shortest, longest = options.prompt_tokens
    make_prompts(prompts, options.batch * (options.steps + 1), shortest, longest)
    job = {
        "model": str(model),
        "prompts": str(prompts),
        "steps": options.steps,
        "batch": options.batch,
        "microbatch": options.microbatch,
        "epochs": options.epochs,
        "prompt_tokens": longest,
        "response_tokens": options.response_tokens,
        "ragged": options.ragged,
        "dtype": options.dtype,
        "threads": options.threads,
        "save_every": options.save_every or options.steps,
        "lr": 1e-6,
        "kl_coef": 0.02,
        "kl_place": "loss" if options.old_logprobs == "current" else "reward",
        "kl_estimator": "k2" if options.old_logprobs == "current" else "k1",
        "old_logprobs": options.old_logprobs,
        "gae_lambda": 0.95,
        "value_clip": 0.2,
    }
    here = Path(__file__).resolve()
    ours, trl = Side(), Side()
    for number in range(options.rounds):
        ours.add(run_side([sys.executable, str(here), "--our-side"], job, folder / f"ours-{number}"))
        trl.add(run_side([str(python), str(here.with_name("trl_side.py"))], job, folder / f"trl-{number}"))
    ratio = ours.tokens_per(ours.step_s) / trl.tokens_per(trl.step_s)
    by_cpu = ours.tokens_per(ours.cpu_s) / trl.tokens_per(trl.cpu_s)
    target, is_met = TARGETS[size], min(ratio, by_cpu) >= TARGETS[size]
    print(f"\n{size}: {parameters / 1e6:.2f}M parameters, {options.dtype}, threads {options.threads}")
    print("  side   tokens/s   per CPU s   wall and CPU seconds of the measured steps")
    print(ours.describe("ours"))
    print(trl.describe("TRL"))
    print(f"  ratio  {ratio:8.2f} {by_cpu:12.2f}   target {target:g}: {'met' if is_met else 'MISSED'}")
    padded = options.batch * (longest + options.response_tokens)
    used = statistics.mean(trl.tokens) + options.batch * (shortest + longest) / 2
    print(f"  {used / padded:.0%} of the positions that TRL computes are prompt or response, the rest padding")
    print(f"  our shares  {ours.shares()}")
    print(f"  TRL shares  {trl.shares()}")
    scores = [" ".join(f"{score:.4f}" for score in side.scores[0]) for side in (ours, trl)]
    print(f"  mean scores of the steps  ours {scores[0]}   TRL {scores[1]}")
    for name, side in (("ours", ours), ("TRL", trl)):
        print(f"  {name}: " + ", ".join(f"{package} {version}" for package, version in side.versions.items()))
    sys.stdout.flush()
    return is_met


def main() -> int:
    if sys.argv[1:2] == ["--our-side"]:
        our_side(json.loads(Path(sys.argv[2]).read_text("utf-8")), Path(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(description="PPO steps beside TRL's.")
    parser.add_argument("--env", type=Path, default=Path(tempfile.gettempdir()) / "ppoctl-vs-trl-env")
    parser.add_argument("--sizes", nargs="+", choices=sorted(SHAPES), default=["4m", "10m"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each side, taking turns")
    parser.add_argument("--steps", type=int, default=3, help="of each process; the first does not count")
    parser.add_argument("--batch", type=int, default=64, help="sequences per step")
    parser.add_argument("--microbatch", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=[16, 64], metavar=("SHORTEST", "LONGEST"))
    parser.add_argument("--response-tokens", type=int, default=256, help="the window of a response")
    parser.add_argument(
        "--ragged",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="responses end where the model draws the end token; otherwise none does",
    )
    parser.add_argument("--vocabulary", type=int, default=len(LETTERS), help="tokens the model can draw")
    parser.add_argument(
        "--old-logprobs",
        choices=["trainer", "sampler", "current"],
        default="trainer",
        help="whose they are on our side: sampler and current run no forward pass of the actor for them",
    )
    parser.add_argument("--save-every", type=int, default=0, help="our saves; 0: none within what is measured")
    options = parser.parse_args()
    python = trl_python(options.env)
    shortest, longest = options.prompt_tokens
    print(f"CPU: {cpu_model()}")
    print(
        f"{options.batch} prompts of {shortest}-{longest} tokens, {options.response_tokens} new tokens, microbatches "
        f"of {options.microbatch}, epochs {options.epochs}, vocabulary {options.vocabulary}, "
        f"{'ragged' if options.ragged else 'equal'} responses, {options.rounds} x {options.steps - 1} steps a side"
    )
    with tempfile.TemporaryDirectory() as folder:
        met = [compare(size, options, python, Path(folder) / size) for size in options.sizes]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
