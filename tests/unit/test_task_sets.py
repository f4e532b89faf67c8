"""Where a run's tasks come from, which of them are taken, and which are held out."""

import json
import os
from pathlib import Path

import pytest
from trials import write_task

from dockyard.cli import main
from dockyard.collect.task_sets import check_tasks, task_sets
from dockyard.config import TASK_SOURCES, RunConfig, TasksConfig
from dockyard.errors import DockyardError
from dockyard.run_dir.run import RunDir
from dockyard.settings.load import load_run_config
from dockyard.tasks.sources import SOURCES, SourceRequest, find_source


def run_of(folder: Path, **tasks: object) -> RunDir:
    config = RunConfig.model_validate({"run_dir": folder / "run", "tasks": tasks})
    return RunDir.create(folder / "run", config, overwrite=True)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    for repo in ("django__django", "psf__requests"):
        for number in range(6):
            words = {"instruction.md": f"Mend bug {number} of {repo}."}
            write_task(tmp_path / "tasks" / f"{repo}-{number}", f"echo {number}\n", **words)
    return tmp_path / "tasks"


def test_the_table_has_exactly_the_sources_that_the_setting_accepts():
    assert set(SOURCES) == set(TASK_SOURCES)
    for name in SOURCES:
        TasksConfig(source=name)


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_in_the_table_can_be_found(name: str):
    source = find_source(name)
    assert callable(source.check)
    assert callable(source.open)


def test_a_source_provides_the_same_tasks_when_it_is_opened_again(tmp_path: Path):
    request = SourceRequest(settings=TasksConfig(source="demo", num_train=4, num_heldout=4), seed=3, folder=tmp_path)
    first, again = (find_source("demo").open(request) for _ in range(2))
    assert first == again
    assert (len(first.train), len(first.heldout or [])) == (4, 4)


def test_recorded_rollouts_bring_no_training_tasks_but_may_have_held_out_ones(tmp_path: Path, tasks: Path):
    with run_of(tmp_path, source="recorded", dataset="job", heldout=tasks) as run:
        sets = task_sets(run)
    assert (sets.train, len(sets.heldout)) == ([], 12)


def test_a_folders_tasks_are_all_taken_in_their_order(tmp_path: Path, tasks: Path):
    with run_of(tmp_path, train=tasks) as run:
        sets = task_sets(run)
    assert [task.name for task in sets.train] == sorted(path.name for path in tasks.iterdir())
    assert sets.heldout == []


def test_tasks_are_filtered_by_repository_and_number(tmp_path: Path, tasks: Path):
    with run_of(tmp_path, train=tasks, repo="django/django", limit=3) as run:
        names = [task.name for task in task_sets(run).train]
        assert [task.name for task in task_sets(run).train] == names
    assert len(names) == 3
    assert all(name.startswith("django__") for name in names)


def test_another_seed_draws_other_tasks(tmp_path: Path, tasks: Path):
    def drawn(seed: int) -> list[str]:
        config = RunConfig.model_validate(
            {"seed": seed, "run_dir": tmp_path / "run", "tasks": {"train": tasks, "limit": 3}}
        )
        with RunDir.create(tmp_path / "run", config, overwrite=True) as run:
            return [task.name for task in task_sets(run).train]

    assert len({tuple(drawn(seed)) for seed in range(4)}) > 1


def test_fewer_tasks_than_asked_for_are_said(tmp_path: Path, tasks: Path, caplog: pytest.LogCaptureFixture):
    with run_of(tmp_path, train=tasks, limit=201) as run:
        assert len(task_sets(run).train) == 12
    assert "201 tasks were asked for" in caplog.text


def test_an_id_that_does_not_exist_is_named_with_the_nearest(tmp_path: Path, tasks: Path):
    missing = "has no id `django__django-9`"
    with (
        run_of(tmp_path, train=tasks, ids=["django__django-9"]) as run,
        pytest.raises(DockyardError, match=missing) as caught,
    ):
        task_sets(run)
    assert "did you mean `django__django-" in caught.value.hint


def test_ids_that_do_not_exist_beside_others_are_said(tmp_path: Path, tasks: Path, caplog: pytest.LogCaptureFixture):
    with run_of(tmp_path, train=tasks, ids=["django__django-1", "nobody-1"]) as run:
        assert [task.name for task in task_sets(run).train] == ["django__django-1"]
    assert "has no id `nobody-1`" in caplog.text


def test_a_listed_task_that_is_gone_is_named_and_paths_may_be_relative_to_the_registry(
    tmp_path: Path, tasks: Path, caplog: pytest.LogCaptureFixture
):
    listed = [{"name": name, "path": f"tasks/{name}"} for name in ("django__django-1", "gone")]
    registry = tmp_path / "registry.json"
    registry.write_text(json.dumps([{"name": "mine", "version": "1.0", "description": "", "tasks": listed}]))
    with run_of(tmp_path, source="harbor", dataset="mine@1.0", registry=registry) as run:
        assert [task.name for task in task_sets(run).train] == ["django__django-1"]
    assert "skipped a task of `mine@1.0`: " in caplog.text
    assert "gone" in caplog.text


def test_an_empty_dataset_of_a_registry_is_an_error(tmp_path: Path):
    registry = tmp_path / "registry.json"
    registry.write_text(json.dumps([{"name": "mine", "version": "1.0", "description": "", "tasks": []}]))
    config = {"source": "harbor", "dataset": "mine@1.0", "registry": registry}
    with pytest.raises(DockyardError, match="`mine@1.0` in .* has no tasks on this machine"):
        check_tasks(RunConfig.model_validate({"tasks": config}))


def test_a_drawn_split_is_recorded_and_read_again(tmp_path: Path, tasks: Path):
    with run_of(tmp_path, train=tasks, heldout_share=0.25) as run:
        sets = task_sets(run)
        recorded = json.loads(run.paths.split.read_text())
        assert {task.name for task in sets.heldout} == set(recorded["heldout"])
        assert len(sets.heldout) == 3
        assert not {task.name for task in sets.train} & {task.name for task in sets.heldout}
        assert len(sets.train) == 9
        recorded["heldout"], recorded["train"] = recorded["train"], recorded["heldout"]
        run.paths.split.write_text(json.dumps(recorded))
        assert len(task_sets(run).heldout) == 9


def test_a_split_that_names_lost_tasks_is_an_error(tmp_path: Path, tasks: Path):
    with run_of(tmp_path, train=tasks, heldout_share=0.25) as run:
        gone = task_sets(run).heldout[0]
        gone.path.rename(tmp_path / "elsewhere")
        with pytest.raises(DockyardError, match=f"no longer there: {gone.name}"):
            task_sets(run)


def test_a_dataset_of_a_registry_is_found_by_its_name(tmp_path: Path, tasks: Path):
    listed = [{"name": path.name, "path": str(path)} for path in sorted(tasks.iterdir())]
    registry = tmp_path / "registry.json"
    registry.write_text(json.dumps([{"name": "mine", "version": "1.0", "description": "", "tasks": listed}]))
    with run_of(tmp_path, source="harbor", dataset="mine@1.0", registry=registry, limit=5) as run:
        assert len(task_sets(run).train) == 5
    wrong = {"source": "harbor", "dataset": "mine@2.0", "registry": registry}
    with pytest.raises(DockyardError, match="`mine@2.0` could not be loaded"):
        check_tasks(RunConfig.model_validate({"tasks": wrong}))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks.source=harbor", "--tasks.train=x"], "`tasks.train` has no effect"),
        (["--tasks.train=x", "--tasks.dataset=y"], "`tasks.dataset` has no effect"),
        (["--tasks.train=x", "--tasks.passes=1", "--steps=3"], "`steps` has no effect"),
        (["--tasks.source=recorded"], "`tasks.dataset` is not set"),
        (["--tasks.train=x", "--tasks.heldout=y", "--tasks.heldout_share=0.5"], "`tasks.heldout_share` has no effect"),
        (["--tasks.source=demo", "--tasks.limit=3"], "`tasks.limit` has no effect"),
    ],
)
def test_settings_that_mean_nothing_together_are_refused(words: list[str], message: str):
    with pytest.raises(DockyardError, match=message):
        load_run_config(None, words)


def test_a_run_that_fails_before_its_first_rollout_leaves_nothing_in_the_way(
    tmp_path: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    words = ["rollout", f"--tasks.train={tasks}", "--agent=oracle", "--tasks.repo=nobody/nothing"]
    for _ in range(2):
        assert main(words) == 2
        assert "has no repository `nobody/nothing`" in capsys.readouterr().err


def test_a_dotenv_file_that_is_no_text_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    Path(".env").write_bytes(b"KEY=\xff\xfe")
    assert main(["train", "--dry-run", "--tasks.source=demo"]) == 2
    assert f"`{tmp_path / '.env'}` cannot be read" in capsys.readouterr().err


def test_keys_in_a_dotenv_file_are_read_and_what_is_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", "")  # so that it is put back
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "set already")
    Path(".env").write_text("WANDB_API_KEY=secret\nTOKENIZERS_PARALLELISM=true\n")
    assert main(["train", "--dry-run", "--tasks.source=demo"]) == 0
    assert (os.environ["WANDB_API_KEY"], os.environ["TOKENIZERS_PARALLELISM"]) == ("secret", "set already")
