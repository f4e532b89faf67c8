"""What commands show in a terminal: a live line while rollouts are made, and tables."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from dockyard.rollout.blame import causes_text
from dockyard.rollout.plan import Phase
from dockyard.types import Rollout


class RolloutProgress:
    """A progress line that counts finished rollouts."""

    def __init__(self, title: str, total: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._live = Live("", console=self._console, transient=True, refresh_per_second=4)
        self._title, self._total = title, total
        self._rewards: list[float] = []
        self._failures: Counter[str] = Counter()
        self._done = 0
        self._phases = ""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def finished(self, rollout: Rollout) -> None:
        """Count a finished rollout."""
        self._done += 1
        if rollout.reward is not None:
            self._rewards.append(rollout.reward)
        if rollout.failure:
            self._failures[rollout.failure.cause] += 1
        self._show()

    def phases(self, counts: Mapping[Phase, int]) -> None:
        """Show the number of rollouts in each phase."""
        self._phases = ", ".join(f"{count} {phase}" for phase, count in counts.items() if count)
        self._show()

    def _show(self) -> None:
        if not self._console.is_terminal:
            return
        reward = f"{sum(self._rewards) / len(self._rewards):.2f}" if self._rewards else "-"
        under_way = f" ({self._phases})" if self._phases else ""
        text = f"{self._title}: {self._done}/{self._total}{under_way}  reward {reward}  failures "
        self._live.update(Text(text + causes_text(dict(self._failures))))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as lines with left-aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
