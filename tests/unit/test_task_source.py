"""`tasks.source = "module:Class"`: what a class of the user's may provide, and what is said when it is wrong."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from trials import write_task

from dockyard.backends.launch import refuse_ignored
from dockyard.backends.prime_rl.launch import BACKEND as PRIME_RL
from dockyard.backends.slime.launch import BACKEND as SLIME
from dockyard.cli import main
from dockyard.collect.task_sets import task_sets
from dockyard.config import RunConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.run_dir.run import Purpose, RunDir
from dockyard.settings.load import load_run_config, written_settings
from dockyard.trainer.run import run_training
from dockyard.verbs import check_extensions

SOURCE = """
from pathlib import Path
from trials import write_task

CALLS = []

class Tasks:
    def __init__(self, count=3, held=1, word="one"):
        self.count, self.held, self.word = count, held, word

    def train(self, folder, seed):
        CALLS.append(("train", seed, list(folder.iterdir())))
        return [self.write(folder / f"train-{index}") for index in range(self.count)]

    def heldout(self, folder, seed):
        CALLS.append(("heldout", seed, list(folder.iterdir())))
        return [self.write(folder / f"heldout-{index}") for index in range(self.held)]

    def write(self, path):
        write_task(path, f"echo {self.word} {path.name}")
        return path
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    Path("mine.py").write_text(SOURCE)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("mine", None)
    sys.modules.pop("my_training", None)


def create(**tasks: object) -> RunDir:
    config = RunConfig.model_validate({"seed": 7, "run_dir": "run", "tasks": {"source": "mine:Tasks", **tasks}})
    return RunDir.create(Path("run"), config, overwrite=True)


def calls() -> list[tuple[str, int, list[Path]]]:
    return sys.modules["mine"].CALLS


def names(run: RunDir) -> tuple[list[str], list[str]]:
    sets = task_sets(run)
    return [task.name for task in sets.train], [task.name for task in sets.heldout]


def replace_source(code: str) -> None:
    Path("mine.py").write_text(code)
    sys.modules.pop("mine", None)


def test_a_class_provides_training_and_held_out_tasks_in_the_run_folder():
    with create(kwargs={"count": 2}) as run:
        sets = task_sets(run)
        assert names(run) == (["train-0", "train-1"], ["heldout-0"])
    assert calls() == [("train", 7, []), ("heldout", 7, [])]  # once, with an empty folder
    assert [task.path for task in sets.train] == [run.paths.tasks / "train" / name for name in ("train-0", "train-1")]


def test_a_resumed_run_has_its_first_tasks_even_if_the_class_would_now_provide_others(here: Path):
    with create() as run:
        before = task_sets(run)
    replace_source(SOURCE.replace('word="one"', 'word="two"').replace("count=3", "count=5"))
    with RunDir.resume(here / "run") as run:
        assert task_sets(run) == before
        assert "echo one" in (before.train[0].path / "tests/test.sh").read_text()


def test_a_run_folder_may_be_moved(here: Path):
    with create() as run:
        before = names(run)
    shutil.move(here / "run", here / "elsewhere")
    with RunDir.resume(here / "elsewhere") as run:
        assert names(run) == before
        assert task_sets(run).train[0].path.is_relative_to(here / "elsewhere")


@pytest.mark.parametrize("inside", [True, False])
def test_a_task_that_changed_since_the_run_began_is_an_error_that_names_it(here: Path, inside: bool):
    if not inside:
        write_task(here / "shared" / "a", "echo 1")
        replace_source(
            "from pathlib import Path\n"
            "class Tasks:\n"
            "    def train(self, folder, seed): return [Path('shared/a')]\n"
            "    def heldout(self, folder, seed): return []\n"
        )
    with create() as run:
        changed = task_sets(run).train[0]
        assert task_sets(run).train == [changed, *task_sets(run).train[1:]]
    (changed.path / "tests" / "test.sh").write_text("echo 2")
    with (
        RunDir.resume(here / "run") as run,
        pytest.raises(DockyardError, match=f"the task `{changed.path}` changed since this run began"),
    ):
        task_sets(run)


def test_an_interrupted_source_starts_again_with_an_empty_folder(here: Path):
    fails = SOURCE.replace('CALLS.append(("heldout"', '1 / 0; CALLS.append(("heldout"')
    replace_source(fails)
    with create() as run, pytest.raises(DockyardError) as raised:
        task_sets(run)
    said = "`tasks.source` is `mine:Tasks.heldout`, which failed on the tasks of this run: ZeroDivisionError"
    assert raised.value.message.startswith(said)
    assert f"({here / 'mine.py'}:" in raised.value.message
    replace_source(SOURCE.replace("count=3", "count=1"))
    with RunDir.resume(here / "run") as run:
        assert names(run) == (["train-0"], ["heldout-0"])
    assert calls()[0] == ("train", 7, [])


def test_ids_limit_and_shares_choose_among_its_tasks(here: Path):
    with create(ids=["train-2"]) as run:
        assert names(run) == (["train-2"], ["heldout-0"])
    with create(limit=2) as run:
        assert len(names(run)[0]) == 2
    with create(kwargs={"count": 8}, heldout_share=0.25) as run:
        train, heldout = names(run)
        assert (len(train), len(heldout)) == (6, 2)
        assert all(name.startswith("train-") for name in heldout)  # the setting replaces its own
        assert names(run) == (train, heldout)
    write_task(here / "other" / "x", "echo 1")
    with create(heldout=here / "other") as run:
        assert names(run)[1] == ["x"]


@pytest.mark.parametrize(
    ("code", "message", "hint"),
    [
        ("class Tasks:\n    def train(self, folder, seed): ...", "it lacks heldout", "def heldout(self, folder: Path"),
        (
            "class Tasks:\n    def train(self): ...\n    def heldout(self, folder, seed): ...",
            "`mine:Tasks.train`, whose signature is `def train(self)`",
            "define `def train(self, folder: Path, seed: int) -> Sequence[Path]`",
        ),
        ("def Tasks(): ...", "which is not a class", "def train(self, folder: Path, seed: int) -> Sequence[Path]"),
        (
            "class Tasks:\n    def __init__(self, rows: int): ...\n"
            "    def train(self, folder, seed): ...\n    def heldout(self, folder, seed): ...",
            "cannot be created with the arguments in `tasks.kwargs`: missing a required argument: 'rows'",
            "it is `Tasks(rows: int)`",
        ),
        (
            "class Tasks:\n    def __init__(self):\n        1 / 0\n"
            "    def train(self, folder, seed): ...\n    def heldout(self, folder, seed): ...",
            "`tasks.source` is `mine:Tasks`, which cannot be created: ZeroDivisionError: division by zero",
            "correct `Tasks.__init__`",
        ),
    ],
)
@pytest.mark.parametrize("verb", ["rollout", "train"])
def test_a_wrong_class_is_refused_before_the_first_rollout_with_the_right_signature(
    code: str, message: str, hint: str, verb: str, capsys: pytest.CaptureFixture[str]
):
    replace_source(code)
    # The function that `train` calls, without the import of torch that comes before it.
    agent = [] if verb == "train" else ["--agent=oracle"]
    words = [verb, "--tasks.source=mine:Tasks", "--run_dir=fresh", "--model.name=nowhere/no-model", *agent]
    assert main(words, run_training=run_training) == 2
    said = capsys.readouterr().err
    assert message in said
    assert hint in said
    assert not Path("fresh", "config.toml").exists()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return []", "whose `train` returned no tasks"),
        ("return None", "whose `train` returned `None`; it must return a list of paths"),
        ("return ['a']", "whose `train` returned `['a']`; it must return a list of paths"),
        ("return [folder]", "/run/tasks/train` has no `task.toml`"),
        ("return [self.write(folder / 'a'), self.write(folder / 'b' / 'a')]", "more than one task named `a`"),
    ],
)
def test_wrong_tasks_are_named(body: str, message: str):
    replace_source(
        SOURCE.replace("    def train(self, folder, seed):\n", f"    def train(self, folder, seed):\n        {body}\n")
    )
    with create() as run, pytest.raises(DockyardError) as raised:
        task_sets(run)
    assert message in raised.value.message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks.source=mine:Tasks", "--tasks.num_train=8"], "`tasks.num_train` has no effect"),
        (["--tasks.source=mine:Tasks", "--tasks.dataset=x"], "`tasks.dataset` has no effect"),
        (
            ["--tasks.source=demo", "--tasks.kwargs.count=3"],
            "`tasks.kwargs` has no effect when `tasks.source` is `demo`",
        ),
        (
            ["--tasks.source=demo", "--tasks.order=a:b", "--tasks.passes=2"],
            "`tasks.passes` has no effect when `tasks.order`",
        ),
        (
            ["--tasks.source=recorded", "--tasks.dataset=x", "--tasks.order=a:b"],
            "`tasks.order` has no effect when `tasks.source`",
        ),
        (
            ["--tasks.source=demoo"],
            "it must be `folder`, `demo`, `trail`, `harbor`, `swebench`, `c2bug`, `recorded`, or `module:Class`",
        ),
        (["--tasks.source=demo", "--tasks.order=shuffle"], "it must be `module:name`, your own function"),
    ],
)
def test_settings_that_it_does_not_read_are_refused(words: list[str], message: str):
    with pytest.raises(DockyardError) as raised:
        load_run_config(None, words)
    assert message in raised.value.message


def test_what_it_reads_is_accepted_and_shown(capsys: pytest.CaptureFixture[str]):
    replace_source(f"{SOURCE}\ndef order(tasks, history, count, rng): ...\n")
    words = ["--tasks.source=mine:Tasks", "--tasks.kwargs.count=3", '--tasks.ids=["a"]', "--tasks.limit=2"]
    assert main(["train", "--dry-run", *words, "--tasks.order=mine:order", "--eval.samples=2"]) == 0
    shown = capsys.readouterr().out
    assert 'source = "mine:Tasks"' in shown
    assert "kwargs = { count = 3 }" in shown
    assert 'order = "mine:order"' in shown


def test_a_dry_run_checks_the_class_and_the_function(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "--dry-run", "--tasks.source=mine:Tasks", "--tasks.kwargs.rows=3"]) == 2
    assert "got an unexpected keyword argument 'rows'" in capsys.readouterr().err
    assert main(["train", "--dry-run", "--tasks.source=demo", "--tasks.order=mine:order"]) == 2
    assert "`tasks.order` is `mine:order`, but" in capsys.readouterr().err


def test_a_verb_loads_only_what_it_calls(capsys: pytest.CaptureFixture[str]):
    Path("my_training.py").write_text("from pathlib import Path\nPath('loaded').touch()\n")
    words = ["--dry-run", "--tasks.source=demo"]
    functions = ["--tasks.order=my_training:order", "--grpo.advantage=my_training:f", "--grpo.reward=my_training:f"]
    for verb in ("rollout", "eval"):
        assert main([verb, *words, *functions, "--grpo.loss=my_training:f"]) == 0
        assert not Path("loaded").exists()
        assert main([verb, *words[:1], "--tasks.source=mine:Missing"]) == 2
        assert main([verb, *words, "--engine.type=mine:Missing"]) == 2
        assert main([verb, *words, '--callbacks=["mine:Missing"]']) == 2
        assert capsys.readouterr().err.count("defines no `Missing`") == 3
    for function in functions:
        assert main(["train", *words, function]) == 2
    assert capsys.readouterr().err.count("my_training.py` defines no") == 3


@pytest.mark.parametrize("backend", [SLIME, PRIME_RL], ids=["slime", "prime-rl"])
def test_backends_take_a_source_and_refuse_an_order(backend):
    words = ["--tasks.source=mine:Tasks", "--tasks.kwargs.count=3"]
    refuse_ignored(backend, load_run_config(None, words), written_settings(None, words))
    words.append("--tasks.order=mine:order")
    with pytest.raises(UsageError, match="ignores `tasks.order`"):
        refuse_ignored(backend, load_run_config(None, words), written_settings(None, words))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def order(tasks, history): ...", "whose signature is `def order(tasks, history)`"),
        ("order = 3", "which is not a function"),
        ("def other(): ...", "defines no `order`"),
    ],
)
def test_a_wrong_order_is_refused_with_the_right_signature(code: str, message: str):
    Path("mine.py").write_text(f"{SOURCE}\n{code}\n")
    config = RunConfig.model_validate({"tasks": {"source": "mine:Tasks", "order": "mine:order"}})
    with pytest.raises(UsageError) as raised:
        check_extensions(config, Purpose(verb="train"), trains_here=False)
    assert message in raised.value.message
    if "defines no" not in message:
        assert raised.value.hint == (
            "define `def order(tasks: Sequence[Task], history: Sequence[Attempted], count: int, rng: Random) "
            "-> Sequence[Task]`"
        )


def test_an_evaluation_without_held_out_tasks_says_what_to_set(capsys: pytest.CaptureFixture[str]):
    assert main(["eval", "--tasks.source=mine:Tasks", "--tasks.kwargs.held=0", "--agent=oracle"]) == 2
    assert "`tasks.source` is `mine:Tasks`, which has no held-out tasks" in capsys.readouterr().err


def test_a_backend_gets_its_tasks_as_a_list(capsys: pytest.CaptureFixture[str]):
    words = ["--model.name=Qwen/Qwen3-8B", "--slime.checkout=slime", "--tasks.source=mine:Tasks", "--run_dir=fresh"]
    assert main(["backend", "slime", "--write", *words, "--tasks.kwargs.held=0"]) == 2
    assert "`mine:Tasks`, which has no held-out tasks, but slime evaluates" in capsys.readouterr().err
    assert main(["backend", "slime", "--write", *words]) == 0
    listed = json.loads(Path("fresh/task-list.json").read_text())
    assert [task["name"] for task in listed["train"]] == ["train-0", "train-1", "train-2"]
    assert [task["name"] for task in listed["heldout"]] == ["heldout-0"]
