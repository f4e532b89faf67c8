#!/bin/bash
# Grades the repository by its hidden tests: reward 1 when every test that must pass does, else 0.
reward() { echo "$1" >/logs/verifier/reward.txt; }
reward 0
cd {{ workdir }} || exit 1

if [ -d /opt/miniconda3/envs/testbed ]; then . /opt/miniconda3/bin/activate testbed; fi
python=$(command -v python3 || command -v python)

# What the agent did to tests does not count: they are put back, with what steers them, and nothing of theirs is new.
find . -name __pycache__ -prune -exec rm -rf {} +
while IFS= read -r file; do rm -rf -- "$file"; done </tests/replaced.txt
tar -xzf /tests/files.tar.gz || exit 1
[ -z "$python" ] || "$python" -I /tests/clean.py /tests/replaced.txt /tests/kept.txt || exit 1

out=$(mktemp -d)
export DOCKYARD_REPORT=$out/report PYTHONPATH=/tests/plugin${PYTHONPATH:+:$PYTHONPATH}
export PYTEST_ADDOPTS="$PYTEST_ADDOPTS -p dockyard_report"
bash /tests/run.sh >"$out/log" 2>&1
code=$?
cat "$out/log"
echo "the tests ended with $code"
if [ -f /tests/tests.json ]; then
    "$python" -I /tests/grade.py /tests/tests.json "$out/report" "$out/log"
    code=$?
fi
[ "$code" -ne 0 ] || reward 1
