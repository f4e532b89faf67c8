"""Rollouts and evaluations in real sandboxes, by the command line, from Python and by `harbor run`."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from gateway_fakes import FakeEngine, Said, tiny_renderer, write_model
from processes import alive, descendants, wait_until_gone
from server_fakes import FakeHosted, FakeVLLM, served, write_adapter
from trials import skip_without_terminals

from dockyard import HarborConfig, HarborRolloutGenerator
from dockyard.cli import main
from dockyard.collect.harbor_cli import HarborCliRunner
from dockyard.collect.open import open_pool
from dockyard.config import RunConfig
from dockyard.rollout.job import read_job
from dockyard.rollout.plan import Attempt
from dockyard.rollout.trial import TrialRunner
from dockyard.run_dir.run import EVAL, ROLLOUTS, RunDir
from dockyard.tasks.folder import load_tasks
from dockyard.tasks.generated import write_demo_tasks
from dockyard.types import Rollout, Task

pytestmark = pytest.mark.filterwarnings("ignore:.*checksum.*:DeprecationWarning")

COMMAND = [sys.executable, "-c", "import sys; from dockyard.cli import main; sys.exit(main())"]
ORACLE = ("--tasks.source", "demo", "--agent", "oracle")
PATIENCE_S = 600  # only against hanging


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    write_demo_tasks(tmp_path / "demo", num_train=4, num_heldout=4)
    return tmp_path / "demo" / "train"


def has_begun(run: str) -> bool:
    """Whether something is recorded. The file alone may still be empty."""
    file = Path(run, "rollouts", f"{ROLLOUTS}.jsonl")
    return file.exists() and file.read_bytes().endswith(b"\n")


def attempts(run: str, phase: str = ROLLOUTS) -> list[tuple[str, int]]:
    """What was recorded, line by line."""
    lines = Path(run, "rollouts", f"{phase}.jsonl").read_text().splitlines()
    return [(line["task"], line["attempt"]) for line in map(json.loads, lines)]


@pytest.mark.parametrize("verb", [["rollout"], ["train", "--skip-training"]])
def test_rollouts_are_made_without_training_a_model_or_torch(verb: list[str], capsys: pytest.CaptureFixture[str]):
    assert main([*verb, *ORACLE, "--num-tasks", "2", "--grpo.group_size", "2", "--run_dir=mine", "--json"]) == 0
    captured = capsys.readouterr()
    summary = json.loads(captured.out)
    assert (summary["tasks"], summary["rollouts"], summary["reward"], summary["sampled_tokens"]) == (2, 4, 1.0, 0)
    assert "mean reward   1.000" in captured.err
    assert len(set(attempts("mine"))) == 4


def test_no_torch_is_loaded_where_no_model_is():
    words = ["rollout", *ORACLE, "--num-tasks", "1", "--grpo.group_size", "2"]
    code = f"import sys; from dockyard.cli import main; main({words!r}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout == "False\n", done.stderr


def test_a_killed_run_is_taken_up_and_nothing_is_made_twice(capsys: pytest.CaptureFixture[str]):
    words = [*COMMAND, "rollout", *ORACLE, "--num-tasks=6", "--rollout.concurrency=1", "--run_dir=mine"]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as process:
        while not has_begun("mine"):
            time.sleep(0.01)
            assert process.poll() is None
        process.kill()
    made = attempts("mine")
    assert 0 < len(made) < 24
    assert main(["rollout", "--resume", "mine"]) == 0
    assert attempts("mine")[: len(made)] == made
    assert len(attempts("mine")) == len(set(attempts("mine"))) == 24
    assert "24 rollouts" in capsys.readouterr().err


def test_a_signal_stops_rollouts_and_says_how_to_go_on():
    words = [*COMMAND, "rollout", *ORACLE, "--rollout.concurrency=1", "--run_dir=mine"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        while not has_begun("mine"):
            time.sleep(0.01)
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert err.endswith("stopped; `dockyard rollout --resume mine` continues\n")


def test_an_evaluation_reports_pass_at_k_and_goes_beside_the_training_run(capsys: pytest.CaptureFixture[str]):
    words = ["eval", *ORACLE, "--tasks.num_heldout=4", "--eval.samples=2", "--run_dir=mine", "--json"]
    assert main(words) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert set(report["scores"]["passes"]) == {"1", "2"}
    assert report["scores"]["passes"]["2"] == pytest.approx(
        {"mean": 1, "low": 0.3976, "high": 1, "num_tasks": 4}, abs=1e-4
    )
    assert set(report["kinds"]) == {"copy", "folder", "rename", "write"}
    assert (report["rollouts"], report["lost"]) == (8, 0)
    assert "all     4" in captured.err
    assert main(["eval", "--resume", "mine"]) == 0
    assert len(attempts("mine", "eval")) == 8


def test_an_evaluation_in_which_every_rollout_was_lost_exits_1(tasks: Path, capsys: pytest.CaptureFixture[str]):
    for task in tasks.iterdir():
        (task / "environment" / "Dockerfile").write_text("FROM debian\nRUN false\n")
    words = ["eval", "--tasks.train", str(tasks), "--split=train", "--agent=nop", "--rollout.retries=0"]
    assert main([*words, "--run_dir=a"]) == 1
    assert "4 of 4 rollouts of eval were lost to infrastructure (environment_build 4x)" in capsys.readouterr().err
    assert main([*words, "--run_dir=b", "--rollout.max_lost_share=1"]) == 1
    assert "4 rollouts, 4 lost, failures: environment_build 4" in capsys.readouterr().err


def test_an_endpoint_that_tells_no_token_ids_gives_rollouts_as_text(tasks: Path):
    with served(FakeHosted(models=("gpt",), max_model_len=None)) as server:
        engine = ["--engine.type=openai", "--engine.url", server.url, "--model.name=gpt"]
        assert main(["rollout", *engine, "--tasks.train", str(tasks), "--num-tasks=1", "--run_dir=mine"]) == 0
    with RunDir.resume(Path("mine")) as run:
        rollouts = [item.rollout for item in run.read_rollouts(ROLLOUTS)]
    assert [(rollout.reward, len(rollout.segments)) for rollout in rollouts] == [(0.0, 0)] * 4
    assert {rollout.exchanges[0].reply.text for rollout in rollouts} == {"hi"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (write_model(tmp_path / "model") / "config.json").write_text("{}")
    return tmp_path / "model"


def test_an_adapter_is_evaluated_on_a_server(model: Path, tasks: Path, capsys: pytest.CaptureFixture[str]):
    adapter = write_adapter(model.parent / "adapter", 1.5)
    with served(FakeVLLM(tokenizer=model / "tokenizer.json", max_model_len=4096)) as server:
        words = ["eval", "--engine.type=vllm", "--engine.url", server.url, "--model.name", str(model)]
        words += ["--tasks.heldout", str(tasks), "--tasks.train", str(tasks), "--sampling.max_new_tokens=8"]
        assert main([*words, "--adapter", str(adapter), "--run_dir=mine", "--json"]) == 0
        sampled = [body["model"] for body in server.bodies if "sampling_params" in body]
        assert server.adapters == {}
    report = json.loads(capsys.readouterr().out)
    assert (report["adapter"], report["rollouts"], report["lost"]) == (str(adapter), 4, 0)
    assert len({name for name in sampled if name != "policy"}) == 1
    assert len([name for name in sampled if name != "policy"]) >= 4


def test_an_adapter_for_an_endpoint_of_text_is_refused(tasks: Path, capsys: pytest.CaptureFixture[str]):
    adapter = write_adapter(tasks.parent / "adapter", 1.5)
    with served(FakeHosted(models=("gpt",), max_model_len=None)) as server:
        words = ["eval", "--engine.type=openai", "--engine.url", server.url, "--model.name=gpt", "--split=train"]
        assert main([*words, "--tasks.train", str(tasks), "--adapter", str(adapter)]) == 1
    assert "cannot load an adapter" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
async def test_rollouts_from_python_inside_a_running_event_loop(tasks: Path):
    config = HarborConfig(agent="oracle", environment="sandbox", n_samples=2, n_concurrent=2)
    rollouts = HarborRolloutGenerator(config=config).generate(dataset=str(tasks), n_tasks=2)
    assert [(rollout.reward, rollout.attempt) for rollout in rollouts] == [(1.0, 0), (1.0, 1)] * 2
    assert len({rollout.task for rollout in rollouts}) == 2
    assert len(list(Path("runs").iterdir())) == 1


def test_rollouts_from_python_of_a_dataset_in_a_registry_file(tasks: Path):
    named = [{"name": task.name, "path": str(task)} for task in sorted(tasks.iterdir())]
    listed = [
        {"name": "mine", "version": version, "description": "", "tasks": named[:count]}
        for version, count in (("1", 1), ("2", 3))
    ]
    Path("registry.json").write_text(json.dumps(listed))
    config = HarborConfig(
        agent="oracle", environment="sandbox", registry_path=Path("registry.json"), output_dir=Path("out")
    )
    rollouts = HarborRolloutGenerator(config).generate("mine@2", n_tasks=2)
    assert [rollout.task for rollout in rollouts] == [task["name"] for task in named[:2]]
    assert len(attempts("out")) == 2


WRITE = Said("```bash\necho hi > hello.txt\n```")
HELLO = '[ "$(cat /app/hello.txt)" = hi ] && echo 0.5 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt'


@pytest.fixture
def task(tmp_path: Path) -> Task:
    for name, text in {
        "task.toml": 'schema_version = "1.4"\n[task]\nname = "test/hello"\n[metadata]\nkind = "k"\n',
        "instruction.md": "Do it.\n",
        "environment/Dockerfile": "FROM scratch\n",
        "tests/test.sh": HELLO,
    }.items():
        (tmp_path / "hello" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "hello" / name).write_text(text)
    return load_tasks(tmp_path / "hello")[0]


@asynccontextmanager
async def by_command(engine: FakeEngine, **settings: object) -> AsyncGenerator[HarborCliRunner]:
    config = RunConfig.model_validate({"tasks": {"source": "demo"}, **settings})
    with RunDir.create(Path("mine"), config) as run:
        async with open_pool(config, run, engine, tiny_renderer()) as pool:
            assert isinstance(pool.runner, TrialRunner)
            yield HarborCliRunner(common=pool.runner)


def attempt_of(task: Task) -> Attempt:
    return Attempt(name="a", task=task, group=0, index=1, seed=5, temperature=1.0)


def same_tokens(left: Rollout, right: Rollout) -> bool:
    pairs = zip(left.segments, right.segments, strict=True)
    return all(
        np.array_equal(one.token_ids, other.token_ids) and np.array_equal(one.sampled, other.sampled)
        for one, other in pairs
    )


async def test_harbor_run_gives_the_rollout_that_the_gateway_recorded_and_no_file_has_the_key(task: Task):
    engine = FakeEngine([WRITE, Said("It is done.")])
    async with by_command(engine) as runner:
        rollout = await runner.run(attempt_of(task))
    assert (rollout.task, rollout.kind, rollout.attempt, rollout.reward, rollout.failure) == (
        "hello",
        "k",
        1,
        0.5,
        None,
    )
    [segment] = rollout.segments
    assert segment.sampled.sum() == sum(len(generation.token_ids) for generation in engine.generations)
    files = [path.read_text() for path in Path("mine/trials").rglob("*.json")]
    values = {value for text in files for value in re.findall(r'"DOCKYARD_API_KEY": "(.*?)"', text)}
    assert values == {"${DOCKYARD_ROLLOUT_KEY}"}


async def test_a_harbor_run_that_cannot_start_is_not_the_policys_fault(task: Task):
    async with by_command(FakeEngine()) as runner:
        broken = HarborCliRunner(common=runner.common, command=(*runner.command, "--no-such-option"))
        rollout = await broken.run(attempt_of(task))
    assert rollout.failure is not None
    assert (rollout.reward, rollout.failure.cause) == (None, "setup_error")
    assert "No such option" in rollout.failure.message


async def test_a_harbor_run_that_is_cancelled_is_ended_with_all_it_started(task: Task):
    slow = "sleep 86412.5"
    engine = FakeEngine([Said(f"```bash\n{slow}\n```")])
    async with by_command(engine) as runner:
        running = asyncio.create_task(runner.run(attempt_of(task)))
        while slow not in processes():
            await asyncio.sleep(0.1)
            assert not running.done()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    async with asyncio.timeout(PATIENCE_S):
        while slow in processes():  # a Harbor that had to be killed does not wait for the end of its sandbox
            await asyncio.sleep(0.1)


def test_a_run_that_is_killed_leaves_no_harbor_run_behind(tasks: Path):
    for task in tasks.iterdir():
        (task / "solution" / "solve.sh").write_text("sleep 86414.5\n")
    words = ["rollout", "--tasks.train", str(tasks), "--agent=oracle", "--harbor-cli", "--num-tasks=1"]
    with subprocess.Popen([*COMMAND, *words, "--grpo.group_size=2"], stderr=subprocess.DEVNULL) as process:
        while "sleep 86414.5" not in processes():
            time.sleep(0.1)
            assert process.poll() is None
        started = descendants(process.pid)
        process.kill()
    try:
        wait_until_gone(started)
    finally:
        for left in alive(started):
            os.kill(left.pid, signal.SIGKILL)


async def test_what_an_earlier_try_still_writes_is_not_read(task: Task):
    async with by_command(FakeEngine([WRITE, Said("It is done.")])) as runner:
        assert (await runner.run(attempt_of(task))).reward == 0.5
        [written] = Path("mine/trials/a").glob("job*/")
        shutil.copytree(written, "kept")
        late = HarborCliRunner(common=runner.common, command=("sh", "-c", f"cp -r kept {written}"))
        rollout = await late.run(attempt_of(task))
    assert written.exists()
    assert rollout.reward is None


def processes() -> str:
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout


async def test_a_harbor_run_out_of_time_is_ended(task: Task):
    async with by_command(FakeEngine(), rollout={"total_timeout_s": 1}) as runner:
        stuck = HarborCliRunner(common=runner.common, command=("sh", "-c", "exec sleep 86413.5"))
        rollout = await stuck.run(attempt_of(task))
    assert rollout.failure is not None
    assert (rollout.reward, rollout.failure.cause) == (None, "rollout_timeout")
    assert "sleep 86413.5" not in processes()


async def test_tokens_that_terminus_2_kept_are_those_that_the_gateway_recorded(task: Task):
    skip_without_terminals()

    def say(*keystrokes: str, done: bool) -> Said:
        commands = [{"keystrokes": text, "duration": 0.5} for text in keystrokes]
        return Said(json.dumps({"analysis": "a", "plan": "p", "commands": commands, "task_complete": done}))

    engine = FakeEngine([say("echo hi > hello.txt\n", done=False), say(done=True), say(done=True)])
    agent = {"name": "terminus-2", "kwargs": {"collect_rollout_details": True}}
    async with by_command(engine, agent=agent) as runner:
        recorded = await runner.run(attempt_of(task))
    [job] = Path("mine/trials/a").glob("job-*/")
    [read] = read_job(job)
    assert (read.task, read.kind, read.reward, read.failure) == ("hello", "k", 0.5, None)
    assert read.stats["calls"] == 3
    assert read.num_sampled == recorded.num_sampled > 0
    assert same_tokens(read, recorded)
    assert read.segments[0].logprobs is not None
    assert recorded.segments[0].logprobs is not None
    assert np.allclose(read.segments[0].logprobs, recorded.segments[0].logprobs)


@pytest.mark.train
def test_a_real_model_makes_rollouts_and_is_evaluated(tasks: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--model.name=smollm2-135m", "--tasks.train", str(tasks), "--tasks.heldout", str(tasks)]
    words += ["--sampling.max_new_tokens=16", "--agent.max_turns=1"]
    assert main(["rollout", *words, "--num-tasks=2", "--grpo.group_size=2", "--run_dir=mine", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["rollouts"], summary["lost"]) == (4, 0)
    assert summary["sampled_tokens"] > 0
    assert main(["eval", *words, "--run_dir=other", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rollouts"] == 4


@pytest.mark.train
def test_an_adapter_is_evaluated_in_this_process(tasks: Path, capsys: pytest.CaptureFixture[str]):
    from tiny_policy import tiny_model_dir, tiny_policy  # imports torch

    tiny_policy().save_weights(Path("adapter"))
    words = ["eval", "--model.name", str(tiny_model_dir()), "--tasks.heldout", str(tasks), "--tasks.train", str(tasks)]
    words += ["--sampling.max_new_tokens=8", "--agent.max_turns=1", "--model.device=cpu", "--adapter=adapter"]
    assert main([*words, "--run_dir=mine", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["rollouts"], report["lost"], report["scores"]["reward"]["num_tasks"]) == (4, 0, 4)
    with RunDir.resume(Path("mine")) as run:
        versions = [item.rollout.segments[0].versions for item in run.read_rollouts(EVAL)]
    assert [set(found.tolist()) for found in versions if found is not None] == [{-1, 1}] * 4
