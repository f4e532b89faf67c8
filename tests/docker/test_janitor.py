"""What killed runs left behind goes; what lives, or is not ours, stays."""

import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest
from docker_engine import BASE, docker

from dockyard.rollout.docker.site import PROJECT_LABEL, label_args, owner_labels, remove_leftovers, remove_run

OWN = """
import socket, subprocess, sys, time
socket.gethostname = lambda: sys.argv[2]
from dockyard.rollout.docker.site import PROJECT_LABEL, label_args, owner_labels
labels = label_args(owner_labels("killed")) + ["--label", PROJECT_LABEL + "=" + sys.argv[2]]
subprocess.run(["docker", "network", "create", *labels, sys.argv[2]], check=True, capture_output=True)
subprocess.run(["docker", "run", "--detach", "--volume", "/data", *labels, sys.argv[1], "sleep", "600"], check=True)
sys.stdout.flush()
time.sleep(600)
"""


@pytest.fixture
def name(monkeypatch: pytest.MonkeyPatch) -> str:
    """Of this machine too, as far as this test's owners know: the janitors of other tests leave them alone."""
    name = f"killed-{uuid.uuid4().hex}"
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    return name


@pytest.fixture
def owner(name: str) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen([sys.executable, "-c", OWN, BASE, name], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def run(*args: str) -> str:
    return docker("run", "--detach", *args, BASE, "sleep", "600")


def is_there(container: str) -> bool:
    return container in docker("ps", "--all", "--quiet", "--no-trunc").split()


async def test_the_janitor_removes_what_a_killed_owner_had_and_nothing_else(name: str, owner: "subprocess.Popen[str]"):
    assert owner.stdout is not None
    theirs = owner.stdout.readline().strip()
    service = run("--label", f"{PROJECT_LABEL}={name}")  # a further service of that task
    [volume] = docker("inspect", "--format", "{{range .Mounts}}{{.Name}}{{end}}", theirs).split()
    living = uuid.uuid4().hex
    mine = run(*label_args(owner_labels(living)))
    foreign = run("--label", f"{PROJECT_LABEL}=another")
    elsewhere = run("--label", "dockyard.owner=another-host|boot|1|1|1")
    try:
        await remove_leftovers()
        assert is_there(theirs), "its owner lives"
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        removed = await remove_leftovers()
        assert {theirs, service} <= set(removed.containers)
        assert not {mine, foreign, elsewhere} & set(removed.containers)
        assert name not in docker("network", "ls", "--format", "{{.Name}}").split()
        assert volume not in docker("volume", "ls", "--quiet").split()
        assert all(map(is_there, (mine, foreign, elsewhere)))
        assert (await remove_run(living)).containers == (mine,)
        assert all(map(is_there, (foreign, elsewhere)))
    finally:
        for container in filter(is_there, (theirs, service, mine, foreign, elsewhere)):
            docker("rm", "--force", "--volumes", container)
