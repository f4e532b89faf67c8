"""`kill -9` at random moments of a real run, then `--resume`: the same bits as a run that was never killed."""

import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from killable_runs import GROUP_SIZE, TASKS_PER_STEP, adapter, num_recorded, write_tasks
from killable_runs import settings as killable_settings
from processes import Process, descendants, wait_until_gone

import dockyard
from dockyard.run_dir.run import RunDir, step_phase

STEPS, NUM_HELDOUT = 5, 3
PATIENCE_S = 1200  # only against hanging
KILLED_BY_0_1_0 = Path(__file__).parents[1] / "data/killed_run.tar.xz"
"""A run of two steps that was killed in the second, in the folder `/tmp/old`, as version 0.1.0 left it."""
COMMAND = [sys.executable, "-c", "import sys; from dockyard.cli import main; sys.exit(main())", "train"]


def settings(folder: Path) -> list[str]:
    write_tasks(folder / "heldout", NUM_HELDOUT)
    values = killable_settings(folder, STEPS) | {
        "tasks.heldout": folder / "heldout",
        "trainer.schedule": "linear",
        "trainer.warmup_steps": 1,
        "trainer.keep_last": 1,
        "trainer.keep_best": "true",
        "eval.every": 2,
    }
    return [f"--{key}={value}" for key, value in values.items()]


def start(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    paths = [str(Path(__file__).parents[1] / "support"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with log.open("ab") as out:
        return subprocess.Popen([*COMMAND, *arguments], env=environment, stdout=out, stderr=out)


def kill_after(process: subprocess.Popen[bytes], run: Path, recorded: int, delay_s: float) -> set[Process]:
    """Returns what it had started and what should have ended with it."""
    deadline = time.monotonic() + PATIENCE_S
    while num_recorded(run) < recorded:
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(delay_s)
    started = descendants(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return started


@pytest.mark.parametrize("num_kills", [2, pytest.param(20, marks=pytest.mark.soak)])
def test_a_run_killed_again_and_again_ends_with_the_bits_of_one_never_killed(num_kills: int, tmp_path: Path):
    arguments, log = settings(tmp_path), tmp_path / "log"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start([*arguments, f"--run_dir={whole}"], log).wait() == 0, log.read_text()

    seed = random.SystemRandom().randrange(10**6)
    rng = random.Random(seed)
    total = STEPS * TASKS_PER_STEP * GROUP_SIZE + 4 * NUM_HELDOUT  # before, after steps 2 and 4, after
    moments = sorted(rng.sample(range(1, total - 1), num_kills))
    for index, recorded in enumerate(moments):
        process = start([f"--resume={killed}"] if index else [*arguments, f"--run_dir={killed}"], log)
        orphans = kill_after(process, killed, recorded, delay_s=rng.uniform(0, 0.2))
        wait_until_gone(orphans)
    assert start([f"--resume={killed}"], log).wait() == 0, f"seed {seed}: {log.read_text()}"

    assert num_recorded(killed) == total  # nothing lost, nothing twice
    assert adapter(killed, STEPS) == adapter(whole, STEPS), f"seed {seed}, moments {moments}"
    assert adapter(killed, STEPS) != (whole / f"adapters/v{STEPS - 1:05}/adapter_model.safetensors").read_bytes()
    for run in (whole, killed):
        assert {path.name for path in (run / "checkpoints").iterdir()} == {"best", f"step-{STEPS:05}"}
    for name in ("score.json", "adapter_model.safetensors"):
        assert (killed / "checkpoints/best" / name).read_bytes() == (whole / "checkpoints/best" / name).read_bytes()
    for name in ("summary.json", "metrics.jsonl", "reward.png"):
        assert (killed / name).exists()
    steps = [line.split(b",")[0] for line in (killed / "metrics.jsonl").read_bytes().splitlines()]
    assert steps == [f'{{"step": {step}'.encode() for step in range(STEPS)]


def oldest(path: Path) -> int:
    """How many updates old the weights behind any token of the run were."""
    with RunDir.resume(path) as run:
        return max(
            step - int(segment.versions[segment.sampled].min())
            for step in range(STEPS)
            for item in run.read_rollouts(step_phase(step))
            for segment in item.rollout.segments
            if segment.versions is not None and segment.sampled.any()
        )


def test_a_run_killed_while_rollouts_were_early_ends_with_the_bits_its_rollouts_give_in_one_go(tmp_path: Path):
    """Which weights are behind a token depends on timing here, so the run never killed learns from the same tokens."""
    arguments, log = [*settings(tmp_path), "--rollout.max_staleness=1"], tmp_path / "log"
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    seed = random.SystemRandom().randrange(10**6)
    rng = random.Random(seed)
    total = STEPS * TASKS_PER_STEP * GROUP_SIZE + 4 * NUM_HELDOUT
    moment = rng.randrange(NUM_HELDOUT + TASKS_PER_STEP * GROUP_SIZE, total - NUM_HELDOUT)
    process = start([*arguments, f"--run_dir={killed}"], log)
    kill_after(process, killed, moment, delay_s=rng.uniform(0, 0.2))
    assert start([f"--resume={killed}"], log).wait() == 0, f"seed {seed}: {log.read_text()}"
    assert num_recorded(killed) == total
    assert oldest(killed) <= 1

    shutil.copytree(killed, whole, ignore=shutil.ignore_patterns("checkpoints", "adapters", "metrics.jsonl"))
    assert start([f"--resume={whole}"], log).wait() == 0, log.read_text()
    assert num_recorded(whole) == total  # nothing was made anew
    assert adapter(killed, STEPS) == adapter(whole, STEPS), f"seed {seed}, moment {moment}"


def test_a_run_that_an_earlier_version_left_is_read_and_continued(tmp_path: Path):
    killable = killable_settings(tmp_path, 2)
    with tarfile.open(KILLED_BY_0_1_0) as archive:
        archive.extractall(tmp_path, filter="data")
    run, config, log = tmp_path / "run", tmp_path / "run/config.toml", tmp_path / "log"
    text = config.read_text().replace("/tmp/old/model", str(killable["model.name"])).replace("/tmp/old", str(tmp_path))
    config.write_text(text)
    before = {file.name: file.read_text() for file in run.glob("rollouts/*.jsonl")}
    left = dockyard.load_run(run)
    assert [row["step"] for row in left.metrics(as_="arrow").to_pylist()] == [0]
    assert left.rollouts(as_="arrow").num_rows == num_recorded(run) == 11

    assert start([f"--resume={run}"], log).wait() == 0, log.read_text()
    assert num_recorded(run) == 2 * TASKS_PER_STEP * GROUP_SIZE
    assert all((run / "rollouts" / name).read_text().startswith(lines) for name, lines in before.items())
    assert adapter(run, 2) != adapter(run, 1)
