"""A task source: each line of a JSONL file, `{"question": ..., "answer": ...}`, becomes a Harbor task.

dockyard train --tasks.source tasks:Questions --tasks.kwargs.train questions.jsonl --tasks.heldout_share 0.1
"""

import json
from pathlib import Path

from dockyard.tasks.folder import write_task

TEST = """\
if [ "$(cat /app/answer.txt)" = "$(cat /tests/answer.txt)" ]; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt
"""


class Questions:
    """Questions of two files. `tasks.kwargs` are the arguments of the constructor."""

    def __init__(self, train: str, heldout: str | None = None) -> None:
        self.train_file, self.heldout_file = train, heldout

    def train(self, folder: Path, seed: int) -> list[Path]:
        return [write(folder, *row) for row in enumerate(Path(self.train_file).read_text().splitlines())]

    def heldout(self, folder: Path, seed: int) -> list[Path]:
        rows = Path(self.heldout_file).read_text().splitlines() if self.heldout_file else []
        return [write(folder, *row) for row in enumerate(rows)]


def write(folder: Path, number: int, line: str) -> Path:
    task, row = folder / f"{folder.name}-{number:04}", json.loads(line)
    files = {
        "task.toml": f'schema_version = "1.4"\n[task]\nname = "questions/{task.name}"\n',
        "instruction.md": f"{row['question']}\nWrite only the answer to the file answer.txt.\n",
        "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\n",
        "tests/test.sh": TEST,
        "tests/answer.txt": f"{row['answer']}\n",
        "solution/answer.txt": f"{row['answer']}\n",
        "solution/solve.sh": "cp /solution/answer.txt /app/answer.txt\n",
    }
    write_task(task, files)
    return task
