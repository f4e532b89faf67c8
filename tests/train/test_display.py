"""What a terminal shows of a run, read as text from a console of a given size."""

import io
from pathlib import Path

import numpy as np
from rich.console import Console

from dockyard.trainer.display import TrainingProgress, Words
from dockyard.types import IntArray, Rollout, Segment, Task

TASKS = [Task(name=f"{kind}-{index}", path=Path("nowhere"), kind=kind) for kind in ("copy", "move") for index in (1, 2)]
NUMBERS = {
    "reward/mean": 0.5,
    "time/step_s": 9.0,
    "time/update_s": 3.0,
    "rollout/tokens_per_s": 70.0,
    "rollout/sampled_tokens": 2.0,
    "train/tokens": 2.0,
}


def spell(ids: IntArray) -> str:
    return "".join(map(chr, ids)).replace("\0", "<|im_end|>")


def rollout(task: Task, reply: str, reward: float | None) -> Rollout:
    ids = np.array([ord(letter) for letter in f"?{reply}"] + [0], dtype=np.int32)
    segment = Segment(token_ids=ids, sampled=np.arange(len(ids)) > 0, logprobs=None, versions=None)
    return Rollout(task=task.name, kind=task.kind, attempt=0, segments=(segment,), reward=reward, failure=None)


def progress_with(tasks: list[Task], *, terminal: bool = True) -> tuple[TrainingProgress, Console]:
    console = Console(file=io.StringIO(), width=100, height=40, force_terminal=terminal, color_system=None)
    return TrainingProgress(3, console, Words.of(tasks, spell)), console


def screen(progress: TrainingProgress, console: Console) -> str:
    with console.capture() as captured:
        console.print(progress.display)
    return captured.get()


def test_the_reward_curve_grows_with_each_step():
    progress, console = progress_with(TASKS)
    screens = [screen(progress, console)]
    for step in range(2):
        progress.step(step, NUMBERS, {})
        screens.append(screen(progress, console))
    assert ["█" * 3 * count in shown for count, shown in enumerate(screens)] == [True] * 3
    assert ["█" * 3 * (count + 1) in shown for count, shown in enumerate(screens)] == [False] * 3
    assert all("─" * 9 in shown for shown in screens)  # there is room for all three


def test_each_task_shows_its_rollouts_done_and_to_come():
    progress, console = progress_with(TASKS)
    progress.begin("step 1 of 3", 16, TASKS, 4)
    progress.finished(rollout(TASKS[0], "cp", 1.0))
    progress.finished(rollout(TASKS[0], "cp", 0.5))
    shown = screen(progress, console)
    assert "copy-1 ■■·· 0.75" in shown
    assert "move-2 ····" in shown
    assert "step 1 of 3: rollouts 2/16" in shown


def test_many_tasks_are_shown_by_kind():
    many = [Task(name=f"{index}", path=Path("nowhere"), kind="copy" if index % 2 else "move") for index in range(10)]
    progress, console = progress_with(many)
    progress.begin("held-out tasks before training", 10, many)
    progress.finished(rollout(many[1], "cp", 1.0))
    progress.finished(rollout(many[3], "cp", None))
    assert "copy ■■··· 1.00" in screen(progress, console)


def test_what_the_model_wrote_at_first_stays_beside_what_it_writes_now(tmp_path: Path):
    task, other = (Task(name=name, path=tmp_path, kind="copy") for name in ("one", "other"))
    (tmp_path / "instruction.md").write_text("Copy a to b.")
    progress, console = progress_with([task, other, TASKS[2]])
    progress.begin("before training", 1, [task])
    progress.finished(rollout(task, "touch a", 0.0))
    progress.begin("step 1 of 3", 2, [other, TASKS[2]])
    progress.finished(rollout(other, "cp a b", 1.0))
    progress.finished(rollout(TASKS[2], "mv a b", 1.0))
    shown = screen(progress, console)
    assert "Copy a to b." in shown
    assert [word in shown for word in ("touch a", "cp a b", "mv a b", "im_end")] == [True, True, False, False]
    progress.begin("after training", 2, [task, other])
    progress.finished(rollout(task, "cp -p a b", 1.0))
    progress.finished(rollout(other, "cp -r a b", 1.0))  # the very task wins over another of its kind
    assert "cp -p a b" in screen(progress, console)


def test_without_a_terminal_nothing_is_drawn():
    progress, console = progress_with(TASKS, terminal=False)
    with progress:
        progress.begin("step 1 of 3", 4, TASKS)
        progress.finished(rollout(TASKS[0], "cp", 1.0))
        progress.step(0, NUMBERS, {})
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().strip() == ""
