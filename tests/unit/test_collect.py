"""Rollouts without training: what is reported of them, how they are asked for, what is refused before they start."""

import asyncio
import json
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dockyard import HarborConfig, HarborRolloutGenerator, process
from dockyard.cli import main
from dockyard.collect.evaluate import EvalReport
from dockyard.collect.open import NoModel, find_model_files, open_pool
from dockyard.collect.rollout import RolloutSummary
from dockyard.config import AgentConfig, RunConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.rollout.agents.wiring import asks_no_model
from dockyard.run_dir.run import EVAL, ROLLOUTS, Purpose, RunDir, read_purpose
from dockyard.tasks.generated import write_demo_tasks
from dockyard.types import Blame, Failure, Rollout


def rollout(task: str, attempt: int, reward: float | None, kind: str = "k") -> Rollout:
    lost = Failure(cause="engine_failed", blame=Blame.INFRASTRUCTURE, message="")
    return Rollout(
        task=task,
        kind=kind,
        attempt=attempt,
        segments=(),
        reward=reward,
        failure=lost if reward is None else None,
        stats={"calls": 2, "prompt_tokens": 100, "sampled_tokens": 10},
    )


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


def report_of(rollouts: list[Rollout]) -> EvalReport:
    return EvalReport.of(rollouts, split="heldout", adapter=None, data="d")


def test_lost_rollouts_are_counted_and_are_in_no_score():
    report = report_of([rollout("a", 0, 1.0), rollout("a", 1, None), rollout("b", 0, 0.0), rollout("b", 1, 1.0)])
    assert report.scores is not None
    assert (report.rollouts, report.lost, report.failures) == (4, 1, {"engine_failed": 1})
    assert (report.scores.passes[1].mean, report.scores.passes[1].num_tasks) == (0.75, 2)
    assert (report.scores.passes[2].mean, report.scores.passes[2].num_tasks) == (1.0, 1)


def test_kinds_are_scored_apart_and_one_that_lost_rollouts_leaves_its_largest_k_out():
    report = report_of([rollout("a", 0, 1.0, "x"), rollout("a", 1, 0.0, "x"), rollout("b", 0, 0.0, "y")])
    assert {kind: sorted(scores.passes) for kind, scores in report.kinds.items()} == {"x": [1, 2], "y": [1]}
    header, everything, x, y = (re.split(r"\s{2,}", line) for line in report.table().splitlines()[1:5])
    assert header == ["kind", "tasks", "pass@1", "pass@2", "mean reward"]
    assert [line[:2] for line in (everything, x, y)] == [["all", "2"], ["x", "1"], ["y", "1"]]
    assert (y[3], len(y)) == ("-", 5)


def test_an_evaluation_that_lost_everything_has_no_scores():
    report = report_of([rollout("a", 0, None)])
    assert (report.scores, report.kinds, report.lost) == (None, {}, 1)
    assert "1 rollouts, 1 lost, failures: engine_failed 1" in report.table()


def test_the_summary_of_rollouts_counts_tasks_rewards_failures_and_tokens():
    rollouts = [rollout("a", 0, 1.0, "x"), rollout("a", 1, 0.5, "x"), rollout("b", 0, None, "y")]
    summary = RolloutSummary.of(rollouts, data=Path("d.jsonl"), trials=Path("t"), wall_s=2.0)
    assert (summary.tasks, summary.rollouts, summary.reward, summary.lost) == (2, 3, 0.75, 1)
    assert (summary.calls, summary.prompt_tokens, summary.sampled_tokens) == (6, 300, 30)
    assert summary.table().splitlines() == [
        "tasks         2, 3 rollouts in 2 s",
        "mean reward   0.750",
        "failures      engine_failed 1; 1 rollouts lost",
        "tokens        30 sampled, 300 in prompts, 6 calls",
        "rollouts      d.jsonl",
        "trials        t",
    ]


def test_an_agent_that_asks_no_model_needs_none():
    config = RunConfig.model_validate({"agent": {"name": "oracle"}, "model": {"name": "/nowhere"}})
    assert asks_no_model(config.agent)
    assert find_model_files(config) is None
    assert not asks_no_model(AgentConfig(name="shell"))


def test_a_model_that_only_an_endpoint_knows_is_sampled_as_text(caplog: pytest.LogCaptureFixture):
    engine = {"type": "openai", "url": "http://127.0.0.1:1"}
    config = RunConfig.model_validate({"model": {"name": "/nowhere"}, "engine": engine})
    assert find_model_files(config) is None
    assert "text mode" in caplog.text
    with pytest.raises(DockyardError, match="`/nowhere` is not a model folder"):
        find_model_files(config.model_copy(update={"engine": config.engine.model_copy(update={"type": "vllm"})}))


async def answer() -> tuple[int, bool]:
    await asyncio.sleep(0)
    return 7, threading.current_thread() is threading.main_thread()


def test_a_coroutine_is_run_where_the_caller_is():
    assert process.blocking(lambda: process.run(answer())) == (7, True)


async def test_a_coroutine_is_run_beside_a_running_loop():
    assert process.blocking(lambda: process.run(answer())) == (7, False)


async def test_what_a_coroutine_raises_beside_a_running_loop_is_raised():
    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        process.blocking(lambda: process.run(fail()))


def test_settings_from_python_are_those_of_a_run():
    config = HarborConfig(
        model="m", agent="shell", environment="sandbox", n_concurrent=3, base_url="http://h:1", engine="vllm"
    ).run_config()
    assert (config.model.name, config.agent.name, config.environment.type) == ("m", "shell", "sandbox")
    assert (config.rollout.concurrency, config.engine.type, config.engine.url) == (3, "vllm", "http://h:1")
    assert HarborConfig().run_config().engine.type == "transformers"
    assert HarborConfig(base_url="http://h:1").run_config().engine.type == "openai"
    assert config.run_dir != HarborConfig().run_config().run_dir


def test_an_unknown_agent_is_refused_from_python_before_a_folder_is_made(tmp_path: Path):
    with pytest.raises(UsageError, match="`agent.name` is `shel`"):
        HarborRolloutGenerator(HarborConfig(agent="shel")).generate("anything")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("n_tasks", [0, -1])
def test_a_number_of_tasks_below_1_is_refused_from_python_before_a_folder_is_made(n_tasks: int, tmp_path: Path):
    with pytest.raises(UsageError, match=f"`n_tasks` is {n_tasks}; it must be at least 1"):
        HarborRolloutGenerator(HarborConfig(agent="oracle")).generate("anything", n_tasks=n_tasks)
    assert list(tmp_path.iterdir()) == []


async def test_a_port_in_use_is_named_with_the_reason_and_a_way_out(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        agent, environment = {"name": "oracle"}, {"type": "podman"}
        config = RunConfig.model_validate({"gateway": {"port": port}, "agent": agent, "environment": environment})
        with RunDir.create(tmp_path / "mine", config) as run, pytest.raises(UsageError) as caught:
            async with open_pool(config, run, NoModel(), None):
                pass
    assert caught.value.message.startswith(f"`gateway.port` is {port}, where the gateway cannot listen: ")
    assert "address already in use" in caught.value.message
    assert caught.value.hint == "`--gateway.port 0` uses a free port"


def test_importing_the_package_loads_neither_torch_nor_harbor():
    code = (
        "import sys, dockyard; print(sorted({'torch', 'harbor', 'dockyard.collect.open'} & set(sys.modules)));"
        "dockyard.HarborConfig; print('torch' in sys.modules, 'harbor' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout == "[]\nFalse True\n", done.stderr


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["rollout", "--agent", "shel"], "`agent.name` is `shel`, which is not an agent", "did you mean `shell`?"),
        (
            ["rollout", "--num-tasks", "0"],
            "argument --num-tasks: must be an integer of at least 1, not `0`",
            "rollout --help",
        ),
        (["rollout", "--numtasks", "1"], "`--numtasks` is not an option", "did you mean `--num-tasks`?"),
        (["train", "--num-tasks", "1"], "`--num-tasks` needs `--skip-training`", "`dockyard rollout`"),
        (
            ["rollout", "--harbor-cli", "--rollout.max_running=2"],
            "`rollout.max_running` has no effect with `--harbor-cli`",
            "`--rollout.concurrency`",
        ),
        (["train", "--harbor-cli"], "`--harbor-cli` needs `--skip-training`", "`dockyard rollout`"),
        (["eval", "--adapter", "none"], "`none` has no `adapter_config.json`", "RUN_DIR/adapters"),
        (["eval", "--resume", "nowhere"], "`nowhere` holds no run", "starts one"),
    ],
)
def test_misuse_exits_2_and_makes_nothing(
    words: list[str], error: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    demo = [] if "--resume" in words else ["--tasks.source=demo"]
    assert main([*words, *demo]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"error: {error}"
    assert hint in second
    assert list(tmp_path.iterdir()) == []


def test_an_evaluation_without_held_out_tasks_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_demo_tasks(tmp_path / "demo", num_train=4, num_heldout=4)
    assert main(["eval", "--tasks.train=demo/train", "--agent=oracle"]) == 2
    assert "`tasks.heldout` is not set" in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "run_dir", "heldout"),
    [
        ([], "runs/run-eval", None),
        (["--run_dir", "mine"], "mine", None),
        (["--split=train", "--eval.samples=4"], "runs/run-eval", "demo/train"),
    ],
)
def test_an_evaluation_has_a_folder_and_tasks_of_its_own(
    words: list[str], run_dir: str, heldout: str | None, capsys: pytest.CaptureFixture[str]
):
    assert main(["eval", "--tasks.train=demo/train", "--dry-run", "--json", *words]) == 0
    settings = json.loads(capsys.readouterr().out)
    assert (settings["run_dir"], settings["tasks"]["heldout"]) == (run_dir, heldout)


def test_a_run_is_continued_by_its_own_verb_with_what_it_began_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = RunConfig.model_validate({"tasks": {"source": "demo"}, "agent": {"name": "oracle"}})
    purpose = Purpose(verb="eval", split="train", adapter=tmp_path / "adapter")
    RunDir.create(tmp_path / "mine", config, purpose=purpose).close()
    assert read_purpose(tmp_path / "mine") == purpose
    for verb in ("train", "rollout"):
        assert main([verb, "--resume", "mine"]) == 2
        assert capsys.readouterr().err.splitlines() == [
            "error: `mine` was started by `dockyard eval`",
            "hint: `dockyard eval --resume mine` continues it",
        ]
    assert main(["eval", "--resume", "mine", "--split", "heldout"]) == 2
    assert "`--split` cannot be combined with `--resume`" in capsys.readouterr().err


def test_a_run_of_before_there_were_purposes_is_a_training_run(tmp_path: Path):
    RunDir.create(tmp_path / "mine", RunConfig()).close()
    (tmp_path / "mine" / "purpose.json").unlink()
    assert read_purpose(tmp_path / "mine") == Purpose(verb="train")
    assert read_purpose(tmp_path / "none") is None


def test_the_phases_of_rollouts_and_evaluations_are_recorded_like_steps(tmp_path: Path):
    with RunDir.create(tmp_path / "mine", RunConfig()) as run:
        for phase in (ROLLOUTS, EVAL):
            run.write_rollout(phase, rollout("a", 0, 1.0))
            [recorded] = run.read_rollouts(phase)
            assert (recorded.phase, recorded.step, recorded.rollout.reward) == (phase, None, 1.0)
            assert run.paths.rollouts_of(phase).name == f"{phase}.jsonl"
