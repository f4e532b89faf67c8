"""What `make test` says and when it fails: groups that pass, fail, or cannot run on a machine."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "run_tests.py"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("ONLY", "STRICT", "INSTALL", "JOBS"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("run_tests", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "run_tests", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(module, "ENGINE_ANSWERS", "true")
    return module


def group(script: Any, name: str, *tests: str, **more: Any) -> Any:
    return script.Group(name, tests, **more)


def passing(script: Any, name: str = "good") -> Any:
    return group(script, name, "echo '==== 3 passed, 1 skipped in 0.10s ===='")


def lacking(script: Any) -> Any:
    return group(script, "far", "false", missing=lambda: script.Missing("no engine answers", "`make engine`"))


def test_the_last_lines_are_a_table_and_the_sum(script: Any, capsys: pytest.CaptureFixture[str]):
    twice = group(script, "twice", *["echo '2 passed in 61.00s (0:01:01)'"] * 2)
    assert script.main([passing(script), twice]) == 0
    *_, header, good, two, total = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["group", "result"]
    assert good.split()[:2] == ["good", "passed"]
    assert good.endswith("3 passed, 1 skipped")
    assert two.endswith("4 passed")
    assert total == "7 passed, 0 failed, 1 skipped"


def test_coverage_of_the_groups_that_measure_it_is_shown(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(script, "COVERAGE", tmp_path)
    measured = "python -m coverage run --source dockyard -m dockyard --version"
    assert script.main([passing(script), group(script, "measured", measured)]) == 0
    line = capsys.readouterr().out.splitlines()[-2]
    assert line.startswith("coverage of src/dockyard by measured: ")
    assert 0 < int(line.split(": ")[1].split()[0]) < 100


def test_a_group_that_cannot_run_is_skipped_with_its_reason_and_fails_only_when_strict(
    script: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert script.main([passing(script), lacking(script)]) == 0
    [reason, fix] = capsys.readouterr().out.splitlines()[-3:-1]
    assert reason.split()[:2] == ["far", "skipped"]
    assert reason.endswith("no engine answers")
    assert fix.strip() == "`make engine`"
    monkeypatch.setenv("STRICT", "1")
    assert script.main([passing(script), lacking(script)]) == 1


def test_a_setting_of_the_tests_that_makes_no_sense_is_refused(script: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STRICT", "true")
    with pytest.raises(SystemExit, match="STRICT is `true`"):
        script.main([passing(script)])
    monkeypatch.delenv("STRICT")
    for jobs in ("0", "x", "-1"):
        monkeypatch.setattr(script, "JOBS", jobs)
        with pytest.raises(SystemExit, match=f"JOBS is `{jobs}`"):
            script.main([passing(script)])


def test_a_failure_shows_its_log_and_the_other_groups_still_run(script: Any, capsys: pytest.CaptureFixture[str]):
    bad = group(script, "bad", "echo the reason", "echo '1 failed, 2 passed in 0.10s'; exit 1", "echo never")
    assert script.main([bad, passing(script)]) == 1
    out = capsys.readouterr().out
    assert "the reason" in out
    assert "never" not in out
    assert out.splitlines()[-1] == "5 passed, 1 failed, 1 skipped"


def test_a_setup_that_fails_is_a_failure_and_no_test_runs(script: Any, capsys: pytest.CaptureFixture[str]):
    assert script.main([group(script, "bad", "echo never", setup=("echo no network; false",))]) == 1
    out = capsys.readouterr().out
    assert "no network" in out
    assert "never" not in out


def test_a_group_without_a_setup_does_not_wait_for_the_setup_of_another(script: Any, tmp_path: Path):
    mark = tmp_path / "ran"
    waits = group(
        script, "waits", "true", setup=(f"for i in $(seq 6000); do [ -e {mark} ] && exit; sleep 0.1; done; false",)
    )
    assert script.main([waits, group(script, "runs", f"touch {mark}")]) == 0


def test_a_group_that_hangs_is_ended_and_fails(script: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(script, "MAX_COMMAND_S", 0.2)
    assert script.main([group(script, "stuck", "sleep 60")]) == 1


def test_groups_are_chosen_by_name(script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("ONLY", "good other")
    assert script.main([passing(script), passing(script, "other"), group(script, "bad", "false")]) == 0
    monkeypatch.setenv("ONLY", "godo")
    with pytest.raises(SystemExit, match="there is no group of tests `godo`"):
        script.main([passing(script)])


def test_skipped_tests_are_listed_with_their_reasons(script: Any, capsys: pytest.CaptureFixture[str]):
    line = "SKIPPED [2] tests/unit/test_x.py:3: X_REPO does not name a checkout"
    assert script.main([group(script, "some", f"echo '{line}'; echo '1 passed, 2 skipped in 0.10s'")]) == 0
    assert line in capsys.readouterr().out.splitlines()


def test_no_system_package_is_installed_unless_told(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    told = group(script, "told", f'echo "$INSTALL" >{tmp_path}/told')
    assert script.main([told]) == 0
    assert (tmp_path / "told").read_text() == "0\n"
