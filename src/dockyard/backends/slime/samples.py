"""Rollouts become SLiME's samples: one for each segment, at least one for each rollout, in groups of one size."""

from collections.abc import Sequence

from dockyard.backends.slime.classes import SampleEntry, SlimeSample, new_sample
from dockyard.config import RunConfig
from dockyard.convert.samples import SampleMeta, SampleNumbers, samples_of
from dockyard.convert.slime_pt import slime_rows
from dockyard.gateway.render.renderer import Renderer
from dockyard.types import Group, Rollout


def step_samples(
    groups: Sequence[Group], step: int, config: RunConfig, renderer: Renderer
) -> list[list[list[SlimeSample]]]:
    """By group, rollout and segment. The last step of a pass may have too few groups for SLiME: others stand in."""
    size, num_groups = config.grpo.group_size, config.grpo.tasks_per_step
    numbers = SampleNumbers(first_group=step * num_groups, first_rollout=step * num_groups * size)
    absent = [_absent(size)] * (num_groups - len(groups))
    return [
        [rollout_samples(rollout, f"group {number}", numbers, config, renderer) for rollout in group.rollouts]
        for number, group in enumerate([*groups, *absent])
    ]


def rollout_samples(
    rollout: Rollout, group: str, numbers: SampleNumbers, config: RunConfig, renderer: Renderer
) -> list[SlimeSample]:
    """Those of one rollout, which share its `rollout_id`. One that is lost, or sampled nothing, gets padding."""
    meta = SampleMeta(
        agent=config.agent.name,
        model=config.model.name,
        group=group,
        exact=True,
        skipped="no_reward" if rollout.reward is None else None,
    )
    return [new_sample(row) for row in slime_rows(samples_of(rollout, meta, numbers, renderer, pad=True))]


def _absent(size: int) -> Group:
    """Nothing is learnt from it."""
    rollouts = [
        Rollout(task="", kind="", attempt=attempt, segments=(), reward=None, failure=None) for attempt in range(size)
    ]
    return Group(task="", rollouts=tuple(rollouts))


def even(groups: Sequence[Sequence[SampleEntry]]) -> list[list[SampleEntry]]:
    """Either all rollouts are lists, or none is: SLiME looks at the first alone to see how deep to unpack."""
    nested = [[entry if isinstance(entry, list) else [entry] for entry in group] for group in groups]
    if all(len(samples) == 1 for group in nested for samples in group):
        return [[samples[0] for samples in group] for group in nested]
    return [[*group] for group in nested]


def flat(entries: Sequence[SampleEntry]) -> list[SlimeSample]:
    """The samples of a group, whether its rollouts are lists or not."""
    return [sample for entry in entries for sample in (entry if isinstance(entry, list) else [entry])]
