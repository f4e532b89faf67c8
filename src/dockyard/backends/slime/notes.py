"""What the user is told of a run with SLiME: what the defaults came to, and how it differs from `dockyard train`."""

from dockyard.backends.slime.arguments import is_evaluated
from dockyard.backends.slime.layout import Layout
from dockyard.backends.slime.models import Split
from dockyard.config import RunConfig


def notes(config: RunConfig, layout: Layout, split: Split) -> list[str]:
    """A line each."""
    grpo, what = config.grpo, "LoRA adapters" if config.slime.flavour == "miles" else "all weights"
    lines = [
        f"{config.slime.flavour} trains {what} of {config.model.name} ({split.num_params_b:.1f} billion) on "
        f"{config.slime.num_gpus} GPUs: {layout}",
        f"each step: {grpo.tasks_per_step} tasks × {grpo.group_size} rollouts, one update; contexts up to "
        f"{config.engine.context_length} tokens, those above {config.trainer.micro_batch_tokens * layout.context} "
        "in a pass of their own",
        f"KL penalty {grpo.kl_coef:g} (low_var_kl, in the loss) against the base model"
        if grpo.kl_coef
        else "no KL penalty",
        "recorded probabilities are not used: a file may have none, so the ratio is 1 and clipping never acts"
        if config.tasks.source == "recorded"
        else "clipping acts on the ratio to the probabilities recorded while sampling",
        "lost rollouts scale a step's gradient by the share that was compared",
    ]
    if config.tasks.passes and config.slime.dynamic_sampling:
        lines.append("SLiME's own loop knows no end of a pass: the steps are counted, the last may begin another pass")
    if layout.offload:
        lines.append("the optimiser's state is kept in the host's memory: it does not fit the GPUs")
    if config.trainer.warmup_steps and config.trainer.schedule == "linear":
        lines.append("the learning rate falls from the end of the warm-up on, not from the first step")
    if is_evaluated(config) and config.rollout.max_staleness:
        lines.append(
            "held-out tasks are attempted after the last step only: asynchronous training has no evaluation before"
        )
    return lines
