"""The checks: each examines one thing and, if that does not work, names the command that fixes it.

A check gets the machine as a `Probe`, so that a test can pass any machine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from packaging.specifiers import SpecifierSet

from dockyard.doctor.machine import MachineProblem, Probe

REQUIRED = {
    "harbor": ">=0.25,<0.26",
    "torch": ">=2.11",
    "transformers": ">=5.17",
    "peft": ">=0.19",
    "gguf": ">=0.17",
}
"""The same as in pyproject.toml; a test compares them."""

KEYS = {
    "HF_TOKEN": "gated models and datasets of the Hugging Face Hub",
    "WANDB_API_KEY": "metrics in Weights & Biases",
    "MODAL_TOKEN_ID": "Modal environments",
    "MODAL_TOKEN_SECRET": "Modal environments",
    "DAYTONA_API_KEY": "Daytona environments",
    "OPENAI_API_KEY": "a hosted model behind an agent",
    "ANTHROPIC_API_KEY": "a hosted model behind an agent",
}
MIN_FREE_GB = 2.0
"""Enough for the demo's model, adapters and rollouts."""


class Status(StrEnum):
    """The result of a check."""

    OK = "ok"
    MISSING = "missing"
    BROKEN = "broken"
    """It exists but does not work."""


class Use(StrEnum):
    """What a user may want to run on this machine."""

    DEMO = "the demo"
    GPU = "one-GPU training"
    DOCKER = "Docker environments"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a check found."""

    status: Status
    found: str
    fix: str = ""
    """The command that fixes it; empty if it works."""
    notes: tuple[str, ...] = ()
    """Restrictions of something that works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the report."""

    name: str
    needed_for: frozenset[Use]
    look: Callable[[Probe], Finding]


def ok(found: str) -> Finding:
    """Return the finding for something that works."""
    return Finding(status=Status.OK, found=found)


def missing(found: str, *, fix: str) -> Finding:
    """Return the finding for something that is not installed or not set."""
    return Finding(status=Status.MISSING, found=found, fix=fix)


def broken(found: str, *, fix: str) -> Finding:
    """Return the finding for something that exists but does not work."""
    return Finding(status=Status.BROKEN, found=found, fix=fix)


def install(probe: Probe, requirement: str) -> str:
    """Return the command that installs into this Python. Environments created by uv have no pip."""
    if probe.has_command("uv"):
        return f"uv pip install --python {probe.python} '{requirement}'"
    if probe.package_version("pip"):
        return f"{probe.python} -m pip install '{requirement}'"
    return f"{probe.python} -m ensurepip && {probe.python} -m pip install '{requirement}'"


def last_line(text: str) -> str:
    """Return the last line, where most programs print the error."""
    return text.splitlines()[-1].strip() if text else "no error message"


def check_python(probe: Probe) -> Finding:
    """Check that Python is 3.12 or newer."""
    version = ".".join(map(str, probe.python_version))
    if probe.python_version < (3, 12):
        return broken(f"{version}; 3.12 or newer is required", fix="uv venv --python 3.12")
    return ok(f"{version} ({probe.python})")


def check_package(probe: Probe, name: str) -> Finding:
    """Check that a package is installed in a supported version."""
    requirement = name + REQUIRED[name]
    version = probe.package_version(name)
    if version is None:
        return missing("not installed", fix=install(probe, requirement))
    if not SpecifierSet(REQUIRED[name]).contains(version, prereleases=True):
        return broken(f"{version}; {REQUIRED[name]} is required", fix=install(probe, requirement))
    return ok(version)


def check_harbor(probe: Probe) -> Finding:
    """Check Harbor, whose older versions also start qwen-coder incorrectly."""
    finding = check_package(probe, "harbor")
    version = probe.package_version("harbor")
    if version is None or not SpecifierSet("<0.25").contains(version, prereleases=True):
        return finding
    bug = "the bug of its qwen-coder agent (`echo ... | qwen -y`) is fixed in the required version"
    return broken(f"{finding.found}; {bug}", fix=finding.fix)


def check_torch(probe: Probe) -> Finding:
    """Check torch by importing it, because an installed torch may be unable to load its libraries."""
    finding = check_package(probe, "torch")
    if finding.status is not Status.OK:
        return finding
    ran = probe.run([probe.python, "-c", "import torch"])
    if ran.code is None:
        return ok(f"{finding.found} (not imported: that took too long)")
    if ran.code != 0:
        fix = install(probe, f"torch{REQUIRED['torch']}").replace("install", "install --force-reinstall", 1)
        return broken(f"{finding.found}; importing it fails: {last_line(ran.error)}", fix=fix)
    return finding


def check_sandbox(probe: Probe) -> Finding:
    """Check the `sandbox` environment: how sandboxes are made here, and what they do not protect."""
    found = probe.sandbox()
    if isinstance(found, MachineProblem):
        return broken(found.message, fix=found.hint)
    return Finding(status=Status.OK, found=found[0], notes=tuple(found[1:]))


def check_docker(probe: Probe) -> Finding:
    """Check that the Docker client is installed and its engine answers."""
    if not probe.has_command("docker"):
        return missing("no `docker` on the PATH", fix="curl -fsSL https://get.docker.com | sh")
    ran = probe.run(["docker", "version", "--format", "{{.Server.Version}}"])
    if ran.code == 0:
        return ok(f"engine {ran.output}")
    if ran.code is None:
        return broken("the client is installed, but its engine does not answer in time", fix=start_docker(probe))
    if "permission denied" in ran.error.lower():
        return broken(
            "the engine runs, but you may not access it",
            fix='sudo usermod -aG docker "$USER" && newgrp docker',
        )
    return broken(f"the client is installed, but no engine is running: {last_line(ran.error)}", fix=start_docker(probe))


def start_docker(probe: Probe) -> str:
    """Return the command that starts the engine."""
    if probe.system == "Darwin":
        return "open -a Docker"
    return "sudo systemctl start docker" if probe.has_command("systemctl") else "sudo service docker start"


def check_compose(probe: Probe) -> Finding:
    """Check Compose v2, which Harbor uses for everything it does with Docker."""
    fix = "sudo apt-get install docker-compose-plugin"
    if not probe.has_command("docker"):
        return missing("no `docker` on the PATH", fix="curl -fsSL https://get.docker.com | sh")
    ran = probe.run(["docker", "compose", "version", "--short"])
    if ran.code != 0 or not ran.output:
        return missing("`docker compose` is not installed", fix=fix)
    if ran.output.lstrip("v").startswith(("0.", "1.")):
        return broken(f"{ran.output}; v2 is required", fix=fix)
    return ok(ran.output)


def check_gpu(probe: Probe) -> Finding:
    """Check for an NVIDIA GPU and its driver."""
    if not probe.has_command("nvidia-smi"):
        return missing("no `nvidia-smi` on the PATH", fix="dockyard train RUN.toml --model.device cpu")
    ran = probe.run(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"])
    if ran.code is None:
        return broken("`nvidia-smi` does not answer in time", fix="sudo nvidia-smi -pm 1")
    if ran.code != 0 or not ran.output:
        return broken(f"`nvidia-smi` fails: {last_line(ran.output or ran.error)}", fix="sudo modprobe nvidia")
    return ok("; ".join(map(name_gpu, ran.output.splitlines())))


def name_gpu(line: str) -> str:
    """Format a line such as `NVIDIA H200, 143771`. GPUs that share the host's memory report no number."""
    name, _, memory_mib = (part.strip() for part in line.rpartition(","))
    return f"{name}, {int(memory_mib) / 1024:.0f} GiB" if memory_mib.isdigit() else name


def check_cuda(probe: Probe) -> Finding:
    """Check that torch can use the GPU. Its CPU build cannot, even if there is a driver."""
    fix = install(probe, f"torch{REQUIRED['torch']}").replace("install", "install --force-reinstall", 1)
    if not probe.has_command("nvidia-smi"):
        return missing("no GPU that torch could use", fix="dockyard train RUN.toml --model.device cpu")
    if probe.package_version("torch") is None:
        return missing("torch is not installed", fix=install(probe, f"torch{REQUIRED['torch']}"))
    ran = probe.run([probe.python, "-c", "import torch; print(torch.version.cuda, torch.cuda.device_count())"])
    if ran.code is None:
        return broken("torch does not answer in time", fix=f"{probe.python} -c 'import torch; torch.zeros(1).cuda()'")
    if ran.code != 0:
        return broken(f"torch fails: {last_line(ran.error)}", fix=fix)
    cuda, count = ran.output.split()[-2:]
    if cuda == "None" or count == "0":
        return broken(f"torch finds no GPU (built for CUDA: {cuda})", fix=fix)
    return ok(f"torch finds {count} GPU{'s' if count != '1' else ''}, CUDA {cuda}")


def check_vllm(probe: Probe) -> Finding:
    """Check for vLLM, in this environment or as a command of another one."""
    version = probe.package_version("vllm")
    if version:
        return ok(version)
    if probe.has_command("vllm"):
        return ok("the `vllm` command")
    return missing("not installed", fix=install(probe, "vllm"))


def check_disk(probe: Probe, folder: Path | None = None) -> Finding:
    """Check the free disk space in a folder; None: in the cache folder."""
    place = folder or probe.cache_dir
    space = probe.space(place)
    free_gb = space.free_bytes / 1e9
    if not space.writable:
        return broken(f"{place} is not writable", fix=f'sudo chown -R "$USER" {place}')
    if free_gb < MIN_FREE_GB:
        move = "export DOCKYARD_CACHE=/larger/disk/dockyard"
        fix = "dockyard train RUN.toml --run_dir /larger/disk/run" if folder else move
        return broken(f"{free_gb:.1f} GB free in {place}; {MIN_FREE_GB:.0f} GB is required", fix=fix)
    return ok(f"{free_gb:.0f} GB free in {place}")


def check_key(probe: Probe, name: str) -> Finding:
    """Check whether a key is set. Its value is never read."""
    if probe.has_variable(name):
        return ok("set")
    return missing(f"not set; needed for {KEYS[name]}", fix=f"export {name}=...")


EVERY = frozenset(Use)
TRAINING = frozenset({Use.DEMO, Use.GPU})
DEMO = frozenset({Use.DEMO})
NONE: frozenset[Use] = frozenset()

CHECKS: tuple[Check, ...] = (
    Check(name="python", needed_for=EVERY, look=check_python),
    Check(name="harbor", needed_for=EVERY, look=check_harbor),
    Check(name="torch", needed_for=TRAINING, look=check_torch),
    Check(name="transformers", needed_for=TRAINING, look=partial(check_package, name="transformers")),
    Check(name="peft", needed_for=TRAINING, look=partial(check_package, name="peft")),
    Check(name="gguf", needed_for=DEMO, look=partial(check_package, name="gguf")),
    Check(name="sandbox", needed_for=DEMO, look=check_sandbox),
    Check(name="disk, here", needed_for=EVERY, look=partial(check_disk, folder=Path())),
    Check(name="disk, cache", needed_for=TRAINING, look=check_disk),
    Check(name="gpu", needed_for=frozenset({Use.GPU}), look=check_gpu),
    Check(name="cuda", needed_for=frozenset({Use.GPU}), look=check_cuda),
    Check(name="docker", needed_for=frozenset({Use.DOCKER}), look=check_docker),
    Check(name="compose", needed_for=frozenset({Use.DOCKER}), look=check_compose),
    Check(name="vllm", needed_for=NONE, look=check_vllm),
    *(Check(name=name, needed_for=NONE, look=partial(check_key, name=name)) for name in KEYS),
)
