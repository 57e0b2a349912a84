"""The recipe: one frozen class per TOML table, one docstring per key. Nothing here computes; see `rules` and `plan`.

Alternatives are tagged tables (`kind = "..."`). `None` appears only where absence is a meaning. Conflicts are errors
(`rules`), never corrected. Every key declares its effect (`table`).
"""

from typing import TYPE_CHECKING, Annotated, Literal, Union

from pydantic import Field

from ppoctl.recipe.algorithm import Batching as Batching
from ppoctl.recipe.algorithm import BySequences as BySequences
from ppoctl.recipe.algorithm import ByTokens as ByTokens
from ppoctl.recipe.algorithm import Correction as Correction
from ppoctl.recipe.algorithm import GaeAdvantages as GaeAdvantages
from ppoctl.recipe.algorithm import Kl as Kl
from ppoctl.recipe.algorithm import KlInLoss as KlInLoss
from ppoctl.recipe.algorithm import KlInReward as KlInReward
from ppoctl.recipe.algorithm import NoCorrection as NoCorrection
from ppoctl.recipe.algorithm import NoKl as NoKl
from ppoctl.recipe.algorithm import OptimizerTable as OptimizerTable
from ppoctl.recipe.algorithm import ParallelTable as ParallelTable
from ppoctl.recipe.algorithm import PolicyLossTable as PolicyLossTable
from ppoctl.recipe.algorithm import PpoTable as PpoTable
from ppoctl.recipe.algorithm import Recompute as Recompute
from ppoctl.recipe.algorithm import TrainedTable as TrainedTable
from ppoctl.recipe.algorithm import TruncatedImportance as TruncatedImportance
from ppoctl.recipe.algorithm import ValueLossTable as ValueLossTable
from ppoctl.rewards.kinds import KINDS
from ppoctl.rewards.table import RewardTable
from ppoctl.table import REPORTING, RESULTS, SPEED, Array, AtLeastOne, NotNegative, OrOff, Positive
from ppoctl.table import Table as Table


class ModelTable(Table):
    """The base model: actor, reference and critic start from it."""

    path: Annotated[str, RESULTS]
    """Hugging Face folder (relative paths start at the recipe file) or hub id."""
    dtype: Annotated[Literal["float32", "bfloat16"], RESULTS] = "bfloat16"
    """Of weights and activations; main weights and optimizer are float32 either way."""
    critic: Annotated[str | None, RESULTS] = None
    """Where the critic starts: a reward model made from the same base (a folder or hub id of a
    ...ForSequenceClassification with one label, or a folder by `convert-ckpt --to megatron`); absent: `path`, with a
    head of zero."""


class Gsm8kRows(Table):
    """GSM8K's JSONL: `question`, and `answer` ending in `#### N`."""

    format: Annotated[Literal["gsm8k"], RESULTS]
    """GSM8K's own keys."""
    path: Annotated[str, RESULTS]
    """JSONL file; `$NAME` at the start is an environment variable (where a relative one starts, the command was
    typed); other relative paths start at the recipe file."""
    system: Annotated[str, RESULTS] = ""
    """System message; empty: none."""
    instruction: Annotated[str, RESULTS] = ""
    """Appended to each question after a line break; empty: none."""
    max_rows: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Use the first rows only; absent: all."""


class ColumnRows(Table):
    """JSONL or parquet with a prompt and an answer in columns of any name."""

    format: Annotated[Literal["columns"], RESULTS]
    """Columns named below."""
    path: Annotated[str, RESULTS]
    """`.jsonl` or `.parquet` file; `$NAME` at the start is an environment variable (where a relative one
    starts, the command was typed); other relative paths start at the recipe file."""
    prompt: Annotated[str, RESULTS]
    """Column with the question (text, or a list of chat messages)."""
    answer: Annotated[str | None, RESULTS] = None
    """Column with the ground truth; dots reach into nested columns (`reward_model.ground_truth`). Absent: there is
    none, for rewards that need none."""
    fields: Annotated[tuple[str, ...], RESULTS, Array] = ()
    """Further columns that the reward is given, by these names."""
    system: Annotated[str, RESULTS] = ""
    """System message; empty: none."""
    instruction: Annotated[str, RESULTS] = ""
    """Appended to each text question after a line break; empty: none."""
    max_rows: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Use the first rows only; absent: all."""


Rows = Annotated[Gsm8kRows | ColumnRows, Field(discriminator="format")]


class DataTable(Table):
    """Prompts: one training set, any number of named evaluation sets."""

    train: Rows
    """What rollouts are drawn from, in a seeded order, epoch after epoch."""
    eval: dict[str, Rows] = Field(default_factory=dict)
    """Evaluation sets by name."""


class RolloutTable(Table):
    """How responses are drawn. Truncated sampling (top-p, top-k) is left out on purpose: the trainer's log-probs are
    those of the full distribution, and the ratio of the two would be biased."""

    prompts_per_step: Annotated[int, RESULTS, AtLeastOne]
    """Prompts in one PPO step."""
    samples_per_prompt: Annotated[int, RESULTS, AtLeastOne] = 1
    """Responses per prompt; sequences in a step = prompts_per_step x samples_per_prompt."""
    max_prompt_tokens: Annotated[int, RESULTS, AtLeastOne]
    """A longer prompt is an error at start (it is neither cut nor dropped)."""
    max_new_tokens: Annotated[int, RESULTS, AtLeastOne]
    """A response that reaches it is truncated."""
    temperature: Annotated[float, RESULTS, Positive] = 1.0
    """Logits are divided by it in the generator and in the trainer alike."""
    stop_strings: Annotated[tuple[str, ...], RESULTS, Array] = ()
    """A response ends where one of them appears; end-of-sequence tokens always end it."""
    keep_finished_every_s: Annotated[float, SPEED, Positive] = 5.0
    """Finished samples of an unfinished rollout or evaluation are written this often: what a kill loses at most."""


if TYPE_CHECKING:
    Reward = RewardTable
else:
    Reward = Annotated[Union[KINDS], Field(discriminator="kind")]  # noqa: UP007 - the members are known by now only


class GeneratorTable(Table):
    """vLLM. Engines share one queue of prompts; a sample is the same whichever engine draws it."""

    engines: Annotated[int, SPEED, AtLeastOne] = 1
    """Copies of the model that draw side by side."""
    tensor: Annotated[int, SPEED, AtLeastOne] = 1
    """Ranks that split each engine's layers; divides attention heads and key/value heads."""
    gpu_memory_frac: Annotated[float, SPEED, Field(gt=0, lt=1)] = 0.6
    """Share of the GPU it may use for weights and KV cache; not read on CPU."""
    kv_cache_mib: Annotated[int, SPEED, AtLeastOne] = 256
    """KV cache on CPU, where no share of a GPU limits it; not read on GPU."""
    max_concurrent_seqs: Annotated[int, SPEED, AtLeastOne] = 256
    """Requests decoded together."""
    compile: Annotated[bool, SPEED] = False
    """Compile and capture graphs: slower start, faster tokens."""
    canary_tolerance: Annotated[float | None, SPEED, Positive] = None
    """Largest allowed gap between the generator's and the trainer's log-probs of the canary prompt after a weight
    update, in nats; absent: 1e-3 for float32, 0.5 for bfloat16 on the mean."""


class CheckpointTable(Table):
    """When states are saved and which are kept. Data artifacts are committed after every stage regardless."""

    every_steps: Annotated[int, SPEED, AtLeastOne] = 1
    """Between saves the artifacts are a redo log: resume replays at most this many steps' updates."""
    asynchronous: Annotated[bool, SPEED] = True
    """States are copied, and written while the next step goes on: takes the host memory of one more copy of actor and
    critic, weights and optimizer. False: training waits until they are on disk."""
    reshardable: Annotated[Literal["full", "dp"], SPEED] = "full"
    """Under which layouts the state of a distributed optimizer can be loaded. full: any that has one too; to save it,
    it is gathered over the data ranks, on each of them. dp: any number of data ranks, the rest as it was; each rank
    writes what it has. A role without a distributed optimizer can be laid out anew for nothing."""
    keep_last: Annotated[int, SPEED, Field(ge=2)] = 2
    """Healthy actor and critic pairs to keep; the last healthy one is never deleted."""
    best: Annotated[str | None, REPORTING] = None
    """Metric whose best actor is kept besides, as weights only: the actor that was measured, which is the one a step
    began with for figures of training, and the one it made for evaluations. Absent: none."""
    keep_rollouts_every_steps: Annotated[int, REPORTING, NotNegative] = 10
    """Rollouts of every such step stay readable after its folder is no longer needed; 0: none."""


class EvalTable(Table):
    """Evaluation of the actor on every set of `data.eval`: greedy, and sampled at `temperature`."""

    every_steps: Annotated[int, REPORTING, NotNegative] = 0
    """0: only at the end."""
    at_start: Annotated[bool, REPORTING] = True
    """Also before the first step."""
    samples_per_prompt: Annotated[int, RESULTS, AtLeastOne] = 1
    """Of the sampled pass."""
    temperature: Annotated[float, RESULTS, Positive] = 1.0
    """Of the sampled pass."""
    max_new_tokens: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Absent: as in rollouts."""


class HealthRule(Table):
    """Bounds on one figure."""

    min: Annotated[float | None, REPORTING, OrOff] = None
    """Absent or "off": no lower bound."""
    max: Annotated[float | None, REPORTING, OrOff] = None
    """Absent or "off": no upper bound."""
    action: Annotated[Literal["warn", "stop"], REPORTING] = "warn"
    """stop ends the run with exit 5 after the step's artifacts are committed."""
    from_step: Annotated[int, REPORTING, AtLeastOne] = 1
    """Not judged before."""
    for_steps: Annotated[int, REPORTING, AtLeastOne] = 1
    """Consecutive steps out of bounds before it acts."""


class HealthTable(Table):
    """What a healthy run looks like. The reward's error share has its own hard limit in `[reward]`."""

    kl: HealthRule = HealthRule(max=0.5)
    """policy/approx_kl: how far one step moved the actor (nats per token)."""
    reference_kl: HealthRule = HealthRule()
    """kl/reference_mean, where a reference is read."""
    entropy: HealthRule = HealthRule()
    """policy/entropy_mean (nats per token)."""
    truncated: HealthRule = HealthRule(max=0.5)
    """rollout/truncated_frac."""
    explained_variance: HealthRule = HealthRule(min=-1.0, from_step=10, for_steps=3)
    """value/explained_variance."""
    reward_errors: HealthRule = HealthRule(max=0.01)
    """reward/error_frac + reward/timeout_frac."""
    reward_spread: HealthRule = HealthRule(min=1e-6)
    """reward/score_std: where all scores of a step are equal there is nothing to learn from."""


class MlflowTracking(Table):
    """Mirror to MLflow. The run directory stays the truth; MLflow being down never stops training."""

    kind: Annotated[Literal["mlflow"], REPORTING]
    """Mirror to MLflow."""
    uri: Annotated[str | None, REPORTING] = None
    """Any tracking URI without a secret, or `$NAME` of a variable that has it; absent: a sqlite file in the runs
    folder."""
    experiment: Annotated[str, REPORTING] = "ppoctl"
    """Experiment name."""


class NoTracking(Table):
    """The run directory alone."""

    kind: Annotated[Literal["none"], REPORTING]
    """No mirror."""


Tracking = Annotated[MlflowTracking | NoTracking, Field(discriminator="kind")]


class ClusterTable(Table):
    """This machine, or a running Ray. Where every role is one process and they share a device, all of them live in
    this process; otherwise each role runs in processes of Ray."""

    placement: Annotated[Literal["colocated", "apart"], SPEED] = "colocated"
    """Whether roles share devices. colocated: one process of each role on a device; apart: each process has its
    own."""
    offload: Annotated[bool, SPEED] = False
    """Whether roles that share devices take turns in their memory: whoever is not at work is on the host, and vLLM
    sleeps. `plan` says what each stage needs with and without."""
    weights: Annotated[Literal["shared", "store", "broadcast"], SPEED] = "shared"
    """How weights reach engines in other processes. shared: they read memory of the actor's ranks on their node (CUDA
    IPC on GPUs); store: all from one rank, through Ray's object store, as shared does for nodes without such a rank;
    broadcast: over a process group (NCCL on GPUs, gloo on CPUs), where roles are apart."""
    weights_bucket_mib: Annotated[int, SPEED, AtLeastOne] = 64
    """Weights on their way to other processes at one time, some copies of each; a tensor that is larger goes alone.
    The driver asks every rank and engine for each bucket: on many GPUs larger ones are faster."""
    threads: Annotated[int | None, SPEED, AtLeastOne] = None
    """CPU threads of trainer and generator; absent: all cores this process may use. A role's processes share them."""
    ray_address: Annotated[str | None, SPEED] = None
    """A running Ray (`host:port`); absent: one of the run's own is started where it is needed."""
    start_deadline_s: Annotated[float, SPEED, Positive] = 300.0
    """Processes of a role that have not met by then stop the run (exit 3)."""
    call_deadline_s: Annotated[float, SPEED, Positive] = 3600.0
    """A role that has not answered by then hangs: the run stops (exit 6) and says who waits where."""
    draw_deadline_s: Annotated[float | None, SPEED, Positive] = None
    """The same of an engine's next tokens (16 of each sequence it holds); absent: `call_deadline_s`."""
    forward_deadline_s: Annotated[float | None, SPEED, Positive] = None
    """The same of the stages that score rollouts (log-probs, the reference's, values); absent: `call_deadline_s`."""
    update_deadline_s: Annotated[float | None, SPEED, Positive] = None
    """The same of an update, all its epochs together; absent: `call_deadline_s`."""
    save_deadline_s: Annotated[float | None, SPEED, Positive] = None
    """The same of what saving a state waits for; absent: `call_deadline_s`."""


class Expectation(Table):
    """A bound the run must meet; unmet means exit 5."""

    at_step: Annotated[int | None, REPORTING, NotNegative] = None
    """Absent: the last step."""
    min: Annotated[float | None, REPORTING] = None
    """Absent: no lower bound."""
    max: Annotated[float | None, REPORTING] = None
    """Absent: no upper bound."""
    rise_min: Annotated[float | None, REPORTING] = None
    """Smallest rise over the metric's first value; absent: not judged."""


class Recipe(Table):
    """A job."""

    name: Annotated[str, REPORTING, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    """Names the run directory, `runs/NAME`."""
    seed: Annotated[int, RESULTS, NotNegative] = 42
    """All randomness is a hash of it and of where it is used."""
    steps: Annotated[int, REPORTING, AtLeastOne, Field(le=1_000_000)]
    """PPO steps to do. Raising it continues a finished run."""
    model: ModelTable
    data: DataTable
    rollout: RolloutTable
    reward: Reward
    ppo: PpoTable
    actor: TrainedTable
    critic: TrainedTable
    generator: GeneratorTable = GeneratorTable()
    checkpoint: CheckpointTable = CheckpointTable()
    eval: EvalTable = EvalTable()
    health: HealthTable = HealthTable()
    tracking: Tracking = MlflowTracking(kind="mlflow")
    cluster: ClusterTable = ClusterTable()
    expect: dict[str, Expectation] = Field(default_factory=dict)
    """What the run must reach, by metric name."""
