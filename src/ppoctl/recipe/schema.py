"""The recipe: one frozen class per TOML table, one docstring per key. The classes only contain values.

Alternatives are tagged tables (`kind = "..."`). `None` is used only if the absence of a key has a meaning. Conflicts
between keys are errors (`loading.rules`) and are never corrected. Every key declares its effect (`recipe_table`).
"""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from ppoctl.algorithms.evaluation_table import EvalTable
from ppoctl.algorithms.ppo_table import PpoTable
from ppoctl.algorithms.role_table import ActorTable, CriticTable, TrainedTable
from ppoctl.algorithms.rollout_table import RolloutTable
from ppoctl.core.recipe_table import (
    REPORTING,
    RESULTS,
    SPEED,
    Array,
    AtLeastOne,
    NotNegative,
    OrAll,
    OrOff,
    Positive,
    Table,
)
from ppoctl.data.row_tables import DataTable
from ppoctl.environments.environment_kinds import EnvironmentOf
from ppoctl.environments.environment_table import EpisodeTable
from ppoctl.models.head import SharedValueHead
from ppoctl.models.model_tables import ModelTable
from ppoctl.models.trainable_tables import ValueHeadTable
from ppoctl.recipe.fingerprint import fingerprint
from ppoctl.recipe.slurm_table import SlurmTable
from ppoctl.recipe.tracking_table import MlflowTracking, Tracking
from ppoctl.rewards.reward_table import Reward


class GeneratorTable(Table):
    """vLLM engines that generate responses. They share one queue of prompts, and a sample does not depend on the
    engine that generates it."""

    engines: Annotated[int, SPEED, AtLeastOne] = 1
    """Number of engines; each has a copy of the model, and all generate in parallel. With `engines_per_gpu`, the
    number of GPUs with engines."""
    engines_per_gpu: Annotated[int, SPEED, AtLeastOne] = 1
    """Number of engines that share a GPU (without GPUs: the CPU threads). Each has a copy of the weights, and an
    equal part of `gpu_memory_frac` (`kv_cache_mib`) and of `max_concurrent_seqs`. An engine computes in Python for
    every sequence and token, so several small engines are faster than one. Requires `tensor = 1`."""
    tensor: Annotated[int, SPEED, AtLeastOne] = 1
    """Number of ranks that split the layers of each engine (vLLM's `tensor_parallel_size`). It must divide the
    numbers of attention heads and key/value heads."""
    gpu_memory_frac: Annotated[float, SPEED, Field(gt=0, lt=1)] = 0.6
    """Fraction of a GPU's memory that its engines may use for weights and KV cache (vLLM's `gpu_memory_utilization`);
    ignored on CPU."""
    kv_cache_mib: Annotated[int, SPEED, AtLeastOne] = 256
    """Size of the KV cache on CPU, in MiB (vLLM's `kv_cache_memory_bytes`); ignored on GPU."""
    max_concurrent_seqs: Annotated[int, SPEED, AtLeastOne] = 256
    """Maximum number of sequences that the engines of a GPU decode at the same time (vLLM's `max_num_seqs`)."""
    compile: Annotated[bool | None, SPEED] = None
    """Whether to compile the model and capture CUDA graphs (which turns off vLLM's `enforce_eager`): startup is
    slower, decoding is faster. Absent: on for a GPU, off for a CPU."""
    batch_invariant: Annotated[bool, SPEED] = False
    """Whether a GPU computes each sequence with the same rounding, independently of the other sequences in the batch
    (vLLM's `VLLM_BATCH_INVARIANT`): slower decoding, bitwise repeatable responses. Ignored on CPU."""
    async_scheduling: Annotated[bool | None, SPEED] = None
    """Whether to prepare the next decoding step while the GPU computes the current one. Absent: vLLM decides on a
    GPU; off on a CPU."""
    model_runner: Annotated[Literal["v1", "v2"] | None, SPEED] = None
    """Model runner of vLLM (`VLLM_USE_V2_MODEL_RUNNER`), as a workaround if one of them has a bug; absent: vLLM's
    choice."""
    canary_tolerance: Annotated[float | None, SPEED, Positive] = None
    """Largest allowed difference, in nats, between generator and trainer log-probs of the canary prompt after a
    weight transfer. Absent: 1e-3 for float32; 0.5 for bfloat16, as a bound on the mean difference."""


class CheckpointTable(Table):
    """Saving and retention of states. Records are committed after every stage in any case."""

    every_steps: Annotated[int, SPEED, AtLeastOne] = 1
    """Steps between saves of all trained roles. Between two saves, the records are a redo log: a resume replays the
    updates of at most this many steps."""
    asynchronous: Annotated[bool, SPEED] = True
    """Whether states are written while the next step runs. This requires host memory for one more copy of the weights
    and the optimizer of each trained role. False: training waits until the states are on disk."""
    reshardable: Annotated[Literal["full", "dp"], SPEED] = "full"
    """Layouts under which the saved state of a distributed optimizer can be loaded. full: any layout with a
    distributed optimizer; a save gathers the state in the host memory of the first data rank. dp: the same layout
    with any number of data ranks; each rank writes its own shard. The state of a non-distributed optimizer can always
    be loaded under every layout without a distributed optimizer."""
    keep_last: Annotated[int | None, SPEED, Field(ge=2), OrAll] = 2
    """Number of healthy checkpoints (states of all trained roles) to keep; the last healthy checkpoint is never
    deleted. "all" keeps every checkpoint; records of steps are still kept for the last two steps only. A checkpoint
    that was saved because the run was stopped is not counted, and is deleted when a later checkpoint is saved."""
    best: Annotated[str | None, REPORTING] = None
    """Metric that selects the best actor, whose weights are kept in addition; absent: no best actor is kept. The kept
    actor is the actor that was measured: for training metrics the actor at the start of the step, for evaluations the
    actor after the step."""
    best_keep: Annotated[int, REPORTING, AtLeastOne] = 1
    """Number of best actors to keep; if two have equal values, the later actor is kept (NeMo-RL's `keep_top_k`, which
    counts complete states)."""
    best_direction: Annotated[Literal["higher", "lower"] | None, REPORTING] = None
    """Direction in which the metric is better; absent: the direction that `ppoctl recipes metrics` shows."""
    keep_rollouts_every_steps: Annotated[int, REPORTING, NotNegative] = 10
    """Steps between rollouts that remain readable after the folder of their step is no longer needed; 0: no rollout
    remains."""


class HealthRule(Table):
    """Bounds on one metric."""

    min: Annotated[float | None, REPORTING, OrOff] = None
    """Lowest healthy value; absent or "off": no lower bound."""
    max: Annotated[float | None, REPORTING, OrOff] = None
    """Highest healthy value; absent or "off": no upper bound."""
    action: Annotated[Literal["warn", "stop"], REPORTING] = "warn"
    """Action of the rule. warn prints a warning; stop ends the run with exit 5 after the records of the step are
    committed."""
    from_step: Annotated[int, REPORTING, AtLeastOne] = 1
    """First step that is checked."""
    for_steps: Annotated[int, REPORTING, AtLeastOne] = 1
    """Number of consecutive steps out of bounds before the rule acts."""


class HealthTable(Table):
    """Bounds of a healthy run. The fraction of failed scores has a separate hard limit, `reward.max_error_frac`."""

    kl: HealthRule = HealthRule(max=0.5)
    """Bounds on policy/approx_kl, the KL between the actor before and after a step (nats per token). If
    `ppo.old_logprobs` is "current", the metric is always 0."""
    reference_kl: HealthRule = HealthRule()
    """Bounds on kl/reference_mean, if the run has a reference."""
    entropy: HealthRule = HealthRule()
    """Bounds on policy/entropy_mean (nats per token)."""
    truncated: HealthRule = HealthRule(max=0.5)
    """Bounds on rollout/truncated_frac."""
    explained_variance: HealthRule = HealthRule(min=-1.0, from_step=10, for_steps=3)
    """Bounds on value/explained_variance."""
    reward_errors: HealthRule = HealthRule(max=0.01)
    """Bounds on reward/error_frac + reward/timeout_frac."""
    reward_spread: HealthRule = HealthRule(min=1e-6)
    """Bounds on reward/score_std: if all scores of a step are equal, there is nothing to learn from."""
    mismatch_k3: HealthRule = HealthRule(max=0.1, action="stop", for_steps=2)
    """Bounds on mismatch/gap_k3 (nats per token), the difference between sampler and trainer. A few tokens can
    dominate this metric, so the rule acts after two steps. The rule is checked at the end of a step, after the
    updates; `resume --back-to` returns to an earlier step."""
    mismatch_abs: HealthRule = HealthRule(max=0.3, action="stop")
    """Bounds on mismatch/gap_mean_abs (nats per token), which a few tokens cannot dominate. docs/gpu.md lists values
    for bfloat16."""


AllOrNone = BeforeValidator(
    lambda value: ["actor", "critic", "generator"] * value if isinstance(value, bool) else value
)
"""Validator of a list of roles. Run directories of earlier versions contain true or false instead of the list."""


class ClusterTable(Table):
    """Processes and devices, on this machine or in a running Ray cluster. Ray is not used if every role has one
    process and all roles share a device: the trained roles are then in the process of the command, and vLLM is in
    another process. Otherwise each role runs in processes of Ray."""

    placement: Annotated[Literal["colocated", "apart"], SPEED] = "colocated"
    """Whether roles share devices. colocated: one process of each role on a device; apart: each process has its own
    device."""
    offload: Annotated[tuple[Literal["actor", "critic", "generator", "reward"], ...], SPEED, Array, AllOrNone] = ()
    """Roles that are offloaded from shared devices while another role runs: actor, critic and reward models move to
    host memory; engines free their KV cache and enter sleep mode (vLLM's `enable_sleep_mode`). A role that is not
    listed is never offloaded. `plan` shows the memory of each stage."""
    weights: Annotated[Literal["shared", "store", "broadcast"], SPEED] = "shared"
    """Transfer of weights to engines in other processes. shared: an engine reads the memory of the actor's ranks on
    the same node (CUDA IPC on GPUs); on a node without such a rank, it reads Ray's object store. store: one rank
    sends all weights through Ray's object store; without Ray, engines read the host memory of this rank. broadcast:
    the weights are broadcast over a process group (NCCL on GPUs, gloo on CPUs); this requires roles with separate
    devices."""
    weights_bucket_mib: Annotated[int, SPEED, AtLeastOne] = 64
    """Size, in MiB, of a bucket of weights that is sent to the engines. A few buckets are in memory at the same time,
    and a larger tensor is sent alone. The driver calls every rank and engine for each bucket, so larger buckets are
    faster on many GPUs."""
    threads: Annotated[int | None, SPEED, AtLeastOne] = None
    """CPU threads of trainer and generator, shared by the processes of a role; absent: all cores available to this
    process."""
    ray_address: Annotated[str | None, SPEED] = None
    """Address (`host:port`) of a running Ray cluster; absent: the run starts Ray itself if it requires Ray."""
    start_deadline_s: Annotated[float, SPEED, Positive] = 300.0
    """Deadline, in seconds, for the processes of a role to start and connect. After the deadline the run stops (exit
    3)."""
    call_deadline_s: Annotated[float, SPEED, Positive] = 3600.0
    """Deadline, in seconds, for a role to return from one call. After the deadline the role is considered hung: the
    run stops (exit 6) and reports which process waits at which point."""
    draw_deadline_s: Annotated[float | None, SPEED, Positive] = None
    """Deadline, in seconds, of one call of an engine, which generates 16 to 64 tokens for each sequence of the call;
    absent: `call_deadline_s`."""
    forward_deadline_s: Annotated[float | None, SPEED, Positive] = None
    """Deadline, in seconds, of a forward pass over rollouts (log-probs of actor or reference, values); absent:
    `call_deadline_s`."""
    update_deadline_s: Annotated[float | None, SPEED, Positive] = None
    """Deadline, in seconds, of an update with all its epochs; absent: `call_deadline_s`."""
    save_deadline_s: Annotated[float | None, SPEED, Positive] = None
    """Deadline, in seconds, of the part of a save that training waits for; absent: `call_deadline_s`."""


class Expectation(Table):
    """Bounds that a metric of the run must meet; a run that does not meet them ends with exit 5."""

    at_step: Annotated[int | None, REPORTING, NotNegative] = None
    """Step whose value is checked; absent: the last step."""
    min: Annotated[float | None, REPORTING] = None
    """Lowest allowed value; absent: no lower bound."""
    max: Annotated[float | None, REPORTING] = None
    """Highest allowed value; absent: no upper bound."""
    rise_min: Annotated[float | None, REPORTING] = None
    """Smallest rise above the metric's first value; absent: not checked."""


class Target(Table):
    """Bounds on a metric that, together with the other metrics of `[until]`, end the run early."""

    min: Annotated[float | None, REPORTING] = None
    """Lowest value that ends the run; absent: no lower bound."""
    max: Annotated[float | None, REPORTING] = None
    """Highest value that ends the run; absent: no upper bound."""
    for_steps: Annotated[int, REPORTING, AtLeastOne] = 1
    """Number of consecutive steps with a value of this metric within the bounds. Steps that do not report the metric
    are not counted."""


class Recipe(Table):
    """One training run: model, data, algorithm, roles, and the devices that they run on."""

    name: Annotated[str, REPORTING, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    """Name of the run directory, `runs/NAME`."""
    seed: Annotated[int, RESULTS, NotNegative] = 42
    """Seed of the run. Each random number is derived from a hash of the seed and of the place where the number is
    used."""
    steps: Annotated[int, REPORTING, AtLeastOne, Field(le=1_000_000)]
    """Number of PPO steps of the run. A higher number continues a finished run."""
    epochs: Annotated[int | None, REPORTING, AtLeastOne] = None
    """Number of passes over the training rows, instead of `steps`. It is converted to complete steps when the recipe
    is read, and the run keeps it as `steps`. Rows of an epoch that do not fill a step are used in the first step of
    the next epoch; such rows of the last epoch are not used."""
    requires: Annotated[tuple[str, ...], REPORTING, Array] = ()
    """Features that the run requires and ppoctl does not have yet, by their names in docs/limits.md (`async`,
    `critic-free`). `validate` and `plan` report them; `train` rejects the recipe."""
    without: Annotated[tuple[str, ...], REPORTING, Array] = ()
    """Names in `requires` that the run trains without; `train --without NAME` adds a name. The results can then
    differ from the results of the original recipe."""
    model: ModelTable
    data: DataTable
    rollout: RolloutTable
    environment: EnvironmentOf | None = None
    """Environment that answers the actor's turns, so that a response has several turns; absent: a response has one
    turn."""
    reward: Reward
    ppo: PpoTable
    actor: ActorTable
    critic: CriticTable | None = None
    """The critic: a role with a model of its own or, with the key `on`, a value head on the actor's model. Absent:
    the run trains none, because its advantages use no values (`ppo.advantages.kind`)."""
    generator: GeneratorTable = GeneratorTable()
    checkpoint: CheckpointTable = CheckpointTable()
    eval: EvalTable = EvalTable()
    health: HealthTable = HealthTable()
    tracking: Tracking = MlflowTracking(kind="mlflow")
    cluster: ClusterTable = ClusterTable()
    slurm: SlurmTable = SlurmTable()
    expect: dict[str, Expectation] = Field(default_factory=dict)
    """Bounds that the run must meet, by metric name."""
    until: dict[str, Target] = Field(default_factory=dict)
    """Bounds that end the run before `steps`, by metric name: the run ends after the first step that reports every
    metric of this table with a value within its bounds. It then saves, evaluates (`eval.at_end`) and checks
    `[expect]`, as after its last step. An evaluation before the first step ends no run. Schedules of learning rates
    still use `steps`."""

    def fingerprint(self, keys: Sequence[str], *, without: Sequence[str] = ()) -> str:
        """Return the digest of the keys at or below `keys` that decide results, except those at or below `without`.

        Raises ValueError if a key is not in the schema.
        """
        return fingerprint(self, keys, without=without)

    @property
    def trained(self) -> dict[str, TrainedTable]:
        """Role -> its table, for each role that this recipe trains, in the order of the tables."""
        return {name: table for name, table in vars(self).items() if isinstance(table, TrainedTable)}

    def environment_of(self, data: str) -> EpisodeTable | None:
        """Return the environment of the rows with this key below `data`; None: their responses have one turn."""
        return self.environment if data == "train" else self.eval_environment

    @property
    def eval_environment(self) -> EpisodeTable | None:
        """Environment of evaluations; None: their responses have one turn."""
        own = self.eval.environment
        if own is None:
            return self.environment
        return own if isinstance(own, EpisodeTable) else None

    @property
    def value_head(self) -> SharedValueHead | None:
        """The value head on the actor's model; None: there is none."""
        return self.critic.shape if isinstance(self.critic, ValueHeadTable) else None
