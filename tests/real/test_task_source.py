"""The example of a task source, in real sandboxes: its questions are attempted, graded and held out."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dockyard.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:.*checksum.*:DeprecationWarning")

EXTEND = Path(__file__).parents[2] / "examples" / "extend"
ROWS = [
    {"question": "How much is 2 + 3?", "answer": 5},
    {"question": 'What does `echo "it\'s $HOME"` begin with?', "answer": 'it\'s "$HOME" `pwd`'},
]


@pytest.fixture(autouse=True)
def _beside_the_example(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(EXTEND)
    path = list(sys.path)
    yield
    sys.path[:] = path
    sys.modules.pop("tasks", None)


def questions(file: Path, rows: list[dict[str, object]]) -> Path:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def rewards(run: Path, phase: str) -> dict[str, float]:
    lines = (run / "rollouts" / f"{phase}.jsonl").read_text().splitlines()
    return {line["task"]: line["reward"] for line in map(json.loads, lines)}


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_the_answers_of_the_example_are_graded(tmp_path: Path, agent: str, reward: float):
    words = [
        *("--tasks.source=tasks:Questions", f"--tasks.kwargs.train={questions(tmp_path / 'train.jsonl', ROWS)}"),
        *(f"--agent={agent}", f"--run_dir={tmp_path / 'run'}", "--grpo.group_size=2"),
    ]
    assert main(["rollout", *words]) == 0
    assert rewards(tmp_path / "run", "rollouts") == {"train-0000": reward, "train-0001": reward}


def test_the_example_holds_out_the_questions_of_its_second_file(tmp_path: Path):
    train, heldout = questions(tmp_path / "train.jsonl", ROWS), questions(tmp_path / "heldout.jsonl", ROWS[1:])
    words = [f"--tasks.kwargs.train={train}", f"--tasks.kwargs.heldout={heldout}", f"--run_dir={tmp_path / 'run'}"]
    assert main(["eval", "--tasks.source=tasks:Questions", "--agent=oracle", *words]) == 0
    assert rewards(tmp_path / "run", "eval") == {"heldout-0000": 1.0}
