"""The live display of a run in a terminal: the reward curve, the rollouts under way, what the model wrote then and now.

It is made from what the loop tells `Progress` anyway, and drawn twice a second at most.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dockyard.trainer.report import chart
from dockyard.types import IntArray, Rollout, Task

_MOST_LISTED = 8
"""Tasks of a phase that have a line each; where there are more, a kind of task has one."""
_MOST_CELLS = 16
"""Rollouts of a line."""
_MOST_LINES = 4
"""Of what the model wrote."""
_CONTROL_TOKEN = re.compile(r"<\|[^|>]*\|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Rollouts in words."""

    text: Callable[[IntArray], str]
    """What token ids say."""
    folders: Mapping[str, Path]
    """Of tasks, by name."""

    @classmethod
    def of(cls, tasks: Sequence[Task], text: Callable[[IntArray], str]) -> "Words":
        return cls(text=text, folders={task.name: task.path for task in tasks})

    def asked(self, rollout: Rollout) -> str:
        """What the task asks for; empty where that is not one file."""
        folder = self.folders.get(rollout.task)
        file = folder / "instruction.md" if folder else None
        return file.read_text(errors="replace").strip() if file and file.is_file() else ""

    def wrote(self, rollout: Rollout) -> str:
        """The last reply of the model."""
        if not rollout.segments:
            return ""
        segment = rollout.segments[-1]
        sampled = np.flatnonzero(segment.sampled)
        breaks = np.flatnonzero(np.diff(sampled) > 1)
        last = sampled[breaks[-1] + 1 :] if len(breaks) else sampled
        return _CONTROL_TOKEN.sub("", self.text(segment.token_ids[last])).strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One rollout as it is shown."""

    task: str
    kind: str
    when: str
    asked: str
    wrote: str
    reward: float


@dataclass(slots=True)
class Display:
    """What is on the screen. The status line is `Progress`'s own."""

    words: Words
    num_steps: int
    status: Text = field(default_factory=Text)
    rewards: list[float] = field(default_factory=list[float])
    """Of the steps so far."""
    then: Said | None = None
    """The worst rollout of the first phase: the model before it learned."""
    now: Said | None = None
    """The last rollout of a later phase that had the same task, or else one of its kind."""
    _phase: str = ""
    _num_phases: int = 0
    _group_size: int = 1
    _kinds: dict[str, str] = field(default_factory=dict[str, str])
    """Of this phase's tasks."""
    _finished: list[Rollout] = field(default_factory=list[Rollout])

    def begin(self, phase: str, tasks: Sequence[Task], group_size: int) -> None:
        """Other rollouts follow, `group_size` of each of these tasks."""
        self._phase, self._group_size = phase, group_size
        self._num_phases += 1
        self._kinds = {task.name: task.kind for task in tasks}
        self._finished = []

    def finished(self, rollout: Rollout) -> None:
        """A rollout of this phase is done."""
        self._kinds.setdefault(rollout.task, rollout.kind)
        self._finished.append(rollout)
        if rollout.reward is None:
            return
        if self._num_phases == 1:
            if self.then is None or rollout.reward < self.then.reward:
                self.then = self._said(rollout)
        elif self.then and self._is_closer(rollout, self.then):
            self.now = self._said(rollout)

    def _is_closer(self, rollout: Rollout, then: Said) -> bool:
        known = self.now is not None and self.now.when == self._phase and self.now.task == then.task
        return rollout.task == then.task or (rollout.kind == then.kind and not known)

    def _said(self, rollout: Rollout) -> Said:
        return Said(
            task=rollout.task,
            kind=rollout.kind,
            when=self._phase,
            asked=self.words.asked(rollout),
            wrote=self.words.wrote(rollout),
            reward=rollout.reward or 0.0,
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts = Table.grid(padding=(0, 3))
        parts.add_row(self._curve(options.max_width), self._rollouts())
        yield Group(parts, self.status, *([self._then_and_now()] if self.then else []))

    def _curve(self, width: int) -> Text:
        most = max(1, (width // 2 - 6) // 3)
        shown = self.rewards[-most:] or [0.0]
        return Text(chart(shown, min(self.num_steps, most)), style="cyan", no_wrap=True)

    def _rollouts(self) -> Table:
        """A line for each task or kind of task, a square for each of its rollouts."""
        kinds, finished = dict(self._kinds), list(self._finished)  # drawn by a thread of its own
        by_kind = len(kinds) > _MOST_LISTED
        planned = Counter(_line(task, kind, by_kind=by_kind) for task, kind in kinds.items())
        lines = {name: list[float | None]() for name in planned}
        for rollout in finished:
            name = _line(rollout.task, rollout.kind, by_kind=by_kind)
            lines.setdefault(name, []).append(rollout.reward)
        table = Table.grid(padding=(0, 1))
        for name, rewards in sorted(lines.items())[:_MOST_LISTED]:
            cells = Text.assemble(*(("■", _colour(reward)) for reward in rewards[-_MOST_CELLS:]))
            cells.append("·" * (min(planned[name] * self._group_size, _MOST_CELLS) - len(cells)), "dim")
            known = [reward for reward in rewards if reward is not None]
            table.add_row(Text(name, "dim", no_wrap=True), cells, f"{sum(known) / len(known):.2f}" if known else "")
        return table

    def _then_and_now(self) -> Panel:
        lines = Table.grid(padding=(0, 2))
        for said in (self.then, self.now):
            if said:
                lines.add_row(Text(said.when, "dim"), Text(_short(said.asked), "italic"))
                lines.add_row(Text(f"reward {said.reward:.2f}", _colour(said.reward)), Text(_short(said.wrote) or "-"))
        title = f"what the model writes: {self.then.kind}" if self.then and self.then.kind else "what the model writes"
        return Panel(lines, title=title, title_align="left", border_style="dim")


def _line(task: str, kind: str, *, by_kind: bool) -> str:
    return (kind or "all tasks") if by_kind else task


def _colour(reward: float | None) -> str:
    if reward is None:
        return "magenta"
    return "green" if reward >= 1 else "yellow" if reward > 0 else "red"


def _short(text: str) -> str:
    """The first lines, without characters that a terminal would obey."""
    lines = ["".join(c if c.isprintable() else " " for c in line) for line in text.splitlines()]
    return "\n".join([*lines[:_MOST_LINES], *(["..."] if len(lines) > _MOST_LINES else [])])
