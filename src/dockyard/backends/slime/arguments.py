"""SLiME's command-line arguments. It silently accepts unknown ones, so a test compares these with its parser."""

from dockyard.backends.slime.layout import Layout, MegatronArguments
from dockyard.backends.slime.setting_support import setting_of
from dockyard.config import RunConfig, TrainerConfig
from dockyard.errors import UsageError
from dockyard.run_dir.paths import RunPaths

MODEL, REFERENCE = "$MODEL", "$REFERENCE"
"""Variables that the script sets: the model's folder, and the weights that the policy starts from."""
CUSTOM_CONFIG = "dockyard.yaml"
_HOOKS = "dockyard.backends.slime.hooks"
_WITHOUT_EFFECT = {
    "--kl-coef": "SLiME's GRPO ignores its value; `grpo.kl_coef` is the KL penalty",
    "--use-tis": "the ratio already uses the recorded probabilities",
    "--rm-type": "rewards come from the tasks' verifiers",
    "--custom-rm-path": "rewards come from the tasks' verifiers",
    "--prompt-data": "the section `tasks` sets what is trained on",
    "--num-epoch": "`tasks.passes` sets the number of passes",
}


def arguments(config: RunConfig, layout: Layout, paths: RunPaths) -> MegatronArguments:
    """Return all arguments except the model's shape. No option occurs in two groups."""
    recorded = config.tasks.source == "recorded"
    groups = (
        _gpus(layout),
        _checkpoints(config, paths),
        _hooks(config, paths),
        _batches(config),
        {"--load-debug-rollout-data": str(config.tasks.dataset)} if recorded else _engines(config),
        _evaluation(config, paths) if is_evaluated(config) else {},
        _loss(config),
        _optimizer(config.trainer, layout),
        _lora(config, layout) if config.slime.flavour == "miles" else {},
        _memory(config),
    )
    ours: MegatronArguments = {}
    for group in groups:
        assert not ours.keys() & group.keys()
        ours |= group
    return ours


def _gpus(layout: Layout) -> MegatronArguments:
    apart: MegatronArguments = {"--colocate": None} if layout.colocated else {"--rollout-num-gpus": str(layout.engines)}
    return {
        "--actor-num-nodes": str(layout.train_nodes),
        "--actor-num-gpus-per-node": str(layout.train // layout.train_nodes),
        "--num-gpus-per-node": str(layout.per_node),
        **apart,
        "--rollout-num-gpus-per-engine": str(layout.per_engine),
        "--tensor-model-parallel-size": str(layout.tensor),
        **({"--sequence-parallel": None} if layout.tensor > 1 else {}),
        "--context-parallel-size": str(layout.context),
        "--pipeline-model-parallel-size": str(layout.pipeline),
        "--expert-model-parallel-size": str(layout.expert),
        "--expert-tensor-parallel-size": "1",
    }


def _checkpoints(config: RunConfig, paths: RunPaths) -> MegatronArguments:
    """A run without a checkpoint starts from the reference weights."""
    checkpoints = str(paths.backend / "checkpoints")
    return {
        "--hf-checkpoint": MODEL,
        "--ref-load": REFERENCE,
        "--load": checkpoints,
        "--save": checkpoints,
        "--save-interval": str(config.trainer.save_every),
        "--seed": str(config.seed),
        "--rollout-seed": str(config.seed),
    }


def _hooks(config: RunConfig, paths: RunPaths) -> MegatronArguments:
    """With dynamic sampling SLiME's own loop calls Dockyard per rollout; otherwise Dockyard makes a step's rollouts."""
    mode = "generate_rollout_async" if config.rollout.max_staleness else "generate_rollout"
    dynamic: MegatronArguments = {
        "--custom-generate-function-path": f"{_HOOKS}.generate",
        "--dynamic-sampling-filter-path": f"{_HOOKS}.keep_informative",
        "--rollout-sample-filter-path": f"{_HOOKS}.even_out",
        "--over-sampling-batch-size": str(2 * config.grpo.tasks_per_step),  # without spare groups none is dropped
    }
    samples = str(paths.backend / "samples" / "{rollout_id}.pt")  # SLiME fills in the number of the step
    return {
        "--custom-config-path": str(paths.backend / CUSTOM_CONFIG),
        "--data-source-path": f"{_HOOKS}.SlimeDataSource",
        **(dynamic if config.slime.dynamic_sampling else {"--rollout-function-path": f"{_HOOKS}.{mode}"}),
        "--eval-function-path": f"{_HOOKS}.generate_rollout",
        "--custom-reward-post-process-path": f"{_HOOKS}.reward_post_process",
        **({"--save-debug-rollout-data": samples} if config.slime.save_rollouts else {}),
    }


def _batches(config: RunConfig) -> MegatronArguments:
    return {
        "--num-rollout": str(config.steps),
        "--rollout-batch-size": str(config.grpo.tasks_per_step),
        "--n-samples-per-prompt": str(config.grpo.group_size),
        "--global-batch-size": str(config.grpo.tasks_per_step * config.grpo.group_size),
        "--num-steps-per-rollout": "1",
        "--balance-data": None,
        "--rollout-temperature": str(config.sampling.temperature),
    }


def _engines(config: RunConfig) -> MegatronArguments:
    """No top-p or top-k: the loss uses probabilities that depend on the temperature only."""
    context = str(config.engine.context_length)
    router = "--sglang-router-policy" if config.slime.flavour == "miles" else "--router-policy"
    return {
        "--rollout-top-p": "1",
        "--rollout-top-k": "-1",
        "--rollout-max-response-len": str(config.sampling.max_new_tokens),
        "--rollout-max-context-len": context,
        "--sglang-context-length": context,
        router: "consistent_hashing",
        "--sglang-mem-fraction-static": "0.7",
    }


def is_evaluated(config: RunConfig) -> bool:
    """Whether there are held-out tasks, and engines to attempt them."""
    return config.tasks.source != "recorded" and config.tasks.holds_out


def _evaluation(config: RunConfig, paths: RunPaths) -> MegatronArguments:
    """Evaluate before the first step and after the last one, as `dockyard train` does."""
    return {
        "--eval-interval": str(config.eval.every or max(config.steps, 1)),
        "--eval-prompt-data": ("heldout", str(paths.task_list)),
        "--n-samples-per-eval-prompt": str(config.eval.samples),
        "--eval-temperature": str(config.sampling.eval_temperature),
    }


def _loss(config: RunConfig) -> MegatronArguments:
    """The KL term is part of the loss: SLiME's GRPO ignores the value of `--kl-coef`.

    Recorded files may lack logprobs. Without them the ratio is 1, since each step is one batch.
    """
    recorded: MegatronArguments = {"--use-rollout-logprobs": None}
    kl: MegatronArguments = {
        "--use-kl-loss": None,
        "--kl-loss-coef": str(config.grpo.kl_coef),
        "--kl-loss-type": config.grpo.kl_type,
    }
    return {
        "--advantage-estimator": "grpo",
        "--eps-clip": str(config.grpo.clip_low),
        "--eps-clip-high": str(config.grpo.clip_high),
        **({} if config.tasks.source == "recorded" else recorded),
        "--entropy-coef": "0",
        **(kl if config.grpo.kl_coef else {}),
    }


def _optimizer(trainer: TrainerConfig, layout: Layout) -> MegatronArguments:
    """Megatron's warm-up starts at its initial rate, Dockyard's at the first step of the increase."""
    warmup: MegatronArguments = {
        "--lr-warmup-iters": str(trainer.warmup_steps),
        "--lr-warmup-init": str(trainer.lr / (trainer.warmup_steps + 1)),
    }
    offload: MegatronArguments = {
        "--optimizer-cpu-offload": None,
        "--overlap-cpu-optimizer-d2h-h2d": None,
        "--use-precision-aware-optimizer": None,
    }
    return {
        "--optimizer": "adam",
        "--lr": str(trainer.lr),
        "--lr-decay-style": trainer.schedule,
        **(warmup if trainer.warmup_steps else {}),
        "--override-opt-param-scheduler": None,  # a resumed run may have more steps
        "--weight-decay": str(trainer.weight_decay),
        "--adam-beta1": "0.9",
        "--adam-beta2": str(trainer.adam_beta2),
        "--adam-eps": "1e-08",
        "--clip-grad": str(trainer.max_grad_norm),
        **(offload if layout.offload else {}),
    }


def _lora(config: RunConfig, layout: Layout) -> MegatronArguments:
    return {
        "--lora-rank": str(config.trainer.lora_r),
        "--lora-alpha": str(config.trainer.lora_alpha),
        "--lora-dropout": "0.0",
        "--target-modules": "all-linear",
        "--megatron-to-hf-mode": "bridge",
        **({"--lora-base-cpu-backup": None} if layout.colocated else {}),
        **({"--sglang-lora-backend": "triton"} if layout.expert > 1 else {}),
    }


def _memory(config: RunConfig) -> MegatronArguments:
    return {
        "--use-dynamic-batch-size": None,
        "--max-tokens-per-gpu": str(config.trainer.micro_batch_tokens),
        "--log-probs-chunk-size": "1024",
        "--recompute-granularity": "full",
        "--recompute-method": "uniform",
        "--recompute-num-layers": "1",
        "--attention-dropout": "0.0",
        "--hidden-dropout": "0.0",
        "--accumulate-allreduce-grads-in-fp32": None,
        "--attention-softmax-in-fp32": None,
        "--attention-backend": "flash",
    }


def check_more(more: tuple[str, ...], ours: MegatronArguments) -> None:
    """Refuse additional arguments that contradict the run file or have no effect."""
    for option in (word.partition("=")[0] for word in more if word.startswith("--")):
        setting = setting_of(option)
        taken = next((own for own in ours if own.startswith(option)), None)
        if setting:
            raise UsageError(f"`slime.args` has `{option}`, which is set by `{setting}`", hint=f"`--{setting} VALUE`")
        if taken:
            hint = "remove it; the sections `slime` and `trainer` have the settings that can be changed"
            raise UsageError(f"`slime.args` has `{option}`, but the launcher sets `{taken}`", hint=hint)
        if why := _WITHOUT_EFFECT.get(option):
            raise UsageError(f"`slime.args` has `{option}`, which has no effect here", hint=why)
