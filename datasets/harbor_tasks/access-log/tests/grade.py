"""Grades the program by `cases.py`. The same file in each of these tasks.

The program must neither see nor change how it is graded. So the cases are read into memory and /tests is emptied
before it starts. It runs without privileges: as another user where the grader may change users (Docker), and under
Landlock, where the kernel has it, shut out of /tests, /logs and every process but its own. When it ends, all that it
started is ended with it; its output is compared here, and the reward is written last.
"""

import ctypes
import os
import resource
import runpy
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

TIMEOUT_S = 20
OUTPUT_LIMIT = 1 << 20
NOBODY = 65534
CLOSED = ("tests", "logs", "solution", "root")
WRITABLE = ("tmp", "dev")

SET_DUMPABLE, SET_CHILD_SUBREAPER, SET_NO_NEW_PRIVS = 4, 36, 38
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
READ, ALL, OF_A_FILE, REFER, SIGNALS = 0b1101, (1 << 13) - 1, 0b111, 1 << 13, 2
libc = ctypes.CDLL(None, use_errno=True)


def main():
    check = runpy.run_path("/tests/cases.py")["check"]
    libc.prctl(SET_DUMPABLE, 0)  # nobody may read this memory
    libc.prctl(SET_CHILD_SUBREAPER, 1)  # orphans of the program become children of this process
    empty(Path("/tests"), "*")
    passed = False
    try:
        passed = check(run)
    finally:
        end_children()
        empty(Path("/logs/verifier"), "reward*")
        Path("/logs/verifier/reward.txt").write_text("1\n" if passed else "0\n")


def run(words, files=None, stdin=""):
    """What the program prints, or None when it fails, takes too long or says too much. `files` lie in its folder."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, tempfile.TemporaryFile() as said:
        for name, text in (files or {}).items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for path in (Path(folder), *Path(folder).rglob("*")):
            path.chmod(0o777)  # the program may be another user
        ended_well = wait(words, folder, stdin, said)
        said.seek(0)
        output = said.read(OUTPUT_LIMIT + 1)
    if not ended_well or len(output) > OUTPUT_LIMIT:
        return None
    return output.decode(errors="replace")


def wait(words, folder, stdin, said):
    with tempfile.TemporaryFile() as given:
        given.write(stdin.encode())
        given.seek(0)
        environment = {"PATH": os.environ["PATH"], "HOME": folder, "LANG": "C.UTF-8"}
        streams = {"stdin": given, "stdout": said, "stderr": subprocess.DEVNULL}
        try:
            program = subprocess.Popen(
                words, cwd=folder, env=environment, **streams, start_new_session=True, preexec_fn=confine
            )
        except (OSError, subprocess.SubprocessError) as error:
            return failed(f"`{words[0]}` cannot be started: {error}")
    try:
        code = program.wait(TIMEOUT_S)
        return code == 0 or failed(f"`{' '.join(words)}` ended with {code}")
    except subprocess.TimeoutExpired:
        return failed(f"`{' '.join(words)}` took longer than {TIMEOUT_S} s")
    finally:
        end_children()


def failed(why):
    sys.stdout.write(why + "\n")
    return False


def confine():
    """In the program's process, before the program."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * OUTPUT_LIMIT, 4 * OUTPUT_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    libc.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    shut_out()
    try:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    except OSError:
        pass  # in a sandbox there is no other user, and root has no powers


def shut_out():
    version = libc.syscall(CREATE_RULESET, None, 0, 1)
    if version < 1:
        return  # a kernel without Landlock
    everything = ALL | (REFER if version > 1 else 0)
    rules = struct.pack("QQQ", everything, 0, SIGNALS) if version > 5 else struct.pack("Q", everything)
    ruleset = libc.syscall(CREATE_RULESET, rules, len(rules), 0)
    for name in os.listdir("/"):
        if name not in CLOSED:
            place = os.open(f"/{name}", os.O_PATH)
            access = everything if name in WRITABLE else READ
            access &= everything if os.path.isdir(f"/{name}") else OF_A_FILE
            libc.syscall(ADD_RULE, ruleset, 1, struct.pack("=Qi", access, place), 0)
            os.close(place)
    if libc.syscall(RESTRICT_SELF, ruleset, 0):
        raise OSError(ctypes.get_errno(), "Landlock does not hold")
    os.close(ruleset)


def end_children():
    """Those of children that end become children of this process, so it is done when there are none."""
    while children := own_children():
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            try:
                os.waitpid(pid, 0)
            except ChildProcessError:
                pass  # `subprocess` was there first


def own_children():
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(state[1]) == os.getpid():
            found.append(int(path.parent.name))
    return found


def empty(folder, pattern):
    for path in folder.glob(pattern):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


if __name__ == "__main__":
    main()
