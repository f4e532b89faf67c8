"""Prime-RL's files of before 0.8, in today's form."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from dockyard.backends.prime_rl.own_file import read_own_file, translate
from dockyard.errors import DockyardError, UsageError

ROOT = Path(__file__).parents[2]
OLD = ROOT / "tests" / "data" / "prime_rl_old.toml"
TODAY = ROOT / "configs" / "harbor_8b.toml"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)


def translated(text: str) -> dict[str, Any]:
    return translate(tomllib.loads(text)).values


def test_an_old_file_says_the_same_in_todays_form():
    assert translate(tomllib.loads(OLD.read_text())).values == {
        "max_steps": 100,
        "seq_len": 8192,
        "model": {"name": "Qwen/Qwen3-8B"},
        "ckpt": {"interval": 10},
        "resume": {},
        "monitors": {"wandb": {"project": "harbor"}},
        "trainer": {"model": {"lora": {"rank": 16}}},
        "orchestrator": {
            "batch_size": 32,
            "group_size": 8,
            "concurrency": {"max_inflight": 16},
            "train": {
                "sampling": {"temperature": 0.9, "max_completion_tokens": 2048},
                "source": [
                    {
                        "name": "harbor",
                        "serve": {"pool": {"type": "static", "num_workers": 2}},
                        "env": {
                            "taskset": {"id": "harbor_env", "tasks_dir": "datasets/harbor_tasks"},
                            "agent": {
                                "harness": {"id": "harbor_env", "environment_type": "docker", "max_turns": 30},
                                "runtime": {"type": "subprocess"},
                            },
                        },
                    }
                ],
            },
            "eval": {
                "interval": 20,
                "group_size": 2,
                "sampling": {"max_completion_tokens": 1024},
                "source": [
                    {
                        "name": "heldout",
                        "group_size": 4,
                        "env": {
                            "taskset": {"id": "harbor_env", "tasks_dir": "datasets/harbor_tasks"},
                            "agent": {"harness": {"id": "harbor_env"}, "runtime": {"type": "subprocess"}},
                        },
                    }
                ],
            },
        },
        "inference": {
            "vllm": {
                "max_model_len": 8192,
                "tensor_parallel_size": 1,
                "data_parallel_size": 1,
                "gpu_memory_utilization": 0.8,
            }
        },
    }


def test_each_change_is_told():
    notes = translate(tomllib.loads(OLD.read_text())).notes
    for part in (
        "`[[orchestrator.env]]` is now `[[orchestrator.train.source]]`",
        "`wandb` is now `monitors.wandb`",
        "`orchestrator.rollouts_per_example` is now `orchestrator.group_size`",
        "`args.n_parallel_envs` is now `orchestrator.concurrency.max_inflight`, for the whole run",
        "`args.vllm_base_url` was removed: Prime-RL passes the address of its engine",
    ):
        assert part in notes
    assert any(note.startswith("`orchestrator.buffer` was removed") for note in notes)


def test_what_is_todays_already_stays_as_it_is():
    values = tomllib.loads(TODAY.read_text())
    translation = translate(values)
    assert (translation.values, translation.notes) == (values, [])


def test_translating_leaves_the_given_settings_alone():
    values = tomllib.loads(OLD.read_text())
    translate(values)
    assert values == tomllib.loads(OLD.read_text())


def test_a_step_to_go_on_from_is_kept():
    assert translated("[ckpt]\nresume_step = 20\n") == {"ckpt": {}, "resume": {"step": 20}}


def test_another_environment_keeps_its_arguments():
    found = translated("[[orchestrator.train.env]]\nid = 'me/word-game'\nargs = {level = 3}\n")
    assert found["orchestrator"]["train"]["source"] == [{"env": {"taskset": {"id": "word_game", "level": 3}}}]


def test_the_form_of_0_7_is_translated_too():
    source = "[[orchestrator.train.env]]\nname = 'harbor'\ntaskset = {id = 'harbor_env', tasks_dir = 't'}\n"
    found = translated(source + "harness = {id = 'harbor_env', max_turns = 3}\n")
    assert found["orchestrator"]["train"]["source"] == [
        {
            "name": "harbor",
            "env": {
                "taskset": {"id": "harbor_env", "tasks_dir": "t"},
                "agent": {"harness": {"id": "harbor_env", "max_turns": 3}},
            },
        }
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[orchestrator.env]]\nid = 'harbor_env'\nargs = {n_envs = 3}\n", "`harbor_env` has no argument `n_envs`"),
        ("[orchestrator.env]\nid = 'harbor_env'\n", "not a list of tables"),
        ("[orchestrator]\nenv = [3]\n", "`orchestrator.env` is `[3]`, not a list of tables"),
        ("[[orchestrator.env]]\nid = 'harbor_env'\nargs = 3\n", "`args` of `harbor_env` is `3`, not a table"),
        ("wandb = {project = 'a'}\nmonitors = 3\n", "but `monitors` there is `3`"),
        (
            "[orchestrator]\nrollouts_per_example = 8\ngroup_size = 4\n",
            "`orchestrator.rollouts_per_example` is `8`, and `orchestrator.group_size` is `4`",
        ),
    ],
)
def test_what_cannot_be_translated_is_refused(text: str, message: str):
    with pytest.raises(UsageError) as caught:
        translated(text)
    assert message in caught.value.message


def test_an_old_file_is_launched_from_a_new_one_beside_it(tmp_path: Path):
    old = tmp_path / "old.toml"
    old.write_text(OLD.read_text())
    own = read_own_file(old)
    own.write()
    launch = own.launch(None, ["--max-steps", "3"])
    assert launch.command == ("rl", "@", str(tmp_path / "old.translated.toml"), "--max-steps", "3")
    assert tomllib.loads((tmp_path / "old.translated.toml").read_text()) == translated(OLD.read_text())
    assert launch.notes[0].endswith("is its translation:")
    assert old.read_text() == OLD.read_text()


def test_a_file_of_today_is_launched_as_it_is():
    own = read_own_file(TODAY)
    assert (own.file, own.text, own.environments, own.notes) == (TODAY, None, ("docker",), ())


@pytest.mark.parametrize(
    ("tasks_dir", "message"),
    [("tasks_dir = 'nowhere'", "`nowhere` is not a folder of tasks"), ("", "`tasks_dir` of a taskset in `")],
)
def test_tasks_that_are_not_there_are_found_before_a_model_is_loaded(tmp_path: Path, tasks_dir: str, message: str):
    file = tmp_path / "rl.toml"
    file.write_text(
        f"[[orchestrator.train.source]]\n[orchestrator.train.source.env.taskset]\nid='harbor_env'\n{tasks_dir}"
    )
    with pytest.raises(DockyardError) as caught:
        read_own_file(file)
    assert message in caught.value.message


def test_a_file_without_anything_to_train_on_is_refused(tmp_path: Path):
    file = tmp_path / "rl.toml"
    file.write_text("[orchestrator]\nbatch_size = 8\n")
    with pytest.raises(UsageError, match="has no source to train on"):
        read_own_file(file)
