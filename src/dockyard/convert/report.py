"""Counts the results of a conversion, and prints them as a table."""

import logging
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from dockyard.convert.conversation import Converted

logger = logging.getLogger(__name__)

_MAX_NAMED = 3
"""How many skipped trials the table lists per reason. The others are logged."""
NOTES = {
    "no_tool_definitions": "there are tool calls, but the tools are not defined",
    "no_system_prompt": "the agent's system text is not in its trajectory: the model saw more than is rendered",
    "rebuilt_replies": "the trajectory has terminus-2's replies split into parts; they were joined in its format",
    "paraphrased_replies": "the trajectory has OpenHands' description of an action, not the model's text",
    "turns_without_ids": "some replies have no ids and are context only",
    "thoughts_left_out": "the chat template does not print reasoning",
    "summary_missing": "a history was summarised, and the summary is missing",
    "file_missing": "the trajectory refers to a file that is missing",
    "file_unreadable": "the trajectory refers to a file that is damaged",
    "media_left_out": "images or sounds are shown as `[image]`",
    "merged_replies": "a step combines several model calls",
    "empty_replies": "steps with an empty reply were left out",
    "trajectory_unreadable": "ids are used; the trajectory cannot be read",
    "malformed_calls": "replies with a call whose arguments are not JSON are context only",
    "failed_unrewarded": "`result` names an exception that the policy can have caused, and no reward: counted as 0",
    "no_reward": "the reward is not known",
}
"""What the notes on attempts mean."""


@dataclass(frozen=True, slots=True)
class _Skipped:
    where: str
    reason: str
    detail: str

    @property
    def line(self) -> str:
        return self.detail if self.where in self.detail else f"{self.where}: {self.detail}"


@dataclass(slots=True)
class ConversionReport:
    """Counts attempts one at a time."""

    trials: int = 0
    exact: int = 0
    text: int = 0
    segments: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    samples: int = 0
    worded: int = 0
    """Attempts whose text is known, converted or not."""
    rewards: list[float] = field(default_factory=list[float])
    skipped: Counter[str] = field(default_factory=Counter[str])
    notes: Counter[str] = field(default_factory=Counter[str])
    skipped_trials: list[_Skipped] = field(default_factory=list[_Skipped])

    @property
    def converted(self) -> int:
        return self.exact + self.text

    def add(self, found: Converted) -> None:
        """Count one attempt."""
        self.trials += 1
        self.worded += bool(found.conversations)
        if found.skipped is not None:
            skipped = _Skipped(found.where, found.skipped, found.detail)
            self.skipped[skipped.reason] += 1
            self.skipped_trials.append(skipped)
            if self.skipped[skipped.reason] > _MAX_NAMED:
                logger.info("%s: %s", skipped.reason, skipped.line)
            return
        self.exact += found.exact
        self.text += not found.exact
        self.notes.update(set(found.notes))
        rollout = found.rollout
        self.segments += len(rollout.segments)
        self.tokens += sum(len(segment.token_ids) for segment in rollout.segments)
        self.trained_tokens += rollout.num_sampled
        if rollout.reward is not None:
            self.rewards.append(rollout.reward)

    def summary(self) -> dict[str, Any]:
        """The counts as JSON data."""
        return {
            "trials": self.trials,
            "converted": self.converted,
            "exact": self.exact,
            "text": self.text,
            "skipped": dict(sorted(self.skipped.items())),
            "skipped_trials": [asdict(trial) for trial in self.skipped_trials],
            "notes": dict(sorted(self.notes.items())),
            "samples": self.samples,
            "worded": self.worded,
            "segments": self.segments,
            "tokens": self.tokens,
            "trained_tokens": self.trained_tokens,
            "masked_share": 1 - self.trained_tokens / self.tokens if self.tokens else None,
            "reward_mean": sum(self.rewards) / len(self.rewards) if self.rewards else None,
            "rewarded": len(self.rewards),
        }

    def table(self) -> str:
        """The counts as a table."""
        found = self.summary()
        share, reward = found["masked_share"], found["reward_mean"]
        masked = "" if share is None else f" ({share:.1%} masked)"
        lines = [
            f"trials         {self.trials:,}",
            f"converted      {self.converted:,} ({self.exact:,} from exact ids, {self.text:,} from text)",
            f"skipped        {self.skipped.total():,}",
            *(line for why, count in sorted(self.skipped.items()) for line in self._reason(why, count)),
            f"segments       {self.segments:,}",
            f"tokens         {self.tokens:,}, trained {self.trained_tokens:,}{masked}",
            f"mean reward    {'-' if reward is None else f'{reward:.3f}'} ({len(self.rewards):,} rewarded)",
        ]
        if self.notes:
            lines += ["notes", *(self._note(name, count) for name, count in sorted(self.notes.items()))]
        return "\n".join(lines)

    def _reason(self, why: str, count: int) -> list[str]:
        named = [trial.line for trial in self.skipped_trials if trial.reason == why][:_MAX_NAMED]
        more = [f"    and {count - len(named):,} more, listed above"] if count > len(named) else []
        return [f"  {why} {count:,}", *(f"    {line}" for line in named), *more]

    def _note(self, name: str, count: int) -> str:
        return f"  {name} {count:,}{f': {NOTES[name]}' if name in NOTES else ''}"
