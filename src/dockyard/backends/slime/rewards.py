"""Rewards become advantages: groups by `group_index`, each rollout once, those that are lost not at all.

SLiME by itself goes by position, counts segments as rollouts, and a lost rollout as a reward of 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dockyard.backends.slime.classes import SlimeSample
from dockyard.errors import DockyardError
from dockyard.rl.advantage import group_advantages


@dataclass(slots=True)
class Scored:
    """A group's rollouts that have a reward."""

    rewards: dict[int, float] = field(default_factory=dict[int, float])
    """By rollout."""

    @property
    def comparable(self) -> bool:
        return len(self.rewards) > 1

    @property
    def differs(self) -> bool:
        return len(set(self.rewards.values())) > 1

    def advantages(self) -> dict[int, float]:
        """By rollout."""
        return dict(zip(self.rewards, group_advantages([*self.rewards.values()]), strict=True))


def scored_groups(samples: Sequence[SlimeSample]) -> dict[int | None, Scored]:
    """By group. Samples that are to be left out are of lost rollouts."""
    groups: dict[int | None, Scored] = {}
    for place, sample in enumerate(samples):
        group = groups.setdefault(sample.group_index, Scored())
        if sample.remove_sample or sample.reward is None:
            continue
        reward, rollout = float(sample.reward), rollout_of(sample, place)
        if group.rewards.setdefault(rollout, reward) != reward:
            raise DockyardError(
                f"the samples of rollout {rollout} have the rewards {group.rewards[rollout]} and {reward}",
                hint="all samples of a rollout carry its reward; does a hook of yours change them?",
            )
    return groups


def rollout_of(sample: SlimeSample, place: int) -> int:
    """Whose sample it is; one that does not say is a rollout of its own, which gets a number that no other has."""
    return -1 - place if sample.rollout_id is None else sample.rollout_id
