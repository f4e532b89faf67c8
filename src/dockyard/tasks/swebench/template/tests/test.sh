#!/bin/bash
# SWE-bench's harness needs Python 3.10 or later, whatever the repository's own environment has. The system's comes
# first: it is the one that is put back as it was before grading.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
for python in /usr/bin/python3 /usr/local/bin/python3 /opt/miniconda3/bin/python3 python3 python3.{14,13,12,11,10}; do
    if "$python" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
        exec "$python" -I -S -B -X utf8 "$here/grade.py" "$@"
    fi
done
echo "error: this image has no Python 3.10 or later, which SWE-bench's harness needs to grade" >&2
echo "hint: name another image in the row's \`image\`, or add one to environment/Dockerfile and build it" >&2
exit 1
