"""The columns of SWE-bench's rows."""

from collections.abc import Collection, Mapping

from dockyard.tasks.columns import Column, match_columns, unknown_layout

DEFAULT_DATASET = "SWE-bench/SWE-bench_Verified"

_SCRIPT = Column(
    name="eval_script",
    about=f"the script that runs the tests, as in `{DEFAULT_DATASET}`; or `test_cmd` in its place",
    needed=False,
)
_PARSER = Column(name="log_parser", about="which of SWE-bench's parsers reads the tests' output", needed=False)
COLUMNS = (
    Column(name="instance_id", about="the task's name, such as `django__django-11099`"),
    Column(name="repo", about="the repository, as `owner/name`"),
    Column(name="base_commit", about="the commit that the image holds"),
    Column(name="problem_statement", about="the issue"),
    Column(name="patch", about="the change that resolves it", aliases=("gold_patch",)),
    Column(name="test_patch", about="the tests that come with it"),
    Column(name="FAIL_TO_PASS", about="tests that it mends, a list or its JSON", aliases=("fail_to_pass",)),
    Column(name="PASS_TO_PASS", about="tests that it must not break", aliases=("pass_to_pass",)),
    _SCRIPT,
    Column(name="test_cmd", about="the whole command that runs the tests", aliases=("test_command",), needed=False),
    _PARSER,
    Column(name="eval_type", about="whether passing tests are in the output, or failing ones only", needed=False),
    Column(name="image", about="the image with the repository", aliases=("image_name", "docker_image"), needed=False),
    Column(name="version", about="of the repository", needed=False),
    Column(name="image_assets", about="files that a patch cannot carry", needed=False),
)


def match(found: Collection[str], mapping: Mapping[str, str], where: str) -> dict[str, str]:
    """Our names to theirs. How to run the tests and how to read them must be said: neither is guessed."""
    names = match_columns(COLUMNS, found, mapping, where)
    missing = [] if {"eval_script", "test_cmd"} & names.keys() else [_SCRIPT]
    missing += [] if "log_parser" in names else [_PARSER]
    if missing:
        raise unknown_layout(COLUMNS, found, missing, where)
    return names
