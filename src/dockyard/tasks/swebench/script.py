"""The script that runs an instance's tests, for rows that carry the command alone."""

from hashlib import blake2b
from string import Template

# `cut` takes the path from git's `added<tab>deleted<tab>path`. A file that the commit lacks is new in the patch.
_SCRIPT = Template("""\
#!/bin/bash
set -uxo pipefail
if [ -f /opt/miniconda3/bin/activate ]; then
    source /opt/miniconda3/bin/activate testbed
fi
cd /testbed
git config --global --add safe.directory /testbed
tests=$$(mktemp)
cat >"$$tests" <<'$end'
$test_patch
$end
git apply --numstat -z "$$tests" | cut -z -f 3 | while IFS= read -r -d '' file; do
    git checkout $base_commit -- "$$file" || rm -rf "$$file"
done
git apply --verbose "$$tests"
: '$begin_mark'
$test_cmd
: '$end_mark'
""")


def eval_script(*, base_commit: str, test_patch: str, test_cmd: str, markers: tuple[str, ...]) -> str:
    """Put the test files back as they were at the commit, apply the test patch, run the tests between the markers."""
    begin_mark, end_mark = markers
    return _SCRIPT.substitute(
        base_commit=base_commit,
        test_patch=test_patch.removesuffix("\n"),
        test_cmd=test_cmd.strip("\n"),
        begin_mark=begin_mark,
        end_mark=end_mark,
        end=f"EOF_{blake2b(test_patch.encode(), digest_size=8).hexdigest()}",
    )
