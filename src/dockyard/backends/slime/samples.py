"""Convert rollouts into SLiME's samples: one per segment, at least one per rollout, in groups of equal size."""

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
    """Return samples by group, rollout and segment. If a step has too few groups, add padding groups."""
    size, num_groups = config.grpo.group_size, config.grpo.tasks_per_step
    numbers = SampleNumbers(first_group=step * num_groups, first_rollout=step * num_groups * size)
    padding = [_padding_group(size)] * (num_groups - len(groups))
    return [
        [rollout_samples(rollout, f"group {number}", numbers, config, renderer) for rollout in group.rollouts]
        for number, group in enumerate([*groups, *padding])
    ]


def rollout_samples(
    rollout: Rollout, group: str, numbers: SampleNumbers, config: RunConfig, renderer: Renderer
) -> list[SlimeSample]:
    """Return the samples of one rollout, with one `rollout_id`. A rollout without tokens or reward gets padding."""
    meta = SampleMeta(
        agent=config.agent.name,
        model=config.model.name,
        group=group,
        exact=True,
        skipped="no_reward" if rollout.reward is None else None,
    )
    return [new_sample(row) for row in slime_rows(samples_of(rollout, meta, numbers, renderer, pad=True))]


def _padding_group(size: int) -> Group:
    """Return a group of lost rollouts, which trains nothing."""
    rollouts = [
        Rollout(task="", kind="", attempt=attempt, segments=(), reward=None, failure=None) for attempt in range(size)
    ]
    return Group(task="", rollouts=tuple(rollouts))


def even(groups: Sequence[Sequence[SampleEntry]]) -> list[list[SampleEntry]]:
    """Make either all rollouts lists or none: SLiME looks only at the first to see how deep to unpack."""
    nested = [[entry if isinstance(entry, list) else [entry] for entry in group] for group in groups]
    if all(len(samples) == 1 for group in nested for samples in group):
        return [[samples[0] for samples in group] for group in nested]
    return [[*group] for group in nested]


def flat(entries: Sequence[SampleEntry]) -> list[SlimeSample]:
    """Return the samples of a group, whether its rollouts are lists or not."""
    return [sample for entry in entries for sample in (entry if isinstance(entry, list) else [entry])]
