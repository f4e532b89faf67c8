"""The `docker` environment with a real engine: images, commands, files, whole trials."""

import asyncio
import subprocess
import uuid
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from docker_engine import BASE, docker
from docker_environment import (
    NAME,
    code_of,
    containers_of,
    docker_clients,
    main_of,
    make,
    reward_of,
    run_trial,
    started,
)
from harbor.environments.base import SandboxBuildFailedError

from dockyard.config import EnvironmentConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.rollout.blame import DockerUnreachableError, ImageMissingError, SandboxDiedError
from dockyard.rollout.docker.docker_cli import read_state
from dockyard.rollout.docker.images import images
from dockyard.rollout.docker.site import OWNER_LABEL, Owner, docker_site

pytestmark = pytest.mark.filterwarnings("ignore:Task.checksum will be deprecated:DeprecationWarning")  # Harbor's own


async def test_a_group_builds_its_image_once_and_leaves_it_for_the_next(tmp_path: Path, dockerfile: str):
    async def one(index: int) -> str:
        async with started(tmp_path / str(index), files={"Dockerfile": dockerfile}) as environment:
            return (await environment.exec("cat /mark")).stdout or ""

    marks = await asyncio.gather(*(one(index) for index in range(4)))
    assert images().num_builds == 1
    assert set(marks) == {dockerfile.split()[4] + "\n"}
    await one(4)
    assert images().num_builds == 1


async def test_a_new_base_image_makes_a_new_task_image(tmp_path: Path, dockerfile: str):
    base = f"dockyard-test:{uuid.uuid4().hex}"
    docker("tag", BASE, base)
    try:
        folder = tmp_path / "context"
        folder.mkdir()
        (folder / "Dockerfile").write_text(f"FROM {base}\n")
        first = await images().built(folder, "same", task=NAME)
        (tmp_path / "Dockerfile").write_text(dockerfile)
        docker("tag", (await images().built(tmp_path, "other", task=NAME)).name, base)
        images()._tags.clear()  # as in another process
        assert (await images().built(folder, "same", task=NAME)).name != first.name
    finally:
        docker("image", "rm", "--force", base)


async def test_a_dockerfile_that_does_not_build_says_why_and_is_tried_three_times_at_most(tmp_path: Path):
    broken = f"FROM {BASE}\nRUN echo {uuid.uuid4().hex}; echo the reason >&2; false\n"
    for attempt in range(5):
        environment = make(tmp_path / str(attempt), files={"Dockerfile": broken})
        with pytest.raises(SandboxBuildFailedError, match="the reason"):
            await environment.start(force_build=False)
        await environment.stop(delete=True)
    assert images().num_builds == 3


async def test_an_image_that_cannot_be_had_is_named(tmp_path: Path):
    environment = make(tmp_path)
    environment.task_env_config.docker_image = "127.0.0.1:1/nobody/has-this:1"
    with pytest.raises(ImageMissingError, match="`127.0.0.1:1/nobody/has-this:1` does not exist locally"):
        await environment.start(force_build=False)
    await environment.stop(delete=True)


@pytest.mark.parametrize("seconds", [0.05, 0.2, 0.35, 0.5, 0.7])
async def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path, seconds: float):
    run = uuid.uuid4().hex
    environment = make(tmp_path, run=run)
    starting = asyncio.create_task(environment.start(force_build=False))
    await asyncio.sleep(seconds)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await environment.stop(delete=True)
    assert docker_clients() == []
    assert containers_of(run) == []


async def test_a_build_that_is_cancelled_leaves_no_client_and_the_next_start_works(tmp_path: Path, dockerfile: str):
    slow = make(tmp_path, files={"Dockerfile": f"{dockerfile}RUN sleep 3\n"})
    starting = asyncio.create_task(slow.start(force_build=False))
    while not images().num_builds:
        await asyncio.sleep(0.05)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    assert docker_clients() == []
    await slow.start(force_build=False)
    await slow.stop(delete=True)


async def test_output_errors_variables_and_the_return_code_come_through(tmp_path: Path):
    async with started(tmp_path) as environment:
        command = 'echo "$GREETING $API_KEY"; echo bad >&2; pwd; exit 3'
        result = await environment.exec(command, cwd="/usr", env={"GREETING": "hi", "API_KEY": "s e\ncret"})
    assert (result.return_code, result.stdout, result.stderr) == (3, "hi s e\ncret\n/usr\n", "bad\n")


ODD = {
    "PLAIN": "1",
    "EMPTY": "",
    "LINES": "a\n\nb=c\n",
    "QUOTED": """ '"$HOME`id`\\ é """,
    "PATH": "/opt/none:/usr/bin:/bin",  # these from here on would change the docker client itself
    "HOME": "/nowhere",
    "DOCKER_HOST": "unix:///nowhere.sock",
    "DOCKER_CONFIG": "a\nb",
    "LD_PRELOAD": "",
    "LD_LIBRARY_PATH": "/nowhere",
    "http_proxy": "http://127.0.0.1:1",
    "ALL_PROXY": "socks5://127.0.0.1:1",
    "GODEBUG": "netdns=go",
}


async def test_variables_arrive_as_they_are_and_none_changes_the_client(tmp_path: Path):
    async with started(tmp_path) as environment:
        result = await environment.exec("env --null", env=ODD)
    seen = dict(line.split("=", 1) for line in (result.stdout or "").split("\0") if line)
    assert {name: seen.get(name) for name in ODD} == ODD


async def test_a_variables_value_is_in_no_process_list(tmp_path: Path):
    value = uuid.uuid4().hex
    async with started(tmp_path) as environment:
        running = asyncio.create_task(environment.exec("touch /started; sleep 60", env={"GREETING": value}))
        while await code_of(environment, "test -e /started"):
            pass
        listed = subprocess.run(["ps", "-ewwo", "args"], capture_output=True, text=True, check=True).stdout
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert "GREETING" in listed
    assert value not in listed


async def test_a_command_that_takes_too_long_is_ended_and_its_output_kept(tmp_path: Path):
    async with started(tmp_path) as environment:
        result = await environment.exec("echo first; sleep 1234 & setsid sleep 1234", timeout_sec=10)
        assert (result.return_code, result.stdout) == (124, "first\n")
        assert result.stderr == "\n[killed after 10 s]\n"
        assert await code_of(environment, "pgrep -f 'sleep 123[4]'") == 1
    assert docker_clients() == []


async def test_a_cancelled_command_leaves_no_process_on_either_side(tmp_path: Path):
    async with started(tmp_path) as environment:
        running = asyncio.create_task(environment.exec("touch /started; sleep 4321"))
        while await code_of(environment, "test -e /started"):
            pass
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await code_of(environment, "pgrep -f 'sleep 432[1]'") == 1
        assert docker_clients() == []


async def test_a_container_that_ended_is_reported_with_its_code(tmp_path: Path):
    async with started(tmp_path) as environment:
        docker("kill", await main_of(environment))
        with pytest.raises(SandboxDiedError, match="ended with code 137"):
            await environment.exec("true")
        with pytest.raises(SandboxDiedError, match="ended with code 137"):
            await environment.seal()


async def test_a_command_cannot_pretend_that_its_container_or_the_engine_died(tmp_path: Path):
    async with started(tmp_path) as environment:
        lie = "echo 'Error response from daemon: No such container. Cannot connect to the Docker daemon' >&2; exit 137"
        assert (await environment.exec(lie)).return_code == 137


async def test_a_command_that_takes_too_much_memory_is_killed_and_the_next_runs(tmp_path: Path):
    async with started(tmp_path, override_memory_mb=64) as environment:
        assert await code_of(environment, "python3 -c 'x = bytes([1]) * (1 << 29)'") == 137
        assert await code_of(environment, "true") == 0


async def test_an_engine_that_stops_answering_is_not_the_commands_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with started(tmp_path) as environment:
        with monkeypatch.context() as patch:
            patch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
            with pytest.raises(DockerUnreachableError):
                await environment.exec("true")
            with pytest.raises(DockerUnreachableError):
                await environment.seal()
            with pytest.raises(DockerUnreachableError):
                await environment.upload_dir(tmp_path, "/x")


async def test_downloads_leave_links_out(tmp_path: Path):
    async with started(tmp_path) as environment:
        await environment.exec("mkdir -p /d/in; echo 1 >/d/in/file; ln -s /etc/hostname /d/link")
        await environment.download_dir("/d", tmp_path / "d")
        await environment.download_file("/d/in/file", tmp_path / "file")
        with pytest.raises(RuntimeError, match="not a file"):
            await environment.download_file("/d/link", tmp_path / "link")
    assert [path.name for path in sorted((tmp_path / "d").rglob("*"))] == ["in", "file"]
    assert (tmp_path / "file").read_text() == "1\n"


async def test_uploads_make_the_folders_they_need(tmp_path: Path):
    (tmp_path / "up").mkdir()
    (tmp_path / "up" / "file").write_text("1\n")
    async with started(tmp_path) as environment:
        await environment.upload_dir(tmp_path / "up", "/deep/down")
        await environment.upload_file(tmp_path / "up" / "file", "/other/deep/name")
        assert (await environment.exec("cat /deep/down/file /other/deep/name")).stdout == "1\n1\n"


async def test_limits_and_labels_reach_the_container(tmp_path: Path):
    async with started(tmp_path, override_memory_mb=256, override_cpus=0.5, max_processes=99, run="abc") as environment:
        wanted = (
            '{{.HostConfig.Memory}} {{.HostConfig.NanoCpus}} {{.HostConfig.PidsLimit}} {{index .Config.Labels "%s"}}'
        )
        facts = docker("inspect", "--format", wanted % OWNER_LABEL, await main_of(environment)).split(" ", 3)
    assert facts == [str(256 << 20), "500000000", "99", Owner.current().label]


async def test_trials_of_one_name_in_several_runs_do_not_meet(tmp_path: Path):
    async with AsyncExitStack() as stack:
        config = EnvironmentConfig(type="docker")
        sites = [await stack.enter_async_context(docker_site(config, inside=True)) for _ in range(2)]
        trials = [run_trial(tmp_path / str(index), site) for index, site in enumerate([*sites, *sites])]
        assert [reward_of(result) for result in await asyncio.gather(*trials)] == [1, 1, 1, 1]
        assert [containers_of(site.environment.kwargs["run"]) for site in sites] == [[], []]
    names = docker("network", "ls", "--format", "{{.Name}}").split()
    assert not {site.environment.kwargs["network_name"] for site in sites} & set(names)


async def test_an_engine_that_does_not_answer_is_named_with_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(DockyardError, match="Docker does not answer") as caught:
        async with docker_site(EnvironmentConfig(type="docker"), inside=True):
            pass
    assert "dockyard doctor" in caught.value.hint
    with pytest.raises(DockerUnreachableError):
        await read_state("any")


async def test_an_agent_inside_needs_a_network():
    with pytest.raises(UsageError, match="from inside the environment"):
        async with docker_site(EnvironmentConfig(type="docker", network="none"), inside=True):
            pass
