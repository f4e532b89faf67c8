"""Trials per minute on one machine: `harbor run` with its defaults, Dockyard on Docker, Dockyard in its own sandbox.

All rows run the same oracle task, so that only environment, verifier and bookkeeping are measured.
Harbor's time is from the start of its first trial to the end of its last, without starting its command line.

    tools/install-docker.sh && python bench/rollouts.py
    python bench/rollouts.py --leaks          200 trials in sandboxes, 32 concurrent: resources before and after
"""

import argparse
import asyncio
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean

os.environ.setdefault("HARBOR_TELEMETRY", "off")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

from dockyard.collect.open import NoModel, open_pool
from dockyard.config import AgentConfig, EnvironmentConfig, RolloutConfig, RunConfig
from dockyard.rollout.plan import RolloutPlan
from dockyard.run_dir.run import RunDir
from dockyard.tasks.folder import load_tasks
from dockyard.types import Rollout

IMAGE = "dockyard/base:1"
PHASES = ("environment", "setup", "agent", "verifier")
TASK = {
    "task.toml": f'schema_version = "1.4"\n[task]\nname = "bench/hello"\n[environment]\ndocker_image = "{IMAGE}"\n',
    "instruction.md": "Write hi into /app/hello.txt.\n",
    "solution/solve.sh": "#!/bin/bash\nmkdir -p /app && echo hi > /app/hello.txt\n",
    "tests/test.sh": '#!/bin/bash\n[ "$(cat /app/hello.txt)" = hi ] && reward=1 || reward=0\n'
    "echo $reward > /logs/verifier/reward.txt\n",
}


@dataclass(frozen=True, slots=True)
class Figures:
    """The results of one way to run trials."""

    name: str
    at_once: int
    trials: int
    wall_s: float
    phases: dict[str, float]

    @property
    def per_minute(self) -> float:
        return 60 * self.trials / self.wall_s


def write_task(folder: Path) -> Path:
    for name, text in TASK.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "environment").mkdir()
    return folder


def harbor(task: Path, folder: Path, trials: int, at_once: int) -> Figures:
    """Run `harbor run` as a user would."""
    command = [Path(sys.executable).with_name("harbor"), "run", "-p", task, "-a", "oracle", "-e", "docker"]
    flags = ["-k", trials, "-n", at_once, "-o", folder, "--job-name", f"n{at_once}", "-y", "-q"]
    subprocess.run([*map(str, command), *map(str, flags)], check=True, stdout=subprocess.DEVNULL)
    results = [json.loads(path.read_text()) for path in folder.glob(f"n{at_once}/*/result.json")]
    rewards = [result["verifier_result"]["rewards"]["reward"] for result in results]
    assert rewards == [1.0] * trials, f"harbor's own trials failed: {rewards}"
    spans = [(_when(result["started_at"]), _when(result["finished_at"])) for result in results]
    wall_s = max(end for _, end in spans) - min(start for start, _ in spans)
    names = {"environment": "environment_setup", "setup": "agent_setup", "agent": "agent_execution"}
    phases = {phase: fmean(_seconds(result[names.get(phase, phase)]) for result in results) for phase in PHASES}
    return Figures(
        "harbor run", at_once, trials, wall_s, _with_rest(phases, fmean(end - start for start, end in spans))
    )


def _when(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _seconds(timing: dict[str, str] | None) -> float:
    return _when(timing["finished_at"]) - _when(timing["started_at"]) if timing else 0.0


def _with_rest(phases: dict[str, float], total: float) -> dict[str, float]:
    return {**phases, "rest": total - sum(phases.values()), "total": total}


async def ours(kind: str, task: Path, folder: Path, trials: int, at_once: int) -> Figures:
    """Run the pool and trials of a training run, in Docker or in a sandbox with this mechanism."""
    which = {"type": "docker"} if kind == "docker" else {"type": "sandbox", "sandbox": kind}
    config = RunConfig(
        agent=AgentConfig(name="oracle"),
        environment=EnvironmentConfig.model_validate(which),
        rollout=RolloutConfig(concurrency=at_once),
    )
    with RunDir.create(folder / f"{kind}-{at_once}", config) as run:
        async with open_pool(config, run, NoModel(), None) as pool:
            await pool.collect(_plan(task, "step-00000", at_once), _ignore)  # imports, and the first of everything
            started = time.monotonic()
            groups = await pool.collect(_plan(task, "step-00001", trials), _ignore)
            wall_s = time.monotonic() - started
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert [rollout.reward for rollout in rollouts] == [1.0] * trials, [rollout.failure for rollout in rollouts]
    phases = {phase: fmean(rollout.seconds.get(phase, 0.0) for rollout in rollouts) for phase in PHASES}
    total = fmean(rollout.seconds["total"] for rollout in rollouts)
    name = "dockyard docker" if kind == "docker" else f"dockyard sandbox, {kind}"
    return Figures(name, at_once, trials, wall_s, _with_rest(phases, total))


def _plan(task: Path, phase: str, trials: int) -> RolloutPlan:
    return RolloutPlan(phase=phase, tasks=load_tasks(task), group_size=trials, temperature=1.0, seed=0, stream=phase)


def _ignore(_: Rollout) -> None: ...


def show(figures: Sequence[Figures]) -> None:
    """Print one table, with ratios to Harbor with one trial at a time, and to its best rate."""
    theirs = [row for row in figures if row.name == "harbor run"]
    alone = next(row.per_minute for row in theirs if row.at_once == 1)
    best = max(row.per_minute for row in theirs)
    columns = ("at once", "trials", "trials/min", "× harbor at 1", "× harbor at its best", *PHASES, "rest", "seconds")
    print(f"| | {' | '.join(columns)} |")
    print(f"|---|{'---|' * len(columns)}")
    for row in figures:
        ratios = f"{row.per_minute / alone:.1f} | {row.per_minute / best:.1f}"
        seconds = " | ".join(f"{row.phases[name]:.2f}" for name in (*PHASES, "rest", "total"))
        print(f"| {row.name} | {row.at_once} | {row.trials} | {row.per_minute:.1f} | {ratios} | {seconds} |")


@dataclass(frozen=True, slots=True)
class Held:
    """The resources of the machine that this process holds."""

    processes: int
    file_descriptors: int
    memory_mb: float
    temporary_files: int

    @classmethod
    def now(cls) -> "Held":
        gc.collect()
        status = Path("/proc/self/status").read_text()
        rss_kb = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        temporary = sum(1 for folder in ("/tmp", "/dev/shm", "/var/tmp") for _ in Path(folder).iterdir())
        return cls(_descendants(), len(os.listdir("/proc/self/fd")), rss_kb / 1024, temporary)


def _descendants() -> int:
    listed = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout
    parents = {int(pid): int(parent) for pid, parent in (line.split() for line in listed.splitlines()[1:])}
    own = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in own} - own:
        own |= more
    return len(own) - 2  # without this process and `ps`


async def leaks(kind: str, task: Path, folder: Path) -> None:
    """Measure before, after the first 40 (all modules imported and all threads started), and after 240."""
    await ours(kind, task, folder / f"warm-{kind}", 40, 32)
    before = Held.now()
    figures = await ours(kind, task, folder / f"run-{kind}", 200, 32)
    after = Held.now()
    print(f"200 trials in sandboxes made by {kind}, 32 at once, {figures.per_minute:.0f} trials/min\n")
    print("| | before | after |\n|---|---|---|")
    for name in ("processes", "file_descriptors", "memory_mb", "temporary_files"):
        print(f"| {name.replace('_', ' ')} | {getattr(before, name):.0f} | {getattr(after, name):.0f} |")


@contextmanager
def scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="dockyard-bench-", dir=os.environ.get("DOCKYARD_BENCH_DIR")))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leaks", action="store_true")
    parser.add_argument("--trials", type=int, default=4, help="of Harbor at one at a time; the others get more")
    parser.add_argument(
        "--harbor", type=int, nargs="*", default=[4, 8, 16, 24], help="how many trials at once, besides 1"
    )
    arguments = parser.parse_args()
    with scratch() as folder:
        task = write_task(folder / "hello")
        if arguments.leaks:
            for kind in ("namespaces", "landlock"):
                await leaks(kind, task, folder)
            return
        n = arguments.trials
        figures = [harbor(task, folder / "jobs", n, 1)]
        figures += [harbor(task, folder / "jobs", 2 * at_once, at_once) for at_once in arguments.harbor]
        figures += [await ours("docker", task, folder, 2 * n, 1), await ours("docker", task, folder, 4 * n, 4)]
        for kind in ("namespaces", "landlock"):
            figures += [await ours(kind, task, folder, 20 * n, 1), await ours(kind, task, folder, 60 * n, 8)]
        show(figures)


if __name__ == "__main__":
    asyncio.run(main())
