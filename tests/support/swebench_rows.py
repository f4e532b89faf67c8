"""Rows of SWE-bench for tests."""

import json
from pathlib import Path
from typing import Any

MARKS = (">>>>> Start Test Output", ">>>>> End Test Output")
SCRIPT = f"#!/bin/bash\nset -uxo pipefail\n: '{MARKS[0]}'\n%s\n: '{MARKS[1]}'\n"
GOLD = "diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+GOLD\n"


def row(**changes: Any) -> dict[str, Any]:
    values = {
        "instance_id": "django__django-1",
        "repo": "django/django",
        "base_commit": "abc123",
        "problem_statement": "It costs $5 {here}.\n",
        "patch": GOLD,
        "test_patch": "diff --git a/t.py b/t.py\nTESTS\n",
        "FAIL_TO_PASS": '["test_a"]',
        "PASS_TO_PASS": ["test_b"],
        "version": "3.0",
        "eval_script": SCRIPT % "echo PASSED test_a; echo PASSED test_b",
        "log_parser": "parse_log_pytest",
    } | changes
    return {name: value for name, value in values.items() if value is not ...}


def write_rows(tmp_path: Path, *rows: dict[str, Any] | str) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in rows))
    return str(file)
