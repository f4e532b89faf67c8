"""`dockyard tasks check` in real sandboxes: good tasks and bad ones, killed in the middle, with a scripted policy."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from server_fakes import FakeHosted, served
from trials import write_task

from dockyard.cli import main
from dockyard.tasks.folder import load_tasks
from dockyard.tasks.generated import write_demo_tasks

pytestmark = pytest.mark.filterwarnings("ignore:.*checksum.*:DeprecationWarning")

COMMAND = [sys.executable, "-c", "import sys; from dockyard.cli import main; sys.exit(main())"]
TOUCH = "touch /app/done\n"


def grade(done: str = "1", undone: str = "0") -> str:
    return f"[ -f /app/done ] && reward={done} || reward={undone}\necho $reward > /logs/verifier/reward.txt\n"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


def write(name: str, test: str | None = None, solution: str = TOUCH, *, toml: str = "", **files: str) -> None:
    texts = {"instruction.md": f"Do {name}.\n", "solution/solve.sh": solution, **files}
    write_task(Path("in", name), grade() if test is None else test, toml=toml, **texts)


def checked(*words: str) -> dict[str, list[str]]:
    """What is wrong with each task of `in`."""
    main(["tasks", "check", "in", "--report", "report.json", "--rollout.retries=0", *words])
    return verdicts(json.loads(Path("report.json").read_text()))


def verdicts(report: dict[str, Any]) -> dict[str, list[str]]:
    return {item["task"]: [problem["why"] for problem in item["problems"]] for item in report["reports"]}


def test_a_check_says_of_each_task_what_is_wrong_with_it():
    of_five = "[metadata]\nmax_reward = 5\n"
    write("good")
    write("good-with-partial-credit", grade(undone="0.5"))
    write("good-of-five", grade(done="5", undone="1"), toml=of_five)
    write("oracle-fails", solution="exit 1\n")
    write("oracle-earns-one-of-five", toml=of_five)
    write("nop-rewarded", "echo 1 > /logs/verifier/reward.txt\n")
    write("upside-down", grade(done="0", undone="1"))
    write("no-solution", solution="")
    write("no-tests", "")
    write("no-toml", toml="[metadata\n")
    write("no-reward", "true\n")
    write("no-sandbox", **{"environment/Dockerfile": "FROM debian\nRUN false\n"})
    assert checked() == {
        "good": [],
        "good-of-five": [],
        "good-with-partial-credit": [],
        "no-reward": ["oracle_lost", "nop_lost"],
        "no-sandbox": ["oracle_lost", "nop_lost"],
        "no-solution": ["no_solution"],
        "no-tests": ["broken"],
        "no-toml": ["broken"],
        "nop-rewarded": ["nop_rewarded"],
        "oracle-earns-one-of-five": ["oracle_failed"],
        "oracle-fails": ["oracle_failed"],
        "upside-down": ["oracle_failed", "nop_rewarded"],
    }
    by_name = {item["task"]: item for item in json.loads(Path("report.json").read_text())["reports"]}
    assert (by_name["good-with-partial-credit"]["nop"], by_name["good-of-five"]["oracle"]) == (0.5, 5.0)
    assert by_name["no-reward"]["problems"][0]["detail"].startswith("reward_missing: ")
    assert by_name["no-sandbox"]["problems"][0]["detail"].startswith("environment_build: ")
    failed = by_name["oracle-fails"]["problems"][0]["detail"].split("`")[1]
    assert Path(failed, "agent", "exit-code.txt").read_text() == "1"


def test_the_first_of_duplicates_is_kept_and_what_is_kept_can_be_trained_on(capsys: pytest.CaptureFixture[str]):
    write("a")
    write("b", **{"instruction.md": "Do  a."})
    write("c", f"cd /app\n{grade()}", **{"instruction.md": "do **a**!"})
    write("d", solution="exit 1\n")
    assert checked("--keep", "out") == {"a": [], "b": ["duplicate"], "c": ["duplicate"], "d": ["oracle_failed"]}
    said = capsys.readouterr().err
    assert "b  duplicate      of `a` (the same instruction, tests and environment)" in said
    assert "c  duplicate      of `a` (the same words in the instruction" in said
    assert "1 of 4 tasks in" in said
    assert [task.name for task in load_tasks(Path("out"))] == ["a"]
    words = ["rollout", "--tasks.train=out", "--agent=oracle", "--grpo.group_size=2", "--run_dir=after", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["reward"] == 1.0


def test_a_folder_of_good_tasks_exits_0_and_one_bad_task_makes_it_1(capsys: pytest.CaptureFixture[str]):
    write_demo_tasks(Path("demo"), num_train=6, num_heldout=4)
    assert main(["tasks", "check", "demo/train", "--json", "--concurrency=4"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["tasks"], report["good"], report["problems"]) == (6, 6, {})
    next(Path("demo/train").iterdir()).joinpath("solution", "solve.sh").write_text("true\n")
    assert main(["tasks", "check", "demo/train"]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main(["tasks", "check", "demo/train", "--overwrite"]) == 1
    assert "5 of 6 tasks in" in capsys.readouterr().err


def test_one_broken_task_alone_is_reported_without_running_anything(capsys: pytest.CaptureFixture[str]):
    write("only", solution="")
    assert main(["tasks", "check", "in/only", "--keep=out"]) == 1
    assert "only  no_solution  " in capsys.readouterr().err
    assert list(Path("out").iterdir()) == []


def recorded(phase: str = "rollouts") -> list[tuple[str, int]]:
    lines = Path("mine", "rollouts", f"{phase}.jsonl").read_text().splitlines()
    return [(line["task"], line["attempt"]) for line in map(json.loads, lines)]


def begin_and_stop(number: int) -> subprocess.Popen[str]:
    """Send the signal once something is recorded."""
    write_demo_tasks(Path("demo"), num_train=12, num_heldout=4)
    words = ["tasks", "check", "demo/train", "--concurrency=1", "--run_dir=mine", "--report=r.json", "--keep=out"]
    process = subprocess.Popen([*COMMAND, *words], stderr=subprocess.PIPE, text=True)
    file = Path("mine/rollouts/rollouts.jsonl")
    while not (file.exists() and file.read_bytes().endswith(b"\n")):
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(number)
    return process


def test_a_killed_check_is_taken_up_and_nothing_is_run_twice(capsys: pytest.CaptureFixture[str]):
    with begin_and_stop(signal.SIGKILL):
        pass
    made = recorded()
    assert 0 < len(made) < 24
    assert not Path("r.json").exists()
    assert main(["tasks", "check", "--resume", "mine", "--concurrency=4"]) == 0
    assert recorded()[: len(made)] == made
    assert len(recorded()) == len(set(recorded())) == 24
    assert json.loads(Path("r.json").read_text())["good"] == 12
    assert len(load_tasks(Path("out"))) == 12
    assert main(["tasks", "check", "--resume", "mine", "--keep=again"]) == 0
    assert len(recorded()) == 24
    assert len(load_tasks(Path("again"))) == 12
    assert "12 of 12 tasks" in capsys.readouterr().err


def test_a_signal_stops_a_check_and_says_how_to_go_on():
    with begin_and_stop(signal.SIGINT) as process:
        _, err = process.communicate(timeout=600)  # only against hanging
    assert process.returncode == 130
    assert err.endswith("stopped; `dockyard tasks check --resume mine` continues\n")


def test_tasks_that_were_mended_are_not_judged_by_what_they_were(capsys: pytest.CaptureFixture[str]):
    write("a", solution="exit 1\n")
    assert main(["tasks", "check", "in", "--run_dir=mine"]) == 1
    Path("in/a/solution/solve.sh").write_text(TOUCH)
    assert main(["tasks", "check", "--resume", "mine"]) == 2
    assert "have changed since `mine` started to check them" in capsys.readouterr().err
    assert main(["tasks", "check", "in", "--run_dir=mine", "--overwrite"]) == 0


@dataclass(kw_only=True)
class Scripted(FakeHosted):
    """A policy that solves tasks called `always`, never those called `never`, and others every second time."""

    models: tuple[str, ...] = ("gpt",)
    max_model_len: int | None = None
    asked: Counter[str] = field(default_factory=Counter)

    async def _chat(self, request: web.Request) -> web.Response:
        messages = (await request.json())["messages"]
        said = {"role": "assistant", "content": self._reply(messages)}
        return web.json_response({"choices": [{"message": said, "finish_reason": "stop"}]})

    def _reply(self, messages: list[dict[str, str]]) -> str:
        if len(messages) > 2:  # its command has been run
            return "Done."
        task = messages[-1]["content"]
        self.asked[task] += 1
        solves = "always" in task or ("never" not in task and self.asked[task] % 2 == 0)
        return f"```bash\n{TOUCH}```" if solves else "I cannot."


def test_difficulty_keeps_what_a_policy_solves_sometimes(capsys: pytest.CaptureFixture[str]):
    for name in ("always", "never", "sometimes"):
        write(name)
    write("sometimes-again", **{"instruction.md": "Do sometimes."})
    write("unsolvable", solution="exit 1\n")
    with served(Scripted()) as server:
        policy = ["--difficulty=4", "--model=gpt", "--engine.type=openai", "--engine.url", server.url]
        found = checked(*policy, "--keep=out", "--run_dir=mine")
        asked = dict(server.asked)
        assert main(["tasks", "check", "--resume", "mine"]) == 1
        assert server.asked == asked
    assert found == {
        "always": ["always_solved"],
        "never": ["never_solved"],
        "sometimes": [],
        "sometimes-again": ["duplicate"],
        "unsolvable": ["oracle_failed"],
    }
    assert asked == {"Do always.": 4, "Do never.": 4, "Do sometimes.": 4}
    assert [task.name for task in load_tasks(Path("out"))] == ["sometimes"]
    by_name = {item["task"]: item for item in json.loads(Path("report.json").read_text())["reports"]}
    assert by_name["sometimes"]["policy"] == {"rollouts": 4, "solved": 2, "lost": 0, "reward": 0.5}
    assert by_name["unsolvable"]["policy"] is None
    assert "4 of 4 rollouts" in capsys.readouterr().err
    assert len(set(recorded("eval"))) == 12


LOST = Path("mine/trials/rollouts-000-00/of-the-first-try")


def test_tasks_that_a_policy_was_given_stay_the_same_when_a_check_is_taken_up():
    write("a", "exit 1\n")
    write("b")
    with served(Scripted()) as server:
        policy = ["--difficulty=2", "--model=gpt", "--engine.type=openai", "--engine.url", server.url]
        assert checked(*policy, "--run_dir=mine") == {"a": ["oracle_lost", "nop_lost"], "b": []}
        lines = Path("mine/rollouts/eval.jsonl").read_text().splitlines(keepends=True)
        Path("mine/rollouts/eval.jsonl").write_text(lines[0])
        LOST.touch()
        assert main(["tasks", "check", "--resume", "mine"]) == 1
    assert sorted(recorded("eval")) == [("b", 0), ("b", 1)]
    assert LOST.exists()


def test_an_engine_that_does_not_answer_leaves_a_check_that_can_go_on(capsys: pytest.CaptureFixture[str]):
    write("a", "exit 1\n")
    write("b")
    words = ["--difficulty=2", "--model=gpt", "--engine.type=openai", "--engine.url=http://127.0.0.1:9"]
    assert main(["tasks", "check", "in", *words, "--run_dir=mine", "--engine.retry_s=0", "--rollout.retries=0"]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err
    LOST.touch()
    with served(Scripted()) as server:
        assert main(["tasks", "check", "--resume", "mine", "--engine.url", server.url]) == 1
    assert len(recorded("eval")) == 2
    assert Counter(recorded())["b", 0] == 1
    assert not LOST.exists()  # no policy had begun, so it was tried again
