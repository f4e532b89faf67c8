"""Our hooks as SLiME's contract tests call them: with arguments that lack all that a real start has.

`slime_contracts.py` says where the run and its router are.
"""

import os
from argparse import Namespace
from functools import wraps
from pathlib import Path
from typing import Any

from scripted_router import model_folder
from slime_stand_in import slime_args

from dockyard.backends.slime import hooks


def _args() -> Namespace:
    return slime_args(Path(os.environ["CONTRACT_RUN"]), os.environ["CONTRACT_ROUTER"], model_folder())


def _with_arguments(hook: Any) -> Any:
    """The same function, signature included, with the arguments of a real start."""

    @wraps(hook)
    def called(args: Any, *others: Any, **named: Any) -> Any:
        return hook(_args(), *others, **named)

    return called


@wraps(hooks.generate)
async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    [[known, _]] = SlimeDataSource(args).get_samples(1)
    sample.metadata = known.metadata
    return await hooks.generate(_args(), sample, sampling_params, evaluation=evaluation)


class SlimeDataSource(hooks.SlimeDataSource):
    def __init__(self, args: Any) -> None:
        super().__init__(_args())


generate_rollout = _with_arguments(hooks.generate_rollout)
generate_rollout_async = _with_arguments(hooks.generate_rollout_async)
keep_informative = _with_arguments(hooks.keep_informative)
even_out = _with_arguments(hooks.even_out)
reward_post_process = _with_arguments(hooks.reward_post_process)
