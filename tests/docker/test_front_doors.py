"""Every command of examples/harbor as its README has it, in real containers with the real qwen-coder.

What differs is the model, a tiny one with random weights, and that datasets lie in local caches under their names.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import c2bug_repositories
import pytest
from docker_engine import AGENTS_IMAGE, docker, need_image
from openai import OpenAI
from scripted_chat import Json, ScriptedChat, says
from tiny_policy import tiny_qwen_dir
from trials import write_task

ROOT = Path(__file__).parents[2]
C2BUG = "TwelfthStar/c2bug_tasks_django_Jan-22-2026"
LOCAL = "python examples/harbor/harbor_grpo_local.py"
C2BUG_IMAGE = "dockyard/c2bug-agents:1"
pytestmark = pytest.mark.train


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like a checkout."""
    need_image(AGENTS_IMAGE)
    folder = tmp_path_factory.mktemp("doors")
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


@pytest.fixture(autouse=True)
def swebench(place: Path) -> Path:
    """A cache with one task under SWE-bench Verified's name."""
    folder = place / "cache" / "datasets" / "swebench-verified@1.0"
    shutil.rmtree(folder, ignore_errors=True)
    add_task(folder, 11099)
    return folder


def add_task(folder: Path, number: int) -> None:
    write_task(
        folder / f"django__django-{number}",
        "[ -e /app/done ] && reward=1 || reward=0\necho $reward > /logs/verifier/reward.txt\n",
        "",
        toml=f'[environment]\ndocker_image = "{AGENTS_IMAGE}"\nworkdir = "/app"\n',
        **{
            "instruction.md": f"Make the file done for {number}.\n",
            "solution/solve.sh": "touch /app/done\n",
            "environment/.keep": "-",
        },
    )


def run(place: Path, line: str, *more: str) -> subprocess.CompletedProcess[str]:
    """A command as the README has it. `more` is what a test may add: the model."""
    program, *words = line.split()
    assert program == "python"
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("DOCKYARD_REGISTRY", "OPENAI_API_KEY")},
        "DOCKYARD_CACHE": str(place / "cache"),
        "HF_HOME": str(place / "hf"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, *words, *more]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=900)
    print(done.stdout, done.stderr, sep="\n")
    return done


def newest(place: Path, under: str = "runs") -> Path:
    return max((place / under).iterdir(), key=lambda path: path.stat().st_mtime)


def summary(place: Path, under: str = "runs") -> dict[str, Any]:
    return json.loads((newest(place, under) / "summary.json").read_text())


def model() -> tuple[str, str]:
    return "--model", str(tiny_qwen_dir())


def test_swebench_is_trained_on(place: Path):
    done = run(place, f"{LOCAL} --agent qwen-coder --num-rollouts 50", *model())
    assert done.returncode == 0
    assert "50 tasks were asked for; `swebench-verified@1.0` has 1" in done.stderr
    found = summary(place)
    assert (found["rollouts"], found["steps"], found["failures"]) == (4, 1, {})
    assert found["sampled_tokens"] > 0
    assert (newest(place) / "adapters/v00001/adapter_model.safetensors").exists()


def test_an_agent_that_samples_nothing_is_reported_and_not_trained_and_a_test_run_takes_five_instances(
    place: Path, swebench: Path
):
    for number in range(11100, 11106):
        add_task(swebench, number)
    done = run(place, f"{LOCAL} --test --agent oracle", *model())
    assert done.returncode == 0
    assert "samples no tokens: its rewards are reported, the update is skipped" in done.stderr
    found = summary(place)
    assert (found["reward"], found["rollouts"], found["failures"]) == (1.0, 5 * 4, {})
    [file] = (newest(place) / "rollouts").glob("*.jsonl")
    assert len({json.loads(line)["task"] for line in file.read_text().splitlines()}) == 5


QWEN = pytest.param((), id="qwen-coder", marks=pytest.mark.soak)  # the line as it is
ORACLE = pytest.param(("--agent", "oracle"), id="oracle")  # the same tasks and counts in a fraction of the time


@pytest.mark.parametrize("agent", [ORACLE, QWEN])
@pytest.mark.parametrize(
    ("arguments", "num_tasks"),
    [
        ("--num-rollouts 201 --n-samples 4", 1),
        ("--data-source swebench --dataset swebench-verified@1.0", 1),
        pytest.param("--test", 5, marks=pytest.mark.soak),
    ],
)
def test_swebench_is_found_by_its_name(
    place: Path, swebench: Path, arguments: str, num_tasks: int, agent: tuple[str, ...]
):
    for number in range(11100, 11099 + num_tasks):
        add_task(swebench, number)
    done = run(place, f"{LOCAL} {arguments}", *model(), *agent)
    assert done.returncode == 0
    assert num_tasks > 1 or "tasks were asked for; `swebench-verified@1.0` has 1" in done.stderr
    found = summary(place)
    assert (found["rollouts"], found["failures"]) == (4 * num_tasks, {})


def test_the_slime_trainer_trains(place: Path):
    words = (
        "--agent qwen-coder --dataset swebench-verified@1.0 --n-rollouts 50 --n-samples 2 --n-concurrent 2 "
        "--lora-r 16 --output-dir outputs/harbor_training"
    )
    line = f"python examples/harbor/harbor_slime_trainer.py {' '.join(model())} {words}"
    assert run(place, line).returncode == 0
    found = summary(place, "outputs/harbor_training")
    assert (found["rollouts"], found["steps"]) == (2, 1)
    adapter = json.loads((newest(place, "outputs/harbor_training") / "adapters/v00001/adapter_config.json").read_text())
    assert adapter["r"] == 16


def test_training_can_be_skipped(place: Path):
    done = run(place, f"{LOCAL} --skip-training --n-samples 2", *model())
    assert done.returncode == 0
    assert summary(place)["rollouts"] == 2
    assert not list((newest(place) / "adapters").iterdir())


class EveryOther:
    """A policy that solves every other attempt at a task by one command, and does nothing in the rest."""

    def __init__(self, solution: Callable[[str], str]) -> None:
        self._solution = solution
        self._turns = defaultdict[str, Iterator[bool]](lambda: itertools.cycle([True, False]))

    def __call__(self, messages: list[Json]) -> Json:
        if any(message["role"] == "tool" for message in messages):
            return says("Done.")
        solution = self._solution(json.dumps(messages, ensure_ascii=False))
        command = solution if next(self._turns[solution]) else "true"
        return says("I do it.", ("run_shell_command", {"command": command, "is_background": False}))


def test_an_endpoint_is_trained_from_its_text(place: Path):
    chat = ScriptedChat(EveryOther(lambda _: "touch /app/done"))
    line = f"{LOCAL} --openai-base-url http://172.17.0.1:8000/v1 --openai-api-key local"
    with chat.at("172.17.0.1", 8000):
        done = run(place, line, *model(), "--n-samples", "2")
    assert done.returncode == 0
    assert chat.keys == {"Bearer local"}
    assert "off-policy by 0 updates: rollouts come from `http://172.17.0.1:8000/v1`" in done.stderr
    [metrics] = [json.loads(text) for text in (newest(place) / "metrics.jsonl").read_text().splitlines()]
    assert metrics["reward/mean"] == 0.5
    assert metrics["train/tokens"] > 0
    assert metrics["train/grad_norm"] > 0
    assert "local" not in (newest(place) / "config.toml").read_text().replace("localhost", "").split('"')


@pytest.fixture(scope="module")
def bugs(place: Path) -> list[Json]:
    """The rows of a C2Bug dataset, in an image that has qwen-coder."""
    file, repositories = c2bug_repositories.write_dataset(place / "bugs")
    context = place / "image"
    context.mkdir()
    site = "/usr/local/lib/python3.13/dist-packages"
    (context / "Dockerfile").write_text(
        f"FROM {AGENTS_IMAGE}\nCOPY --from={c2bug_repositories.build_image()} {site} {site}\n"
        "RUN ln -sf /usr/bin/python3 /usr/local/bin/python\n"
    )
    docker("build", "--quiet", "--tag", C2BUG_IMAGE, str(context))
    places = {source.repo: str(repositories / source.place) for source in c2bug_repositories.SOURCES}
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row | {"image": C2BUG_IMAGE, "clone_url": places[row["repo"]]} for row in rows]


def cache_c2bug(place: Path, rows: list[Json]) -> None:
    """As the Hub's client would have left it."""
    folder = place / "hf" / "hub" / f"datasets--{C2BUG.replace('/', '--')}"
    shutil.rmtree(folder, ignore_errors=True)
    revision = "0" * 40
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(revision)
    (folder / "snapshots" / revision).mkdir(parents=True)
    (folder / "snapshots" / revision / "bugs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def mend(told: str) -> str:
    """A command that fixes the bug in the agent's instruction."""
    [edit] = [edit for edit in c2bug_repositories.EDITS if json.dumps(edit.problem, ensure_ascii=False)[1:-1] in told]
    return (
        f"python3 - <<'END'\nimport pathlib\np = pathlib.Path({edit.file!r})\n"
        f"p.write_text(p.read_text().replace({edit.wrong!r}, {edit.right!r}))\nEND"
    )


def test_c2bug_is_trained_on_with_a_scripted_policy(place: Path, bugs: list[Json]):
    cache_c2bug(place, bugs)
    chat = ScriptedChat(EveryOther(mend))
    with chat.at() as url:
        endpoint = ("--openai-base-url", url, "--openai-api-key", "local")
        done = run(place, f"{LOCAL} --data-source c2bug --num-rollouts 2 --n-samples 2", *model(), *endpoint)
    assert done.returncode == 0
    lines = (newest(place) / "rollouts" / "step-00000.jsonl").read_text().splitlines()
    rollouts = [json.loads(line) for line in lines]
    assert len(rollouts) == 4
    assert len({rollout["task"] for rollout in rollouts}) == 2
    assert {rollout["reward"] for rollout in rollouts} == {0.0, 1.0}
    [metrics] = [json.loads(text) for text in (newest(place) / "metrics.jsonl").read_text().splitlines()]
    assert 0.3 < metrics["reward/mean"] < 0.7
    assert metrics["train/grad_norm"] > 0


@pytest.mark.parametrize("agent", [ORACLE, QWEN])
def test_c2bug_is_found_by_its_name(place: Path, bugs: list[Json], agent: tuple[str, ...]):
    cache_c2bug(place, bugs[:1])
    assert run(place, f"{LOCAL} --data-source c2bug --c2bug-dataset {C2BUG}", *model(), *agent).returncode == 0
    assert summary(place)["rollouts"] == 4


def test_a_job_is_converted(place: Path):
    shutil.copytree(ROOT / "tests" / "data" / "trials", place / "jobs" / "your-job-name", dirs_exist_ok=True)
    line = "python examples/harbor/trajectory_converter.py jobs/your-job-name --tokenizer MODEL --output samples.json"
    assert run(place, line.replace("MODEL", model()[1])).returncode == 0
    samples = json.loads((place / "samples.json").read_text())
    assert samples
    for sample in samples:
        assert len(sample["loss_mask"]) == sample["response_length"] <= len(sample["tokens"])


PYTHON_API = """
import sys
sys.path.insert(0, "examples/harbor")
from harbor_rollout import HarborConfig, HarborRolloutGenerator
from harbor_slime_trainer import HarborSlimeTrainer, TrainerConfig
from trajectory_converter import HarborTrajectoryConverter
from transformers import AutoTokenizer

model, job = sys.argv[1:]
generator = HarborRolloutGenerator(config=HarborConfig(model=model, agent="qwen-coder", n_concurrent=2))
[rollout] = generator.generate(dataset="swebench-verified@1.0", n_tasks=1)
assert rollout.num_sampled > 0 and rollout.reward == 0.0, rollout
assert len(generator.generate_from_existing_job(job)) > 5
converter = HarborTrajectoryConverter(AutoTokenizer.from_pretrained(model))
samples = converter.load_job(job)
assert samples and all(sample.response_length for sample in samples)
config = TrainerConfig(
    model_name=model, agent="qwen-coder", dataset="swebench-verified@1.0", n_rollouts=1, n_samples_per_prompt=2,
    lr=1e-6,
    kl_coef=0.001, eps_clip=0.2, eps_clip_high=0.28, use_lora=True, lora_r=16, save_every=10,
)
print(HarborSlimeTrainer(config).train()["rollouts"], len(samples))
"""


def test_the_python_calls_work_as_written(place: Path):
    (place / "calls.py").write_text(PYTHON_API)
    job = ROOT / "tests" / "data" / "trials"
    done = run(place, "python calls.py", model()[1], str(job))
    assert done.returncode == 0
    assert done.stdout.split()[-2] == "2"


def test_the_server_answers_openai_clients(place: Path):
    words = ["examples/harbor/simple_openai_server.py", *model(), "--port=0", "--api-key=local", "--device=cpu"]
    with subprocess.Popen([sys.executable, *words], cwd=place, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr
            url = next(found[0] for line in server.stderr if (found := re.search(r"http://127[^\s/]+", line)))
            client = OpenAI(base_url=f"{url}/v1", api_key="local", max_retries=0)
            [served] = client.models.list().data
            said: Any = [{"role": "user", "content": "Hi"}]
            answer: Any = client.chat.completions.create(model=served.id, messages=said, max_tokens=3, logprobs=True)
        finally:
            server.terminate()
    assert 1 <= len(answer.choices[0].logprobs.content) <= 3


def test_bugs_become_tasks(place: Path, bugs: list[Json]):
    cache_c2bug(place, bugs)
    assert run(place, "python examples/harbor/c2bug_adapter.py made --limit 2").returncode == 0
    assert len(list((place / "made").glob("*/task.toml"))) == 2


def test_the_examples_own_tests_pass(place: Path):
    done = run(place, "python -m pytest -q examples/harbor/test_harbor_slime.py")
    assert done.returncode == 0
