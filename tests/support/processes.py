"""Processes of a run under test, found through /proc and distinguished from all others on the machine."""

import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Process:
    """Told apart from any other that ever had its number."""

    pid: int
    started: str


def descendants(pid: int) -> set[Process]:
    """Every process that this one started, directly or not."""
    parents = {number: stat for number in _numbers() if (stat := _stat(number))}
    own = {pid}
    while more := {number for number, stat in parents.items() if stat[0] in own} - own:
        own |= more
    return {Process(number, parents[number][1]) for number in own - {pid} if number in parents}


def alive(processes: set[Process]) -> set[Process]:
    """The processes that still run; zombies do not count."""
    return {process for process in processes if (stat := _stat(process.pid)) and stat[1] == process.started}


def wait_until_gone(processes: set[Process]) -> None:
    """They end by themselves, soon or late on a machine that is busy."""
    deadline = time.monotonic() + 600  # only against hanging
    while left := alive(processes):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


def words_of(process: Process) -> set[str]:
    """Its command line; none when it has ended."""
    try:
        return set(Path(f"/proc/{process.pid}/cmdline").read_text().split("\0"))
    except OSError:
        return set()


def _numbers() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _stat(pid: int) -> tuple[int, str] | None:
    """Parent and start time; None when there is no such process, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else (int(fields[1]), fields[19])
