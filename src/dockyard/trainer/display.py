"""The progress of a run: a live display in a terminal, one log line per step elsewhere.

The display shows the reward curve, the rollouts in progress, and what the model wrote first and last. The loop's calls
to `TrainingProgress` update it, and it is redrawn at most twice a second.
"""

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dockyard.rollout.blame import causes_text
from dockyard.rollout.plan import Phase
from dockyard.trainer.report import chart
from dockyard.types import IntArray, Rollout, Task

_MOST_LISTED = 8
"""The most tasks of a phase that get a line each; with more, each kind of task gets one."""
_MOST_CELLS = 16
"""The most rollouts shown in a line."""
_MOST_LINES = 4
"""The most lines shown of what the model wrote."""
_CONTROL_TOKEN = re.compile(r"<\|[^|>]*\|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What was asked and written in a rollout, as text."""

    text: Callable[[IntArray], str]
    """Decodes token ids."""
    folders: Mapping[str, Path]
    """The folders of tasks by name."""

    @classmethod
    def of(cls, tasks: Sequence[Task], text: Callable[[IntArray], str]) -> "Words":
        return cls(text=text, folders={task.name: task.path for task in tasks})

    def asked(self, rollout: Rollout) -> str:
        """The task's instruction; empty if it is not in one file."""
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
    """The content of the screen. `TrainingProgress` writes the status line."""

    words: Words
    num_steps: int
    status: Text = field(default_factory=Text)
    rewards: list[float] = field(default_factory=list[float])
    """The mean rewards of the steps so far."""
    then: Said | None = None
    """The rollout of the first phase with the lowest reward: the model before training."""
    now: Said | None = None
    """The last rollout of a later phase with the same task, or otherwise one of the same kind."""
    _phase: str = ""
    _num_phases: int = 0
    _group_size: int = 1
    _kinds: dict[str, str] = field(default_factory=dict[str, str])
    """The kinds of this phase's tasks, by name."""
    _finished: list[Rollout] = field(default_factory=list[Rollout])

    def begin(self, phase: str, tasks: Sequence[Task], group_size: int) -> None:
        """Start a phase with `group_size` rollouts of each of these tasks."""
        self._phase, self._group_size = phase, group_size
        self._num_phases += 1
        self._kinds = {task.name: task.kind for task in tasks}
        self._finished = []

    def finished(self, rollout: Rollout) -> None:
        """Show a rollout of this phase that is done."""
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
        kinds, finished = dict(self._kinds), list(self._finished)  # another thread draws
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
    """The first lines, without control characters."""
    lines = ["".join(c if c.isprintable() else " " for c in line) for line in text.splitlines()]
    return "\n".join([*lines[:_MOST_LINES], *(["..."] if len(lines) > _MOST_LINES else [])])


logger = logging.getLogger(__name__)

_NO_WORDS = Words(text=lambda _: "", folders={})


class TrainingProgress:
    """Counts the rollouts of the current phase and estimates the remaining time from the steps so far."""

    def __init__(self, num_steps: int, console: Console | None = None, words: Words = _NO_WORDS) -> None:
        self._console = console or Console(stderr=True)
        self.display = Display(words, num_steps)
        self._live = Live(self.display, console=self._console, transient=True, refresh_per_second=2)
        self._num_steps = num_steps
        self._title = ""
        self._total = 0
        self._rewards: list[float] = []
        self._done = 0
        self._tokens = 0
        self._failures: Counter[str] = Counter()
        self._phases = ""
        self._phase_start = time.monotonic()
        self._step_seconds: list[float] = []
        self._steps_done = 0

    def __enter__(self) -> "TrainingProgress":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """Print a line that stays on the screen, or log it."""
        if self._console.is_terminal:
            self._console.print(text, highlight=False)
        else:
            logger.info(text)

    def begin(self, title: str, total: int, tasks: Sequence[Task] = (), group_size: int = 1) -> None:
        """Start a phase of `total` rollouts, `group_size` of each of these tasks."""
        self.display.begin(title, tasks, group_size)
        self._title, self._total, self._phase_start = title, total, time.monotonic()
        self._rewards, self._done, self._tokens, self._failures = [], 0, 0, Counter()
        self._show()

    def extend(self, count: int) -> None:
        """Add `count` rollouts to the current phase."""
        self._total += count
        self._show()

    def finished(self, rollout: Rollout) -> None:
        """Count a rollout of the current phase that is done."""
        self._done += 1
        self._tokens += rollout.num_sampled
        if rollout.reward is not None:
            self._rewards.append(rollout.reward)
        if rollout.failure:
            self._failures[rollout.failure.cause] += 1
        if self._console.is_terminal:
            self.display.finished(rollout)
        self._show()

    def phases(self, counts: Mapping[Phase, int]) -> None:
        """Show the number of rollouts in each phase of their work."""
        self._phases = ", ".join(f"{count} {phase}" for phase, count in counts.items() if count)
        self._show()

    def step(self, step: int, numbers: dict[str, float], failures: dict[str, int]) -> None:
        """Report a training step that is done."""
        self._steps_done = step + 1
        self.display.rewards.append(numbers["reward/mean"])
        self._step_seconds = [*self._step_seconds[-4:], numbers["time/step_s"]]
        self.say(
            f"step {step + 1}/{self._num_steps}  reward {numbers['reward/mean']:.2f}  "
            f"{numbers['time/step_s']:.0f} s (update {numbers['time/update_s']:.0f} s)  "
            f"{numbers['rollout/tokens_per_s']:.0f} tokens/s  failures {causes_text(failures)}  {self._left()}"
        )
        if numbers.get("train/skipped"):
            self.say(f"step {step + 1}: update skipped, its gradient is not finite")
        if numbers["train/tokens"] == 0:
            why = "no group's rewards differ" if numbers["rollout/sampled_tokens"] else "the agent sampled no tokens"
            self.say(f"step {step + 1}: update skipped, {why}")

    def _left(self) -> str:
        if not self._step_seconds:
            return ""
        seconds = sum(self._step_seconds) / len(self._step_seconds) * (self._num_steps - self._steps_done)
        return f"{seconds / 60:.0f} min left" if seconds >= 90 else f"{seconds:.0f} s left"

    def _show(self) -> None:
        if not self._console.is_terminal:
            return
        seconds = max(time.monotonic() - self._phase_start, 1e-3)
        reward = f"{sum(self._rewards) / len(self._rewards):.2f}" if self._rewards else "-"
        failures = causes_text(dict(self._failures))
        doing = "learning" if self._done == self._total and self._title.startswith("step") else "rollouts"
        self.display.status = Text(
            f"{self._title}: {doing} {self._done}/{self._total}{self._phases and f' ({self._phases})'}  "
            f"reward {reward}  "
            f"{self._tokens / seconds:.0f} tokens/s  failures {failures}  {self._left()}",
            style="bold",
        )
