"""In a container with Docker's defaults, where bubblewrap cannot make namespaces: as root, and as an ordinary user."""

import subprocess
import sys
from pathlib import Path

import pytest
from anywhere import ROOT, TESTS, pytest_command
from docker_engine import BASE

from dockyard.engine.model_dir import find_model

MODEL = "smollm2-135m"


def run_in_container(user: int, cache: Path, *command: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """With this checkout, its virtual environment and the Python behind it at the places they have here."""
    mounts = {str(ROOT), sys.prefix, sys.base_prefix}
    homes = {str(Path("/", *Path(path).parts[1:2])) for path in mounts} & {"/root"}  # closed to others in the image
    options = (
        *("run", "--rm", "--network", "none", "--user", f"{user}:{user}", "--workdir", str(folder)),
        *(word for home in homes for word in ("--volume", f"{cache}/home:{home}")),
        *(word for path in sorted(mounts) for word in ("--volume", f"{path}:{path}:ro")),
        *("--volume", f"{cache}:/cache", "--env", "DOCKYARD_CACHE=/cache", "--env", "HOME=/tmp"),
        *("--env", "PYTHONDONTWRITEBYTECODE=1", "--env", "OMP_NUM_THREADS=1", "--env", "HARBOR_TELEMETRY=off"),
        *("--env", "LITELLM_LOCAL_MODEL_COST_MAP=True"),
    )
    return subprocess.run(["docker", *options, BASE, *command], capture_output=True, text=True, timeout=2000)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dockyard's cache with the demo's model in it, for any user."""
    folder = tmp_path_factory.mktemp("cache")
    model = find_model(MODEL)
    subprocess.run(["cp", "--recursive", "--dereference", str(model.parent), str(folder)], check=True)
    (folder / "home").mkdir()
    subprocess.run(["chmod", "--recursive", "a+rwX", str(folder)], check=True)
    return folder


@pytest.mark.parametrize("user", [0, 1000], ids=["root", "uid 1000"])
def test_attacks_rollouts_leaks_and_the_demo_are_as_everywhere(user: int, cache: Path):
    done = run_in_container(user, cache, *pytest_command(*TESTS))
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all("no sandbox can start here" in line or "no namespaces anyway" in line for line in skipped), skipped


@pytest.mark.parametrize(("user", "words"), [(0, "a user of its own"), (1000, "your user")], ids=["root", "uid 1000"])
def test_doctor_says_that_the_demo_runs_and_what_a_sandbox_lacks(user: int, words: str, cache: Path):
    done = run_in_container(user, cache, sys.executable, "-m", "dockyard", "doctor", folder=Path("/tmp"))
    assert done.returncode == 0, done.stdout
    assert "This machine can run the demo" in done.stdout
    assert f"{words}: files and processes apart, kernel shared" in done.stdout
    assert "- a task has no loopback network" in done.stdout
