"""What must hold wherever a person may be: in a container with Docker's defaults, as root or not."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = (
    "tests/real/test_attacks.py",
    "tests/real/test_harbor_tasks.py",
    "tests/real/test_mechanisms.py",
    "tests/train/test_learning.py::test_a_short_demo_trains_evaluates_and_reports",
)
"""Attacks on the reward and on graders, a rollout of each kind, leaks, and the demo."""


def pytest_command(*tests: str) -> list[str]:
    """That runs them with a folder for its temporary files that any user can make."""
    options = ("-m", "not soak", "-p", "no:cacheprovider", "--quiet", "-rs", f"--basetemp=/tmp/anywhere-{os.getpid()}")
    return [sys.executable, "-m", "pytest", *options, *tests]
