"""`dockyard doctor`: what this machine can run, and the command that fixes what it cannot.

The exit code is 0 if everything that `make demo` needs works, whatever else is missing. `dockyard doctor MODEL`
examines a model instead.
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from dockyard.doctor.checks import CHECKS, Check, Finding, Status, Use
from dockyard.doctor.machine import Machine, Probe

STYLES = {Status.OK: "green", Status.MISSING: "yellow", Status.BROKEN: "red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """Every check with its finding."""

    rows: tuple[tuple[Check, Finding], ...]

    def missing_for(self, use: Use) -> list[str]:
        """Return the names of the checks that failed and are needed for this use."""
        return [
            check.name for check, finding in self.rows if use in check.needed_for and finding.status is not Status.OK
        ]

    def can_run(self, use: Use) -> bool:
        return not self.missing_for(use)


def examine(probe: Probe) -> DoctorReport:
    """Run all checks concurrently."""
    with ThreadPoolExecutor(max_workers=len(CHECKS)) as pool:
        findings = [pool.submit(check.look, probe) for check in CHECKS]
        return DoctorReport(rows=tuple((check, found.result()) for check, found in zip(CHECKS, findings, strict=True)))


def to_json(report: DoctorReport) -> str:
    """Return the report as JSON."""
    checks = [
        {
            "name": check.name,
            "status": finding.status,
            "found": finding.found,
            "fix": finding.fix or None,
            "notes": list(finding.notes),
            "needed_for": sorted(use.name.lower() for use in check.needed_for),
        }
        for check, finding in report.rows
    ]
    can_run = {use.name.lower(): report.can_run(use) for use in Use}
    return json.dumps({"checks": checks, "can_run": can_run}, indent=2)


def to_table(report: DoctorReport) -> Text:
    """Return the report as a table: one line per check, with notes and the fix below it, and a summary."""
    width = max(len(check.name) for check, _ in report.rows)
    table = Text()
    for check, finding in report.rows:
        table.append(f"{finding.status:<8}", style=STYLES[finding.status])
        table.append(f" {check.name:<{width}}  {finding.found}\n")
        for note in finding.notes:
            table.append(f"{'':<8} {'':<{width}}  - {note}\n", style="dim")
        if finding.fix:
            table.append(f"{'':<8} {'':<{width}}  fix: {finding.fix}\n", style="dim")
    return table.append("\n").append(summarize(report), style="bold")


def summarize(report: DoctorReport) -> str:
    """Return one sentence on what this machine can run, and one on what it cannot and which checks failed."""
    can = [use.value for use in Use if report.can_run(use)]
    cannot = [f"{use.value} ({', '.join(report.missing_for(use))})" for use in Use if not report.can_run(use)]
    first = f"This machine can run {', '.join(can)}." if can else "This machine cannot run anything yet."
    return f"{first} It cannot run {'; '.join(cannot)}." if cannot else first


def main(argv: list[str]) -> int:
    """Print the report. Return 0 if the demo can run here, otherwise 1; for a model always 0."""
    parser = argparse.ArgumentParser(
        prog="dockyard doctor", description="Check what this machine can run, or how a model's prompts are built."
    )
    parser.add_argument("model", metavar="MODEL", nargs="?")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    arguments = parser.parse_args(argv)
    if arguments.model is not None:
        return _show_model(arguments.model, as_json=arguments.json)
    report = examine(Machine())
    _print(to_json(report) if arguments.json else to_table(report))
    return 0 if report.can_run(Use.DEMO) else 1


def _show_model(name: str, *, as_json: bool) -> int:
    from dockyard.doctor.model import examine_model, model_to_json, model_to_text  # loads tokenizers

    report = examine_model(name)
    _print(model_to_json(report) if as_json else model_to_text(report))
    return 0


def _print(report: str | Text) -> None:
    if isinstance(report, str):
        sys.stdout.write(report + "\n")
    else:
        Console(highlight=False).print(report, soft_wrap=True)
