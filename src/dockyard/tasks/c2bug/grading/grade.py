"""Checks that all required tests passed. Runs in the task's container, on Python 3.7 or newer.

pytest's results come from the report of Dockyard's plugin, those of unittest and Django's runner from their output.
Usage: grade.py TESTS.json REPORT LOG; exit 0 when all passed
"""

from __future__ import annotations

import json
import os
import re
import sys

_NAMED = re.compile(r"^(?:(FAIL|ERROR|UNEXPECTED SUCCESS): )?(\w+) \(([\w.]+)\)")
_GOOD = ("ok", "expected failure")
_BAD = ("FAIL", "ERROR", "unexpected success")
_SHOWN = 20


def passed_by_report(lines: list[str]) -> dict[str, bool]:
    """Return the results of pytest. A test passed if its call did and no phase failed."""
    passed: dict[str, bool] = {}
    for line in lines:
        try:
            phase = json.loads(line)
        except ValueError:  # a worker was killed while writing
            continue
        if phase["outcome"] == "failed":
            passed[phase["test"]] = False
        elif phase["when"] == "call" or not phase["passed"]:
            passed[phase["test"]] = phase["passed"] and passed.get(phase["test"], True)
        elif phase["when"] == "setup" and phase["outcome"] == "skipped":  # an xfail that is not even run
            passed.setdefault(phase["test"], phase["passed"])
    return passed


def passed_by_log(log: str) -> dict[str, bool]:
    """Return the results of unittest by dotted name, and by description if it prints one."""
    passed: dict[str, bool] = {}
    running = ""
    for line in log.splitlines():
        named = _NAMED.match(line)
        if named:
            running = _label(named.group(2), named.group(3))
        if named and named.group(1):
            passed[running] = False
            running = ""
        if not running:
            continue
        shown, _, result = line.rpartition(" ... ")  # output of the test may precede its result
        result = result.strip()
        if result in _GOOD or result in _BAD or result.startswith("skipped"):
            passed[running] = result in _GOOD and passed.get(running, True)
            passed[shown.strip()] = passed[running]
            running = ""
    return passed


def _label(name: str, path: str) -> str:
    return path if path.endswith("." + name) else path + "." + name


def is_passed(test: str, report: dict[str, bool], log: dict[str, bool]) -> bool:
    """A file or a class passes if it has tests and all of them pass."""
    if "::" in test or test.endswith(".py"):
        if test in report:
            return report[test]
        inside = [good for name, good in report.items() if name.startswith((test + "::", test + "["))]
        return bool(inside) and all(inside)
    named = _NAMED.match(test)
    if named:
        return log.get(_label(named.group(2), named.group(3)), False)
    return log.get(test, False)


def _read(path: str) -> str:
    if not os.path.exists(path):
        return ""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def main(tests: str, report: str, log: str) -> int:
    """Print the tests that did not pass. Return 0 if all passed."""
    wanted = json.loads(_read(tests))
    by_report, by_log = passed_by_report(_read(report).splitlines()), passed_by_log(_read(log))
    missed = [test for test in wanted if not is_passed(test, by_report, by_log)]
    sys.stdout.write(f"{len(wanted) - len(missed)} of {len(wanted)} tests passed\n")
    sys.stdout.writelines(f"not passed: {test}\n" for test in missed[:_SHOWN])
    return 1 if missed or not wanted else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
