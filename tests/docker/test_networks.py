"""What containers reach, with a real engine."""

import socket
from pathlib import Path

import pytest
from docker_engine import docker
from docker_environment import COMPOSE, GRADE, code_of, make, reward_of, run_trial, started
from harbor.environments.base import SandboxBuildFailedError

from dockyard.config import EnvironmentConfig
from dockyard.rollout.docker.site import docker_site
from dockyard.rollout.environments import Site

pytestmark = pytest.mark.filterwarnings("ignore:Task.checksum will be deprecated:DeprecationWarning")  # Harbor's own

SERVE = """
python3 -m http.server 8000 >/dev/null 2>&1 &
until (exec 3<>/dev/tcp/127.0.0.1/8000) 2>/dev/null; do sleep 0.1; done
"""
PYTHON_CONNECTS = "python3 -c 'import socket,sys; socket.create_connection((sys.argv[1],int(sys.argv[2])),3)' {} {}"


def listen(address: str) -> socket.socket:
    listener = socket.create_server((address, 0))
    listener.listen()
    return listener


async def test_with_no_network_there_is_none(tmp_path: Path):
    async with docker_site(EnvironmentConfig(type="docker", network="none"), inside=False) as site:
        assert (site.host, site.listen) == (None, ("127.0.0.1",))
        async with started(tmp_path, **site.environment.kwargs) as environment:
            assert (await environment.exec("ls /sys/class/net")).stdout == "lo\n"


async def test_the_gateway_network_leads_to_this_machine_and_nowhere_else(tmp_path: Path):
    async with docker_site(EnvironmentConfig(type="docker", network="gateway"), inside=True) as site:
        assert site.host is not None
        with listen(site.host) as listener:
            async with started(tmp_path, **site.environment.kwargs) as environment:
                assert await code_of(environment, PYTHON_CONNECTS.format(site.host, listener.getsockname()[1])) == 0
        name = site.environment.kwargs["network_name"]
        assert docker("network", "inspect", "--format", "{{.Internal}}", name) == "true"


async def test_a_public_network_leads_out_and_to_the_gateway_but_not_to_other_containers(tmp_path: Path, site: Site):
    assert site.host is not None
    kwargs = site.environment.kwargs
    assert docker("network", "inspect", "--format", "{{.Internal}}", kwargs["network_name"]) == "false"
    with listen(site.host) as listener:
        async with started(tmp_path / "a", **kwargs) as one, started(tmp_path / "b", **kwargs) as other:
            assert await code_of(one, PYTHON_CONNECTS.format(site.host, listener.getsockname()[1])) == 0
            address = ((await other.exec("hostname -i")).stdout or "").strip()
            await other.exec(SERVE)
            assert await code_of(other, PYTHON_CONNECTS.format(address, 8000)) == 0
            assert await code_of(one, PYTHON_CONNECTS.format(address, 8000)) == 1


async def test_a_task_that_says_no_network_gets_none_without_a_sidecar(tmp_path: Path, site: Site):
    test = f"[ $(ls /sys/class/net) = lo ] && {GRADE}"
    result = await run_trial(tmp_path, site, test=test, toml='[environment]\nnetwork_mode = "no-network"')
    assert reward_of(result) == 1


async def test_the_run_decides_about_the_network_of_a_task_that_has_other_wishes(tmp_path: Path):
    async with docker_site(EnvironmentConfig(type="docker", network="none"), inside=False) as site:
        test = f"[ $(ls /sys/class/net) = lo ] && {GRADE}"
        result = await run_trial(tmp_path, site, test=test, toml='[agent]\nnetwork_mode = "public"')
    assert reward_of(result) == 1


@pytest.mark.parametrize("network", ["none", "gateway"])
async def test_networks_of_a_compose_file_are_not_pretended_to_be_closed(tmp_path: Path, network: str):
    environment = make(tmp_path, files={"docker-compose.yaml": COMPOSE}, network=network, network_name="any")
    with pytest.raises(SandboxBuildFailedError, match=f"`environment.network = {network}` cannot restrict"):
        await environment.start(force_build=False)
    await environment.stop(delete=True)
