"""The `sandbox` environment with each of its mechanisms, and real Harbor trials."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harbor import (
    Trial,
    TrialAgentConfig,
    TrialConfig,
    TrialEnvironmentConfig,
    TrialResult,
    TrialTaskConfig,
    TrialVerifierConfig,
)
from harbor.environments.base import SandboxBuildFailedError
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths
from processes import Process, descendants

from dockyard.process import Output
from dockyard.rollout.blame import SandboxDiedError, SealError
from dockyard.rollout.sandbox import ENVIRONMENT
from dockyard.rollout.sandbox.check import SandboxSetting, check_sandbox, diagnose
from dockyard.rollout.sandbox.client import KILLED
from dockyard.rollout.sandbox.dockerfile import DockerfileError, read_image
from dockyard.rollout.sandbox.environment import SandboxEnvironment
from dockyard.rollout.sandbox.launch import PLACES, landlock_abi, outside_user, remove_leftovers
from dockyard.rollout.verifier import VERIFIER

pytestmark = [
    pytest.mark.filterwarnings("ignore:Task.checksum will be deprecated:DeprecationWarning"),  # Harbor's own
]

SOURCES = Path(__file__).parents[2] / "src"
KEEPS_SIGNALS_IN = pytest.mark.skipif(0 < landlock_abi() < 6, reason="Landlock keeps signals in from ABI 6 on")
SOLVE = "echo 42 >/app/answer.txt\n"
GRADE = 'grep -qx 42 /app/answer.txt && r=1 || r=0\necho "$r" >/logs/verifier/reward.txt\n'


class Current:
    """The mechanism that the test under way is about."""

    mechanism: SandboxSetting = "auto"


@pytest.fixture(params=["namespaces", "landlock"], autouse=True)
def mechanism(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if problem := check_sandbox(request.param):
        pytest.skip(problem.message)
    monkeypatch.setattr(Current, "mechanism", request.param)
    return request.param


@contextlib.asynccontextmanager
async def sandbox(
    tmp_path: Path,
    dockerfile: str | None = "FROM scratch\n",
    *,
    files: dict[str, str] | None = None,
    config: dict[str, Any] | None = None,
    **kwargs: Any,
) -> AsyncGenerator[SandboxEnvironment]:
    folder = tmp_path / "environment"
    for name, text in {"Dockerfile": dockerfile, **(files or {})}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            (folder / name).write_text(text)
    environment = SandboxEnvironment(
        environment_dir=folder,
        environment_name="tiny",
        session_id="tiny__env",
        trial_paths=TrialPaths(trial_dir=tmp_path / "trial"),
        task_env_config=EnvironmentConfig(**(config or {})),
        mechanism=Current.mechanism,
        **kwargs,
    )
    await environment.start(force_build=False)
    try:
        yield environment
    finally:
        await environment.stop(delete=True)


def write_task(
    folder: Path, *, solve: str = SOLVE, test: str = GRADE, dockerfile: str = "FROM x\n", toml: str = ""
) -> Path:
    for name, text in {
        "task.toml": f'schema_version = "1.4"\n{toml}\n[task]\nname = "tests/tiny"\n',
        "instruction.md": "Write 42 into /app/answer.txt.\n",
        "environment/Dockerfile": dockerfile,
        "solution/solve.sh": f"#!/bin/bash\n{solve}",
        "tests/test.sh": f"#!/bin/bash\n{test}",
    }.items():
        path = folder / "tiny" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "tiny"


async def run_trial(task: Path, agent: str = "oracle", *, verifier: str | None = VERIFIER) -> TrialResult:
    config = TrialConfig(
        task=TrialTaskConfig(path=task),
        trials_dir=task.parent / "trials",
        agent=TrialAgentConfig(name=agent),
        environment=TrialEnvironmentConfig(import_path=ENVIRONMENT, kwargs={"mechanism": Current.mechanism}),
        verifier=TrialVerifierConfig(import_path=verifier),
    )
    return await (await Trial.create(config)).run()


def reward(result: TrialResult) -> float:
    assert result.verifier_result is not None, result.exception_info
    assert result.verifier_result.rewards is not None
    return result.verifier_result.rewards["reward"]


@dataclass(frozen=True)
class Seen:
    """A process that the host sees."""

    command: str
    user: int


def processes(marker: str) -> list[Seen]:
    """Those in sandboxes whose command line contains the marker."""
    found: list[Seen] = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if marker in command and "python" not in command:
                found.append(Seen(command, path.stat().st_uid))
    return found


def with_marker(marker: str) -> list[str]:
    """The numbers of processes that sleep so long, as the host sees them."""

    def has_it(process: Path) -> bool:
        with contextlib.suppress(OSError):
            return (process / "cmdline").read_bytes() == f"sleep\0{marker}\0".encode()
        return False

    return [path.name for path in Path("/proc").glob("[0-9]*") if has_it(path)]


def inside(environment: SandboxEnvironment) -> set[Process]:
    """The processes of a sandbox, as the host sees them."""
    assert environment._sandbox is not None
    return descendants(environment._sandbox._process.pid)


def shells(environment: SandboxEnvironment) -> int:
    """What served an earlier command may still be on its way out, but is no shell."""
    names = [Path(f"/proc/{process.pid}/comm") for process in inside(environment)]
    return sum(name.exists() and name.read_text() == "bash\n" for name in names)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(600):  # only against hanging
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def marker(tmp_path: Path) -> str:
    """An argument of `sleep` that no other process has."""
    return f"{100 + os.getpid()}.{time.time_ns() % 10**9:09d}"


async def test_the_reference_solution_earns_one_and_doing_nothing_earns_zero(tmp_path: Path):
    task = write_task(tmp_path)
    oracle, nop = await run_trial(task), await run_trial(task, "nop")
    assert (reward(oracle), oracle.exception_info) == (1.0, None)
    assert (reward(nop), nop.exception_info) == (0.0, None)


async def test_a_reward_between_zero_and_one_arrives_as_it_is(tmp_path: Path):
    task = write_task(tmp_path, test="echo 0.5 >/logs/verifier/reward.txt\n")
    assert reward(await run_trial(task)) == 0.5


async def test_a_process_that_keeps_rewriting_the_reward_wins_nothing_once_sealed(tmp_path: Path):
    pay = "echo 1 >/logs/verifier/mine; mv /logs/verifier/mine /logs/verifier/reward.txt"  # never half written
    cheat = f"(while :; do {pay}; sleep 0.01; done) >/dev/null 2>&1 &\n"
    until_paid = "until grep -qx 1 /logs/verifier/reward.txt; do sleep 0.01; done\n"
    unsealed = write_task(tmp_path / "unsealed", solve=cheat, test=f"{GRADE}{until_paid}")
    assert reward(await run_trial(unsealed, verifier=None)) == 1.0
    sealed = write_task(tmp_path / "sealed", solve=cheat, test=f"{GRADE}sleep 0.2\n")
    assert reward(await run_trial(sealed)) == 0.0


async def test_a_separate_verifier_gets_the_artifacts_and_they_are_not_wiped(tmp_path: Path):
    task = write_task(
        tmp_path,
        solve="echo 42 >/logs/artifacts/answer.txt; echo 42 >/tmp/answer.txt\n",
        test="cat /logs/artifacts/answer.txt /tmp/answer.txt | tr -d '\\n' >/logs/verifier/reward.txt\n",
        toml='artifacts = ["/tmp/answer.txt"]\n[verifier]\nenvironment_mode = "separate"\n',
    )
    assert reward(await run_trial(task)) == 4242.0


async def test_a_full_disk_is_graded(tmp_path: Path, mechanism: str):
    places = ("/app", "/tmp") if mechanism == "namespaces" else ("/app",)
    task = write_task(
        tmp_path,
        solve=SOLVE + "".join(f"cat /dev/zero >{place}/full\n" for place in places),
        toml="[environment]\nstorage_mb = 8\n",
    )
    result = await run_trial(task)
    assert (reward(result), result.exception_info) == (1.0, None)


async def test_a_dockerfile_that_runs_commands_fails_its_trial_with_the_line_and_the_way_out(tmp_path: Path):
    result = await run_trial(write_task(tmp_path, dockerfile="FROM x\n\nRUN apt-get install -y \\\n  gcc\n"))
    assert result.exception_info is not None
    assert result.exception_info.exception_type == "SandboxBuildFailedError"
    assert "line 3 of its Dockerfile, `RUN apt-get install -y gcc`" in result.exception_info.exception_message
    assert 'environment.type = "docker"' in result.exception_info.exception_message


async def test_a_command_reports_its_streams_and_return_code(tmp_path: Path):
    async with sandbox(tmp_path) as environment:
        result = await environment.exec("echo out; echo err >&2; cat; exit 3")
        assert (result.stdout, result.stderr, result.return_code) == ("out\n", "err\n", 3)
        assert (await environment.exec("kill -TERM $$")).return_code == 128 + signal.SIGTERM
        own_limit = await environment.exec("timeout 0.1 sleep 9", timeout_sec=9)
        assert (own_limit.return_code, own_limit.stderr) == (124, "")


async def test_a_command_has_the_variables_and_the_folder_it_was_given(tmp_path: Path):
    dockerfile = "FROM x\nENV A=image B=image\nWORKDIR /work\n"
    async with sandbox(tmp_path, dockerfile, persistent_env={"B": "trial"}) as environment:
        result = await environment.exec("echo $A $B $C $PWD $HOME", env={"C": "call"})
        assert result.stdout == "image trial call /work /root\n"
        assert (await environment.exec("pwd", cwd="/tmp")).stdout == "/tmp\n"
        missing = await environment.exec("pwd", cwd="/missing")
        assert missing.return_code == 126
        assert "/missing" in (missing.stderr or "")


async def test_a_request_may_be_larger_than_a_socket_buffer(tmp_path: Path):
    env = {f"V{i}": "x" * 100_000 for i in range(5)}
    async with sandbox(tmp_path) as environment:
        assert (await environment.exec("echo ${#V4}", env=env)).stdout == "100000\n"


async def test_twenty_commands_at_once_get_their_own_output(tmp_path: Path):
    async with sandbox(tmp_path) as environment:
        results = await asyncio.gather(*(environment.exec(f"echo {i}") for i in range(20)))
        assert [result.stdout for result in results] == [f"{i}\n" for i in range(20)]


async def test_a_command_that_takes_too_long_is_killed_with_all_it_started(tmp_path: Path, marker: str):
    async with sandbox(tmp_path) as environment:
        command = f"echo begun; (setsid sleep {marker} &); setsid bash -c 'sleep {marker} &'; sleep {marker}"
        running = asyncio.create_task(environment.exec(command, timeout_sec=10))
        await until(lambda: [p.command for p in processes(marker)] == [f"sleep {marker} "] * 3)
        result = await running
        assert result.return_code == 124
        assert result.stdout == "begun\n"
        assert "killed after 10 s" in (result.stderr or "")
        assert processes(marker) == []
        assert (await environment.exec("echo alive")).stdout == "alive\n"


async def test_cancelling_a_command_leaves_nothing_of_it(tmp_path: Path, marker: str):
    async with sandbox(tmp_path) as environment:
        running = asyncio.create_task(environment.exec(f"(setsid sleep {marker} &); sleep {marker}"))
        await until(lambda: len(processes(marker)) == 2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until(lambda: processes(marker) == [])
        assert (await environment.exec("echo alive")).stdout == "alive\n"


async def test_a_background_process_outlives_its_command_and_ends_with_the_seal(tmp_path: Path, marker: str):
    async with sandbox(tmp_path) as environment:
        started = time.monotonic()
        assert (await environment.exec(f"sleep {marker} & echo started")).stdout == "started\n"
        assert time.monotonic() - started < 100  # which is less than that process sleeps
        assert (await environment.exec(f"pgrep -fx 'sleep {marker}'")).return_code == 0
        await environment.seal()
        assert processes(marker) == []


async def test_a_background_process_may_go_on_writing_to_the_output_of_its_command(tmp_path: Path):
    noisy = "(for i in $(seq 30); do echo {1..5000}; done; echo survived >/tmp/result) & echo started"
    async with sandbox(tmp_path) as environment:
        assert (await environment.exec(noisy)).stdout is not None
        async with asyncio.timeout(600):  # only against hanging
            while (await environment.exec("cat /tmp/result")).stdout != "survived\n":
                await asyncio.sleep(0.02)


@KEEPS_SIGNALS_IN
async def test_killing_everything_from_inside_is_reported_and_survived(tmp_path: Path):
    async with sandbox(tmp_path) as environment:
        assert (await environment.exec("kill -9 -1; sleep 5")).return_code == KILLED
        assert (await environment.exec("echo alive")).stdout == "alive\n"


async def test_a_sandbox_that_died_says_so(tmp_path: Path, marker: str):
    async with sandbox(tmp_path) as environment:
        running = asyncio.create_task(environment.exec(f"sleep {marker}"))
        await until(lambda: processes(marker) != [])
        assert environment._sandbox is not None
        environment._sandbox._process.kill()
        with pytest.raises(SandboxDiedError):
            await running
        with pytest.raises(SandboxDiedError):
            await environment.exec("true")
    await until(lambda: processes(marker) == [])


async def test_what_a_killed_sandbox_left_on_the_disk_is_removed_by_the_next_run(
    tmp_path: Path, mechanism: str, marker: str
):
    def files() -> list[Path]:
        return [path for place in PLACES for path in Path(place).glob(f"dy-*/root/app/{marker}")]

    async with sandbox(tmp_path / "a") as killed, sandbox(tmp_path / "b") as running:
        for environment in (killed, running):
            await environment.exec(f"mkdir {marker}; touch {marker}/x; chmod 0 {marker}")
        assert len(files()) == (0 if mechanism == "namespaces" else 2)
        assert killed._sandbox is not None
        killed._sandbox._process.kill()
        await killed._sandbox._process.wait()
        await until(lambda: remove_leftovers() or len(files()) == (0 if mechanism == "namespaces" else 1))
        assert (await running.exec("echo alive")).stdout == "alive\n"


async def test_only_the_first_and_last_megabyte_of_output_are_kept(tmp_path: Path):
    async with sandbox(tmp_path) as environment:
        text = (await environment.exec("echo first; head -c 5000000 /dev/zero | tr '\\0' x; echo last")).stdout or ""
    assert text.startswith("first\n")
    assert text.endswith("last\n")
    assert "bytes left out" in text
    assert len(text) < 2.1 * 2**20


def test_output_up_to_the_limit_is_kept_whole():
    output = Output(keep_bytes=4)
    for part in (b"ab", b"cde", b"fgh"):
        output.write(part)
    assert output.text() == "abcdefgh"
    output.write(b"ij")
    assert output.text() == "abcd\n[2 bytes left out]\nghij"


async def test_another_user_than_root_is_refused_with_the_way_out(tmp_path: Path):
    async with sandbox(tmp_path) as environment:
        with pytest.raises(SandboxBuildFailedError, match="user `agent`"):
            await environment.exec("true", user="agent")


async def test_nothing_of_the_host_is_visible_but_its_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DRIVER_SECRET", "hunter2")
    (tmp_path / "secret").write_text("hunter2")
    async with sandbox(tmp_path) as environment:
        look = "ls / /root /home /tmp /opt /run; cat /proc/*/environ; env"
        seen = await environment.exec(look)
        assert "hunter2" not in (seen.stdout or "")
        names = set((seen.stdout or "").split())
        assert {"app", "logs", "tests", "usr"} <= names
        assert not names & {"boot", "sys", "mnt", "media", "lost+found", "work"}
        for path in ("/etc/shadow", "/proc/1/environ", "/proc/1/mem", "/proc/1/fd/0", tmp_path / "secret", sys.prefix):
            assert (await environment.exec(f"ls {path}/ || cat {path}")).return_code != 0, path


async def test_the_processes_of_the_host_are_out_of_reach(tmp_path: Path, mechanism: str):
    async with sandbox(tmp_path) as environment:
        pids = (await environment.exec("cd /proc; echo [0-9]*")).stdout or ""
        assert mechanism == "landlock" or len(pids.split()) < 10
        if mechanism == "landlock":
            for pid in (os.getpid(), os.getppid()):
                assert (await environment.exec(f"kill -0 {pid}")).return_code == 1
                for name in ("environ", "mem", "maps", "fd/0", "cwd/", "root/"):
                    assert (await environment.exec(f"cat /proc/{pid}/{name}")).return_code == 1, name
        powers = await environment.exec("grep -E '^Cap(Eff|Prm)|^NoNewPrivs' /proc/self/status | tr -d '[:space:]'")
        assert powers.stdout == "CapPrm:0000000000000000CapEff:0000000000000000NoNewPrivs:1"


async def test_what_the_kernel_would_find_is_closed_even_where_no_path_is_translated(tmp_path: Path, mechanism: str):
    """Through /proc, which is shared without namespaces, the host's own root can be named."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        open_to_all = Path(name)
        open_to_all.chmod(0o777)
        (open_to_all / "secret").write_text("hunter2")
        (open_to_all / "secret").chmod(0o666)
        async with sandbox(tmp_path) as environment:
            for root in ("", "/proc/self/root", "/proc/self/cwd/../../../../.."):
                place = f"{root}{open_to_all}"
                for command in (
                    f"cat {place}/secret",
                    f"ls {place}",
                    f"echo >{place}/new",
                    f"truncate -s 0 {place}/secret",
                ):
                    assert (await environment.exec(command)).return_code != 0, command
        assert [(path.name, path.read_text()) for path in open_to_all.iterdir()] == [("secret", "hunter2")]


@KEEPS_SIGNALS_IN
async def test_a_sandbox_can_do_nothing_to_another_that_runs(tmp_path: Path, marker: str):
    async with sandbox(tmp_path / "a") as a, sandbox(tmp_path / "b") as b:
        await b.exec(f"sleep {marker} &")
        await until(lambda: bool(with_marker(marker)))
        [victim] = with_marker(marker)
        for command in (
            f"kill -9 {victim}",
            f"kill -STOP {victim}",
            f"cat /proc/{victim}/environ",
            f"ls /proc/{victim}/cwd/",
        ):
            assert (await a.exec(command)).return_code != 0, command
        await a.exec("kill -9 -1")
        assert len(processes(f"sleep {marker}")) == 1
        assert (await b.exec("echo alive")).stdout == "alive\n"


async def test_tools_and_settings_are_read_only(tmp_path: Path):
    async with sandbox(tmp_path) as environment:
        for path in ("/usr/x", "/usr/local/bin/x", "/etc/ld.so.preload", "/bin/x", "/dev/x"):
            said = (await environment.exec(f"touch {path}")).stderr or ""
            assert "Read-only" in said or "Permission denied" in said, path


async def test_there_is_no_network_unless_asked_for(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = f"exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]}"
        async with sandbox(tmp_path) as environment:
            assert (await environment.exec(connect)).return_code != 0
        async with sandbox(tmp_path, network=True) as environment:
            assert (await environment.exec(connect)).return_code == 0
        async with sandbox(tmp_path, config={"network_mode": "no-network"}) as environment:
            assert (await environment.exec(connect)).return_code != 0


@KEEPS_SIGNALS_IN
async def test_two_sandboxes_share_nothing(tmp_path: Path, marker: str):
    async with sandbox(tmp_path / "a") as a, sandbox(tmp_path / "b") as b:
        await asyncio.gather(a.exec(f"echo a >/app/x; sleep {marker} &"), b.exec(f"echo b >/app/x; sleep {marker} &"))
        read = await asyncio.gather(a.exec("cat /app/x"), b.exec("cat /app/x"))
        assert [result.stdout for result in read] == ["a\n", "b\n"]
        await a.exec("kill -9 -1")
        await until(lambda: len(processes(f"sleep {marker}")) == 1)  # the reply does not wait for the others' end
        await a.stop(delete=True)
        assert (await b.exec("cat /app/x")).stdout == "b\n"


HONEST = {
    "mkdir -p a/b/c; echo d >n; ln -s ../../../n a/b/c/l; readlink a/b/c/l; cat a/b/c/l": "../../../n\nd\n",
    "ln -s /app/deep/file l; readlink l; mkdir deep; "
    "echo x >l; cat deep/file; realpath l": "/app/deep/file\nx\n/app/deep/file\n",
    "ln -s here there; tar cf t.tar there; rm there; tar xf t.tar; readlink there": "here\n",
    "realpath /dev/null; readlink -f /proc/self/cwd": "/dev/null\n/app\n",
    "cd /; ls -d etc/hostname usr/bin; "
    "cd usr/bin/../..; pwd; cat ../../etc/hostname": "etc/hostname\nusr/bin\n/\nsandbox\n",
    "find / -maxdepth 2 -name hostname 2>/dev/null | grep ^/etc; "
    'test -n "$(find /usr/bin -name env)" && echo found': "/etc/hostname\nfound\n",
    "printf '#!/bin/bash\\necho $# $0\\n' >s; chmod +x s; ./s $(seq 5000); /app/s 'a b'": "5000 ./s\n1 /app/s\n",
    "printf '#!/usr/bin/env -S bash -e\\necho $1\\n' >s; chmod 755 s; ./s ok; chmod 644 s; ./s || echo $?": "ok\n126\n",
    "touch -d 2001-02-03 f; stat -c %y f | cut -c1-10; chmod 640 f; "
    "stat -c %a f; chown root f; echo $?": "2001-02-03\n640\n0\n",
    "ln -s gone l; touch -h -d 2001-02-03 l; stat -c %y l | cut -c1-10; chmod 600 l || echo $?": "2001-02-03\n1\n",
    "python3 -c 'import os; os.sched_setaffinity(os.getpid(), os.sched_getaffinity(0)); print(os.nice(1) > 0)'": (
        "True\n"
    ),
    "python3 -c 'import multiprocessing as m; print(sum(m.Pool(2).map(abs, range(-9, 0))))'": "45\n",
    'python3 -c \'import os; a = "/app/" + "x" * 90; os.symlink(a, "l"); print(len(os.readlink("l")))\'': "95\n",
    "python3 -c 'import threading as t; "
    '[(x := t.Thread(target=open, args=("/app/f", "w")), x.start(), x.join()) for _ in range(300)]\'; ls f': "f\n",
    "mkdir d; cd d; rmdir ../d; pwd; ls ..": "/app/d\n",
    "git init -q r; cd r; ln -s ../x l; "
    "git add l; git -c user.name=n -c user.email=e commit -qm m; git clone -q . ../c; readlink ../c/l": "../x\n",
    "sleep 600 & kill -STOP $!; kill -CONT $!; kill $!; wait $!; echo $?": "143\n",
}
"""Commands whose output is the same everywhere."""


@pytest.mark.parametrize("command", HONEST)
async def test_programs_find_the_files_they_name(tmp_path: Path, command: str):
    async with sandbox(tmp_path) as environment:
        result = await environment.exec(command, timeout_sec=60)
        assert result.stdout == HONEST[command], result.stderr


CONNECT = """
import socket, sys
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    for path in sys.argv[1:]:
        try:
            s = socket.socket(socket.AF_UNIX, kind)
            s.connect(path) if kind == socket.SOCK_STREAM else s.sendto(b"x", path)
            print("reached", path)
        except OSError as error:
            print(error)
"""


async def test_sockets_of_the_host_are_out_of_reach(tmp_path: Path):
    with tempfile.TemporaryDirectory(dir="/tmp") as name, socket.socket(socket.AF_UNIX) as server:
        Path(name).chmod(0o711)
        server.bind(f"{name}/s")  # closed to other users, as most are
        server.listen()
        async with sandbox(tmp_path) as environment:
            (tmp_path / "connect.py").write_text(CONNECT)
            await environment.upload_file(source_path=tmp_path / "connect.py", target_path="/app/connect.py")
            ways = (f"{name}/s", f"/proc/self/root{name}/s", f"../../../..{name}/s", f"/app/l/../..{name}/s")
            said = (await environment.exec(f"ln -s / l; python3 connect.py {' '.join(ways)}")).stdout or ""
        assert len(said.splitlines()) == 8
        assert "reached" not in said


async def test_modes_and_times_of_the_hosts_files_stay(tmp_path: Path):
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        file = Path(name, "file")
        file.write_text("")
        file.chmod(0o644)
        os.utime(file, (1, 1))
        async with sandbox(tmp_path) as environment:
            for place in (file, f"/proc/self/root{file}", f"../../../..{file}", f"/app/l/../..{file}"):
                assert (await environment.exec(f"ln -sfn / l; chmod 777 {place}")).return_code != 0
                await environment.exec(f"touch -c -d 2001-01-01 {place}")
        assert (file.stat().st_mode & 0o777, file.stat().st_mtime) == (0o644, 1)


async def test_a_command_cannot_keep_its_sandbox_alive(tmp_path: Path, marker: str):
    keep = f"for fd in /proc/[0-9]*/fd/*; do (exec 9>$fd; setsid sleep {marker}) 2>/dev/null & done; sleep 1"
    async with sandbox(tmp_path) as environment:
        await environment.exec(keep, timeout_sec=30)
        started = time.monotonic()
        await environment.stop(delete=True)
        assert time.monotonic() - started < 30
    assert processes(marker) == []


@pytest.mark.parametrize(
    "take",
    [
        "import mmap, time; m = mmap.mmap(-1, 400 << 20); [m.write(b'x' * 4096) for _ in range(102400)]; "
        "time.sleep(600)",
        "import os, time; os.mkdir('/app/d'); [open(f'/app/d/{i}', 'wb').write(b'x' * (9 << 20)) for i in range(2)]; "
        "os.chmod('/app/d', 0); time.sleep(600)",
    ],
    ids=["shared memory", "a closed folder"],
)
async def test_what_a_sandbox_takes_in_all_is_bounded(tmp_path: Path, mechanism: str, take: str):
    if mechanism == "namespaces":
        pytest.skip("bounded by the kernel: memory of each process, and the size of each file system")
    async with sandbox(tmp_path, config={"memory_mb": 256, "storage_mb": 9}) as environment:
        with pytest.raises(SandboxDiedError, match="took more than"):
            await environment.exec(f'python3 -c "{take}"', timeout_sec=500)


OWN_FILTER = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
code = (ctypes.c_uint64 * 1)(0x7FFF000000000006)  # allow everything
program = (ctypes.c_uint64 * 2)(1, ctypes.addressof(code))
libc.prctl(38, 1, 0, 0, 0)
print(libc.prctl(22, 2, ctypes.byref(program), 0, 0), ctypes.get_errno())
print(libc.syscall(317, 1, 0, ctypes.byref(program)), ctypes.get_errno())
"""


async def run_python(environment: SandboxEnvironment, tmp_path: Path, code: str, *words: str) -> str:
    (tmp_path / "code.py").write_text(code)
    await environment.upload_file(source_path=tmp_path / "code.py", target_path="/opt/code.py")
    done = await environment.exec(f"python3 /opt/code.py {' '.join(words)}", timeout_sec=300)
    assert done.return_code == 0, done.stderr
    return done.stdout or ""


async def test_a_command_cannot_put_a_filter_of_its_own_before_the_tracers(tmp_path: Path, mechanism: str):
    async with sandbox(tmp_path) as environment:
        said = await run_python(environment, tmp_path, OWN_FILTER)
    refused = "-1 22\n-1 22\n"
    assert (said == refused) == (mechanism == "landlock")  # namespaces need none of their own


ZOMBIES = """
import os
made = 0
try:
    while made < 500:
        if os.fork() == 0:
            os._exit(0)
        made += 1
except OSError:
    pass
print(made)
"""


async def test_processes_that_nobody_waits_for_count(tmp_path: Path):
    async with sandbox(tmp_path, max_processes=64) as environment:
        assert 40 < int(await run_python(environment, tmp_path, ZOMBIES)) <= 64
        assert int(await run_python(environment, tmp_path, ZOMBIES)) > 40  # those of the first are gone


CHURN = "for i in $(seq 20); do for j in $(seq 20); do /bin/true & done; wait; done; kill -9 $$ & wait"


async def test_what_ends_early_leaves_its_place_to_others(tmp_path: Path):
    async with sandbox(tmp_path, max_processes=64) as environment:
        before = int(await run_python(environment, tmp_path, ZOMBIES))
        for _ in range(3):
            await environment.exec(CHURN)
        assert int(await run_python(environment, tmp_path, ZOMBIES)) >= before - 1


DEEP = """
import os, sys
os.chdir(sys.argv[1])
for _ in range(20):
    os.mkdir("d" * 250)
    os.chdir("d" * 250)
for i in range(int(sys.argv[2])):
    open(str(i), "wb").write(b"x" * (9 << 20))
"""


async def test_the_seal_empties_folders_whose_names_are_too_long_for_a_path(tmp_path: Path):
    async with sandbox(tmp_path) as environment:
        await run_python(environment, tmp_path, DEEP, "/tmp", "0")
        await environment.exec("echo 42 >/app/answer.txt")
        await environment.seal()
        assert (await environment.exec("ls -A /tmp; cat /app/answer.txt")).stdout == "42\n"


async def test_files_below_a_name_too_long_for_a_path_are_summed_up(tmp_path: Path, mechanism: str):
    if mechanism == "namespaces":
        pytest.skip("bounded by the size of each file system")
    async with sandbox(tmp_path, config={"storage_mb": 9}) as environment:
        with pytest.raises(SandboxDiedError, match="took more than 18 MB"):
            await run_python(environment, tmp_path, DEEP + "import time; time.sleep(500)", "/app", "3")


async def test_a_folder_that_was_closed_stays_so(tmp_path: Path):
    async with sandbox(tmp_path) as environment:
        done = await environment.exec("mkdir d; touch d/x; chmod 0 d; sleep 2; stat -c %a d")
        assert done.stdout == "0\n"


COPIES = """
import os, time
data = bytearray(os.urandom(1 << 20) * 150)
children = []
for _ in range(6):
    if (child := os.fork()) == 0:
        time.sleep(3)
        os._exit(0)
    children.append(child)
print([os.waitpid(child, 0)[1] for child in children])
"""


async def test_memory_that_processes_share_counts_once(tmp_path: Path):
    async with sandbox(tmp_path, config={"memory_mb": 512}) as environment:
        assert await run_python(environment, tmp_path, COPIES) == "[0, 0, 0, 0, 0, 0]\n"


BEND = """
import os, resource
pid = os.getppid()
while pid > 0:
    try:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (32768, 32768))
    except OSError:
        pass
    try:
        with open(f"/proc/{pid}/stat") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        break
"""


async def test_limits_that_a_command_sets_on_the_server_do_not_reach_the_verifier(tmp_path: Path):
    async with sandbox(tmp_path) as environment:
        await run_python(environment, tmp_path, BEND)
        try:
            await environment.seal()
        except SealError:
            return  # such a rollout earns nothing
        written = await environment.exec("head -c 100000 /dev/zero >/app/large; stat -c %s /app/large")
        assert written.stdout == "100000\n"


async def test_what_leads_above_by_a_dot_is_found(tmp_path: Path):
    async with sandbox(tmp_path) as environment:
        done = await environment.exec("cd / && cat ./etc/hostname && ls -d ././usr/bin && cat etc/hostname")
        assert (done.return_code, done.stderr or "") == (0, "")


WATCH = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
events = libc.inotify_init1(0)
for path in sys.argv[1:]:
    print(libc.inotify_add_watch(events, path.encode(), 0xFFF) > 0)
"""


async def test_changes_to_files_of_the_host_are_not_told(tmp_path: Path):
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        places = (name, f"/proc/self/root{name}", f"../../../../..{name}", "/app", "/usr/bin", ".")
        async with sandbox(tmp_path) as environment:
            said = await run_python(environment, tmp_path, WATCH, *places)
    assert said.split() == ["False", "False", "False", "True", "True", "True"]


CHANGE_OPEN = """
import os, sys
for path in sys.argv[1:]:
    file = os.open(path, os.O_RDONLY)
    for change in (lambda: os.fchmod(file, 0o640), lambda: os.utime(file, (2, 2))):
        try:
            change()
            print("changed")
        except OSError as error:
            print("refused")
"""


async def test_open_files_of_the_host_keep_their_modes_and_times(tmp_path: Path):
    if not os.access("/usr/local/share", os.W_OK):
        pytest.skip("needs a file under /usr that belongs to the sandbox's user")
    with tempfile.NamedTemporaryFile(dir="/usr/local/share") as theirs:
        async with sandbox(tmp_path) as environment:
            await environment.exec("sleep 60 & touch /app/own")
            user = max(Path(f"/proc/{process.pid}").stat().st_uid for process in inside(environment))
            if user != os.geteuid():
                os.chown(theirs.name, user, user)
            said = await run_python(environment, tmp_path, CHANGE_OPEN, theirs.name, "/app/own")
    assert said.split() == ["refused", "refused", "changed", "changed"]


async def test_a_fork_bomb_stays_within_its_limit_and_ends_with_the_seal(tmp_path: Path):
    async with sandbox(tmp_path, max_processes=64) as environment:
        await environment.exec("bomb() { bomb | bomb & }; bomb")
        counts: list[int] = []
        async with asyncio.timeout(600):  # only against hanging
            while len(counts) < 20 or max(counts) <= 10:  # until it has gone off
                counts.append(len(inside(environment)))
                await asyncio.sleep(0.02)
        assert max(counts) <= 64 + 8  # what serves it is not bound
        await environment.seal()
        assert shells(environment) == 0
        assert (await environment.exec("echo alive")).stdout == "alive\n"


async def test_a_fork_bomb_that_runs_out_of_time_is_killed_whole(tmp_path: Path):
    async with sandbox(tmp_path, max_processes=64) as environment:
        await environment.exec("bomb() { bomb | bomb & wait; }; bomb; sleep 9", timeout_sec=1)
        assert shells(environment) == 0
        assert (await environment.exec("echo alive")).stdout == "alive\n"


async def test_the_disk_is_as_large_as_the_task_says(tmp_path: Path):
    async with sandbox(tmp_path, config={"storage_mb": 8}) as environment:
        for folder in ("/app", "/tests", "/logs/agent", "/dev/shm"):
            full = await environment.exec(f"cat /dev/zero >{folder}/full; stat -c %s {folder}/full")
            said = full.stderr or ""
            assert "No space left" in said or "File size limit exceeded" in said
            assert int(full.stdout or 0) <= 64 << 20
            await environment.exec(f"rm {folder}/full")


async def test_a_process_has_as_much_memory_as_the_task_says(tmp_path: Path):
    hungry = "head -c 50000000 /dev/zero | tail -n 1 | wc -c"  # tail holds the whole line
    async with sandbox(tmp_path, config={"memory_mb": 32}) as environment:
        assert "memory exhausted" in ((await environment.exec(hungry)).stderr or "")
    async with sandbox(tmp_path) as environment:
        assert (await environment.exec(hungry)).stdout == "50000000\n"


async def test_the_seal_empties_what_could_trap_the_tests_and_keeps_the_work(tmp_path: Path):
    async with sandbox(tmp_path, "FROM x\nCOPY seed /root/seed\n", files={"seed": "seed"}) as environment:
        await environment.exec("rm -rf /tmp; ln -s /app /tmp; echo work >/app/work; echo trap >/root/seed")
        await environment.exec(
            "mkdir -p /root/.config/deep /tests/x; touch /root/.config/deep/y; chmod 0 /root/.config"
        )
        await environment.seal()
        left = await environment.exec(
            "find /root /tests /tmp /logs/verifier -mindepth 1; stat -c %a /tmp; cat work ~/seed"
        )
        assert (left.stdout, left.stderr) == ("/root/seed\n1777\nwork\nseed", "")


async def test_the_seal_keeps_a_home_that_is_the_working_folder(tmp_path: Path):
    async with sandbox(tmp_path, "FROM x\nWORKDIR /root/project\n") as environment:
        await environment.exec("echo work >file; echo trap >/tmp/trap")
        await environment.seal()
        assert (await environment.exec("cat file; ls /tmp")).stdout == "work\n"


async def test_folders_go_in_and_out_with_contents_and_permissions(tmp_path: Path):
    source = tmp_path / "source"
    (source / "sub" / "empty").mkdir(parents=True)
    (source / "run.sh").write_text("echo ran")
    (source / "run.sh").chmod(0o755)
    (source / "sub" / "data").write_bytes(bytes(range(256)))
    async with sandbox(tmp_path) as environment:
        await environment.upload_dir(source_dir=source, target_dir="/app/copy")
        assert (await environment.exec("copy/run.sh || ./copy/run.sh")).stdout == "ran\n"
        await environment.download_dir(source_dir="/app/copy", target_dir=tmp_path / "back")
    assert (tmp_path / "back/sub/data").read_bytes() == bytes(range(256))
    assert (tmp_path / "back/sub/empty").is_dir()
    assert os.access(tmp_path / "back/run.sh", os.X_OK)


async def test_files_go_in_and_out_also_into_an_existing_folder(tmp_path: Path):
    source = tmp_path / "one.txt"
    source.write_text("1")
    async with sandbox(tmp_path) as environment:
        await environment.upload_file(source_path=source, target_path="/app/new/two.txt")
        await environment.upload_file(source_path=source, target_path="/app/new")
        assert (await environment.exec("ls new")).stdout == "one.txt\ntwo.txt\n"
        await environment.download_file(source_path="/app/new/two.txt", target_path=tmp_path / "back/two.txt")
        assert (tmp_path / "back/two.txt").read_text() == "1"
        with pytest.raises(RuntimeError, match="not a file: /app/none"):
            await environment.download_file(source_path="/app/none", target_path=tmp_path / "none")


async def test_links_and_pipes_stay_inside_on_download(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    make = f"ln -s {secret} link; ln -s {tmp_path} folder; mkfifo pipe; echo real >file; ln file hard"
    async with sandbox(tmp_path) as environment:
        await environment.exec(make)
        await environment.download_dir(source_dir="/app", target_dir=tmp_path / "back")
        for name in ("link", "pipe"):
            with pytest.raises(RuntimeError, match="not a file"):
                await environment.download_file(source_path=f"/app/{name}", target_path=tmp_path / "x")
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == ["file", "hard"]
    assert (tmp_path / "back/hard").read_text() == "real\n"


async def test_a_download_larger_than_the_disk_is_refused(tmp_path: Path, mechanism: str):
    async with sandbox(tmp_path, config={"storage_mb": 8}) as environment:
        size = "1T" if mechanism == "namespaces" else "9000000"  # more is a file too large to be made
        await environment.exec(f"truncate -s {size} /app/huge")
        with pytest.raises(RuntimeError, match="larger than the sandbox's 8 MB"):
            await environment.download_dir(source_dir="/app", target_dir=tmp_path / "back")
        with pytest.raises(RuntimeError, match="larger than the sandbox's 8 MB"):
            await environment.download_file(source_path="/app/huge", target_path=tmp_path / "huge")


async def test_local_files_are_copied_as_the_dockerfile_says(tmp_path: Path):
    files = {"data/a.txt": "a", "run.sh": "echo ran"}
    dockerfile = """
# a comment
FROM ubuntu:24.04 AS base
ARG TARGET=/srv/tool
ENV NAME="two words" \\
    PLACE=${TARGET}/bin
WORKDIR /work
WORKDIR sub
COPY data ./data
COPY --chmod=755 --chown=me:me ["run.sh", "$PLACE/"]
ADD *.sh data/a.txt /opt/mixed/
USER root
EXPOSE 80
CMD ["sleep", "infinity"]
"""
    async with sandbox(tmp_path, dockerfile, files=files) as environment:
        result = await environment.exec('pwd; cat data/a.txt; /srv/tool/bin/run.sh; ls /opt/mixed; echo "$NAME"')
        assert result.stdout == "/work/sub\naran\na.txt\nrun.sh\ntwo words\n"


@pytest.mark.parametrize(
    ("dockerfile", "reason"),
    [
        ("FROM x\nRUN true\n", "line 2 .*`RUN true`: a sandbox cannot build images"),
        ("FROM x\nUSER agent\n", "line 2 .*no user but root"),
        ("FROM x\nCOPY --from=base /a /b\n", "cannot copy from other images"),
        ("FROM x\nADD https://example.com/a /a\n", "only files next to the Dockerfile"),
        ("FROM x\nADD a.tar.gz /a\n", "archives are not unpacked"),
        ("FROM x\nCOPY Dockerfile /usr/bin/tool\n", "`/usr/bin/tool` is read-only"),
        ("FROM x\nWORKDIR /app\nCOPY Dockerfile ../usr/x\n", "line 3 .*`/usr/x` is read-only"),
        ("FROM x\nWORKDIR /usr/src/app\n", "line 2 .*`/usr/src/app` is read-only"),
        ("FROM x\nCOPY missing /app/\n", "`missing` is not next to"),
        ("FROM x\nCOPY ../outside /app/\n", "`../outside` is not next to"),
        ("FROM x\nCOPY link /app/\n", "`link` is not next to"),
        ("FROM x\nCOPY <<EOF /app/file\nhello\nEOF\n", "only files next to the Dockerfile"),
        ("FROM x\nFLY away\n", "unknown instruction"),
    ],
)
def test_what_a_sandbox_cannot_build_is_named_with_its_line(tmp_path: Path, dockerfile: str, reason: str):
    context = tmp_path / "context"
    context.mkdir()
    (tmp_path / "outside").write_text("")
    (context / "link").symlink_to("../outside")
    (context / "Dockerfile").write_text(dockerfile)
    with pytest.raises(DockerfileError, match=reason):
        read_image(context / "Dockerfile")


async def test_a_working_folder_that_cannot_be_made_fails_the_start(tmp_path: Path):
    with pytest.raises(SandboxBuildFailedError, match="Read-only|Permission denied"):
        async with sandbox(tmp_path, config={"workdir": "/usr/src/app"}):
            pass


async def test_files_of_a_task_with_a_prebuilt_image_are_uploaded(tmp_path: Path):
    async with sandbox(tmp_path, None, config={"docker_image": "ubuntu:24.04"}, files={"data": "1"}) as environment:
        assert (await environment.exec("cat data; pwd")).stdout == "1/app\n"


async def test_compose_files_are_refused(tmp_path: Path):
    with pytest.raises(SandboxBuildFailedError, match=r"docker-compose\.yaml"):
        async with sandbox(tmp_path, files={"docker-compose.yaml": "services: {}"}):
            pass


DRIVER = """
import asyncio, pathlib, sys
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths
from dockyard.rollout.sandbox.environment import SandboxEnvironment
from dockyard.rollout.verifier import VERIFIER

async def main(marker, folder):
    environment = SandboxEnvironment(
        environment_dir=folder, environment_name="tiny", session_id="tiny__env",
        trial_paths=TrialPaths(trial_dir=folder), task_env_config=EnvironmentConfig(), mechanism=sys.argv[3],
    )
    await environment.start(force_build=False)
    await environment.exec(f"(setsid sleep {marker} &); sleep {marker}")

asyncio.run(main(sys.argv[1], pathlib.Path(sys.argv[2])))
"""


@contextlib.contextmanager
def start_driver(marker: str, folder: Path, user: int | None) -> Generator[subprocess.Popen[bytes]]:
    """A driver as some user, although the folder of this Python may be closed to that user."""
    prefix = os.open(sys.base_prefix, os.O_PATH)
    home = f"/proc/self/fd/{prefix}"
    env = {
        "PYTHONHOME": home,
        "PYTHONPATH": f"{SOURCES}:{Path(pytest.__file__).parent.parent}",
        "LD_LIBRARY_PATH": f"{home}/lib",
        "HOME": str(folder),
        "TMPDIR": str(folder / "scratch"),
        "HARBOR_TELEMETRY": "off",
    }
    with subprocess.Popen(
        [
            f"{home}/bin/python{sys.version_info.major}.{sys.version_info.minor}",
            "-c",
            DRIVER,
            marker,
            folder,
            Current.mechanism,
        ],
        env=env,
        pass_fds=[prefix],
        user=user,
        group=user,
        extra_groups=None if user is None else [],
        cwd="/",
    ) as driver:
        os.close(prefix)
        try:
            yield driver
        finally:
            driver.kill()


@pytest.mark.parametrize("user", [None, 54321], ids=["this user", "an ordinary user"])
async def test_killing_the_driver_leaves_no_process_and_no_file(marker: str, user: int | None):
    user = user if outside_user() else None  # else an ordinary user is what we are
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "scratch").mkdir()
        for path in (folder, folder / "scratch"):
            path.chmod(0o777)
        with start_driver(marker, folder, user) as driver:
            await until(lambda: len(processes(marker)) == 2 or driver.poll() is not None)
            users = {process.user for process in processes(marker)}
        await until(lambda: processes(marker) == [])
        assert list((folder / "scratch").iterdir()) == []
    assert len(users) == 1
    assert outside_user() is None or 0 not in users
    assert user is None or users == {user}


def test_a_sandbox_can_start_here():
    assert check_sandbox() is None


async def test_the_check_also_works_under_a_running_event_loop():
    assert check_sandbox() is None


@pytest.mark.parametrize(
    ("file", "text", "hint"),
    [
        ("proc/sys/user/max_user_namespaces", "0\n", "sysctl -w user.max_user_namespaces=15000"),
        ("proc/sys/kernel/unprivileged_userns_clone", "0\n", "sysctl -w kernel.unprivileged_userns_clone=1"),
        ("proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1\n", "apparmor_restrict_unprivileged_userns=0"),
        (".dockerenv", "", "--privileged"),
        ("etc/passwd", "", 'environment.type = "docker"'),
    ],
)
def test_a_machine_that_forbids_sandboxes_is_told_what_to_change(tmp_path: Path, file: str, text: str, hint: str):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    problem = diagnose("bwrap: setting up uid map: Permission denied\n", tmp_path)
    assert problem.message == "no sandbox can start here: bwrap: setting up uid map: Permission denied"
    assert hint in problem.hint
