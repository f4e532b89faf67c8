"""`import dockyard` as a script or a notebook uses it, without torch."""

import ast
import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from callers import Caller, from_anywhere, in_a_running_loop, nothing_left_behind
from converting import agent, trajectory, user
from finished_jobs import write_trial
from gateway_fakes import tiny_model

import dockyard
from dockyard import process
from dockyard.config import AgentConfig, RunConfig, TasksConfig, TrainerConfig
from dockyard.convert.sample_files import read_samples
from dockyard.engine.open import check_embedded
from dockyard.errors import DockyardError, UsageError
from dockyard.run_dir.run import EVAL_BEFORE, Purpose, RunDir, step_phase
from dockyard.settings.load import load_run_config
from dockyard.settings.messages import SettingsError
from dockyard.settings.overrides import Overrides, value_overrides
from dockyard.tasks.generated import write_demo_tasks
from dockyard.types import Blame, Failure, Rollout, Segment
from dockyard.verbs import load_training

ORACLE: dict[str, Any] = {"tasks": {"source": "demo"}, "agent": {"name": "oracle"}}
deprecated = pytest.mark.filterwarnings("ignore:.*checksum.*:DeprecationWarning")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_dockyard_loads_no_heavy_package():
    heavy = {"torch", "transformers", "harbor", "litellm", "pydantic", "numpy", "pyarrow", "aiohttp"}
    assert python(f"import sys, dockyard; print(sorted({heavy!r} & set(sys.modules)))") == "[]\n"


def test_the_functions_can_be_called_when_every_module_is_imported():
    """A module of the same name would replace the function as soon as something imports it."""
    code = """
import importlib, pkgutil, dockyard
for module in pkgutil.walk_packages(dockyard.__path__, "dockyard."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ImportError as error:  # of an extra that is not installed
        if (error.name or "dockyard").startswith("dockyard"):
            raise

def message_of(call):
    try:
        call()
    except dockyard.DockyardError as error:
        return error.message

print(message_of(lambda: dockyard.train(stepz=1)))
print(message_of(lambda: dockyard.run_rollouts(stepz=1)))
print(message_of(lambda: dockyard.evaluate(stepz=1)))
print(message_of(lambda: dockyard.convert_job("nowhere")))
print(message_of(lambda: dockyard.load_run("nowhere")))
"""
    assert python(code).splitlines() == [
        "`stepz` in the arguments of `train` is not a setting",
        "`stepz` in the arguments of `run_rollouts` is not a setting",
        "`stepz` in the arguments of `evaluate` is not a setting",
        "`nowhere` does not exist",
        "`nowhere` holds no run",
    ]


def test_every_public_name_can_be_used_and_is_visible_to_type_checkers():
    for name in dockyard.__all__:
        assert getattr(dockyard, name) is not None
        assert name in dir(dockyard)
    tree = ast.parse(Path(dockyard.__file__).read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == set(dockyard.__all__) - {"__version__"}
    assert Path(dockyard.__file__).with_name("py.typed").is_file()


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module `dockyard` has no attribute `tran`"):
        _ = dockyard.tran  # pyright: ignore[reportAttributeAccessIssue]


def loaded(*values: dict[str, Any]) -> RunConfig:
    read = [value_overrides(RunConfig, given, "in a test") for given in values]
    patches = tuple(patch for overrides in read for patch in overrides.patches)
    return load_run_config(None, Overrides(patches, tuple(problem for item in read for problem in item.problems)))


def test_settings_are_overridden_by_name_by_section_and_by_dotted_key():
    demo = {"tasks": {"source": "demo"}}
    expected = RunConfig(steps=3, tasks=TasksConfig(source="demo"), trainer=TrainerConfig(lr=1e-5, lora_r=8))
    assert loaded(demo, {"steps": 3, "trainer": {"lr": 1e-5, "lora_r": 8}}) == expected
    assert loaded(demo, {"steps": 3, "trainer.lr": 1e-5, "trainer.lora_r": np.int64(8)}) == expected
    assert loaded(demo, {"steps": np.int64(3), "trainer": TrainerConfig(lr=1e-5, lora_r=8)}) == expected


def test_every_kind_of_value_arrives_as_it_was_given(tmp_path: Path):
    config = RunConfig.model_validate(
        {
            "run_dir": tmp_path,
            "tasks": {"source": "swebench", "dataset": "d", "ids": ("1", "true"), "map": {"a": "none"}, "limit": None},
            "agent": {"name": "shell", "kwargs": {"text": "3", "number": 3, "deep": {"list": [1, "none", True]}}},
            "grpo": {"dynamic_sampling": True},
            "trainer": {"lr": 3e-05},
        }
    )
    assert loaded(config.model_dump(exclude_unset=True)) == config
    assert loaded(ORACLE, {"agent.kwargs.number": "3", "agent.kwargs.path": tmp_path}).agent == AgentConfig(
        name="oracle", kwargs={"number": "3", "path": str(tmp_path)}
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"stepz": 3}, "`stepz` {} is not a setting"),
        ({"trainer": {"lrr": 3}}, "`trainer.lrr` {} is not a setting"),
        ({"trainer.lrr": 3}, "`trainer.lrr` {} is not a setting"),
        ({"trainerz": {}}, "`trainerz` {} is not a setting"),
        ({"trainer.": 3}, "`trainer.` {} is not a setting"),
        ({"steps": "many"}, "`steps` {} is `many`; it must be an integer of at least 0"),
        ({"steps": 1.5}, "`steps` {} is `1.5`; it must be an integer of at least 0"),
        ({"steps": None}, "`steps` {} is `none`; it must be an integer of at least 0"),
        ({"steps": True}, "`steps` {} is `True`; it must be an integer of at least 0"),
        ({"steps": np.True_}, "`steps` {} is `True`; it must be an integer of at least 0"),
        ({"agent": {"max_turns": False}}, "`agent.max_turns` {} is `False`; it must be an integer"),
        ({"trainer.lr": True}, "`trainer.lr` {} is `True`; it must be a number"),
        ({"trainer": 3}, "`trainer` {} is a section, not a setting"),
        ({"tasks.train": ""}, "`tasks.train` {} is empty; it must be a path"),
        ({"agent.kwargs": {"a": None}}, "`agent.kwargs` {} is `{{'a': None}}`; a table cannot hold null"),
        ({"engine.max_batch": 3, "engine.deterministic": True}, "`engine.max_batch` has no effect"),
    ],
)
def test_a_mistake_in_the_settings_names_the_argument_and_makes_nothing(
    overrides: dict[str, Any], message: str, tmp_path: Path
):
    for call in (dockyard.train, dockyard.run_rollouts, dockyard.evaluate):
        with pytest.raises(SettingsError) as caught:
            call(ORACLE, **overrides)
        assert message.format(f"in the arguments of `{call.__name__}`") in caught.value.message
        assert caught.value.hint
        assert "--trainer" not in f"{caught.value.message}{caught.value.hint}"  # nobody wrote a flag
        with pytest.raises(SettingsError) as caught:
            call(ORACLE | overrides)
        assert message.format(f"in the `config` of `{call.__name__}`") in caught.value.message
    assert list(tmp_path.iterdir()) == []


def test_mistakes_in_the_settings_and_in_the_arguments_are_reported_together():
    with pytest.raises(SettingsError) as caught:
        dockyard.train({"stepz": 3, "seed": -1}, trainer={"lrr": 3, "lr": -1})
    assert [problem.message.partition(" is ")[0] for problem in caught.value.problems] == [
        "`stepz` in the `config` of `train`",
        "`trainer.lrr` in the arguments of `train`",
        "`seed` in the `config` of `train`",
        "`trainer.lr` in the arguments of `train`",
    ]


def test_an_empty_section_changes_nothing_and_text_that_reads_none_stays_text():
    assert loaded(ORACLE, {"trainer": {}, "eval": {}}) == loaded(ORACLE)
    assert loaded({"tasks.source": "demo", "tracker.wandb": "none"}).tracker.wandb == "none"


def test_a_mistake_in_a_file_is_reported_with_the_file(tmp_path: Path):
    Path("run.toml").write_text("[trainer]\nlrr = 1\n")
    with pytest.raises(SettingsError, match="`trainer.lrr` in `run.toml` is not a setting"):
        dockyard.train("run.toml")
    with pytest.raises(UsageError, match="`none.toml` does not exist"):
        dockyard.train(Path("none.toml"))
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_arguments_that_contradict_a_resumed_run_are_refused(tmp_path: Path):
    RunDir.create(tmp_path / "run", RunConfig.model_validate(ORACLE), purpose=Purpose(verb="rollout")).close()
    with pytest.raises(UsageError, match="`config` cannot be combined with `resume`"):
        dockyard.run_rollouts("run.toml", resume="run")
    with pytest.raises(UsageError, match="`overwrite` cannot be combined with `resume`"):
        dockyard.run_rollouts(resume="run", overwrite=True)
    with pytest.raises(UsageError, match="`num_tasks` cannot be combined with `resume`"):
        dockyard.run_rollouts(resume="run", num_tasks=1)
    with pytest.raises(UsageError, match="`run` was started by `dockyard rollout`"):
        dockyard.train(resume="run")
    with pytest.raises(UsageError, match="`seed` cannot change in a run that has started"):
        dockyard.run_rollouts(resume="run", seed=1)
    with pytest.raises(UsageError, match="`none` holds no run"):
        dockyard.train(resume="none")


def test_a_number_of_tasks_below_1_and_a_folder_without_an_adapter_are_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="`num_tasks` is `0`; it must be an integer of at least 1"):
        dockyard.run_rollouts(ORACLE, num_tasks=0)
    with pytest.raises(UsageError, match="has no `adapter_config.json`"):
        dockyard.evaluate(ORACLE, adapter=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda api: api.train(3), "`config` is `3`; it must be a `RunConfig`, a dict of settings, or the path"),
        (lambda api: api.train(["x"]), "`config` is `['x']`; it must be a `RunConfig`"),
        (lambda api: api.train(0), "`config` is `0`; it must be a `RunConfig`"),
        (lambda api: api.train(""), "`config` is empty; it must be a path"),
        (lambda api: api.train(ORACLE, overwrite="no"), "`overwrite` is `no`; it must be True or False"),
        (lambda api: api.train(resume=3), "`resume` is `3`; it must be a path"),
        (lambda api: api.run_rollouts(ORACLE, num_tasks="3"), "`num_tasks` is `3`; it must be an integer of at least"),
        (lambda api: api.run_rollouts(ORACLE, num_tasks=True), "`num_tasks` is `True`; it must be an integer"),
        (lambda api: api.run_rollouts(ORACLE, num_tasks=1.5), "`num_tasks` is `1.5`; it must be an integer"),
        (lambda api: api.run_rollouts(ORACLE, harbor_cli="x"), "`harbor_cli` is `x`; it must be True or False"),
        (lambda api: api.evaluate(ORACLE, split="trian"), "`split` is `trian`; it must be `heldout` or `train`"),
        (lambda api: api.evaluate(ORACLE, split=[]), "`split` is `[]`; it must be `heldout` or `train`"),
        (lambda api: api.evaluate(ORACLE, adapter=3), "`adapter` is `3`; it must be a path"),
        (lambda api: api.convert_job(3), "`path` is `3`; it must be a path"),
        (lambda api: api.convert_job("job", output=b"x"), "`output` is `b'x'`; it must be a path"),
        (lambda api: api.convert_job("job", tokenizer=3), "`tokenizer` is `3`; it must be a model folder"),
        (lambda api: api.convert_job("job", text="no"), "`text` is `no`; it must be True or False"),
        (lambda api: api.load_run(3), "`path` is `3`; it must be a path"),
    ],
)
def test_an_argument_of_a_wrong_kind_is_named_with_its_value(call: Any, message: str, tmp_path: Path):
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        call(dockyard)
    assert caught.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("load", [check_embedded, load_training])
def test_a_missing_kernel_of_bitsandbytes_is_not_logged_and_other_logging_stays(
    load: Callable[[], object], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """bitsandbytes writes this line on some CPUs as soon as PEFT is imported."""
    other = logging.getLogger("bitsandbytes.backends.cpu.ops")
    monkeypatch.setattr(other, "filters", [])
    monkeypatch.setitem(sys.modules, "torch", None)  # not needed here, and slow to import
    line = "Failed to load CPU gemm_4bit_forward from kernels-community: %s."
    other.warning(line, "before")
    root = logging.getLogger()
    before = root.level, list(root.handlers), logging.getLogger("bitsandbytes").level
    with contextlib.suppress(DockyardError):
        load()
    other.warning(line, "after")
    other.warning("another line")
    assert (root.level, list(root.handlers), logging.getLogger("bitsandbytes").level) == before
    with caplog.at_level(logging.DEBUG, logger="dockyard"):
        other.warning(line, "while debugging")
    shown = [record.getMessage() for record in caplog.records if record.name == other.name]
    assert shown == [line % "before", "another line", line % "while debugging"]


def a_rollout(attempt: int, reward: float | None) -> Rollout:
    segment = Segment(
        token_ids=np.array([1, 2], np.int32),
        sampled=np.array([False, True]),
        logprobs=np.array([0, -0.5], np.float32),
        versions=None,
    )
    lost = Failure(cause="engine_failed", blame=Blame.INFRASTRUCTURE, message="gone")
    return Rollout(
        task="t",
        kind="k",
        attempt=attempt,
        segments=(segment,),
        reward=reward,
        failure=lost if reward is None else None,
        seconds={"agent": 1.5},
        stats={"calls": 2},
    )


@pytest.fixture
def finished(tmp_path: Path) -> dockyard.Run:
    with RunDir.create(tmp_path / "run", RunConfig(steps=2, tasks=TasksConfig(source="demo"))) as run:
        run.write_rollout(EVAL_BEFORE, a_rollout(0, 0.25), transcript="hello")
        run.write_rollout(step_phase(0), a_rollout(0, 1.0))
        run.write_rollout(step_phase(0), a_rollout(1, None))
        run.record_metrics(0, {"reward/mean": 1})
        run.record_metrics(1, {"reward/mean": float("nan"), "reward/heldout": 0.5})
        run.write_summary({"rewards": [1.0, None]})
    return dockyard.load_run("run")


def test_a_run_is_read_as_tables(finished: dockyard.Run, tmp_path: Path):
    assert (finished.path, finished.config.steps) == (tmp_path / "run", 2)
    assert finished.config.run_dir == tmp_path / "run"
    assert finished.summary == {"rewards": [1.0, None]}
    metrics = finished.metrics(as_="arrow")
    assert metrics.to_pydict() == {"step": [0, 1], "reward/mean": [1.0, None], "reward/heldout": [None, 0.5]}
    rollouts = finished.rollouts(as_="arrow")
    assert rollouts.select(["phase", "step", "attempt", "reward", "failure", "num_sampled"]).to_pylist() == [
        {"phase": "eval-before", "step": None, "attempt": 0, "reward": 0.25, "failure": None, "num_sampled": 1},
        {"phase": "step-00000", "step": 0, "attempt": 0, "reward": 1.0, "failure": None, "num_sampled": 1},
        {"phase": "step-00000", "step": 0, "attempt": 1, "reward": None, "failure": "engine_failed", "num_sampled": 1},
    ]
    assert rollouts["seconds/agent"].to_pylist() == [1.5] * 3
    assert rollouts["stats/calls"].to_pylist() == [2] * 3
    assert rollouts["transcript"][0].as_py() == "hello"
    assert "segments" not in rollouts.column_names


def test_tokens_are_read_when_asked_for_and_one_phase_by_its_name(finished: dockyard.Run):
    rollouts = finished.rollouts("eval-before", tokens=True, as_="arrow")
    expected = {"token_ids": [1, 2], "sampled": [False, True], "logprobs": [0, -0.5], "versions": None}
    assert rollouts["segments"].to_pylist() == [[expected]]


@pytest.mark.parametrize("phase", ["eval-befor", "eval-after", "step-99999", "step-x", "stepp", "", "../metrics", 3])
def test_a_phase_without_rollouts_is_an_error_that_lists_the_phases(finished: dockyard.Run, phase: Any):
    with pytest.raises(UsageError, match=re.escape(f"`{phase}` is not a phase that `{finished.path}` has")) as caught:
        finished.rollouts(phase, as_="arrow")
    assert caught.value.hint == "the phases of this run are `eval-before`, `step-00000`"


def test_of_many_phases_the_first_and_the_last_are_listed(tmp_path: Path):
    with RunDir.create(tmp_path / "run", RunConfig.model_validate(ORACLE)) as run:
        reader = dockyard.load_run(run.path)
        with pytest.raises(UsageError) as caught:
            reader.rollouts("eval")
        assert caught.value.hint == "the run has recorded no rollouts yet"
        for step in range(30):
            run.write_rollout(step_phase(step), a_rollout(0, 1.0))
    with pytest.raises(UsageError, match="`eval` is not a phase") as caught:
        reader.rollouts("eval")
    assert "`step-00000`, `step-00001`, " in caught.value.hint
    assert caught.value.hint.endswith("`step-00010`, ... `step-00029`")


@pytest.mark.parametrize(
    ("line", "problem"),
    [("{}", "it has no `step`"), ('{"step": 1, "reward/mean": "x"}', "`reward/mean`: "), ('{"st', "Invalid JSON: ")],
)
def test_a_damaged_line_of_metrics_is_an_error_with_its_place(finished: dockyard.Run, line: str, problem: str):
    file = finished.path / "metrics.jsonl"
    good = file.read_text().splitlines()
    file.write_text(f"{good[0]}\n{line}\n{good[1]}\n")
    with pytest.raises(DockyardError, match=re.escape(f"`{file}` line 2 is not the metrics of a step: {problem}")):
        finished.metrics(as_="arrow")
    file.write_text(f"{good[0]}\n{good[1]}\n{line}")  # a process that was killed wrote a part of the last line
    assert finished.metrics(as_="arrow")["step"].to_pylist() == [0, 1]


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": 1} x'])
def test_a_damaged_summary_is_an_error_with_its_place(finished: dockyard.Run, content: str):
    file = finished.path / "summary.json"
    file.write_text(content)
    with pytest.raises(DockyardError, match=re.escape(f"`{file}` is not the summary of a run: ")) as caught:
        _ = finished.summary
    assert "resume the run" in caught.value.hint


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[project]\nname = 'x'\n", "`project` in `{}` is not a setting"),
        ("steps = 'many'\n", "`steps` in `{}` is `many`"),
        ("steps = \n", "`{}` is not valid TOML"),
        ("", "`{}` is empty: the folder holds no run"),
    ],
)
def test_a_folder_whose_settings_are_not_those_of_a_run_is_not_loaded(tmp_path: Path, content: str, problem: str):
    file = tmp_path / "config.toml"
    file.write_text(content)
    with pytest.raises(UsageError, match=re.escape(problem.format(file))):
        dockyard.load_run(tmp_path)


def test_tables_are_data_frames_where_pandas_is_installed(finished: dockyard.Run):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    metrics, rollouts = finished.metrics(), finished.rollouts()
    assert isinstance(metrics, pandas.DataFrame)
    assert list(metrics["step"]) == [0, 1]
    assert rollouts.query("phase == 'step-00000'")["task"].tolist() == ["t", "t"]
    assert max(rollouts["reward"].tolist()) == pytest.approx(1.0)


def test_without_pandas_the_error_names_the_command_and_arrow_works(
    finished: dockyard.Run,
):
    code = """
import sys
class WithoutPandas:
    def find_spec(self, name, *_):
        if name == "pandas":
            raise ModuleNotFoundError("No module named 'pandas'", name="pandas")
sys.meta_path.insert(0, WithoutPandas())
import dockyard
run = dockyard.load_run("run")
print(run.rollouts(as_="arrow").num_rows, run.metrics(as_="arrow").num_rows)
for read in (run.metrics, run.rollouts):
    try:
        read()
    except dockyard.DockyardError as error:
        print(error.message, error.hint, sep="|")
"""
    counts, *errors = python(code).splitlines()
    assert counts == "3 2"
    assert [error.partition("|")[0] for error in errors] == [
        "`run.metrics()` needs `pandas`, which is not installed",
        "`run.rollouts()` needs `pandas`, which is not installed",
    ]
    assert all("`pip install pandas`" in error for error in errors)


def test_another_kind_of_table_is_refused(finished: dockyard.Run):
    with pytest.raises(UsageError, match="`as_` is `polars`; it must be `pandas` or `arrow`"):
        finished.metrics(as_="polars")  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_a_run_that_has_just_begun_is_read_too_and_nothing_is_written(tmp_path: Path):
    with RunDir.create(tmp_path / "run", RunConfig.model_validate(ORACLE)) as run:
        before = sorted(run.path.rglob("*"))
        reader = dockyard.load_run(run.path)
        assert (reader.summary, reader.adapter, reader.config.agent.name) == (None, None, "oracle")
        assert (reader.metrics(as_="arrow").num_rows, reader.rollouts(as_="arrow").num_rows) == (0, 0)
        assert isinstance(reader.rollouts(as_="arrow"), pa.Table)
        assert sorted(run.path.rglob("*")) == before
    with pytest.raises(UsageError, match="`nowhere` holds no run"):
        dockyard.load_run("nowhere")
    assert not Path("nowhere").exists()


def test_the_adapter_is_the_newest_that_was_trained(finished: dockyard.Run):
    assert finished.adapter is None
    for version in (0, 9, 10):
        assert finished.adapter == (finished.path / "adapters/v00009" if version == 10 else None)
        folder = finished.path / f"adapters/v{version:05}"
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
    assert finished.adapter == finished.path / "adapters/v00010"
    (finished.path / "adapters/v00011").mkdir()  # all weights, no adapter
    assert finished.adapter == finished.path / "adapters/v00010"


def job(folder: Path) -> Path:
    trial = write_trial(folder, "a__1", reward=0.25)
    (trial / "agent").mkdir(exist_ok=True)
    steps = user("please list the files in the folder"), agent("ls")
    (trial / "agent/trajectory.json").write_text(json.dumps(trajectory(*steps)))
    return folder


def test_a_job_becomes_samples_in_memory_and_in_a_file(tmp_path: Path):
    (tmp_path / "job").mkdir()
    with nothing_left_behind():
        samples = dockyard.convert_job(job(tmp_path / "job"), tokenizer=tiny_model(), output="samples.jsonl")
    assert [(sample.reward, int(sample.loss_mask.sum()) > 0) for sample in samples] == [(0.25, True)]
    [written] = read_samples(Path("samples.jsonl"))
    assert np.array_equal(written.tokens, samples[0].tokens)


def test_a_job_from_which_nothing_is_converted_is_an_error_and_leaves_no_file(tmp_path: Path):
    (tmp_path / "job").mkdir()
    with pytest.raises(DockyardError, match="nothing in `.*job` could be converted") as caught:
        dockyard.convert_job(job(tmp_path / "job"), output="samples.jsonl")
    assert "no_tokenizer 1" in caught.value.message
    assert "`tokenizer=MODEL`" in caught.value.hint
    with pytest.raises(UsageError, match="`text` needs `tokenizer`"):
        dockyard.convert_job("job", text=True)
    assert not Path("samples.jsonl").exists()


@from_anywhere
def test_a_coroutine_is_run_from_anywhere_and_leaves_nothing_behind(caller: Caller):
    async def answer() -> int:
        process_ = await asyncio.create_subprocess_exec("true")
        await process_.wait()
        return 7

    with nothing_left_behind():
        assert caller(lambda: process.blocking(lambda: process.run(answer()))) == 7


@from_anywhere
def test_what_a_coroutine_raises_is_raised_anywhere(caller: Caller):
    async def fail() -> None:
        raise KeyError("x")

    with nothing_left_behind(), pytest.raises(KeyError):
        caller(lambda: process.blocking(lambda: process.run(fail())))


@pytest.mark.parametrize("caller", [lambda call: call(), in_a_running_loop])
def test_an_interrupted_call_cleans_up_and_puts_the_signal_handlers_back(caller: Caller):
    events: list[str] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0)
            events.append("cleaned up")

    with nothing_left_behind(), pytest.raises(KeyboardInterrupt):
        caller(lambda: process.blocking(lambda: process.run(work())))
    assert events == ["cleaned up"]


def test_an_interruption_before_the_coroutine_starts_stops_it_too():
    async def work() -> None:
        raise AssertionError("the coroutine started")

    def call() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        while not interrupted():
            time.sleep(0.001)
        process.run(work())

    def interrupted() -> bool:
        request = process._STOP_REQUEST.get()  # pyright: ignore[reportPrivateUsage]
        return request is not None and request.is_set

    with nothing_left_behind(), pytest.raises(KeyboardInterrupt):
        in_a_running_loop(lambda: process.blocking(call))


@pytest.mark.real
@deprecated
@from_anywhere
def test_rollouts_are_made_from_anywhere(caller: Caller, tmp_path: Path):
    Path(".env").write_text("DOCKYARD_TEST_KEY=1")

    def notebook() -> dockyard.Run:
        return dockyard.run_rollouts(ORACLE, num_tasks=2, run_dir="mine", grpo={"group_size": 2})

    with nothing_left_behind():
        run = caller(notebook)
    assert isinstance(run, dockyard.Run)
    assert run.path == tmp_path / "mine"
    assert run.summary is not None
    assert (run.summary["tasks"], run.summary["rollouts"], run.summary["reward"]) == (2, 4, 1.0)
    assert run.rollouts(as_="arrow")["reward"].to_pylist() == [1.0] * 4
    assert run.adapter is None


@pytest.mark.real
@deprecated
def test_a_finished_run_is_resumed_without_new_rollouts_and_replaced_on_request():
    first = dockyard.run_rollouts(ORACLE, num_tasks=1, run_dir="mine")
    with pytest.raises(UsageError, match="already holds a run"):
        dockyard.run_rollouts(ORACLE, num_tasks=1, run_dir="mine")
    again = dockyard.run_rollouts(resume="mine", rollout={"concurrency": 2})
    assert again.rollouts(as_="arrow").equals(first.rollouts(as_="arrow"))
    assert again.config.rollout.concurrency == 2
    replaced = dockyard.run_rollouts(
        RunConfig.model_validate(ORACLE), num_tasks=1, run_dir="mine", overwrite=True, seed=1
    )
    assert replaced.config.seed == 1


@pytest.mark.real
@deprecated
@from_anywhere
def test_an_evaluation_goes_beside_the_training_run_and_has_scores(caller: Caller, tmp_path: Path):
    Path("run.toml").write_text(
        'run_dir = "mine"\n[tasks]\nsource = "demo"\nnum_heldout = 4\n[agent]\nname = "oracle"\n'
    )
    with nothing_left_behind():
        run = caller(lambda: dockyard.evaluate("run.toml", eval={"samples": 2}))
    assert isinstance(run, dockyard.Run)
    assert run.path == tmp_path / "mine-eval"
    assert run.summary is not None
    assert run.summary["scores"]["passes"]["2"]["mean"] == 1.0
    assert (run.summary["rollouts"], run.summary["split"]) == (8, "heldout")


@pytest.mark.real
@deprecated
def test_the_training_tasks_are_evaluated_on_request(tmp_path: Path):
    write_demo_tasks(tmp_path / "demo", num_train=4, num_heldout=4)
    run = dockyard.evaluate({"tasks.train": "demo/train", "agent.name": "nop"}, split="train", run_dir="other")
    assert run.path == tmp_path / "other"
    assert run.summary is not None
    assert (run.summary["split"], run.summary["scores"]["reward"]["mean"]) == ("train", 0.0)


@pytest.mark.real
@deprecated
@from_anywhere
def test_the_harbor_classes_work_from_anywhere(caller: Caller, tmp_path: Path):
    write_demo_tasks(tmp_path / "demo", num_train=4, num_heldout=4)
    config = dockyard.HarborConfig(agent="oracle", environment="sandbox", output_dir=tmp_path / "out")
    with nothing_left_behind():
        rollouts = caller(lambda: dockyard.HarborRolloutGenerator(config).generate(tmp_path / "demo/train", n_tasks=2))
    assert isinstance(rollouts, list)
    assert [rollout.reward for rollout in rollouts] == [1.0, 1.0]
    read = caller(lambda: dockyard.HarborRolloutGenerator().generate_from_existing_job(tmp_path / "out/trials"))
    assert isinstance(read, list)
    assert [rollout.reward for rollout in read] == [1.0, 1.0]
    converter = dockyard.HarborTrajectoryConverter(tiny_model())
    assert caller(lambda: converter.load_job(tmp_path / "out/trials")) == []


@pytest.mark.real
@deprecated
def test_training_with_an_agent_that_samples_no_tokens_reports_its_rewards(caplog: pytest.LogCaptureFixture):
    run = dockyard.train(ORACLE | {"tasks.num_train": 4}, grpo={"group_size": 2})
    assert run.summary is not None
    assert run.summary["reward"] == 1.0
    assert "agent `oracle` samples no tokens" in caplog.text
