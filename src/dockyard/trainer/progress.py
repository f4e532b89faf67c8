"""What a person sees while a run goes on: a live display in a terminal, one log line a step elsewhere."""

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.live import Live
from rich.text import Text

from dockyard.collect.progress import causes_text
from dockyard.rollout.phases import Phase
from dockyard.trainer.display import Display, Words
from dockyard.types import Rollout, Task

logger = logging.getLogger(__name__)

_NO_WORDS = Words(text=lambda _: "", folders={})


class Progress:
    """Counts rollouts of the present phase and estimates the time left from the steps so far."""

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

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """One line that stays."""
        if self._console.is_terminal:
            self._console.print(text, highlight=False)
        else:
            logger.info(text)

    def begin(self, title: str, total: int, tasks: Sequence[Task] = (), group_size: int = 1) -> None:
        """A phase of this many rollouts begins, `group_size` of each of these tasks."""
        self.display.begin(title, tasks, group_size)
        self._title, self._total, self._phase_start = title, total, time.monotonic()
        self._rewards, self._done, self._tokens, self._failures = [], 0, 0, Counter()
        self._show()

    def extend(self, count: int) -> None:
        """So many more rollouts belong to the present phase."""
        self._total += count
        self._show()

    def finished(self, rollout: Rollout) -> None:
        """A rollout of the present phase is done."""
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
        """So many rollouts are in each phase now."""
        self._phases = ", ".join(f"{count} {phase}" for phase, count in counts.items() if count)
        self._show()

    def step(self, step: int, numbers: dict[str, float], failures: dict[str, int]) -> None:
        """A training step is done."""
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
