"""Which settings of a run Prime-RL supports.

A setting is translated into Prime-RL's own keys, applied by Dockyard's plug-in (`rollouts`), or ignored for a reason.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dockyard.backends.launch import Ignored, Support, Supported
from dockyard.config import RunConfig

_TARGET_KEYS = {
    "run_dir": ("output_dir",),
    "steps": ("max_steps",),
    "seed": ("inference.vllm.seed",),  # and the order of the tasks
    "model.name": ("model.name",),
    "tasks.heldout": ("orchestrator.eval.source",),
    "tasks.heldout_share": ("orchestrator.eval.source",),
    "tasks.num_heldout": ("orchestrator.eval.source",),
    "tasks.passes": ("max_steps",),
    "sampling.temperature": ("orchestrator.train.sampling.temperature",),
    "sampling.eval_temperature": ("orchestrator.eval.sampling.temperature",),
    "sampling.max_new_tokens": (
        "orchestrator.train.sampling.max_completion_tokens",
        "orchestrator.eval.sampling.max_completion_tokens",
    ),
    "engine.context_length": ("seq_len", "inference.vllm.max_model_len"),
    "rollout.concurrency": ("orchestrator.concurrency.max_inflight",),
    "rollout.retries": ("env.agent.retries.max_retries",),  # of each source
    "rollout.max_staleness": ("orchestrator.max_off_policy_steps",),
    "grpo.group_size": ("orchestrator.group_size",),
    "grpo.tasks_per_step": ("orchestrator.batch_size",),
    "trainer.lr": ("trainer.optim.lr",),
    "trainer.warmup_steps": ("trainer.scheduler.warmup_steps",),
    "trainer.schedule": ("trainer.scheduler",),
    "trainer.adam_beta2": ("trainer.optim.betas2",),
    "trainer.weight_decay": ("trainer.optim.weight_decay",),
    "trainer.max_grad_norm": ("trainer.optim.max_norm",),
    "trainer.lora_r": ("trainer.model.lora.rank",),
    "trainer.lora_alpha": ("trainer.model.lora.alpha",),
    "trainer.save_every": ("ckpt.interval",),
    "eval.samples": ("orchestrator.eval.group_size",),
    "eval.every": ("orchestrator.eval.interval",),
}
"""Setting -> the keys of Prime-RL that it decides."""
_BY_ROLLOUTS = (
    *("tasks.train", "tasks.dataset", "tasks.registry", "tasks.split", "tasks.map", "tasks.repositories"),
    *("tasks.image", "tasks.repo", "tasks.ids", "tasks.limit", "tasks.num_train", "tasks.kwargs"),
    *("agent.name", "agent.max_turns", "agent.kwargs", "agent.env", "agent.install"),
    *("environment.type", "environment.sandbox", "environment.network", "environment.cpus", "environment.memory_mb"),
    *("environment.storage_mb", "environment.seal", "environment.kwargs"),
    *("engine.retry_s", "gateway.max_calls", "gateway.max_sampled_tokens", "gateway.max_concurrency", "gateway.tunnel"),
    *("rollout.build_timeout_s", "rollout.setup_timeout_s", "rollout.agent_timeout_s"),
    *("rollout.verifier_timeout_s", "rollout.total_timeout_s"),
)
_OWN_ENGINE = "it starts vLLM itself"
_OWN_CLIPPING = (
    "its loss masks tokens by the change of their probability instead of clipping the ratio; "
    "`prime_rl.options.trainer.loss.dppo_mask_low` and `dppo_mask_high` set its bounds"
)
_OWN_GATEWAYS = "each of its processes opens its own gateway on a free port"
_OWN_ALGORITHM = "it has its own advantages and loss; `prime_rl.options.orchestrator.algo` selects them"
_OWN_TRACKERS = "it has its own monitors, for example `prime_rl.options.monitors.wandb`"
_IGNORED = {
    "callbacks": "Prime-RL runs the training loop, which does not call them",
    **{
        f"grpo.{name}": _OWN_ALGORITHM
        for name in (
            *("algorithm", "advantage", "aggregation", "constant_length", "ratio", "correction", "correction_cap"),
            *("kl_type", "zero_variance", "overlong", "overlong_length", "overlong_buffer", "loss"),
        )
    },
    "tasks.order": "its orchestrator chooses the tasks of each step",
    "grpo.reward": "it trains with the verifier's reward; `dockyard train` calls the function",
    "grpo.dynamic_sampling": "it drops groups with equal rewards by itself and samples others",
    "grpo.max_tries": "it drops groups with equal rewards by itself and samples others",
    "trainer.compile": "it has its own setting, `prime_rl.options.trainer.model.compile`",
    "trainer.offload": "it has its own setting, `prime_rl.options.trainer.model.ac_offloading`",
    "trainer.max_skipped_steps": "it has no such limit",
    "trainer.keep_last": "it has its own setting, `prime_rl.options.ckpt.keep_last`",
    "trainer.keep_best": "it does not compare checkpoints",
    "tracker.wandb": _OWN_TRACKERS,
    "tracker.tensorboard": _OWN_TRACKERS,
    "tracker.trackio": _OWN_TRACKERS,
    "engine.type": _OWN_ENGINE,
    "engine.kwargs": _OWN_ENGINE,
    "engine.url": _OWN_ENGINE,
    "engine.model": _OWN_ENGINE,
    "engine.api_key_env": _OWN_ENGINE,
    "engine.launch": _OWN_ENGINE,
    "engine.command": _OWN_ENGINE,
    "engine.memory_share": f"{_OWN_ENGINE}; set `prime_rl.options.inference.vllm.gpu_memory_utilization`",
    "engine.args": f"{_OWN_ENGINE}; `prime_rl.options.inference.vllm` takes vLLM's options",
    "engine.max_batch": f"{_OWN_ENGINE}; set `prime_rl.options.inference.vllm.max_num_seqs`",
    "engine.prefix_cache_mb": f"{_OWN_ENGINE}; set `prime_rl.options.inference.vllm.gpu_memory_utilization`",
    "engine.kv_cache_gb": f"{_OWN_ENGINE}; set `prime_rl.options.inference.vllm.gpu_memory_utilization`",
    "engine.deterministic": _OWN_ENGINE,
    "gateway.port": _OWN_GATEWAYS,
    "gateway.public_url": f"{_OWN_GATEWAYS}; `gateway.tunnel` opens one for each",
    "rollout.max_lost_share": "it has its own rule: it stops after several batches without anything to train on",
    "grpo.clip_low": _OWN_CLIPPING,
    "grpo.clip_high": _OWN_CLIPPING,
    "trainer.micro_batch_tokens": "it packs sequences up to `engine.context_length`",
}
_WORKERS = "the limit would apply to each worker separately; `--prime_rl.num_workers 1` starts one worker"


@dataclass(frozen=True, slots=True)
class _Conditional:
    """A setting whose support depends on its own value or on another setting."""

    is_supported: Callable[[RunConfig], bool]
    by: str
    why: str
    """Why it is ignored otherwise."""


_CONDITIONAL = {
    "model.dtype": _Conditional(
        lambda config: config.model.dtype != "float32", "bfloat16, in which it computes", "it computes in bfloat16"
    ),
    "trainer.method": _Conditional(
        lambda config: config.trainer.method == "lora", "trainer.model.lora", "it trains LoRA adapters here"
    ),
    "model.device": _Conditional(lambda config: config.model.device != "cpu", "GPUs", "it needs GPUs"),
    "tasks.source": _Conditional(
        lambda config: config.tasks.source != "recorded", "rollouts", "it trains on new rollouts only"
    ),
    "grpo.kl_coef": _Conditional(
        lambda config: config.grpo.kl_coef == 0,
        "no reference model, as without a KL penalty",
        "it has no reference model; `prime_rl.options.trainer.loss.kl_tau` is against the weights that sampled",
    ),
    **{
        f"rollout.{name}": _Conditional(lambda config: config.prime_rl.num_workers == 1, "rollouts", _WORKERS)
        for name in ("max_building", "max_running", "max_verifying")
    },
}


def support(key: str, config: RunConfig) -> Support:
    """Return the support for the setting with this dotted key, which is not one of the section `prime_rl`."""
    if key in _BY_ROLLOUTS:
        return Supported("rollouts")
    if key in _CONDITIONAL:
        setting = _CONDITIONAL[key]
        return Supported(setting.by) if setting.is_supported(config) else Ignored(setting.why)
    return Ignored(_IGNORED[key]) if key in _IGNORED else Supported(", ".join(_TARGET_KEYS[key]))


def setting_of(key: str) -> str | None:
    """Return the setting that decides this key of Prime-RL, or None."""
    return next((setting for setting, targets in _TARGET_KEYS.items() if key in targets), None)
