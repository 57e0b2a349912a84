"""The recipe: one frozen class per TOML table, one docstring per key. Nothing here computes; see `rules` and `plan`.

Alternatives are tagged tables (`kind = "..."`). `None` appears only where absence is a meaning. Conflicts are errors
(`rules`), never corrected. Every key declares its effect (`table`).
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from ppoctl.recipe.advantages import GaeAdvantages as GaeAdvantages
from ppoctl.recipe.advantages import MonteCarloAdvantages as MonteCarloAdvantages
from ppoctl.recipe.algorithm import Batching as Batching
from ppoctl.recipe.algorithm import BySequences as BySequences
from ppoctl.recipe.algorithm import ByTokens as ByTokens
from ppoctl.recipe.algorithm import ParallelTable as ParallelTable
from ppoctl.recipe.algorithm import PpoTable as PpoTable
from ppoctl.recipe.algorithm import Recompute as Recompute
from ppoctl.recipe.algorithm import TrainedTable as TrainedTable
from ppoctl.recipe.correction import CorrectionTable as CorrectionTable
from ppoctl.recipe.correction import IcePop as IcePop
from ppoctl.recipe.correction import NoCorrection as NoCorrection
from ppoctl.recipe.correction import RatioRejection as RatioRejection
from ppoctl.recipe.correction import SequenceMask as SequenceMask
from ppoctl.recipe.correction import TruncatedImportance as TruncatedImportance
from ppoctl.recipe.correction import TruncatedSequenceImportance as TruncatedSequenceImportance
from ppoctl.recipe.evaluation import EvalTable as EvalTable
from ppoctl.recipe.kl import AdaptivePerSequence as AdaptivePerSequence
from ppoctl.recipe.kl import AdaptivePerToken as AdaptivePerToken
from ppoctl.recipe.kl import Kl as Kl
from ppoctl.recipe.kl import KlInLoss as KlInLoss
from ppoctl.recipe.kl import KlInReward as KlInReward
from ppoctl.recipe.kl import NoKl as NoKl
from ppoctl.recipe.losses import AnyPolicyLossTable as AnyPolicyLossTable
from ppoctl.recipe.losses import CispoLoss as CispoLoss
from ppoctl.recipe.losses import ClippedLoss as ClippedLoss
from ppoctl.recipe.losses import GspoLoss as GspoLoss
from ppoctl.recipe.losses import ReinforceLoss as ReinforceLoss
from ppoctl.recipe.losses import ValueLossTable as ValueLossTable
from ppoctl.recipe.optimizer import OptimizerTable as OptimizerTable
from ppoctl.recipe.rows import AnyRows as AnyRows
from ppoctl.recipe.rows import ColumnRows as ColumnRows
from ppoctl.recipe.rows import DataTable as DataTable
from ppoctl.recipe.rows import DialogueRows as DialogueRows
from ppoctl.recipe.rows import Gsm8kRows as Gsm8kRows
from ppoctl.recipe.rows import MixRows as MixRows
from ppoctl.recipe.rows import PythonRows as PythonRows
from ppoctl.recipe.rows import SingleTable as SingleTable
from ppoctl.recipe.rows import VerlRows as VerlRows
from ppoctl.recipe.slurm import SlurmTable as SlurmTable
from ppoctl.recipe_table import REPORTING, RESULTS, SPEED, Array, AtLeastOne, NotNegative, OrAll, OrOff, Positive
from ppoctl.recipe_table import Table as Table
from ppoctl.rewards.reward import Reward


class CriticModelTable(Table):
    """The critic's own model: of any supported family and size, with the tokens of the actor's.

    Default of: NeMo-RL and verl (none: the actor's model); OpenRLHF starts the critic from the reward model.
    """

    path: Annotated[str, RESULTS]
    """Weights that the critic starts from: a reward model (a folder or hub id of a ...ForSequenceClassification with
    one label), another language model (its value head starts at zero), a folder by `convert-ckpt --to megatron`, or a
    critic that a run has saved, `runs/NAME/states/critic/STEP`, whose optimizer is left behind."""
    dtype: Annotated[Literal["float32", "bfloat16"] | None, RESULTS] = None
    """Dtype of the critic's weights and activations; absent: `model.dtype`."""


PathOrTable = BeforeValidator(lambda value: {"path": value} if isinstance(value, str) else value)
"""A table that may be written as its path alone, as run directories of before have it."""


class ModelTable(Table):
    """The base model: actor and reference start from it, and a critic without a model of its own."""

    path: Annotated[str, RESULTS]
    """Hugging Face folder (a relative path starts at the recipe file) or hub id."""
    dtype: Annotated[Literal["float32", "bfloat16"], RESULTS] = "bfloat16"
    """Dtype of weights and activations; main weights and optimizer are float32 either way."""
    critic: Annotated[CriticModelTable | None, PathOrTable] = None
    """The critic's own model, as a table or as its path alone; absent: the base model, with a head of zero."""


class RolloutTable(Table):
    """Sampling of responses, and of what distribution log-probs are: the trainer divides logits and leaves ids out as
    the generator does, in `logprobs` and in updates, so that a ratio compares like with like.

    Formula: logits / temperature, at the first min_new_tokens positions without the ids that end a response; of these
        min_p, top_k, top_p in this order (vLLM's); an id that was drawn always counts as kept. The reference is
        scored at the same temperature and whole, so that KL from it is at least -log(its probability of the ids that
        are kept)
    Source: top-p: Holtzman et al. 2020 (arXiv:1904.09751); min-p: Nguyen et al. 2024 (arXiv:2407.01082)
    Default of: all systems (nothing is left out); verl's and trlX's trainers score the whole distribution, whatever
        the generator left out
    """

    prompts_per_step: Annotated[int, RESULTS, AtLeastOne]
    """Prompts in one PPO step."""
    samples_per_prompt: Annotated[int, RESULTS, AtLeastOne] = 1
    """Responses per prompt; sequences in a step = prompts_per_step x samples_per_prompt."""
    max_prompt_tokens: Annotated[int, RESULTS, AtLeastOne]
    """Most tokens of a prompt; what becomes of a longer one the rows say (`long_prompts`: an error at start)."""
    max_new_tokens: Annotated[int, RESULTS, AtLeastOne]
    """Most tokens of a response (vLLM's `max_tokens`); one that reaches it is truncated."""
    temperature: Annotated[float, RESULTS, Positive] = 1.0
    """Sampling temperature: logits are divided by it in the generator and in the trainer alike."""
    top_p: Annotated[float, RESULTS, Field(gt=0, le=1)] = 1.0
    """Draw from the smallest set of likeliest ids that has this share of the probability; 1: from all. Evaluations
    have filters of their own."""
    top_k: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Draw from so many likeliest ids, and those as likely as the last of them; absent: from all."""
    min_p: Annotated[float, RESULTS, Field(ge=0, le=1)] = 0.0
    """Draw from ids at least this many times as likely as the likeliest; 0: from all."""
    stop_strings: Annotated[tuple[str, ...], RESULTS, Array] = ()
    """Texts that end a response where they appear (vLLM's `stop`); end-of-sequence tokens always end it."""
    stop_token_ids: Annotated[tuple[int, ...], RESULTS, Array] = ()
    """Ids that end a response besides the model's own end-of-sequence tokens, and are left out of its text as those
    are."""
    min_new_tokens: Annotated[int, RESULTS, NotNegative] = 0
    """Fewest tokens of a response before one may end it (vLLM's `min_tokens`): up to there ids that would are not
    drawn, and the trainer leaves them out too; stop strings are not looked for. Evaluations do not read it."""
    max_window_tokens: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Most tokens of prompt and response together, evaluations included: a long prompt leaves its response less than
    `max_new_tokens`. Absent: there is no such limit."""
    keep_finished_every_s: Annotated[float, SPEED, Positive] = 5.0
    """Seconds between writes of the finished samples of an unfinished rollout or evaluation; a kill loses no more."""


class GeneratorTable(Table):
    """vLLM engines that draw responses. They share one queue of prompts; a sample is the same whichever engine draws
    it."""

    engines: Annotated[int, SPEED, AtLeastOne] = 1
    """Engines, copies of the model that draw side by side."""
    tensor: Annotated[int, SPEED, AtLeastOne] = 1
    """Ranks that split the layers of each engine (vLLM's `tensor_parallel_size`); divides attention heads and
    key/value heads."""
    gpu_memory_frac: Annotated[float, SPEED, Field(gt=0, lt=1)] = 0.6
    """Share of a GPU that an engine may use for weights and KV cache (vLLM's `gpu_memory_utilization`); not read on
    CPU."""
    kv_cache_mib: Annotated[int, SPEED, AtLeastOne] = 256
    """MiB of KV cache on CPU, where no share of a GPU limits it (vLLM's `kv_cache_memory_bytes`); not read on GPU."""
    max_concurrent_seqs: Annotated[int, SPEED, AtLeastOne] = 256
    """Sequences that an engine decodes together (vLLM's `max_num_seqs`)."""
    compile: Annotated[bool | None, SPEED] = None
    """Compile the model and capture CUDA graphs (turns off vLLM's `enforce_eager`): slower start, faster tokens.
    Absent: on a GPU yes, on a CPU no."""
    batch_invariant: Annotated[bool, SPEED] = False
    """Have a GPU compute a sequence in the same order of rounding whichever others are decoded beside it (vLLM's
    `VLLM_BATCH_INVARIANT`): slower tokens, which repeat to the bit; not read on CPU."""
    async_scheduling: Annotated[bool | None, SPEED] = None
    """Prepare the next decoding step while the GPU computes one; absent: vLLM's choice; on a CPU never."""
    model_runner: Annotated[Literal["v1", "v2"] | None, SPEED] = None
    """Code of vLLM that runs the model (its `VLLM_USE_V2_MODEL_RUNNER`), to fall back to where one has a fault;
    absent: vLLM's choice."""
    canary_tolerance: Annotated[float | None, SPEED, Positive] = None
    """Largest allowed gap, in nats, between the generator's and the trainer's log-probs of the canary prompt after a
    weight update; absent: 1e-3 for float32, 0.5 for bfloat16 on the mean."""


class CheckpointTable(Table):
    """Saving of states, and which are kept. Data artifacts are committed after every stage regardless."""

    every_steps: Annotated[int, SPEED, AtLeastOne] = 1
    """Steps between saves of actor and critic. Between saves the artifacts are a redo log: a resume replays at most
    this many steps' updates."""
    asynchronous: Annotated[bool, SPEED] = True
    """Write states while the next step goes on. This takes the host memory of one more copy of actor and critic,
    weights and optimizer. False: training waits until they are on disk."""
    reshardable: Annotated[Literal["full", "dp"], SPEED] = "full"
    """Layouts under which the saved state of a distributed optimizer can be loaded. full: any with a distributed
    optimizer; a save gathers the state in host memory of the first data rank. dp: the same layout with any number of
    data ranks; each rank writes its own shard. The state of any other optimizer can be loaded under every layout
    without one, at no cost."""
    keep_last: Annotated[int | None, SPEED, Field(ge=2), OrAll] = 2
    """Healthy actor and critic pairs to keep; the last healthy one is never deleted. "all": none is, while the
    records of steps stay for the last two only. A pair that was saved because the run was stopped counts as none of
    these, and goes when a later one is saved."""
    best: Annotated[str | None, REPORTING] = None
    """Metric whose best actor is kept besides, as weights only; absent: none. It is the actor that was measured: the
    one a step began with for figures of training, the one it made for evaluations."""
    best_keep: Annotated[int, REPORTING, AtLeastOne] = 1
    """Best actors to keep; of equal ones the later (NeMo-RL's `keep_top_k`, which counts whole states)."""
    best_direction: Annotated[Literal["higher", "lower"] | None, REPORTING] = None
    """Which value of the metric is better; absent: as `ppoctl recipes metrics` says."""
    keep_rollouts_every_steps: Annotated[int, REPORTING, NotNegative] = 10
    """Steps between those whose rollouts stay readable after their folder is no longer needed; 0: none stay."""


class HealthRule(Table):
    """Bounds on one figure."""

    min: Annotated[float | None, REPORTING, OrOff] = None
    """Lowest healthy value; absent or "off": no lower bound."""
    max: Annotated[float | None, REPORTING, OrOff] = None
    """Highest healthy value; absent or "off": no upper bound."""
    action: Annotated[Literal["warn", "stop"], REPORTING] = "warn"
    """What the rule does when it acts. stop ends the run with exit 5 after the step's artifacts are committed."""
    from_step: Annotated[int, REPORTING, AtLeastOne] = 1
    """First step that is judged."""
    for_steps: Annotated[int, REPORTING, AtLeastOne] = 1
    """Consecutive steps out of bounds before the rule acts."""


class HealthTable(Table):
    """Bounds of a healthy run. The reward's error share has its own hard limit in `[reward]`."""

    kl: HealthRule = HealthRule(max=0.5)
    """Bounds on policy/approx_kl: how far one step moved the actor (nats per token); 0 where `ppo.old_logprobs` is
    "current"."""
    reference_kl: HealthRule = HealthRule()
    """Bounds on kl/reference_mean, where a reference is read."""
    entropy: HealthRule = HealthRule()
    """Bounds on policy/entropy_mean (nats per token)."""
    truncated: HealthRule = HealthRule(max=0.5)
    """Bounds on rollout/truncated_frac."""
    explained_variance: HealthRule = HealthRule(min=-1.0, from_step=10, for_steps=3)
    """Bounds on value/explained_variance."""
    reward_errors: HealthRule = HealthRule(max=0.01)
    """Bounds on reward/error_frac + reward/timeout_frac."""
    reward_spread: HealthRule = HealthRule(min=1e-6)
    """Bounds on reward/score_std: where all scores of a step are equal there is nothing to learn from."""
    mismatch_k3: HealthRule = HealthRule(max=0.1, action="stop", for_steps=2)
    """Bounds on mismatch/gap_k3 (nats per token): what the sampler computes, from what the trainer does. Few tokens
    weigh much in it, hence two steps. A step is judged as it ends, after its update; `resume --back-to` leads before
    it."""
    mismatch_abs: HealthRule = HealthRule(max=0.3, action="stop")
    """Bounds on mismatch/gap_mean_abs (nats per token), which no few tokens move. docs/gpu.md has what bfloat16
    reaches."""


class MlflowTracking(Table):
    """Tracking by MLflow, a mirror. The run directory stays the truth; MLflow being down never stops training."""

    kind: Annotated[Literal["mlflow"], REPORTING]
    """Mirror the run to MLflow."""
    uri: Annotated[str | None, REPORTING] = None
    """MLflow tracking URI without a secret, or `$NAME` of a variable that holds it; absent: a sqlite file in the runs
    folder."""
    experiment: Annotated[str, REPORTING] = "ppoctl"
    """Name of the MLflow experiment."""


class NoTracking(Table):
    """No tracking beyond the run directory."""

    kind: Annotated[Literal["none"], REPORTING]
    """No mirror."""


Tracking = Annotated[MlflowTracking | NoTracking, Field(discriminator="kind")]


AllOrNone = BeforeValidator(
    lambda value: ["actor", "critic", "generator"] * value if isinstance(value, bool) else value
)
"""A list of roles that run directories of before have as true or false."""


class ClusterTable(Table):
    """Processes and devices: this machine, or a running Ray. Where every role is one process and they share a device,
    there is no Ray: trained roles live in this process, and vLLM in one beside it; otherwise each role runs in
    processes of Ray."""

    placement: Annotated[Literal["colocated", "apart"], SPEED] = "colocated"
    """Whether roles share devices. colocated: one process of each role on a device; apart: each process has a device
    of its own."""
    offload: Annotated[tuple[Literal["actor", "critic", "generator", "reward"], ...], SPEED, Array, AllOrNone] = ()
    """Roles that leave the memory of shared devices while another one is at work: actor, critic and reward models
    move to the host, engines drop their cache and sleep (vLLM's `enable_sleep_mode`). A role that is not listed never
    leaves. `plan` says what each stage needs."""
    weights: Annotated[Literal["shared", "store", "broadcast"], SPEED] = "shared"
    """How weights reach engines in other processes. shared: engines read memory of the actor's ranks on their node
    (CUDA IPC on GPUs); store: one rank sends all through Ray's object store, as shared does for nodes without such a
    rank, and without Ray engines read host memory of the rank; broadcast: over a process group (NCCL on GPUs, gloo on
    CPUs), where roles are apart."""
    weights_bucket_mib: Annotated[int, SPEED, AtLeastOne] = 64
    """MiB of weights in one bucket on its way to engines; a few buckets exist at one time, and a larger tensor goes
    alone. The driver asks every rank and engine for each bucket: on many GPUs larger buckets are faster."""
    threads: Annotated[int | None, SPEED, AtLeastOne] = None
    """CPU threads of trainer and generator; absent: all cores this process may use. A role's processes share them."""
    ray_address: Annotated[str | None, SPEED] = None
    """Address (`host:port`) of a running Ray; absent: the run starts one of its own where it needs one."""
    start_deadline_s: Annotated[float, SPEED, Positive] = 300.0
    """Seconds for the processes of a role to start and meet; later the run stops (exit 3)."""
    call_deadline_s: Annotated[float, SPEED, Positive] = 3600.0
    """Seconds for a role to answer one call. One that has not answered by then hangs: the run stops (exit 6) and says
    who waits where."""
    draw_deadline_s: Annotated[float | None, SPEED, Positive] = None
    """Deadline, in seconds, of one engine call, which draws 16 to 64 tokens of each sequence it holds; absent:
    `call_deadline_s`."""
    forward_deadline_s: Annotated[float | None, SPEED, Positive] = None
    """Deadline, in seconds, of a pass that scores rollouts (log-probs, the reference's, values); absent:
    `call_deadline_s`."""
    update_deadline_s: Annotated[float | None, SPEED, Positive] = None
    """Deadline, in seconds, of an update, all its epochs together; absent: `call_deadline_s`."""
    save_deadline_s: Annotated[float | None, SPEED, Positive] = None
    """Deadline, in seconds, of the part of a save that training waits for; absent: `call_deadline_s`."""


class Expectation(Table):
    """Bound that the run must meet; unmet means exit 5."""

    at_step: Annotated[int | None, REPORTING, NotNegative] = None
    """Step whose value is judged; absent: the last."""
    min: Annotated[float | None, REPORTING] = None
    """Lowest allowed value; absent: no lower bound."""
    max: Annotated[float | None, REPORTING] = None
    """Highest allowed value; absent: no upper bound."""
    rise_min: Annotated[float | None, REPORTING] = None
    """Smallest rise over the metric's first value; absent: not judged."""


class Recipe(Table):
    """One training job: model, data, algorithm, roles, and where they run."""

    name: Annotated[str, REPORTING, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    """Name of the run directory, `runs/NAME`."""
    seed: Annotated[int, RESULTS, NotNegative] = 42
    """Seed of the run: all randomness is a hash of it and of where it is used."""
    steps: Annotated[int, REPORTING, AtLeastOne, Field(le=1_000_000)]
    """PPO steps of the run. Raising it continues a finished run."""
    epochs: Annotated[int | None, REPORTING, AtLeastOne] = None
    """Passes over the training rows, in place of `steps`: the whole steps in them, counted when the recipe is read,
    and kept by the run as `steps`. Rows that an epoch leaves over begin the next; those of the last are not drawn."""
    requires: Annotated[tuple[str, ...], REPORTING, Array] = ()
    """What the run needs that ppoctl cannot do yet, by the names in docs/limits.md (`lora`, `tools`): `validate` and
    `plan` name it, `train` refuses."""
    without: Annotated[tuple[str, ...], REPORTING, Array] = ()
    """Names of `requires` that the run does without, which `train --without NAME` adds: its result is then its
    own."""
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
    slurm: SlurmTable = SlurmTable()
    expect: dict[str, Expectation] = Field(default_factory=dict)
    """Bounds that the run must reach, by metric name."""
