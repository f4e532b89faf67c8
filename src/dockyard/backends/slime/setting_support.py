"""Which settings of a run SLiME supports.

A setting is translated into SLiME's options, applied by Dockyard's hooks (`rollouts`), or ignored for a reason.
"""

from dockyard.backends.launch import Ignored, Support, Supported
from dockyard.config import GRPOConfig, RunConfig

_OPTIONS = {
    "run_dir": ("--custom-config-path", "--save", "--load"),
    "steps": ("--num-rollout",),
    "seed": ("--seed", "--rollout-seed"),
    "model.name": ("--hf-checkpoint", "--ref-load"),
    "tasks.passes": ("--num-rollout",),
    "tasks.heldout": ("--eval-prompt-data",),
    "tasks.heldout_share": ("--eval-prompt-data",),
    "tasks.dataset": ("--load-debug-rollout-data",),
    "sampling.temperature": ("--rollout-temperature",),
    "sampling.eval_temperature": ("--eval-temperature",),
    "sampling.max_new_tokens": ("--rollout-max-response-len",),
    "engine.context_length": ("--rollout-max-context-len", "--sglang-context-length"),
    "rollout.max_staleness": ("--colocate", "--rollout-function-path", "--update-weights-interval"),
    "grpo.group_size": ("--n-samples-per-prompt", "--global-batch-size"),
    "grpo.tasks_per_step": ("--rollout-batch-size", "--global-batch-size", "--num-steps-per-rollout"),
    "grpo.clip_low": ("--eps-clip",),
    "grpo.clip_high": ("--eps-clip-high",),
    "grpo.kl_coef": ("--use-kl-loss", "--kl-loss-coef"),
    "grpo.kl_type": ("--kl-loss-type",),
    "trainer.lr": ("--lr",),
    "trainer.warmup_steps": ("--lr-warmup-iters", "--lr-warmup-init"),
    "trainer.schedule": ("--lr-decay-style",),
    "trainer.adam_beta2": ("--adam-beta2",),
    "trainer.weight_decay": ("--weight-decay",),
    "trainer.max_grad_norm": ("--clip-grad",),
    "trainer.micro_batch_tokens": ("--max-tokens-per-gpu",),
    "trainer.save_every": ("--save-interval",),
    "eval.samples": ("--n-samples-per-eval-prompt",),
    "eval.every": ("--eval-interval",),
}
"""Setting -> the options of SLiME that it decides."""
_BY_ROLLOUTS = (
    *("tasks.source", "tasks.kwargs", "tasks.train", "tasks.registry", "tasks.split", "tasks.map"),
    *("tasks.repositories", "tasks.image", "tasks.repo", "tasks.ids", "tasks.limit", "tasks.num_train"),
    "tasks.num_heldout",
    *("agent.name", "agent.max_turns", "agent.kwargs", "agent.env", "agent.install"),
    *("environment.type", "environment.sandbox", "environment.network", "environment.cpus", "environment.memory_mb"),
    *("environment.storage_mb", "environment.seal", "environment.kwargs"),
    *("gateway.max_calls", "gateway.max_sampled_tokens", "gateway.max_concurrency", "gateway.port"),
    *("gateway.public_url", "gateway.tunnel"),
    *("rollout.concurrency", "rollout.max_building", "rollout.max_running", "rollout.max_verifying"),
    *("rollout.build_timeout_s", "rollout.setup_timeout_s", "rollout.agent_timeout_s"),
    *("rollout.verifier_timeout_s", "rollout.total_timeout_s", "rollout.retries", "rollout.max_lost_share"),
)
_OWN_ENGINE = "it starts SGLang engines itself"
_ALL_WEIGHTS = "it trains all weights; `--slime.flavour miles` trains LoRA adapters"
_OWN_TRACKERS = "it has its own trackers; add `--use-wandb` to `slime.args`"
_IGNORED = {
    "tasks.order": "it attempts each task once per pass, in an order that the seed determines",
    "grpo.reward": "it trains with the verifier's reward; `dockyard train` calls the function",
    "callbacks": "SLiME runs the training loop, which does not call them",
    "grpo.dynamic_sampling": "use `slime.dynamic_sampling`, SLiME's own implementation",
    "grpo.max_tries": "use `slime.dynamic_sampling`, SLiME's own implementation",
    "trainer.compile": "Megatron has its own kernels",
    "trainer.offload": "set Megatron's recomputation in `slime.args`",
    "trainer.max_skipped_steps": "Megatron skips such updates without a limit",
    "trainer.keep_last": "it keeps all checkpoints",
    "trainer.keep_best": "it keeps all checkpoints",
    "tracker.wandb": _OWN_TRACKERS,
    "tracker.tensorboard": _OWN_TRACKERS,
    "tracker.trackio": _OWN_TRACKERS,
    "model.device": "it trains on GPUs only",
    "engine.type": _OWN_ENGINE,
    "engine.kwargs": _OWN_ENGINE,
    "engine.url": _OWN_ENGINE,
    "engine.model": _OWN_ENGINE,
    "engine.api_key_env": _OWN_ENGINE,
    "engine.retry_s": _OWN_ENGINE,
    "engine.launch": _OWN_ENGINE,
    "engine.command": _OWN_ENGINE,
    "engine.memory_share": f"{_OWN_ENGINE}; set `--sglang-mem-fraction-static` in `slime.args`",
    "engine.args": f"{_OWN_ENGINE}; set SGLang's arguments in `slime.args`",
    "engine.max_batch": f"{_OWN_ENGINE}; set `--sglang-max-running-requests` in `slime.args`",
    "engine.prefix_cache_mb": f"{_OWN_ENGINE}; set `--sglang-mem-fraction-static` in `slime.args`",
    "engine.kv_cache_gb": f"{_OWN_ENGINE}; set `--sglang-mem-fraction-static` in `slime.args`",
    "engine.deterministic": f"{_OWN_ENGINE}; set `--sglang-enable-deterministic-inference` in `slime.args`",
}
_OWN_ALGORITHM = "it supports only the defaults of `grpo.algorithm` `grpo`"
_AS_GRPO = (
    *("algorithm", "advantage", "aggregation", "constant_length", "ratio", "correction", "correction_cap"),
    *("zero_variance", "overlong", "overlong_length", "overlong_buffer", "loss"),
)
"""Settings of `grpo` that are supported as long as they have the defaults of the algorithm `grpo`."""
_AS_SLIME = Supported("SLiME itself, which trains all weights")
_LORA_OPTIONS = {"trainer.lora_r": ("--lora-rank",), "trainer.lora_alpha": ("--lora-alpha",)}


def support(key: str, config: RunConfig) -> Support:
    """Return the support for the setting with this dotted key, which is not one of the section `slime`."""
    if config.tasks.source == "recorded" and key in ("tasks.heldout", "tasks.heldout_share", "rollout.max_staleness"):
        return Ignored("recorded samples are trained on without engines")
    if key in _BY_ROLLOUTS:
        return Supported("rollouts")
    section, _, name = key.partition(".")
    if section == "grpo" and name in _AS_GRPO:
        as_grpo = config.grpo.model_dump()[name] == GRPOConfig().model_dump()[name]
        return Supported("--advantage-estimator") if as_grpo else Ignored(_OWN_ALGORITHM)
    if key == "trainer.method":
        return _method(config)
    if key in _LORA_OPTIONS:
        return Supported(" ".join(_LORA_OPTIONS[key])) if config.slime.flavour == "miles" else Ignored(_ALL_WEIGHTS)
    if key == "model.dtype":
        return Ignored("it trains in bfloat16") if config.model.dtype == "float32" else Supported("--bf16")
    return Ignored(_IGNORED[key]) if key in _IGNORED else Supported(" ".join(_OPTIONS[key]))


def _method(config: RunConfig) -> Support:
    miles, method = config.slime.flavour == "miles", config.trainer.method
    if method == "qlora":
        return Ignored("it trains in bfloat16")
    if method == "full":
        return Ignored("Miles trains adapters here; `--slime.flavour slime` trains all weights") if miles else _AS_SLIME
    return Supported("--lora-rank") if miles else Ignored(_ALL_WEIGHTS)


def setting_of(option: str) -> str | None:
    """Return the setting that decides this option of SLiME, or None. Argparse accepts abbreviated options."""
    options = _OPTIONS | _LORA_OPTIONS
    return next((key for key in options if any(own.startswith(option) for own in options[key])), None)
