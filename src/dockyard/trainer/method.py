"""What `trainer.method` asks of the rest of a run, known before any weights are read."""

import logging

from dockyard.config import RunConfig
from dockyard.errors import UsageError

logger = logging.getLogger(__name__)

_TIMID_LR, _BOLD_LR = 1e-5, 1e-4


def check_method(config: RunConfig, *, elsewhere: bool, attempting: bool) -> None:
    """Refuse what cannot be done, and warn of what rarely goes well.

    `elsewhere`: the policy is on another machine. `attempting`: the run makes rollouts of its own.
    """
    method, lr = config.trainer.method, config.trainer.lr
    if method == "full":
        _refuse_engine(config, elsewhere=elsewhere, attempting=attempting)
        if lr > _BOLD_LR:
            logger.warning("`trainer.lr` is %g: above %g all weights of a model soon fall apart", lr, _BOLD_LR)
        return
    if method == "qlora" and not elsewhere:
        from dockyard.engine.four_bit import check_installed  # with torch, which a policy elsewhere does without

        check_installed()
    if 0 < lr < _TIMID_LR:
        logger.warning("`trainer.lr` is %g: below %g a LoRA barely moves", lr, _TIMID_LR)
    if method == "qlora" and attempting and config.engine.type != "transformers":
        logger.warning(
            "the trainer's base weights have 4 bits, those of `engine.type` `%s` do not: `train/mismatch_kl` says each "
            "step how far apart they are; `--engine.type transformers` samples from the trainer's own",
            config.engine.type,
        )


def _refuse_engine(config: RunConfig, *, elsewhere: bool, attempting: bool) -> None:
    """All weights go to the embedded engine only: others take adapters."""
    if elsewhere:
        raise UsageError(
            "`trainer.method` is `full`, and a policy on another machine sends adapters only",
            hint="`--env modal` runs all of it there; `--trainer.method lora` trains an adapter",
        )
    if attempting and config.engine.type != "transformers":
        raise UsageError(
            f"`trainer.method` is `full`, but `engine.type` `{config.engine.type}` takes adapters only",
            hint="`--engine.type transformers` takes all weights; `--trainer.method lora` trains an adapter",
        )
