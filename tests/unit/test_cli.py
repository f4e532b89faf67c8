"""The command line: what goes to stdout and stderr, exit codes, signals."""

import json
import logging
import os
import pty
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import pytest
from gateway_fakes import write_model

from dockyard import __version__
from dockyard.cli import main
from dockyard.cli.main import VERBS, load_verb
from dockyard.config import RunConfig
from dockyard.errors import DockyardError
from dockyard.run_dir.run import RunDir
from dockyard.settings.text import settings_by_key

DEMO = ("--tasks.source", "demo")
NO_URL = "`--engine vllm` needs the URL of a server, and `engine.url` is not set"
EPOCHS_TOO_FEW = "`--epochs` on the command line is `0`; it must be an integer of at least 1, or none"
PATIENCE_S = 600  # only against hanging


@dataclass(slots=True)
class FakeTraining:
    """A training loop that records how it was called and ends as given."""

    error: BaseException | None = None
    calls: list[tuple[RunConfig, Path]] = field(default_factory=list)

    def __call__(self, config: RunConfig, *, run_dir: RunDir) -> None:
        self.calls.append((config, run_dir.path))
        if self.error:
            raise self.error
        run_dir.write_summary({"reward": 0.5})


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    yield
    logging.getLogger("dockyard").setLevel(logging.NOTSET)


def test_a_dry_run_prints_toml_that_loads_back_and_makes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["train", "--dry-run", "--trainer.lr", "1e-4", *DEMO]) == 0
    printed = capsys.readouterr().out
    assert tomllib.loads(printed)["trainer"]["lr"] == 1e-4
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run.toml").write_text(printed)
    assert main(["train", "run.toml", "--dry-run"]) == 0
    assert capsys.readouterr().out == printed


def test_a_dry_run_as_json(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "--json", "--dry-run", *DEMO, "--steps=3"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 3


@pytest.mark.parametrize(
    "words",
    [
        ["train", "run.toml", "--trainer.lr", "1e-4", "--dry-run"],
        ["train", "--trainer.lr", "1e-4", "run.toml", "--dry-run"],
        ["train", "--dry-run", "--trainer.lr=1e-4", "run.toml"],
    ],
)
def test_the_file_and_the_settings_may_come_in_any_order(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "run.toml").write_text('steps = 5\ntasks.source = "demo"\n')
    assert main(words) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert (printed["steps"], printed["trainer"]["lr"]) == (5, 1e-4)


def test_mistakes_go_to_stderr_as_error_and_hint_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "run.toml").write_text("[grpo]\ngrup_size = 3\n")
    assert main(["train", "run.toml", "--lr", "3"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "error: `--lr` is not a setting",
        "hint: did you mean `--trainer.lr`? `dockyard train --help` lists every setting",
        "error: `grpo.grup_size` in `run.toml` is not a setting",
        "hint: did you mean `grpo.group_size`? `dockyard train --help` lists every setting",
    ]


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        ([], "`dockyard` needs a verb", "`dockyard --help`"),
        (["trian"], "`trian` is not a verb", "did you mean `dockyard train`?"),
        (["train", "--dryrun"], "`--dryrun` is not an option", "did you mean `--dry-run`?"),
        (["train", "a.toml", "b.toml"], "unrecognized arguments: b.toml", "`dockyard train --help`"),
        (["train", "--resume"], "argument --resume: expected one argument", "`dockyard train --help`"),
        (["train", "--resume", "r", "a.toml"], "`a.toml` cannot be combined with `--resume`", "its own settings"),
        (
            ["train", "--resume", "r", "--overwrite"],
            "`--overwrite` cannot be combined with `--resume`",
            "its own settings",
        ),
        (["train", "--resume", "nowhere"], "`nowhere` holds no run", "`dockyard train RUN.toml`"),
        (["train", "none.toml"], "`none.toml` does not exist", "--resume RUN_DIR"),
        (["doctor", "--frob"], "unrecognized arguments: --frob", "`dockyard doctor --help`"),
        (["tasks"], "`dockyard tasks` needs a verb", "`dockyard tasks --help`"),
        (["tasks", "chek"], "`chek` is not a verb of `dockyard tasks`", "did you mean `dockyard tasks check`?"),
        (["backend", "zork"], "`zork` is not a verb of `dockyard backend`", "the verbs are slime, prime-rl"),
        (["--json", "train"], "`--json` must come after the verb", "`dockyard --help`"),
        (["train", "--epochs", "0"], EPOCHS_TOO_FEW, "`tasks.passes`"),
        (["train", "--steps", "3", "--epochs=2", *DEMO], "`steps` has no effect when passes are counted", "remove"),
        (["serve"], "`dockyard serve` needs a model", "`dockyard serve smollm2-135m`"),
        (["serve", "m", "--model.name", "n"], "`m` cannot be combined with `--model.name`", "remove one"),
        (["serve", "m", "--prot", "1"], "`--prot` is not a setting", "did you mean `--port`?"),
        (["serve", "m", "--no-auht"], "`--no-auht` is not an option", "did you mean `--no-auth`?"),
        (["serve", "m", "--engine", "vllm"], NO_URL, "`--engine-url"),
        (["serve", "m", "--engine.type=vllm"], NO_URL, "`--engine-url"),
        (
            ["serve", "m", "--port", "-1"],
            "`--port` on the command line is `-1`; it must be an integer between 0 and 65535",
            "`port`: Port to listen on.",
        ),
        (
            ["serve", "m", "--temperature", "nan"],
            "`--temperature` on the command line is `nan`; it must be a finite number",
            "`temperature`: ",
        ),
    ],
)
def test_misuse_exits_2_and_says_the_way_out(
    words: list[str], error: str, hint: str, capsys: pytest.CaptureFixture[str]
):
    training = FakeTraining()
    assert main(words, run_training=training) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"error: {error}"
    assert second.startswith("hint: ")
    assert hint in second
    assert training.calls == []


def test_training_gets_the_settings_and_the_open_run(tmp_path: Path):
    training = FakeTraining()
    assert main(["train", *DEMO, "--run_dir", "mine", "--steps", "3"], run_training=training) == 0
    [(config, path)] = training.calls
    assert (config.steps, path) == (3, tmp_path / "mine")
    assert (tmp_path / "mine" / "config.toml").exists()


def test_a_run_is_resumed_with_its_own_settings(capsys: pytest.CaptureFixture[str]):
    training = FakeTraining()
    assert main(["train", *DEMO, "--run_dir=mine", "--seed=3"], run_training=training) == 0
    assert main(["train", *DEMO, "--run_dir=mine"], run_training=training) == 2
    assert "--resume mine" in capsys.readouterr().err
    assert main(["train", "--resume", "mine", "--steps=9"], run_training=training) == 0
    assert main(["train", *DEMO, "--run_dir=mine", "--overwrite"], run_training=training) == 0
    assert [(config.seed, config.steps) for config, _ in training.calls] == [(3, 50), (3, 9), (0, 50)]


def test_a_dry_run_of_a_resume_shows_its_settings_and_changes_nothing(capsys: pytest.CaptureFixture[str]):
    main(["train", *DEMO, "--run_dir=mine", "--seed=3"], run_training=FakeTraining())
    before = Path("mine/config.toml").read_bytes()
    assert main(["train", "--resume", "mine", "--steps=9", "--dry-run"]) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert (printed["seed"], printed["steps"]) == (3, 9)
    assert Path("mine/config.toml").read_bytes() == before


def test_the_summary_is_printed_as_data_when_asked(capsys: pytest.CaptureFixture[str]):
    assert main(["train", *DEMO, "--json"], run_training=FakeTraining()) == 0
    assert json.loads(capsys.readouterr().out) == {"reward": 0.5}


def test_a_failed_run_exits_1_without_a_traceback(capsys: pytest.CaptureFixture[str]):
    error = DockyardError("the engine died", hint="look at [its] log")
    assert main(["train", *DEMO], run_training=FakeTraining(error)) == 1
    assert capsys.readouterr().err == "error: the engine died\nhint: look at [its] log\n"


def test_a_run_that_fails_before_its_first_result_leaves_no_folder():
    error = DockyardError("the engine died", hint="look at its log")
    assert main(["train", *DEMO, "--run_dir=runs/mine"], run_training=FakeTraining(error)) == 1
    assert not Path("runs/mine").exists()
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("of the user")
    assert main(["train", *DEMO, "--run_dir=mine"], run_training=FakeTraining(error)) == 1
    assert Path("mine/notes.txt").read_text() == "of the user"


def test_after_an_engine_that_did_not_start_its_log_is_there_and_the_same_command_begins_anew():
    def training(config: RunConfig, *, run_dir: RunDir) -> None:
        assert not run_dir.paths.engine_log.exists() or run_dir.paths.engine_log.read_text() == "CUDA error"
        run_dir.paths.engine_log.write_text("CUDA error")
        raise DockyardError("vLLM did not start", hint="look at its log")

    for _ in range(2):
        assert main(["train", *DEMO, "--run_dir=mine"], run_training=training) == 1
        assert {path.name for path in Path("mine").iterdir()} == {"engine.log", "run.lock"}
    assert main(["train", *DEMO, "--run_dir=mine"], run_training=FakeTraining()) == 0


def test_a_bug_exits_1_and_shows_its_traceback_only_with_debug(capsys: pytest.CaptureFixture[str]):
    assert main(["train", *DEMO, "--run_dir=a"], run_training=FakeTraining(KeyError("x"))) == 1
    quiet = capsys.readouterr().err
    assert quiet.startswith("error: unexpected KeyError: 'x'\nhint: ")
    assert "Traceback" not in quiet
    assert "KeyError" in Path("a/crash.txt").read_text()
    assert main(["train", *DEMO, "--run_dir=b", "--debug"], run_training=FakeTraining(KeyError("x"))) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_exits_130_and_says_how_to_resume(capsys: pytest.CaptureFixture[str]):
    assert main(["train", *DEMO, "--run_dir=mine"], run_training=FakeTraining(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "stopped; `dockyard train --resume mine` continues\n"
    RunDir.resume(Path("mine")).close()


def test_signal_handlers_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    main(["train", *DEMO], run_training=FakeTraining())
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("words", [[], *(verb.split() for verb in VERBS), ["tasks"], ["backend"]], ids=str)
def test_every_verb_says_how_it_is_used(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--help"])
    assert capsys.readouterr().out.startswith(" ".join(["usage: dockyard", *words]))


def test_every_verb_of_the_list_is_there_and_every_verb_is_in_the_list():
    modules = {import_module(f"dockyard.cli.{entry.module}") for entry in VERBS.values()}
    assert sorted(verb.name for module in modules for verb in module.VERBS) == sorted(VERBS)


@pytest.mark.parametrize("name", VERBS)
def test_every_short_name_stands_for_a_setting_and_hides_no_flag(name: str):
    verb = load_verb(name)
    known = settings_by_key(verb.settings) if verb.settings else {}
    assert [flag for flag, key in verb.aliases.items() if key not in known] == []
    assert {flag.name for flag in verb.flags}.isdisjoint(verb.aliases)


@pytest.mark.parametrize(
    ("verb", "listed", "left_out"),
    [
        ("tasks check", "--concurrency, --rollout.concurrency INT", "--trainer.lr"),
        ("serve", "--engine-url, --engine.url TEXT", "--engine.launch"),
        ("train", "--epochs, --tasks.passes INT", "--port"),
    ],
)
def test_help_lists_the_settings_that_a_verb_reads_with_their_short_names(
    verb: str, listed: str, left_out: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit, match="0"):
        main([*verb.split(), "--help"])
    shown = capsys.readouterr().out
    assert f"\n  {listed}" in shown
    assert f"\n  {left_out} " not in shown


def test_the_list_of_verbs_loads_neither_settings_nor_what_is_slow():
    code = (
        "import sys\nfrom dockyard.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n"
        "    slow = {'pydantic', 'numpy', 'rich', 'aiohttp', 'harbor', 'litellm', 'torch', 'dockyard.config'}\n"
        "    print(sorted(slow & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stderr == "[]\n"


@pytest.mark.parametrize("verb", ["train", "serve", "tasks check"])
def test_the_help_of_a_verb_loads_neither_harbor_nor_torch(verb: str):
    code = (
        f"import sys\nfrom dockyard.cli import main\ntry:\n    main([*{verb.split()}, '--help'])\nexcept SystemExit:\n"
        "    print(sorted({'harbor', 'litellm', 'torch', 'transformers'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stderr == "[]\n"


def test_a_path_that_cannot_be_used_is_no_bug(capsys: pytest.CaptureFixture[str]):
    Path("file").touch()
    assert main(["tasks", "demo", "file/tasks"]) == 1
    assert capsys.readouterr().err.startswith("error: `file/tasks/train/train-000-write`: Not a directory\nhint: ch")


def test_help_and_version_exit_0(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert "--resume RUN_DIR" in shown
    assert "--trainer.lr FLOAT  (default: 1e-06; at least 0)" in shown
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"dockyard {__version__}\n"


def test_harbor_is_told_to_stay_quiet_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LITELLM_LOCAL_MODEL_COST_MAP")
    monkeypatch.setenv("HARBOR_TELEMETRY", "on")
    main(["train", "--dry-run", *DEMO])
    assert (os.environ["LITELLM_LOCAL_MODEL_COST_MAP"], os.environ["HARBOR_TELEMETRY"]) == ("True", "on")


@pytest.mark.real
def test_a_reader_that_leaves_early_is_no_error():
    script = "import sys; from dockyard.cli import main; sys.exit(main(['train', '--dry-run', '--tasks.source=demo']))"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(PATIENCE_S) == 0


WAIT_SYNC = """
import time
def training(config, *, run_dir):
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        print("cleaned up", flush=True)
"""

WAIT_ASYNC = """
import asyncio
from dockyard import process
async def work():
    try:
        print("ready", flush=True)
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0)  # cleaning up may wait
        print("cleaned up", flush=True)
def training(config, *, run_dir):
    process.run(work())
"""

STUCK = """
import asyncio, time
from dockyard import process
async def work():
    try:
        print("ready", flush=True)
        await asyncio.sleep(60)
    finally:
        print("stuck", flush=True)
        time.sleep(600)
def training(config, *, run_dir):
    process.run(work())
"""

STUBBORN = """
import asyncio
from dockyard import process
async def work():
    try:
        print("ready", flush=True)
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        print("cleaned up", flush=True)  # and returns as if nothing had happened
def training(config, *, run_dir):
    process.run(work())
"""


def start(training: str, folder: Path) -> subprocess.Popen[str]:
    script = f"{training}\nimport sys\nfrom dockyard.cli import main\n" + (
        "sys.exit(main(['train', '--tasks.source=demo', '--run_dir=mine'], run_training=training))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.real
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("training", [WAIT_SYNC, WAIT_ASYNC, STUBBORN], ids=["sync", "async", "stubborn"])
def test_the_first_signal_stops_cleanly(tmp_path: Path, training: str, number: signal.Signals):
    with start(training, tmp_path) as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (130, "cleaned up\n")
    assert err == "stopped; `dockyard train --resume mine` continues\n"


@pytest.mark.real
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_the_process_at_once(tmp_path: Path, number: signal.Signals):
    with start(STUCK, tmp_path) as process:
        process.send_signal(signal.SIGINT)
        assert process.stdout
        assert process.stdout.readline() == "stuck\n"
        began = time.monotonic()
        process.send_signal(number)
        process.wait(PATIENCE_S)
    assert process.returncode == -number
    assert time.monotonic() - began < 300  # long before what it is stuck in


@pytest.mark.real
@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_errors_are_coloured_on_a_terminal_unless_no_color_is_set(no_color: str, coloured: bool):
    ours, theirs = pty.openpty()
    script = "import sys; from dockyard.cli import main; sys.exit(main(['trian']))"
    environment = os.environ | {"NO_COLOR": no_color, "TERM": "xterm-256color"}
    done = subprocess.run([sys.executable, "-c", script], stderr=theirs, env=environment, timeout=PATIENCE_S)
    os.close(theirs)
    shown = os.read(ours, 4096).decode()
    os.close(ours)
    assert done.returncode == 2
    assert ("\x1b[" in shown) is coloured
    assert "`trian` is not a verb" in shown


def test_demo_tasks_are_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["tasks", "demo", "mine"]) == 0
    assert "wrote mine/train and mine/heldout" in capsys.readouterr().err
    assert len(list((tmp_path / "mine/heldout").iterdir())) == 32
    assert main(["tasks", "demo", "mine"]) == 2
    assert "`mine/train` already exists" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["serve", "/nowhere", "--port", "0"], ["doctor", "/nowhere"]])
def test_an_unknown_model_exits_1(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(words) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert error == "error: `/nowhere` is not a model folder"
    assert hint.startswith("hint: ")


def test_a_model_is_examined_as_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (write_model(tmp_path) / "config.json").write_text('{"max_position_embeddings": 512}')
    assert main(["doctor", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["context_length"] == 512


def test_training_without_torch_is_refused_before_a_folder_is_made(tmp_path: Path):
    code = (
        "import sys; sys.modules.update(torch=None, transformers=None, peft=None); from dockyard.cli import main; "
        "sys.exit(main(['train', '--tasks.source=demo', '--run_dir=mine']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 1
    assert "training needs `torch`, which is not installed" in done.stderr
    assert not (tmp_path / "mine").exists()


def test_an_epoch_count_on_the_command_line_replaces_the_steps_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "run.toml").write_text('steps = 7\ntasks.source = "demo"\n')
    assert main(["train", "run.toml", "--epochs", "3", "--dry-run", "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)
    assert (settings["tasks"]["passes"], settings["steps"]) == (3, RunConfig().steps)


def test_a_job_replaces_the_tasks_of_the_file_whatever_its_name_looks_like(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "run.toml").write_text(
        'steps = 7\n[tasks]\nsource = "swebench"\ndataset = "x"\nlimit = 3\nids = ["a"]\nmap = { a = "b" }\n'
    )
    job = "none --steps=3 {}"
    assert main(["train", "run.toml", "--from-job", job, "--dry-run", "--json"]) == 0
    tasks = json.loads(capsys.readouterr().out)["tasks"]
    assert (tasks["source"], tasks["dataset"]) == ("recorded", job)
    assert (tasks["limit"], tasks["ids"], tasks["map"], tasks["split"]) == (None, [], {}, None)


def test_an_evaluation_has_a_folder_beside_the_one_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "run.toml").write_text('run_dir = "mine"\ntasks.source = "demo"\n')
    assert main(["eval", "run.toml", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run_dir"] == "mine-eval"
    assert main(["eval", "run.toml", "--run_dir=other", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run_dir"] == "other"


def test_a_short_name_on_resume_is_refused_like_its_setting(capsys: pytest.CaptureFixture[str]):
    assert main(["train", *DEMO, "--run_dir=mine"], run_training=FakeTraining()) == 0
    assert main(["train", "--resume", "mine", "--agent", "oracle"], run_training=FakeTraining()) == 2
    assert "error: `agent.name` cannot change in a run that has started" in capsys.readouterr().err


def test_what_is_served_may_come_from_a_file_and_a_dry_run_prints_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["--engine", "vllm", "--engine-url", "http://x", "--port=9", "--max-new-tokens", "5", "--api-key", "hidden"]
    assert main(["serve", "some/model", *words, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "hidden" not in printed
    (tmp_path / "serve.toml").write_text(printed)
    assert main(["serve", "serve.toml", "--dry-run", "--json", "--port", "10"]) == 0
    settings = json.loads(capsys.readouterr().out)
    assert (settings["model"]["name"], settings["engine"]["url"]) == ("some/model", "http://x")
    assert (settings["port"], settings["max_new_tokens"]) == (10, 5)
    (tmp_path / "serve.toml").write_text("port = 1\nprot = 2\n")
    assert main(["serve", "serve.toml"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: `prot` in `serve.toml` is not a setting",
        "hint: did you mean `port`? `dockyard serve --help` lists every setting",
    ]


def test_tasks_are_checked_with_the_settings_of_a_run_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["tasks", "demo", "demo"]) == 0
    (tmp_path / "run.toml").write_text(
        'run_dir = "mine"\nsteps = 7\n[tasks]\ntrain = "demo/train"\nheldout = "demo/heldout"\n[eval]\nsamples = 3\n'
        "[agent]\nmax_turns = 3\n[environment]\nmemory_mb = 512\n[sampling]\neval_temperature = 0\ntemperature = 0.5\n"
    )
    assert main(["tasks", "check", "run.toml", "--dry-run", "--json", "--concurrency=2"]) == 0
    found = RunConfig.model_validate_json(capsys.readouterr().out)
    assert (found.run_dir, found.tasks.train) == (Path("runs/check-train"), tmp_path / "demo" / "train")
    assert (found.environment.memory_mb, found.rollout.concurrency, found.rollout.max_lost_share) == (512, 2, 1)
    assert (found.agent.name, found.agent.max_turns, found.tasks.heldout, found.eval.samples) == (
        "oracle",
        None,
        None,
        1,
    )
    assert main(["tasks", "check", "run.toml", "--difficulty=2", "--dry-run", "--json"]) == 0
    found = RunConfig.model_validate_json(capsys.readouterr().out)
    assert (found.agent.name, found.agent.max_turns, found.sampling.temperature) == ("shell", 3, 0.5)
    (tmp_path / "run.toml").write_text('[tasks]\nsource = "demo"\n')
    assert main(["tasks", "check", "run.toml"]) == 2
    assert "error: `run.toml` names no folder of tasks: `tasks.source` is `demo`" in capsys.readouterr().err
