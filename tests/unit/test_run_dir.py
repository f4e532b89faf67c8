"""The run on disk: what survives a crash, a full disk, a second process and a resume."""

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dockyard.config import GRPOConfig, RunConfig, TasksConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.run_dir.claim import claim_folder, remove_if_empty
from dockyard.run_dir.durable import append_line, read_lines
from dockyard.run_dir.paths import RunPaths
from dockyard.run_dir.records import RecordedRollout, from_line, to_line
from dockyard.run_dir.run import EVAL_AFTER, EVAL_BEFORE, HeldoutScore, RunDir, eval_phase, step_phase
from dockyard.types import (
    Blame,
    Exchange,
    Failure,
    Finish,
    Message,
    Prompt,
    Rollout,
    Segment,
    ToolCall,
)

CONFIG = RunConfig(tasks=TasksConfig(source="demo"), grpo=GRPOConfig(group_size=3))


def a_segment(logprobs: list[float], *, recorded: bool = True) -> Segment:
    count = len(logprobs)
    return Segment(
        token_ids=np.arange(count, dtype=np.int32) + 2**30,
        sampled=np.arange(count) % 2 == 1,
        logprobs=np.array(logprobs, np.float32) if recorded else None,
        versions=np.full(count, -1, np.int32) if recorded else None,
    )


def a_rollout(attempt: int = 0, **changes: object) -> Rollout:
    fields: dict[str, object] = {
        "task": "make-file",
        "kind": "write",
        "attempt": attempt,
        "segments": (a_segment([0.0, -0.1, -1e-7]), a_segment([0.0], recorded=False)),
        "reward": 0.5,
        "failure": Failure(cause="agent_timeout", blame=Blame.POLICY, message="after `1.5` s\nof é"),
        "seconds": {"agent": 1.25},
        "stats": {"calls": 3},
    }
    return Rollout(**(fields | changes))  # pyright: ignore[reportArgumentType]


def parts_of(rollout: Rollout) -> list[object]:
    """Everything in a rollout in a form that `==` compares to the bit."""
    arrays = [
        None if array is None else (array.dtype, array.tobytes())
        for segment in rollout.segments
        for array in (segment.token_ids, segment.sampled, segment.logprobs, segment.versions)
    ]
    rest = (rollout.task, rollout.kind, rollout.attempt, rollout.reward, rollout.failure, rollout.seconds)
    return [*arrays, *rest, rollout.stats]


def rewrite(path: Path, change: bytes) -> None:
    path.write_bytes(path.read_bytes() + change)


def test_a_rollout_returns_from_disk_exactly(tmp_path: Path):
    rollouts = [a_rollout(), a_rollout(1, reward=None), a_rollout(2, reward=-1.0, failure=None, segments=())]
    with RunDir.create(tmp_path / "run", CONFIG) as run:
        for rollout in rollouts:
            run.write_rollout(step_phase(3), rollout, group=4, transcript="user: hi\n")
        recorded = run.read_rollouts(step_phase(3))
    assert [parts_of(one.rollout) for one in recorded] == [parts_of(rollout) for rollout in rollouts]
    assert {(one.phase, one.step, one.group, one.transcript) for one in recorded} == {
        ("step-00003", 3, 4, "user: hi\n")
    }


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_log_probabilities_survive_json_to_the_bit(logprobs: list[float]):
    rollout = a_rollout(segments=(a_segment(logprobs),))
    line = to_line(RecordedRollout(phase=EVAL_BEFORE, group=0, rollout=rollout))
    assert parts_of(from_line(line).rollout) == parts_of(rollout)


CALL = ToolCall("c1", "bash", {"command": "ls é", "n": 1.5})
EXCHANGE = Exchange(
    prompt=Prompt(
        (
            Message("system", "Be brief."),
            Message("user", "go"),
            Message("assistant", "", "Hm.", (CALL,)),
            Message("tool", "seen", call_id="c1"),
        ),
        ({"type": "function", "function": {"name": "bash", "description": "", "parameters": {"type": "object"}}},),
    ),
    reply=Message("assistant", "done"),
    finish=Finish.LENGTH,
    num_prompt=12,
    num_sampled=3,
    delivered=False,
)
EXCHANGE_JSON = (
    r'{"messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"go"},{"role":"assistant",'
    r'"content":null,"reasoning_content":"Hm.","tool_calls":[{"id":"c1","type":"function","function":{"name":"bash",'
    r'"arguments":"{\"command\": \"ls é\", \"n\": 1.5}"}}]},{"role":"tool","content":"seen","tool_call_id":"c1"}],'
    r'"tools":[{"type":"function","function":{"name":"bash","description":"","parameters":{"type":"object"}}}],'
    r'"reply":{"role":"assistant","content":"done"},"finish":"length",'
    r'"usage":{"prompt_tokens":12,"completion_tokens":3},"delivered":false,"auxiliary":false}'
)


def test_a_text_mode_call_is_stored_in_the_form_that_run_folders_have_always_had():
    rollout = a_rollout(segments=(), exchanges=(EXCHANGE,))
    line = to_line(RecordedRollout(phase=EVAL_BEFORE, group=0, rollout=rollout))
    assert f'"exchanges":[{EXCHANGE_JSON}]' in line.decode()
    assert from_line(line).rollout.exchanges == (EXCHANGE,)


def test_a_text_mode_call_of_an_older_run_may_lack_what_was_added_later():
    line = json.loads(to_line(RecordedRollout(phase=EVAL_BEFORE, group=0, rollout=a_rollout(segments=()))))
    line["exchanges"] = [{"messages": [{"role": "user", "content": "go"}], "reply": {"role": "assistant"}}]
    [exchange] = from_line(json.dumps(line).encode()).rollout.exchanges
    assert exchange == Exchange(
        prompt=Prompt((Message("user", "go"),)), reply=Message("assistant", ""), finish=Finish.STOP
    )


@pytest.mark.parametrize("damaged", [7, {}, {"messages": [7], "reply": {"role": "assistant"}}, {"messages": []}])
def test_a_damaged_text_mode_call_is_a_validation_error(damaged: object):
    line = json.loads(to_line(RecordedRollout(phase=EVAL_BEFORE, group=0, rollout=a_rollout(segments=()))))
    line["exchanges"] = [damaged]
    with pytest.raises(ValidationError, match="not a recorded model call"):
        from_line(json.dumps(line).encode())


@pytest.mark.parametrize(
    "changes",
    [{"reward": float("nan")}, {"segments": (a_segment([float("nan")]),)}, {"seconds": {"agent": float("inf")}}],
)
def test_what_is_not_a_finite_number_is_refused(tmp_path: Path, changes: dict[str, object]):
    with RunDir.create(tmp_path / "run", CONFIG) as run:
        with pytest.raises(DockyardError, match="a rollout of `make-file` cannot be recorded"):
            run.write_rollout(EVAL_AFTER, a_rollout(0, **changes))
        assert run.read_rollouts(EVAL_AFTER) == []


def test_text_that_no_file_can_hold_does_not_lose_the_rollout(tmp_path: Path):
    with RunDir.create(tmp_path / "run", CONFIG) as run:
        run.write_rollout(EVAL_AFTER, a_rollout(), transcript="\udcff\u2028")
        [recorded] = run.read_rollouts(EVAL_AFTER)
    assert recorded.transcript == "?\u2028"


def test_each_line_is_one_flat_json_object_that_says_where_it_belongs(tmp_path: Path):
    with RunDir.create(tmp_path / "run", CONFIG) as run:
        run.write_rollout(EVAL_BEFORE, a_rollout())
        run.write_rollout(EVAL_BEFORE, a_rollout(1))
    lines = (tmp_path / "run" / "rollouts" / "eval-before.jsonl").read_text().splitlines()
    first, second = map(json.loads, lines)
    assert list(first) == list(second)
    assert (first["phase"], first["step"], first["task"], first["reward"]) == ("eval-before", None, "make-file", 0.5)
    assert first["segments"][0]["sampled"] == [0, 1, 0]


def test_a_torn_line_is_dropped_by_readers_and_cut_off_by_the_next_append(tmp_path: Path):
    file = tmp_path / "run" / "rollouts" / "step-00000.jsonl"
    with RunDir.create(tmp_path / "run", CONFIG) as run:
        run.write_rollout(step_phase(0), a_rollout(0))
        whole = file.read_bytes()
        rewrite(file, whole[:-1])  # all but the newline: still torn
        assert [one.rollout.attempt for one in run.read_rollouts(step_phase(0))] == [0]
        run.write_rollout(step_phase(0), a_rollout(1))
        assert [one.rollout.attempt for one in run.read_rollouts(step_phase(0))] == [0, 1]
    assert file.read_bytes().startswith(whole)


@pytest.mark.parametrize("torn", [b"x", b"x" * 200_000])
def test_a_file_of_nothing_but_a_torn_line_starts_again(tmp_path: Path, torn: bytes):
    file = tmp_path / "lines"
    file.write_bytes(torn)
    assert read_lines(file) == []
    append_line(file, b"first")
    assert file.read_bytes() == b"first\n"
    file.write_bytes(b"first\n" + torn)
    append_line(file, b"second")
    assert read_lines(file) == [b"first", b"second"]


def test_an_attempt_recorded_twice_counts_once(tmp_path: Path):
    with RunDir.create(tmp_path / "run", CONFIG) as run:
        run.write_rollout(step_phase(0), a_rollout(0, reward=0.0))
        run.write_rollout(step_phase(0), a_rollout(0, reward=1.0))
        run.write_rollout(step_phase(0), a_rollout(0, reward=0.25), group=1)
        assert [one.rollout.reward for one in run.read_rollouts(step_phase(0))] == [1.0, 0.25]


def test_a_broken_line_among_whole_ones_is_named(tmp_path: Path):
    with RunDir.create(tmp_path / "run", CONFIG) as run:
        run.write_rollout(step_phase(0), a_rollout())
        rewrite(tmp_path / "run" / "rollouts" / "step-00000.jsonl", b"{}\n")
        with pytest.raises(DockyardError, match=r"step-00000.jsonl` line 2 is not a rollout"):
            run.read_rollouts(step_phase(0))


@pytest.mark.parametrize("phase", ["step-3", "eval-3", "eval-middle", "eval-../x", "step-../x"])
def test_a_phase_that_is_none_is_refused(tmp_path: Path, phase: str):
    with RunDir.create(tmp_path / "run", CONFIG) as run, pytest.raises(ValueError):  # noqa: PT011
        run.write_rollout(phase, a_rollout())


def test_rollouts_survive_kill_9_and_the_lock_goes_with_its_process(tmp_path: Path):
    script = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import time
from pathlib import Path
from test_run_dir import CONFIG, RunDir, a_rollout, step_phase
run = RunDir.create(Path({str(tmp_path / "run")!r}), CONFIG)
run.write_rollout(step_phase(0), a_rollout())
print("written", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "written\n"
        with pytest.raises(DockyardError, match=f"in use by process {process.pid}\\b"):
            RunDir.resume(tmp_path / "run")
        with pytest.raises(DockyardError, match=f"in use by process {process.pid}\\b"):
            RunDir.create(tmp_path / "run", CONFIG, overwrite=True)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with RunDir.resume(tmp_path / "run") as run:
        assert [parts_of(one.rollout) for one in run.read_rollouts(step_phase(0))] == [parts_of(a_rollout())]


def test_a_folder_that_is_removed_and_claimed_at_the_same_time_has_one_holder(tmp_path: Path):
    paths = RunPaths(tmp_path / "run")
    holders: list[int] = []
    num_held: list[int] = []

    def claim_and_remove(me: int) -> None:
        for _ in range(200):
            try:
                lock = claim_folder(paths, overwrite=False)
            except (DockyardError, OSError):  # another thread holds it, or has just removed the folder
                continue
            holders.append(me)
            time.sleep(0.0005)
            num_held.append(len(holders))
            holders.remove(me)
            remove_if_empty(paths)
            os.close(lock)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(claim_and_remove, range(6)))
    assert set(num_held) == {1}


def test_a_full_disk_is_an_error_with_a_hint_and_keeps_earlier_lines(tmp_path: Path):
    """The process may write files of 2000 bytes at most, so the second long line is cut in its middle."""
    script = """
import resource, sys
from pathlib import Path
from dockyard.errors import DockyardError
from dockyard.run_dir.durable import append_line
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
append_line(Path(sys.argv[1]), b"a" * 1500)
try:
    append_line(Path(sys.argv[1]), b"b" * 1500)
except DockyardError as error:
    print(error.message, error.hint, sep="|")
"""
    file = tmp_path / "lines"
    done = subprocess.run([sys.executable, "-c", script, str(file)], capture_output=True, text=True, timeout=600)
    message, hint = done.stdout.strip().split("|")
    assert message == f"cannot write `{file}`: File too large"
    assert "--resume" in hint
    assert file.read_bytes() == b"a" * 1500 + b"\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_no_space_left_is_an_error_of_ours(tmp_path: Path):
    (tmp_path / "lines").symlink_to("/dev/full")
    with pytest.raises(DockyardError, match="No space left on device"):
        append_line(tmp_path / "lines", b"a")


def test_metrics_are_one_object_per_step_and_never_hold_a_step_twice(tmp_path: Path):
    with RunDir.create(tmp_path / "run", CONFIG) as run:
        for step in range(4):
            run.record_metrics(step, {"train/loss": step, "rollout/reward": float("nan")})
    with RunDir.resume(tmp_path / "run") as run:
        run.record_metrics(2, {"train/loss": 20})
        assert run.read_metrics() == [
            {"step": 0, "train/loss": 0, "rollout/reward": None},
            {"step": 1, "train/loss": 1, "rollout/reward": None},
            {"step": 2, "train/loss": 20},
        ]


def write_half_a_checkpoint(run: RunDir, step: int) -> None:
    with run.checkpoints.new(step) as folder:
        (folder / "weights").write_bytes(b"half")
        raise KeyError


def test_a_checkpoint_is_whole_or_absent(tmp_path: Path):
    with RunDir.create(tmp_path / "run", CONFIG) as run:
        assert run.checkpoints.latest() is None
        with run.checkpoints.new(10) as folder:
            (folder / "inner").mkdir()
            (folder / "inner" / "weights").write_bytes(b"10")
        with pytest.raises(KeyError):
            write_half_a_checkpoint(run, 20)
        latest = run.checkpoints.latest()
        assert latest
        assert (latest.step, (latest.path / "inner" / "weights").read_bytes()) == (10, b"10")
        assert [path.name for path in latest.path.parent.iterdir()] == ["step-00010"]


def test_a_checkpoint_may_be_written_again(tmp_path: Path):
    with RunDir.create(tmp_path / "run", CONFIG) as run:
        for content in (b"first", b"second"):
            with run.checkpoints.new(10) as folder:
                (folder / content.decode()).write_bytes(content)
        latest = run.checkpoints.latest()
        assert latest
        assert [path.name for path in latest.path.iterdir()] == ["second"]
        assert [path.name for path in latest.path.parent.iterdir()] == ["step-00010"]


def test_the_latest_checkpoint_is_by_number(tmp_path: Path):
    with RunDir.create(tmp_path / "run", CONFIG) as run:
        for step in (99_999, 100_000, 5):
            with run.checkpoints.new(step):
                pass
        latest = run.checkpoints.latest()
        assert latest
        assert latest.step == 100_000


def write_checkpoints(run: RunDir, *steps: int) -> None:
    for step in steps:
        with run.checkpoints.new(step) as folder:
            (folder / "adapter").write_text(str(step))


@pytest.mark.parametrize(("count", "left"), [(0, [2, 4, 10]), (1, [10]), (2, [4, 10]), (9, [2, 4, 10])])
def test_only_the_last_checkpoints_are_kept(tmp_path: Path, count: int, left: list[int]):
    with RunDir.create(tmp_path / "run", CONFIG) as run:
        write_checkpoints(run, 2, 4, 10)
        run.checkpoints.keep_last(count)
        assert [checkpoint.step for checkpoint in run.checkpoints.all()] == left
        assert len(list((run.path / "checkpoints").iterdir())) == len(left)


def test_a_checkpoint_that_was_half_removed_is_none(tmp_path: Path):
    with RunDir.create(tmp_path / "run", CONFIG) as run:
        write_checkpoints(run, 2, 4)
    (tmp_path / "run/checkpoints/step-00002").rename(tmp_path / "run/checkpoints/.step-00002.draft")  # as removal does
    with RunDir.resume(tmp_path / "run") as run:
        assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["step-00004"]


def test_the_best_adapter_is_kept_with_its_score_whatever_happens_to_checkpoints(tmp_path: Path):
    with RunDir.create(tmp_path / "run", CONFIG) as run:
        write_checkpoints(run, 2, 4, 6, 8)
        kept = [
            run.checkpoints.keep_best(checkpoint.path, HeldoutScore(step=checkpoint.step, reward=reward))
            for checkpoint, reward in zip(run.checkpoints.all(), [0.25, 0.75, 0.5, 0.75], strict=True)
        ]
        assert kept == [True, True, False, False]  # of equals the first
        run.checkpoints.keep_last(1)
    with RunDir.resume(tmp_path / "run") as run:
        assert run.checkpoints.best() == HeldoutScore(step=4, reward=0.75)
        assert (run.checkpoints.best_path / "adapter").read_text() == "4"
        latest = run.checkpoints.latest()
        assert latest
        assert latest.step == 8


def test_a_best_adapter_that_does_not_fit_the_disk_leaves_the_one_before(tmp_path: Path):
    with RunDir.create(tmp_path / "run", CONFIG) as run:
        write_checkpoints(run, 2)
        run.checkpoints.keep_best(run.checkpoints.all()[0].path, HeldoutScore(step=2, reward=0.5))
        with pytest.raises(FileNotFoundError):  # any failure in the middle
            run.checkpoints.keep_best(tmp_path / "gone", HeldoutScore(step=4, reward=0.75))
        best = run.checkpoints.best()
        assert best
        assert best.step == 2
        assert sorted(path.name for path in (run.path / "checkpoints").iterdir()) == ["best", "step-00002"]


def test_evaluations_during_training_have_a_phase_of_their_own(tmp_path: Path):
    with RunDir.create(tmp_path / "run", CONFIG) as run:
        run.write_rollout(eval_phase(10), a_rollout())
        assert [one.step for one in run.read_rollouts(eval_phase(10))] == [None]
    assert (tmp_path / "run/rollouts/eval-00010.jsonl").exists()


def test_trackers_know_a_run_by_the_same_name_after_it_was_moved(tmp_path: Path):
    with RunDir.create(tmp_path / "run", CONFIG) as run:
        name = run.tracker_id
    (tmp_path / "run").rename(tmp_path / "moved")
    with RunDir.resume(tmp_path / "moved") as run:
        assert run.tracker_id == name
    with RunDir.create(tmp_path / "moved", CONFIG, overwrite=True) as run:
        assert run.tracker_id != name


def test_leftovers_of_torn_writes_are_removed_on_resume(tmp_path: Path):
    RunDir.create(tmp_path / "run", CONFIG).close()
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / ".step-00010.draft").mkdir()
    (checkpoints / ".step-00010.draft" / "weights").write_bytes(b"torn")
    (checkpoints / ".step-00020.old").mkdir()  # a replacement was about to take its name
    (tmp_path / "run" / ".summary.json.draft").write_text("{")
    with RunDir.resume(tmp_path / "run") as run:
        assert [path.name for path in checkpoints.iterdir()] == ["step-00020"]
        assert not list((tmp_path / "run").glob(".*"))
        assert run.read_summary() is None


def test_the_summary_is_replaced_whole(tmp_path: Path):
    with RunDir.create(tmp_path / "run", CONFIG) as run:
        run.write_summary({"reward": 0.25})
        run.write_summary({"reward": {"after": float("nan"), "path": tmp_path}})
        assert run.read_summary() == {"reward": {"after": None, "path": str(tmp_path)}}


def test_creating_over_a_run_is_refused_and_touches_nothing(tmp_path: Path):
    with RunDir.create(tmp_path / "run", CONFIG) as run:
        run.write_rollout(step_phase(0), a_rollout())
    with pytest.raises(UsageError, match="already holds a run") as caught:
        RunDir.create(tmp_path / "run", RunConfig())
    for way_out in ("--resume", "--run_dir", "--overwrite"):
        assert way_out in caught.value.hint
    with RunDir.resume(tmp_path / "run") as run:
        assert run.config.grpo.group_size == 3
        assert len(run.read_rollouts(step_phase(0))) == 1


def test_overwrite_deletes_the_run_and_nothing_else(tmp_path: Path):
    with RunDir.create(tmp_path / "run", CONFIG) as run:
        run.write_rollout(step_phase(0), a_rollout())
        run.record_metrics(0, {"train/loss": 1})
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with RunDir.create(tmp_path / "run", CONFIG, overwrite=True) as run:
        assert run.read_rollouts(step_phase(0)) == []
        assert run.read_metrics() == []
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_somebody_elses_folder_is_never_taken_for_a_run(tmp_path: Path):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "config.toml").write_text("mine = true")
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="is not a run, but holds `tasks`, `config.toml`"):
            RunDir.create(tmp_path, CONFIG, overwrite=overwrite)
    assert (tmp_path / "config.toml").read_text() == "mine = true"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml", "tasks"]


def test_a_folder_with_other_files_can_hold_a_run(tmp_path: Path):
    (tmp_path / "log.txt").write_text("tee")
    with RunDir.create(tmp_path, CONFIG):
        assert (tmp_path / "metrics.jsonl").exists() is False
    assert (tmp_path / "config.toml").exists()


def test_a_file_in_place_of_the_folder_is_misuse(tmp_path: Path):
    (tmp_path / "run").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        RunDir.create(tmp_path / "run", CONFIG)


@pytest.mark.parametrize(
    ("run_dir", "message"),
    [
        ("{}/file/run", "`{0}/file/run` cannot be made in `{0}/file`: it is a file"),
        ("{}/file/deep/run", "`{0}/file/deep/run` cannot be made in `{0}/file`: it is a file"),
        ("/proc/dockyard/run", "`/proc/dockyard/run` cannot be made in `/proc`: no folder can be made there"),
    ],
)
def test_a_place_where_no_folder_can_be_made_is_misuse(tmp_path: Path, run_dir: str, message: str):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError) as caught:
        RunDir.create(Path(run_dir.format(tmp_path)), CONFIG)
    assert caught.value.message == message.format(tmp_path)
    assert "`--run_dir`" in caught.value.hint


def test_resuming_where_no_run_is_says_so_and_makes_nothing(tmp_path: Path):
    with pytest.raises(UsageError, match="holds no run"):
        RunDir.resume(tmp_path / "none")
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_has_its_settings_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = RunConfig(tasks=TasksConfig(train=Path("my-tasks")), run_dir=Path("run"), steps=7)
    RunDir.create(Path("run"), config).close()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").rename(tmp_path / "elsewhere" / "moved")
    monkeypatch.chdir(tmp_path / "elsewhere")
    with RunDir.resume(Path("moved")) as run:
        assert (run.config.tasks.train, run.config.steps) == (tmp_path / "my-tasks", 7)
        assert run.config.run_dir == Path("moved")
        assert run.path == tmp_path / "elsewhere" / "moved"


def test_a_resumed_run_may_go_further_but_not_elsewhere(tmp_path: Path):
    RunDir.create(tmp_path / "run", CONFIG).close()
    RunDir.resume(tmp_path / "run", ["--steps", "99"]).close()
    with RunDir.resume(tmp_path / "run") as run:
        assert run.config.steps == 99
    with pytest.raises(UsageError, match="`grpo.group_size` cannot change"):
        RunDir.resume(tmp_path / "run", ["--grpo.group_size", "5"])
    RunDir.resume(tmp_path / "run", ["--grpo.group_size", "3"]).close()


@pytest.mark.parametrize(("key", "value"), [("micro_batch_tokens", 64), ("compile", False), ("offload", True)])
def test_a_resumed_run_may_be_given_a_way_to_fit_the_memory(tmp_path: Path, key: str, value: object):
    RunDir.create(tmp_path / "run", CONFIG).close()
    with RunDir.resume(tmp_path / "run", [f"--trainer.{key}={json.dumps(value)}"]) as run:
        assert run.config.trainer.model_dump()[key] == value


def test_other_versions_on_resume_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    RunDir.create(tmp_path / "run", CONFIG).close()
    file = tmp_path / "run" / "versions.json"
    versions = json.loads(file.read_text())
    assert {"python", "platform", "dockyard", "harbor", "torch", "transformers"} <= set(versions)
    file.write_text(json.dumps(versions | {"harbor": "0.1"}))
    with caplog.at_level(logging.WARNING):
        RunDir.resume(tmp_path / "run").close()
    assert [record.getMessage() for record in caplog.records] == [
        f"the run was started with harbor 0.1; now it is {versions['harbor']}"
    ]


def test_an_unexpected_error_leaves_its_traceback_in_the_run(tmp_path: Path):
    with pytest.raises(KeyError), RunDir.create(tmp_path / "run", CONFIG):
        {}["gone"]
    assert "KeyError: 'gone'" in (tmp_path / "run" / "crash.txt").read_text()
    RunDir.resume(tmp_path / "run").close()  # the lock was released


def test_the_settings_of_a_resumed_run_are_read_once(tmp_path: Path):
    RunDir.create(tmp_path / "run", CONFIG).close()
    script = """
import sys
from dockyard.cli import main
opened = []
sys.addaudithook(lambda event, found: opened.append(str(found[0])) if event == "open" else None)
code = main(["train", "--resume", *sys.argv[1:]], run_training=lambda config, *, run_dir: None)
print(code, sum(path.endswith("/config.toml") for path in opened))
"""
    run = str(tmp_path / "run")
    for words in ([run], [run, "--steps", "60"]):
        done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=600)
        assert done.stdout == "0 1\n", done.stderr


def test_a_path_inside_a_run_is_built_without_touching_the_disk(tmp_path: Path):
    paths = RunPaths(tmp_path / "none")
    assert paths.rollouts_of(eval_phase(3)) == tmp_path / "none/rollouts/eval-00003.jsonl"
    assert paths.adapter(3) == tmp_path / "none/adapters/v00003"
    assert {path.parent for path in paths.contents} == {paths.root}
    assert paths.contents[-1] == paths.config
    assert not paths.root.exists()


def test_a_run_given_more_steps_is_evaluated_again(tmp_path: Path):
    with RunDir.create(tmp_path / "run", RunConfig(steps=2, tasks=TasksConfig(source="demo"))) as run:
        run.write_rollout(EVAL_BEFORE, a_rollout())
        run.write_rollout(EVAL_AFTER, a_rollout())
    with RunDir.resume(tmp_path / "run") as run:
        assert len(run.read_rollouts(EVAL_AFTER)) == 1
    with RunDir.resume(tmp_path / "run", ["--steps=3"]) as run:
        assert len(run.read_rollouts(EVAL_BEFORE)) == 1
        assert run.read_rollouts(EVAL_AFTER) == []


def test_a_run_is_not_given_fewer_steps_than_it_has_made(tmp_path: Path):
    config = RunConfig(steps=4, tasks=TasksConfig(source="demo"))
    with RunDir.create(tmp_path / "run", config) as run, run.checkpoints.new(4) as folder:
        (folder / "x").touch()
    with pytest.raises(UsageError, match="this run has made 4"):
        RunDir.resume(tmp_path / "run", ["--steps=3"])
    RunDir.resume(tmp_path / "run").close()


def test_a_library_that_has_its_own_error_for_a_full_disk_is_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def save(_folder: Path) -> None:
        raise RuntimeError("enforce fail at inline_container.cc")

    with RunDir.create(tmp_path / "run", RunConfig()) as run:
        with pytest.raises(RuntimeError, match="inline_container"):
            run.publish_adapter(1, save)
        monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=0))
        with pytest.raises(DockyardError, match="no space left"):
            run.publish_adapter(1, save)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_library_that_says_the_disk_was_full_is_believed_also_when_there_is_space_again(tmp_path: Path, code: int):
    def save(_folder: Path) -> None:
        raise RuntimeError(
            f"Error while serializing: I/O error: {os.strerror(code)} (os error {code})"
        )  # as safetensors

    with (
        RunDir.create(tmp_path / "run", RunConfig()) as run,
        pytest.raises(DockyardError, match="no space left") as caught,
    ):
        run.publish_adapter(1, save)
    assert "free some disk space" in caught.value.hint
