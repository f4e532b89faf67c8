"""Runs of the tiny model that are killed and resumed: real trials in sandboxes, the same bits every time."""

from pathlib import Path

from tiny_policy import tiny_model_dir

TASKS_PER_STEP, GROUP_SIZE = 2, 4
# A random model solves nothing, so the reward is the length of what it said, modulo 7: every group has a difference.
TEST_SH = 'echo "$(( $(wc -c < /app/reply.txt) % 7 ))" > /logs/verifier/reward.txt\n'


def write_tasks(folder: Path, count: int) -> None:
    for index in range(count):
        task = folder / f"task-{index}"
        for name, text in {
            "task.toml": f'schema_version = "1.4"\n[task]\nname = "test/task-{index}"\n',
            "instruction.md": f"Say something about the number {index}.\n",
            "environment/Dockerfile": "FROM scratch\n",
            "tests/test.sh": TEST_SH,
        }.items():
            (task / name).parent.mkdir(parents=True, exist_ok=True)
            (task / name).write_text(text)


def settings(folder: Path, steps: int) -> dict[str, object]:
    """Of a run on tasks that are written into this folder."""
    write_tasks(folder / "train", 6)
    return {
        "steps": steps,
        "seed": 3,
        "model.name": tiny_model_dir(),
        "model.device": "cpu",
        "tasks.train": folder / "train",
        "agent.name": "reply_agent:ReplyAgent",
        "environment.type": "sandbox",
        "engine.deterministic": "true",
        "sampling.max_new_tokens": 24,
        "rollout.concurrency": 4,
        "grpo.group_size": GROUP_SIZE,
        "grpo.tasks_per_step": TASKS_PER_STEP,
        "trainer.lr": 0.01,
        "trainer.save_every": 2,
    }


def num_recorded(run: Path) -> int:
    return sum(len(file.read_bytes().splitlines()) for file in run.glob("rollouts/*.jsonl"))


def adapter(run: Path, version: int) -> bytes:
    return (run / f"adapters/v{version:05}/adapter_model.safetensors").read_bytes()
