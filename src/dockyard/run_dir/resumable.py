"""Which settings may differ when a run is resumed."""

from dockyard.config import PrimeRLConfig, RunConfig, SlimeConfig
from dockyard.errors import UsageError
from dockyard.settings import changed_keys

RESUMABLE = frozenset(
    {
        "run_dir",
        "steps",
        "model.device",
        "environment.sandbox",
        "engine.max_batch",
        "engine.kv_cache_gb",
        "engine.url",
        "engine.model",
        "engine.api_key_env",
        "engine.retry_s",
        "engine.launch",
        "engine.command",
        "engine.memory_share",
        "engine.args",
        "gateway.port",
        "gateway.public_url",
        "gateway.tunnel",
        "rollout.concurrency",
        "rollout.max_building",
        "rollout.max_running",
        "rollout.max_verifying",
        "rollout.build_timeout_s",
        "rollout.setup_timeout_s",
        "rollout.agent_timeout_s",
        "rollout.verifier_timeout_s",
        "rollout.total_timeout_s",
        "rollout.retries",
        "rollout.max_lost_share",
        "trainer.micro_batch_tokens",
        "trainer.compile",
        "trainer.offload",
        "trainer.save_every",
        "trainer.keep_last",
        "trainer.keep_best",
        "eval.every",
        "tracker.wandb",
        "tracker.tensorboard",
        "tracker.trackio",
        "trainer.max_skipped_steps",
        *(f"prime_rl.{name}" for name in PrimeRLConfig.model_fields if name != "renderer"),
        *(f"slime.{name}" for name in SlimeConfig.model_fields if name not in ("flavour", "dynamic_sampling")),
    }
)
"""Nothing that recorded rollouts and updates were made with."""


def refuse_fixed(old: RunConfig, new: RunConfig) -> None:
    """An error if anything else differs."""
    # A learning rate that falls over the run's steps would have been another one in the updates to be replayed.
    changeable = RESUMABLE - {"steps"} if old.trainer.schedule == "linear" else RESUMABLE
    fixed = [key for key in changed_keys(old, new) if key not in changeable]
    if fixed:
        names = ", ".join(f"`{key}`" for key in fixed)
        of_backends = ("slime.", "prime_rl.")
        others = ", ".join(f"`{key}`" for key in sorted(changeable - {"run_dir"}) if not key.startswith(of_backends))
        raise UsageError(f"{names} cannot change in a run that has begun", hint=f"what can: {others}")
