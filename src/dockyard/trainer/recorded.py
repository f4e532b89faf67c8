"""Rollouts that are read instead of sampled: a finished Harbor job, a Dockyard run, a file of samples, or text.

`dockyard.convert` reads them. It imports Harbor, so it is imported when it is needed.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dockyard.config import GRPOConfig
from dockyard.errors import DockyardError
from dockyard.gateway.render.renderer import Renderer
from dockyard.gateway.render.template import TemplateRejectionError
from dockyard.rl.advantage import has_signal
from dockyard.run_dir.run import RunDir, step_phase
from dockyard.tasks.order import due
from dockyard.trainer.display import TrainingProgress
from dockyard.trainer.loop import Rollouts
from dockyard.types import Group, Rollout, Segment

logger = logging.getLogger(__name__)


def load_groups(path: Path, renderer: Renderer, grpo: GRPOConfig) -> tuple[Group, ...]:
    """Read the groups at this path, without rollouts that have no reward. Raise an error if no group can be compared.

    No further groups can be made, so `dynamic_sampling` leaves out groups whose rewards do not differ.
    """
    from dockyard.convert.read import read_groups

    found = [_rewarded(group) for group in read_groups(path, renderer)]
    groups = tuple(group for group in found if group.rollouts)
    if not any(len(group.rollouts) > 1 for group in groups):
        raise DockyardError(
            f"no task in `{path}` has two rollouts with a reward: there is nothing to compare",
            hint="make the job with `harbor run -k 4`, or `dockyard rollout --grpo.group_size 4`",
        )
    useful = tuple(group for group in groups if has_signal(group, grpo))
    logger.info("%d groups in %s, %d of them with rewards that differ", len(groups), path, len(useful))
    if not useful:
        logger.warning("the rewards of no task differ: the policy will not learn anything")
    return useful if useful and grpo.dynamic_sampling else groups


def _rewarded(group: Group) -> Group:
    """The rollouts with a reward. How another run shaped it does not matter to this one."""
    known = (rollout for rollout in group.rollouts if rollout.reward is not None)
    return replace(group, rollouts=tuple(replace(rollout, shaped_reward=None) for rollout in known))


@dataclass(slots=True, kw_only=True)
class RecordedRollouts:
    """Groups from disk, each once per pass, in an order that the seed decides. The run records them as its own."""

    groups: Sequence[Group]
    run: RunDir
    progress: TrainingProgress

    async def collect(self, step: int) -> tuple[Group, ...]:
        config = self.run.config
        groups = due(
            self.groups,
            step,
            config.grpo.tasks_per_step,
            config.seed,
            kind_of=lambda group: group.rollouts[0].kind,
            by_pass=True,
        )
        self.progress.begin(f"step {step + 1} of {config.steps}", sum(len(group.rollouts) for group in groups))
        known = {(item.group, item.rollout.attempt) for item in self.run.read_rollouts(step_phase(step))}
        for index, group in enumerate(groups):
            for attempt, rollout in enumerate(group.rollouts):
                if (index, attempt) not in known:
                    self.run.write_rollout(step_phase(step), replace(rollout, attempt=attempt), group=index)
                self.progress.finished(rollout)
        return tuple(groups)


@dataclass(slots=True)
class TextRollouts:
    """Rollouts of an endpoint that returns no token ids. Their text is tokenized by the policy's chat template."""

    rollouts: Rollouts
    renderer: Renderer

    async def collect(self, step: int) -> tuple[Group, ...]:
        return tuple(self._tokenised(group) for group in await self.rollouts.collect(step))

    def _tokenised(self, group: Group) -> Group:
        return replace(group, rollouts=tuple(with_segments(rollout, self.renderer) for rollout in group.rollouts))


def with_segments(rollout: Rollout, renderer: Renderer) -> Rollout:
    """Add segments to a rollout that was recorded as text."""
    from dockyard.convert.conversation import conversations_of, without_malformed
    from dockyard.convert.tokenize import segments_of

    segments: list[Segment] = []
    for conversation in map(without_malformed, conversations_of(rollout.exchanges)):
        try:
            segments += segments_of(conversation, renderer)
        except TemplateRejectionError as error:
            logger.warning("a conversation of `%s` is not trained on: %s", rollout.task, error)
    return replace(rollout, segments=tuple(segments))
