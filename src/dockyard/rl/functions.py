"""Check the functions that a run file names as `module:name`, before a model is loaded or a rollout is made."""

from dockyard.config import GRPOConfig
from dockyard.errors import UsageError
from dockyard.rl.advantage import ADVANTAGES, load_advantage
from dockyard.rl.reward import load_reward


def check_functions(config: GRPOConfig, *, remote: bool) -> None:
    """Load `grpo.advantage`, `grpo.loss` and `grpo.reward`, and raise a UsageError if one cannot be called.

    `remote`: the policy is trained on another machine, which does not have the user's modules. Rewards are computed
    here in any case.
    """
    if remote:
        _refuse_remote(config)
    load_reward(config)
    load_advantage(config)
    if config.loss:
        from dockyard.rl.loss import load_loss  # imports torch, which a remote policy does not need here

        load_loss(config)


def _refuse_remote(config: GRPOConfig) -> None:
    own = {"advantage": config.advantage if config.advantage not in ADVANTAGES else None, "loss": config.loss}
    for name, reference in own.items():
        if reference:
            raise UsageError(
                f"`grpo.{name}` is `{reference}`, but the policy is trained on another machine, which does not have "
                f"the module `{reference.partition(':')[0]}`",
                hint=f"remove `grpo.{name}`, or train on one machine with `dockyard train`",
            )
