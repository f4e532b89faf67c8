"""`dockyard doctor` on machines that a fake describes, and a few questions to the real one."""

import json
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from gateway_fakes import CHATML, write_model
from packaging.requirements import Requirement

from dockyard.doctor import DoctorReport, examine, main, summarize, to_json, to_table
from dockyard.doctor.checks import CHECKS, KEYS, REQUIRED, Finding, Status, Use
from dockyard.doctor.machine import Machine, MachineProblem, Ran, Space
from dockyard.doctor.model import FIRST_PROMPTS, examine_model, model_to_json, model_to_text
from dockyard.errors import DockyardError
from dockyard.rollout.sandbox.check import check_sandbox, choose_mechanism

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"

DOCKER = "docker version --format {{.Server.Version}}"
COMPOSE = "docker compose version --short"
NVIDIA = "nvidia-smi --query-gpu=name,memory.total --format=csv,noheader,nounits"
CUDA = "python -c import torch; print(torch.version.cuda, torch.cuda.device_count())"
TORCH = "python -c import torch"


@dataclass(frozen=True, kw_only=True)
class FakeMachine:
    """A machine with a GPU and Docker on which everything works by default."""

    python: str = "python"
    python_version: tuple[int, int, int] = (3, 12, 1)
    system: str = "Linux"
    cache_dir: Path = Path("/cache")
    commands: frozenset[str] = frozenset({"docker", "nvidia-smi", "systemctl", "uv"})
    runs: dict[str, Ran] = field(
        default_factory=lambda: {
            DOCKER: Ran(code=0, output="28.2.2"),
            COMPOSE: Ran(code=0, output="2.26.1"),
            NVIDIA: Ran(code=0, output="NVIDIA H200, 143771"),
            CUDA: Ran(code=0, output="13.0 1"),
            TORCH: Ran(code=0),
        }
    )
    packages: dict[str, str] = field(
        default_factory=lambda: {
            "harbor": "0.25.0",
            "torch": "2.15.0",
            "transformers": "5.22.2",
            "peft": "0.21.2",
            "gguf": "0.19.0",
        }
    )
    variables: frozenset[str] = frozenset()
    spaces: dict[Path, Space] = field(default_factory=dict)
    problem: MachineProblem | None = None
    sandbox_found: list[str] = field(default_factory=lambda: ["bubblewrap"])

    def has_command(self, name: str) -> bool:
        return name in self.commands

    def run(self, command: Sequence[str]) -> Ran:
        return self.runs[" ".join(command)]

    def package_version(self, name: str) -> str | None:
        return self.packages.get(name)

    def has_variable(self, name: str) -> bool:
        return name in self.variables

    def space(self, folder: Path) -> Space:
        return self.spaces.get(folder, Space(free_bytes=50_000_000_000, writable=True))

    def sandbox(self) -> MachineProblem | list[str]:
        return self.problem or self.sandbox_found

    def answering(self, command: str, ran: Ran) -> "FakeMachine":
        return replace(self, runs={**self.runs, command: ran})

    def having(self, package: str, version: str | None) -> "FakeMachine":
        others = {name: value for name, value in self.packages.items() if name != package}
        return replace(self, packages=others if version is None else {**others, package: version})

    def without(self, *commands: str) -> "FakeMachine":
        return replace(self, commands=self.commands - set(commands))


def finding(report: DoctorReport, name: str) -> Finding:
    return next(found for check, found in report.rows if check.name == name)


def look(probe: FakeMachine, name: str) -> Finding:
    return finding(examine(probe), name)


def test_a_machine_on_which_everything_works_can_run_everything():
    report = examine(FakeMachine())
    assert summarize(report) == "This machine can run the demo, one-GPU training, Docker environments."


def test_a_laptop_without_gpu_and_docker_can_run_the_demo_and_says_what_is_in_the_way_of_the_rest():
    report = examine(FakeMachine().without("docker", "nvidia-smi"))
    assert summarize(report) == (
        "This machine can run the demo. "
        "It cannot run one-GPU training (gpu, cuda); Docker environments (docker, compose)."
    )


def test_a_docker_client_without_an_engine_is_not_a_missing_docker():
    error = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
    stopped = look(FakeMachine().answering(DOCKER, Ran(code=1, error=error)), "docker")
    absent = look(FakeMachine().without("docker"), "docker")
    assert (stopped.status, stopped.fix) == (Status.BROKEN, "sudo systemctl start docker")
    assert "no engine is running" in stopped.found
    assert (absent.status, absent.found) == (Status.MISSING, "no `docker` on the PATH")


@pytest.mark.parametrize(
    ("probe", "fix"),
    [
        (FakeMachine(system="Darwin"), "open -a Docker"),
        (FakeMachine().without("systemctl"), "sudo service docker start"),
    ],
)
def test_docker_is_started_in_the_way_of_the_system(probe: FakeMachine, fix: str):
    assert look(probe.answering(DOCKER, Ran(code=None)), "docker").fix == fix


def test_a_docker_engine_that_refuses_this_user_is_fixed_by_the_group():
    error = "permission denied while trying to connect to the Docker daemon socket"
    found = look(FakeMachine().answering(DOCKER, Ran(code=1, error=error)), "docker")
    assert found.status is Status.BROKEN
    assert "usermod -aG docker" in found.fix


@pytest.mark.parametrize(
    ("ran", "status"),
    [
        (Ran(code=0, output="v2.26.1"), Status.OK),
        (Ran(code=0, output="5.0.1"), Status.OK),
        (Ran(code=0, output="1.29.2"), Status.BROKEN),
        (Ran(code=1, error="docker: 'compose' is not a docker command."), Status.MISSING),
    ],
)
def test_compose_must_be_version_2_or_newer(ran: Ran, status: Status):
    assert look(FakeMachine().answering(COMPOSE, ran), "compose").status is status


def test_an_old_harbor_is_told_of_the_qwen_coder_bug():
    found = look(FakeMachine().having("harbor", "0.3.1"), "harbor")
    assert found.status is Status.BROKEN
    assert "qwen -y" in found.found
    assert found.fix == "uv pip install --python python 'harbor>=0.25,<0.26'"


def test_a_harbor_that_is_too_new_is_not():
    found = look(FakeMachine().having("harbor", "0.26.0"), "harbor")
    assert (found.status, found.found) == (Status.BROKEN, "0.26.0; >=0.25,<0.26 is required")


@pytest.mark.parametrize("name", ["torch", "transformers", "peft", "gguf"])
def test_without_a_training_package_the_demo_cannot_run(name: str):
    report = examine(FakeMachine().having(name, None))
    assert report.missing_for(Use.DEMO) == [name]
    assert f"'{name}{REQUIRED[name]}'" in finding(report, name).fix


def test_a_torch_that_is_installed_but_cannot_be_imported_is_broken():
    error = "Traceback (most recent call last):\nOSError: libcudart.so.13: cannot open shared object file"
    found = look(FakeMachine().answering(TORCH, Ran(code=1, error=error)), "torch")
    assert found.status is Status.BROKEN
    assert found.found.endswith("OSError: libcudart.so.13: cannot open shared object file")


def test_a_torch_that_is_slow_to_import_is_not_called_broken():
    found = look(FakeMachine().answering(TORCH, Ran(code=None)), "torch")
    assert found.status is Status.OK
    assert "took too long" in found.found


@pytest.mark.parametrize(
    ("probe", "command"),
    [
        (FakeMachine(), "uv pip install --python python 'peft>=0.19'"),
        (FakeMachine().without("uv").having("pip", "25.0"), "python -m pip install 'peft>=0.19'"),
        (FakeMachine().without("uv"), "python -m ensurepip && python -m pip install 'peft>=0.19'"),
    ],
)
def test_packages_are_installed_with_what_the_environment_has(probe: FakeMachine, command: str):
    assert look(probe.having("peft", None), "peft").fix == command


def test_a_sandbox_that_does_not_start_passes_its_hint_on():
    problem = MachineProblem(message="user namespaces are switched off", hint="sudo sysctl -w kernel.x=1")
    report = examine(FakeMachine(problem=problem))
    assert finding(report, "sandbox") == Finding(status=Status.BROKEN, found=problem.message, fix=problem.hint)
    assert report.missing_for(Use.DEMO) == ["sandbox"]


def test_what_a_sandbox_does_not_hold_is_listed_below_it():
    report = examine(FakeMachine(sandbox_found=["Landlock", "no loopback", "no terminals"]))
    assert finding(report, "sandbox") == Finding(
        status=Status.OK, found="Landlock", notes=("no loopback", "no terminals")
    )
    lines = [line.strip() for line in str(to_table(report)).splitlines()]
    assert lines[lines.index("- no loopback") + 1] == "- no terminals"


def test_gpus_are_named_with_their_memory():
    ran = Ran(code=0, output="NVIDIA H200, 143771\nNVIDIA GB10, [N/A]")
    assert look(FakeMachine().answering(NVIDIA, ran), "gpu").found == "NVIDIA H200, 140 GiB; NVIDIA GB10"


def test_a_gpu_whose_driver_does_not_answer_is_broken():
    ran = Ran(code=9, output="NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
    found = look(FakeMachine().answering(NVIDIA, ran), "gpu")
    assert found.status is Status.BROKEN
    assert "communicate with the NVIDIA driver" in found.found


@pytest.mark.parametrize("output", ["None 0", "13.0 0"])
def test_a_gpu_that_torch_does_not_see_is_no_gpu_for_training(output: str):
    report = examine(FakeMachine().answering(CUDA, Ran(code=0, output=output)))
    assert report.missing_for(Use.GPU) == ["cuda"]
    assert "--force-reinstall" in finding(report, "cuda").fix


@pytest.mark.parametrize(
    ("probe", "status"),
    [
        (FakeMachine().having("vllm", "0.19.0"), Status.OK),
        (FakeMachine(commands=frozenset({"vllm"})), Status.OK),
        (FakeMachine(), Status.MISSING),
    ],
)
def test_vllm_counts_as_a_package_or_as_a_command(probe: FakeMachine, status: Status):
    assert look(probe, "vllm").status is status


@pytest.mark.parametrize(
    ("folder", "name", "fix"), [(Path(), "disk, here", "--run_dir"), (Path("/cache"), "disk, cache", "DOCKYARD_CACHE")]
)
def test_a_full_disk_is_broken_and_says_where_to_move(folder: Path, name: str, fix: str):
    found = look(FakeMachine(spaces={folder: Space(free_bytes=100_000_000, writable=True)}), name)
    assert found.status is Status.BROKEN
    assert "0.1 GB free" in found.found
    assert fix in found.fix


def test_a_folder_that_is_not_writable_is_broken_however_much_room_it_has():
    spaces = {Path("/cache"): Space(free_bytes=10**12, writable=False)}
    assert look(FakeMachine(spaces=spaces), "disk, cache").found == "/cache is not writable"


def test_an_old_python_is_broken():
    assert examine(FakeMachine(python_version=(3, 11, 7))).missing_for(Use.DOCKER) == ["python"]


def test_keys_are_named_and_missing_ones_keep_nothing_from_running():
    report = examine(FakeMachine(variables=frozenset({"HF_TOKEN"})))
    assert {name: finding(report, name).status for name in KEYS} == {
        name: Status.OK if name == "HF_TOKEN" else Status.MISSING for name in KEYS
    }
    assert all(report.can_run(use) for use in Use)


def test_a_key_s_value_is_never_shown(monkeypatch: pytest.MonkeyPatch):
    secret = "hf_thisisnotarealtoken"
    monkeypatch.setenv("HF_TOKEN", secret)
    real = Machine()
    findings = [check.look(real) for check in CHECKS if check.name in KEYS]
    assert findings[list(KEYS).index("HF_TOKEN")].found == "set"
    assert secret not in repr(findings)


def test_everything_that_does_not_work_comes_with_a_command():
    bare = FakeMachine(commands=frozenset(), packages={}, problem=MachineProblem(message="no", hint="yes"))
    for probe in (bare, FakeMachine(), FakeMachine(python_version=(3, 10, 0)).without("docker")):
        for check, found in examine(probe).rows:
            assert bool(found.fix) == (found.status is not Status.OK), check.name


def test_the_table_has_a_line_per_check_and_its_fix_below():
    lines = to_table(examine(FakeMachine().having("peft", None))).plain.splitlines()
    row = next(number for number, line in enumerate(lines) if " peft " in line)
    assert lines[row].split() == ["missing", "peft", "not", "installed"]
    assert lines[row + 1].strip() == "fix: uv pip install --python python 'peft>=0.19'"


def test_the_report_as_data_holds_every_check_and_what_can_run():
    data = json.loads(to_json(examine(FakeMachine().without("docker"))))
    assert [row["name"] for row in data["checks"]] == [check.name for check in CHECKS]
    assert data["can_run"] == {"demo": True, "gpu": True, "docker": False}
    docker = next(row for row in data["checks"] if row["name"] == "docker")
    assert (docker["status"], docker["needed_for"]) == ("missing", ["docker"])


def test_the_versions_asked_for_are_those_we_are_installed_with():
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    extras = project["optional-dependencies"]
    declared = {
        requirement.name: requirement.specifier
        for requirement in map(Requirement, [*project["dependencies"], *extras["train"], *extras["demo"]])
    }
    assert {name: declared[name] for name in REQUIRED} == {
        name: Requirement(name + specifier).specifier for name, specifier in REQUIRED.items()
    }


def test_a_command_that_hangs_is_ended_in_time_with_its_children():
    start = time.monotonic()
    assert Machine(timeout_s=0.2).run(["sh", "-c", "sleep 600 & sleep 600"]) == Ran(code=None)
    assert time.monotonic() - start < 300  # its children would hold its output open


def test_a_command_s_code_and_output_are_kept_apart():
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    assert Machine(timeout_s=600).run([sys.executable, "-c", code]) == Ran(code=3, output="out", error="err")


def test_room_is_measured_where_a_folder_will_be_made(tmp_path: Path):
    real = Machine()
    assert real.space(tmp_path / "not" / "yet").writable
    assert real.space(tmp_path / "not" / "yet").free_bytes > 0


def test_the_cache_folder_is_the_user_s_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("DOCKYARD_CACHE", str(tmp_path))
    assert Machine().cache_dir == tmp_path
    monkeypatch.setenv("DOCKYARD_CACHE", "")
    assert Machine().cache_dir == Path.home() / ".cache" / "dockyard"


def test_the_real_sandbox_is_tried_and_agrees_with_its_own_check():
    found = Machine(timeout_s=600).sandbox()
    problem = check_sandbox()
    if problem:
        assert found == MachineProblem(message=problem.message, hint=problem.hint)
    else:
        mechanism = choose_mechanism()
        assert found == [mechanism.describe(), *mechanism.not_held]


def test_a_sandbox_that_hangs_is_a_problem():
    found = Machine(timeout_s=0.001).sandbox()
    assert isinstance(found, MachineProblem)
    assert found.message == "a sandbox takes too long to start"


@pytest.mark.real
def test_the_exit_code_says_whether_the_demo_can_run(capsys: pytest.CaptureFixture[str]):
    code = main(["--json"])
    assert json.loads(capsys.readouterr().out)["can_run"]["demo"] == (code == 0)


def model_folder(folder: Path, template: str | None = CHATML, **config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return write_model(folder, template)


def test_a_models_way_of_writing_is_shown(tmp_path: Path):
    report = examine_model(str(model_folder(tmp_path, max_position_embeddings=8192)))
    assert (report.rendering.renderer, report.rendering.splices, report.tools_preamble) == ("template", True, True)
    assert (report.context_length, report.default_system) == (8192, "You are a small helper.")
    shown = model_to_text(report).plain
    for words in ("<|im_end|>", "the system prompt describes the tools", "8,192 tokens", "'You are a small helper.'"):
        assert words in shown


@pytest.mark.parametrize(
    ("context", "fits"),
    [
        ({"max_position_embeddings": 512}, {"no"}),
        ({"max_position_embeddings": 16_801}, {"yes", "tight", "no"}),
        ({"text_config": {"max_position_embeddings": 131_072}, "max_position_embeddings": 7}, {"yes"}),
        ({"n_positions": 131_072}, {"yes"}),
        ({}, {"unknown"}),
    ],
)
def test_agents_are_measured_against_the_context(context: dict[str, Any], fits: set[str], tmp_path: Path):
    report = examine_model(str(model_folder(tmp_path, **context)))
    assert {fit.fits for fit in report.fits} == fits
    assert [fit.first_prompt for fit in report.fits] == sorted(FIRST_PROMPTS.values())


def test_an_agent_that_does_not_fit_is_warned_about_with_what_it_needs(tmp_path: Path):
    report = examine_model(str(model_folder(tmp_path, max_position_embeddings=10_000)))
    [warning] = report.warnings
    assert "the context's 10,000 tokens" in warning
    assert "qwen-code (about 16,800)" in warning
    assert "codex (" not in warning
    assert warning in model_to_text(report).plain


def test_a_template_that_needs_the_whole_history_is_warned_about(tmp_path: Path):
    counting = CHATML.replace("{{ '<|im_start|>' + message", "{{ messages | length ~ '<|im_start|>' + message")
    report = examine_model(str(model_folder(tmp_path, counting, max_position_embeddings=131_072)))
    assert not report.rendering.splices
    assert "cannot render new messages alone" in report.warnings[0]


def test_a_model_report_as_data(tmp_path: Path):
    folder = model_folder(tmp_path, max_position_embeddings=8192)
    report = json.loads(model_to_json(examine_model(str(folder))))
    assert (report["folder"], report["context_length"], report["tools_preamble"]) == (str(folder), 8192, True)
    assert report["rendering"]["stop_tokens"] == ["<|endoftext|>", "<|im_end|>"]
    assert {"agent": "codex", "first_prompt": 9100, "fits": "no"} in report["fits"]


@pytest.mark.parametrize(
    ("missing", "error"),
    [
        ("config.json", "has no readable `config.json`"),
        ("tokenizer.json", "has no readable `tokenizer.json`"),
        ("tokenizer_config.json", "has no chat template"),
    ],
)
def test_a_folder_that_is_no_chat_model_is_refused(missing: str, error: str, tmp_path: Path):
    (model_folder(tmp_path) / missing).unlink()
    with pytest.raises(DockyardError, match=error):
        examine_model(str(tmp_path))
