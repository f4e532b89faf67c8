"""Runs the tests of a SWE-bench instance and grades the log by SWE-bench's own harness, which is next to this file.

Standard library only, Python 3.10 or newer. Everything it needs is read before the tests run, which may change files.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
WORK = Path("/testbed")
UNUSED = {
    "datasets": ("Dataset", "load_dataset", "load_from_disk"),
    "dotenv": ("load_dotenv",),
    "tqdm": ("tqdm",),
    "unidiff": ("PatchSet",),
}
"""Packages that the harness imports but does not use for grading."""


@dataclass(frozen=True)
class Harness:
    """The parts of SWE-bench's package that grade."""

    make_test_spec: Callable[..., Any]
    get_eval_report: Callable[..., Any]
    timeout_mark: str


def main() -> int:
    """Write the report and the reward."""
    options = parse_arguments()
    harness = import_harness()
    task: dict[str, Any] = json.loads((HERE / "instance.json").read_text(encoding="utf-8"))
    spec = harness.make_test_spec(task["instance"])
    options.out.mkdir(parents=True, exist_ok=True)
    log: Path = options.log or options.out / "test_output.txt"
    if options.log is None:
        log.write_text(run_tests(spec.eval_script, task["timeout_s"], harness.timeout_mark), encoding="utf-8")
    report = judge(harness, spec, log)
    (options.out / "report.json").write_text(json.dumps(report, indent=2), encoding="utf-8")
    (options.out / "reward.txt").write_text(f"{int(report['resolved'])}\n", encoding="utf-8")
    sys.stdout.write(f"{spec.instance_id}: {summary(report)}\n")
    return 0


def parse_arguments() -> argparse.Namespace:
    """Parse the options. Harbor passes none."""
    parser = argparse.ArgumentParser(description="Grade a SWE-bench instance.")
    parser.add_argument("--log", type=Path, help="grade this log instead of running the tests")
    parser.add_argument("--out", type=Path, default=Path("/logs/verifier"), help="folder for the report and the reward")
    return parser.parse_args()


def import_harness() -> Harness:
    """Import the harness from this file's folder, with stubs for packages that it does not need here."""
    for name, members in UNUSED.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(dict.fromkeys(members, nothing))
    sys.path.insert(0, str(HERE))
    from swebench.harness.constants import TESTS_TIMEOUT
    from swebench.harness.grading import get_eval_report
    from swebench.harness.utils import make_test_spec

    return Harness(make_test_spec, get_eval_report, TESTS_TIMEOUT)


def nothing() -> None:
    """Stub for functions that are not called, or whose effect is not needed."""


def run_tests(script: str, timeout_s: int, timeout_mark: str) -> str:
    """Run the script and return its stdout and stderr in order."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "eval.sh")
        file.write_bytes(script.encode())
        process = subprocess.Popen(
            ["/bin/bash", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=WORK if WORK.is_dir() else None,
            start_new_session=True,
        )
        output = bytearray()
        # Processes that the tests leave running may keep the pipe open, so wait for the script, not for its output.
        reader = threading.Thread(target=drain, args=(process, output), daemon=True)
        reader.start()
        try:
            process.wait(timeout_s)
            end = ""
        except subprocess.TimeoutExpired:
            end = f"\n{timeout_mark}\nTimeout error: {timeout_s} seconds exceeded.\n"
        end_group(process.pid)
        process.wait()
        reader.join(timeout=5)
    return bytes(output).decode(errors="replace") + end


def drain(process: subprocess.Popen[bytes], output: bytearray) -> None:
    """Read in chunks, so that the output before a timeout is kept."""
    assert process.stdout is not None
    while chunk := os.read(process.stdout.fileno(), 1 << 16):
        output += chunk


def end_group(pid: int) -> None:
    """Kill the script and all processes that it started and did not detach."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def judge(harness: Harness, spec: Any, log: Path) -> dict[str, Any]:
    """Return SWE-bench's report. A log that its parser cannot read counts as not resolved, as in its own runs."""
    prediction = {"instance_id": spec.instance_id, "model_name_or_path": "agent", "model_patch": ""}
    try:
        return harness.get_eval_report(spec, prediction, str(log), include_tests_status=True)[spec.instance_id]
    except Exception as error:  # it parses whatever the tests printed
        return {"resolved": False, "error": f"{type(error).__name__}: {error}"}


def summary(report: dict[str, Any]) -> str:
    """Return the result in one line."""
    verdict = "resolved" if report["resolved"] else "not resolved"
    tests = report.get("tests_status")
    if tests is None:
        reason = report.get("error") or report.get("infra_failure_reason") or "no test results in the log"
        return f"{verdict} ({reason})"
    counts = [
        f"{name} {len(tests[name]['success'])} of {len(tests[name]['success']) + len(tests[name]['failure'])}"
        for name in ("FAIL_TO_PASS", "PASS_TO_PASS")
    ]
    return f"{verdict} ({', '.join(counts)})"


if __name__ == "__main__":
    sys.exit(main())
