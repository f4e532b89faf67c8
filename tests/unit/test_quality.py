"""What a check says of tasks: the rules, the first look at folders, and what is refused before anything runs."""

import json
from pathlib import Path

import pytest
from trials import write_task

from dockyard.cli import main
from dockyard.collect.check import find_candidates, keep_good
from dockyard.collect.quality import (
    Fault,
    QualityReport,
    TaskReport,
    judge_duplicates,
    judge_nop,
    judge_oracle,
    judge_policy,
)
from dockyard.config import RunConfig
from dockyard.errors import DockyardError
from dockyard.run_dir.resume import CheckPurpose
from dockyard.run_dir.run import Purpose, RunDir, read_purpose
from dockyard.tasks.folder import load_tasks, survey_tasks
from dockyard.tasks.generated import write_demo_tasks
from dockyard.types import Blame, Failure, Rollout

TRIAL = Path("trials/a")
SOLUTION = {"solution/solve.sh": "true"}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


def rollout(reward: float | None, cause: str = "environment_build") -> Rollout:
    lost = Failure(cause=cause, blame=Blame.INFRASTRUCTURE, message="no image\nand more\nat last\n")
    return Rollout(task="a", kind="", attempt=0, segments=(), reward=reward, failure=lost if reward is None else None)


def report(full_reward: float = 1.0) -> TaskReport:
    return TaskReport(task="a", path="a", full_reward=full_reward)


def faults(found: TaskReport) -> list[Fault]:
    assert found.ok == (not found.problems)
    return [problem.why for problem in found.problems]


@pytest.mark.parametrize(
    ("reward", "full", "expected"),
    [
        (1.0, 1.0, []),
        (1 - 1e-12, 1.0, []),
        (2.0, 1.0, []),
        (0.9, 1.0, [Fault.ORACLE_FAILED]),
        (1.0, 5.0, [Fault.ORACLE_FAILED]),
        (5.0, 5.0, []),
        (None, 1.0, [Fault.ORACLE_LOST]),
    ],
)
def test_the_solution_must_earn_the_full_reward(reward: float | None, full: float, expected: list[Fault]):
    found = judge_oracle(report(full), rollout(reward), TRIAL)
    assert faults(found) == expected
    assert found.oracle == reward


@pytest.mark.parametrize(
    ("reward", "full", "expected"),
    [
        (0.0, 1.0, []),
        (0.5, 1.0, []),
        (-1.0, 1.0, []),
        (1.0, 5.0, []),
        (1.0, 1.0, [Fault.NOP_REWARDED]),
        (0.5, 0.5, [Fault.NOP_REWARDED]),
        (None, 1.0, [Fault.NOP_LOST]),
    ],
)
def test_doing_nothing_must_not(reward: float | None, full: float, expected: list[Fault]):
    found = judge_nop(report(full), rollout(reward), TRIAL)
    assert faults(found) == expected
    assert found.nop == reward


def test_a_lost_rollout_says_its_cause_and_where_to_look():
    [problem] = judge_oracle(report(), rollout(None), TRIAL).problems
    assert problem.detail == "environment_build: no image ... at last, see `trials/a`"


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0], []),
        ([1.0, 0.9], []),
        ([1.0, 0.0, None], []),
        ([1.0, 1.0], [Fault.ALWAYS_SOLVED]),
        ([1.0, 1.0, None], [Fault.ALWAYS_SOLVED]),
        ([0.0, 0.9], [Fault.NEVER_SOLVED]),
        ([None, 0.0], [Fault.NEVER_SOLVED]),
        ([None, None], [Fault.POLICY_LOST]),
    ],
)
def test_a_policy_must_solve_a_task_sometimes(rewards: list[float | None], expected: list[Fault]):
    found = judge_policy(report(), [rollout(reward, "engine_failed") for reward in rewards])
    assert faults(found) == expected
    assert found.policy is not None
    assert (found.policy.rollouts, found.policy.lost) == (len(rewards), rewards.count(None))


def test_all_problems_of_a_task_are_reported():
    found = judge_nop(judge_oracle(report(), rollout(0.0), TRIAL), rollout(1.0), TRIAL)
    assert faults(found) == [Fault.ORACLE_FAILED, Fault.NOP_REWARDED]


def test_of_duplicates_the_first_good_one_is_kept(tmp_path: Path):
    tasks = [write_task(tmp_path / name, "true", **SOLUTION) for name in "abc"]
    reports = {task.name: TaskReport(task=task.name, path=str(task.path)) for task in tasks}
    reports["a"] = reports["a"].blamed(Fault.ORACLE_LOST, "")
    found = judge_duplicates(reports, tasks)
    assert {name: faults(item) for name, item in found.items()} == {
        "a": [Fault.ORACLE_LOST],
        "b": [],
        "c": [Fault.DUPLICATE],
    }
    assert "of `b`" in found["c"].problems[0].detail


def test_the_table_names_bad_tasks_and_counts_all():
    bad = TaskReport(task="bad", path="p").blamed(Fault.ORACLE_FAILED, "0 of 1").blamed(Fault.NOP_LOST, "why")
    found = QualityReport.of(
        [bad, TaskReport(task="good", path="p")], folder=Path("f"), rollouts=Path("r"), trials=Path("t")
    )
    assert found.table().splitlines() == [
        "bad  oracle_failed  0 of 1",
        "bad  nop_lost       why",
        "1 of 2 tasks in f are good; nop_lost 1, oracle_failed 1",
        "rollouts: r",
    ]


def test_a_long_table_is_cut():
    bad = [TaskReport(task=f"t{index:03}", path="p").blamed(Fault.BROKEN, "x") for index in range(45)]
    lines = QualityReport.of(bad, folder=Path("f"), rollouts=Path("r"), trials=Path("t")).table().splitlines()
    assert lines[40:42] == ["and 5 more, which the report names", "0 of 45 tasks in f are good; broken 45"]


STEPS = '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n'
STEP_FILES = {"instruction.md": "", **{f"steps/{name}/instruction.md": "Do it." for name in ("one", "two")}}


@pytest.mark.parametrize(
    ("toml", "files", "expected"),
    [
        ("", SOLUTION, ""),
        ("", {}, "`{}/solution/solve.sh` does not exist"),
        ("", {"solution/fix.patch": "x"}, "`{}/solution/solve.sh` does not exist"),
        ("", {"instruction.md": " \n", **SOLUTION}, "`{}/instruction.md` is empty"),
        ("", {"instruction.md": "", **SOLUTION}, "`{}` has no `instruction.md`"),
        ("[metadata]\nmax_reward = 5\n", SOLUTION, ""),
        ("[metadata]\nmax_reward = 0\n", SOLUTION, "`metadata.max_reward` in `{}/task.toml` is `0`"),
        ("[metadata]\nmax_reward = 'a'\n", SOLUTION, "`metadata.max_reward` in `{}/task.toml` is `a`"),
        ("[metadata\n", SOLUTION, "`{}/task.toml` is not valid TOML"),
        ("[environment]\nnetwork_mode = 'x'\n", SOLUTION, "`environment.network_mode` in `{}/task.toml`: "),
        ("[agent]\ntimeout_sec = 'x'\n", SOLUTION, "`agent.timeout_sec` in `{}/task.toml` is `x`"),
        ("[[agent]]\n", SOLUTION, "`agent` in `{}/task.toml` is `[{{}}]`, not a table"),
        (STEPS, {**STEP_FILES, **SOLUTION}, ""),
        (STEPS, {**STEP_FILES, "steps/one/solution/solve.sh": "x"}, "`{}/solution/solve.sh` does not exist"),
        (STEPS, {**STEP_FILES, **SOLUTION, "steps/one/solution/a": "x"}, "`{}/steps/one/solution/solve.sh` does not"),
        (STEPS, {**STEP_FILES, **{f"steps/{name}/solution/solve.sh": "x" for name in ("one", "two")}}, ""),
        (STEPS, {**STEP_FILES, "steps/two/instruction.md": "", **SOLUTION}, "`{}` has no `steps/two/instruction.md`"),
    ],
)
def test_a_first_look_finds_what_cannot_be_run(tmp_path: Path, toml: str, files: dict[str, str], expected: str):
    write_task(tmp_path / "tasks" / "good", "true", **SOLUTION)
    looked_at = write_task(tmp_path / "tasks" / "task", "true", toml=toml, **files).path
    found = find_candidates(tmp_path / "tasks")
    details = [problem.detail for problem in found.reports["task"].problems]
    assert len(details) == bool(expected)
    assert all(detail.startswith(expected.format(looked_at)) for detail in details)
    assert [task.name for task in found.tasks] == ["good", *([] if expected else ["task"])]


def test_a_survey_goes_on_where_loading_stops(tmp_path: Path):
    write_demo_tasks(tmp_path, num_train=4, num_heldout=4)
    broken = sorted((tmp_path / "train").iterdir())[1]
    (broken / "tests" / "test.sh").unlink()
    (broken / "instruction.md").unlink()
    found = survey_tasks(tmp_path / "train")
    assert len(found.tasks) == 3
    assert [(item.path, len(item.problems)) for item in found.broken] == [(broken, 2)]
    with pytest.raises(DockyardError, match="has no `instruction.md`; .* has no `tests/test.sh`"):
        load_tasks(tmp_path / "train")


def kept_report(folder: Path, *names: str) -> QualityReport:
    good = [TaskReport(task=name, path=str(write_task(folder / name, "true").path)) for name in names]
    bad = TaskReport(task="bad", path="nowhere").blamed(Fault.BROKEN, "")
    return QualityReport.of([*good, bad], folder=folder, rollouts=Path("r"), trials=Path("t"))


def test_good_tasks_are_copied_and_what_is_there_stays(tmp_path: Path):
    keep_good(tmp_path / "out", kept_report(tmp_path / "in", "a"))
    (tmp_path / "out" / "a" / "mine").write_text("x")
    keep_good(tmp_path / "out", kept_report(tmp_path / "in", "a", "b"))
    assert [task.name for task in load_tasks(tmp_path / "out")] == ["a", "b"]
    assert (tmp_path / "out" / "a" / "mine").exists()


def test_a_folder_with_other_tasks_keeps_nothing(tmp_path: Path):
    write_task(tmp_path / "out" / "other", "true")
    with pytest.raises(DockyardError, match="holds `other`, which is not one of the good tasks"):
        keep_good(tmp_path / "out", kept_report(tmp_path / "in", "a"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["other"]


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        ([], "a check needs a folder of tasks", "dockyard tasks check DIR"),
        (["nowhere"], "`{}/nowhere` is not a folder of tasks", "dockyard tasks demo"),
        (["empty"], "`{}/empty` has no tasks", "dockyard tasks demo"),
        (
            ["in", "--difficulty=1"],
            "argument --difficulty: must be an integer of at least 2, not `1`",
            "tasks check --help",
        ),
        (["in", "--dificulty=4"], "`--dificulty` is not an option", "did you mean `--difficulty`?"),
        (["in", "--keep", "in"], "`in` already exists", "a new or an empty folder"),
        (["in", "--keep", "in/out"], "`in/out` is inside `{}/in`", "choose another"),
        (["in", "--report", "in"], "`in` is a folder", "--report FILE.json"),
        (["in", "--report", "in/a/task.toml/x"], "`in/a/task.toml/x` cannot be made in `{}/in/a/", "--report"),
        (["in", "--keep", "in/a/task.toml/x"], "`in/a/task.toml/x` cannot be made in `{}/in/a/", "--keep"),
        (["in", "--agent", "shell"], "`--agent` has no effect on this check", "--difficulty K"),
        (["in", "--model=m"], "`--model` has no effect on this check", "--difficulty K"),
        (["in", "--trainer.lr=1"], "`--trainer.lr` has no effect on this check", "remove it"),
        (["in", "--tasks.train=x"], "`--tasks.train` has no effect on this check", "remove it"),
        (["in", "--environment.tipe=x"], "`--environment.tipe` is not a setting", "environment.type"),
        (["in", "--environment.type=dokcer"], "`environment.type` is `dokcer`, which is not an environment", "docker"),
        (["in", "--difficulty=2", "--agent=shel"], "`agent.name` is `shel`, which is not an agent", "`shell`"),
        (["in", "more"], "unrecognized arguments: more", "tasks check --help"),
        (["in", "--resume", "x"], "`in` cannot be combined with `--resume`", "its own tasks"),
        (["--resume", "x"], "`x` holds no run", ""),
    ],
)
def test_misuse_says_what_to_do_and_makes_nothing(
    words: list[str], error: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_task(tmp_path / "in" / "a", "true", **SOLUTION)
    (tmp_path / "empty").mkdir()
    assert main(["tasks", "check", *words]) in (1, 2)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: {error.format(tmp_path)}")
    assert hint in second
    assert {path.name for path in tmp_path.iterdir()} == {"in", "empty"}


def test_a_check_has_a_folder_of_its_own_and_short_names_for_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_task(tmp_path / "in" / "a", "true", **SOLUTION)
    assert main(["tasks", "check", "in/.", "--concurrency", "3", "--dry-run", "--json"]) == 0
    config = RunConfig.model_validate(json.loads(capsys.readouterr().out))
    assert (config.run_dir, config.tasks.train) == (Path("runs/check-in"), tmp_path / "in")
    assert (config.rollout.concurrency, config.rollout.max_lost_share, config.agent.name) == (3, 1, "oracle")
    words = ["tasks", "check", "in", "--difficulty=4", "--model=m", "--agent", "terminus-2", "--run_dir=mine"]
    assert main([*words, "--dry-run", "--json"]) == 0
    config = RunConfig.model_validate(json.loads(capsys.readouterr().out))
    assert (config.model.name, config.agent.name, config.run_dir) == ("m", "terminus-2", Path("mine"))


def test_help_says_how_a_check_is_used(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["tasks", "check", "--help"])
    assert ended.value.code == 0
    assert "usage: dockyard tasks check DIR" in capsys.readouterr().out


def test_a_check_is_continued_as_a_check_with_the_tasks_it_began_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_task(tmp_path / "in" / "a", "true", **SOLUTION)
    config = RunConfig.model_validate({"tasks": {"train": str(tmp_path / "in")}, "agent": {"name": "oracle"}})
    purpose = Purpose(verb="tasks check", check=CheckPurpose(digest="of other tasks", difficulty=4))
    RunDir.create(tmp_path / "mine", config, purpose=purpose).close()
    assert read_purpose(tmp_path / "mine") == purpose
    assert main(["rollout", "--resume", "mine"]) == 2
    assert "hint: `dockyard tasks check --resume mine` continues it" in capsys.readouterr().err
    assert main(["tasks", "check", "--resume", "mine", "--difficulty=2"]) == 2
    assert "`--difficulty` cannot be combined with `--resume`" in capsys.readouterr().err
    assert main(["tasks", "check", "--resume", "mine"]) == 2
    assert f"the tasks in `{tmp_path / 'in'}` have changed since `mine` started" in capsys.readouterr().err
