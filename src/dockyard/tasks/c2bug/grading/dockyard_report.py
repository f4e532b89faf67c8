"""A pytest plugin that writes down how each test went. Runs in the task's container, on any Python from 3.7."""

from __future__ import annotations

import json
import os
from typing import Any


def pytest_runtest_logreport(report: Any) -> None:
    """One line for each phase of a test: its name, and whether that phase passed or failed as expected."""
    good = report.outcome == "passed" or (report.outcome == "skipped" and hasattr(report, "wasxfail"))
    phase = {"test": report.nodeid, "when": report.when, "passed": good, "outcome": report.outcome}
    with open(os.environ["DOCKYARD_REPORT"], "a", encoding="utf-8") as file:
        file.write(json.dumps(phase) + "\n")
