"""What `module:name` in a run file may be, and what is said when it is something else."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dockyard.errors import UsageError
from dockyard.extension import failed_call, load, load_function, load_methods


def shorten(text: str, length: int) -> str:
    raise NotImplementedError


class Listener:
    def heard(self, words: Sequence[str]) -> None: ...
    def ended(self) -> None: ...


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    before, path = set(sys.modules), list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(here: Path, code: str, name: str = "my_extension") -> None:
    (here / f"{name}.py").write_text(code)


def test_a_file_in_the_current_folder_is_found(here: Path):
    write(here, "def cut(text, length): return text[:length]")
    assert load_function("my_extension:cut", "grpo.cut", shorten)("abc", 2) == "ab"


@pytest.mark.parametrize(
    "code",
    [
        "def cut(text, length, extra=1): ...",
        "def cut(*words): ...",
        "def cut(a, b): ...",
        "cut = lambda text, length: text",
        "import functools\ndef f(n, text, length): ...\ncut = functools.partial(f, 1)",
        "class C:\n    def __call__(self, text, length): ...\ncut = C()",
        "def __getattr__(name):\n    if name == 'cut': return lambda a, b: a\n    raise AttributeError(name)",
    ],
)
def test_whatever_takes_the_arguments_is_taken(here: Path, code: str):
    write(here, code)
    assert callable(load_function("my_extension:cut", "grpo.cut", shorten))


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def cut(text): ...", "whose signature is `def cut(text)`: too many positional arguments"),
        ("def cut(text, length, more): ...", "missing a required argument: 'more'"),
        ("def cut(*, text, length): ...", "too many positional arguments"),
        ("async def cut(text, length): ...", "must be a plain `def`"),
        ("class C:\n    async def __call__(self, text, length): ...\ncut = C()", "must be a plain `def`"),
        ("async def cut(text, length): yield text", "must be a plain `def`"),
        ("class cut:\n    def __init__(self, text, length): ...", "which is a class, not a function"),
        ("cut = 3", "which is not a function"),
        (
            "import pathlib\ndef cut(a: pathlib.Path, /, *rest: 'int', key: str, more=1, **kw) -> None: ...",
            "whose signature is `def cut(a: Path, /, *rest: int, key: str, more=1, **kw) -> None`: missing",
        ),
        ("def cut(*, text='a', length): ...", "whose signature is `def cut(*, text='a', length)`: too many"),
    ],
)
def test_a_wrong_signature_is_answered_with_the_right_one(here: Path, code: str, says: str):
    write(here, code)
    with pytest.raises(UsageError) as raised:
        load_function("my_extension:cut", "grpo.cut", shorten)
    assert "`grpo.cut` is `my_extension:cut`" in raised.value.message
    assert says in raised.value.message
    assert raised.value.hint == "define `def cut(text: str, length: int) -> str`"


def test_a_module_that_is_not_there_is_named_with_the_folder_that_was_searched(here: Path):
    with pytest.raises(UsageError) as raised:
        load("nowhere.at_all:cut", "grpo.cut")
    assert raised.value.message == "`grpo.cut` is `nowhere.at_all:cut`, but there is no module `nowhere`"
    assert f"in the current folder, `{here}`, then among the installed packages" in raised.value.hint


def test_a_module_in_another_folder_is_found_from_there_or_by_pythonpath(here: Path, monkeypatch: pytest.MonkeyPatch):
    (here / "sub").mkdir()
    write(here / "sub", "def cut(text, length): return 1")
    with pytest.raises(UsageError) as raised:
        load("my_extension:cut", "grpo.cut")
    assert raised.value.hint.endswith(
        "`cd` to the folder that holds `my_extension`, or add that folder to `PYTHONPATH`"
    )
    monkeypatch.chdir(here / "sub")
    assert load("my_extension:cut", "grpo.cut")("", 0) == 1


def test_a_module_that_lacks_a_package_says_which(here: Path):
    write(here, "import not_installed_anywhere")
    with pytest.raises(UsageError, match="failed: ModuleNotFoundError: No module named 'not_installed_anywhere'"):
        load("my_extension:cut", "grpo.cut")


def test_a_module_that_fails_says_how(here: Path):
    write(here, "1 / 0")
    with pytest.raises(UsageError, match="importing `my_extension` failed: ZeroDivisionError: division by zero"):
        load("my_extension:cut", "grpo.cut")


@pytest.mark.parametrize("exits", ["raise SystemExit(3)", "import sys\nsys.exit(3)"])
def test_a_module_that_exits_is_an_error_with_its_line(here: Path, exits: str):
    write(here, exits)
    with pytest.raises(UsageError, match=rf"exits: SystemExit: 3 \(`{here}/my_extension.py`, line \d\)"):
        load("my_extension:cut", "grpo.cut")


def test_a_module_without_a_file_is_named(here: Path):
    with pytest.raises(UsageError, match="`grpo.cut` is `sys:foo_bar`, but `sys` defines no `foo_bar`"):
        load("sys:foo_bar", "grpo.cut")
    (here / "my_folder").mkdir()
    with pytest.raises(UsageError, match="but `my_folder` defines no `cut`") as raised:
        load("my_folder:cut", "grpo.cut")
    assert raised.value.hint == "it is a folder: name one of its modules, as in `my_folder.MODULE:cut`"


def test_a_function_without_a_signature_is_refused():
    with pytest.raises(UsageError, match="`builtins:max`, whose signature cannot be checked") as raised:
        load_function("builtins:max", "grpo.cut", shorten)
    assert raised.value.hint.endswith("define `def max(text: str, length: int) -> str`")


def test_a_name_that_is_misspelt_is_answered_with_the_nearest(here: Path):
    write(here, "def cut(text, length): ...")
    with pytest.raises(UsageError) as raised:
        load("my_extension:cutt", "grpo.cut")
    assert raised.value.hint == "did you mean `my_extension:cut`?"


def test_a_class_is_created_with_its_methods_checked(here: Path):
    write(here, "class L:\n    def heard(self, words): return len(words)\n    def ended(self): ...")
    assert load_methods("my_extension:L", "callbacks", Listener).heard(["a"]) == 1


@pytest.mark.parametrize("method", ["@staticmethod\n    def heard(words):", "@classmethod\n    def heard(cls, words):"])
def test_methods_may_be_static_or_of_the_class(here: Path, method: str):
    write(here, f"class L:\n    {method} return len(words)\n    def ended(self): ...")
    assert load_methods("my_extension:L", "callbacks", Listener).heard(["a"]) == 1


def test_the_signature_of_a_static_method_is_checked(here: Path):
    write(here, "class L:\n    @staticmethod\n    def heard(self, words): ...\n    def ended(self): ...")
    with pytest.raises(UsageError, match=r"`def heard\(self, words\)`: missing a required argument: 'words'"):
        load_methods("my_extension:L", "callbacks", Listener)


def test_methods_may_be_inherited(here: Path):
    write(here, "class B:\n    def heard(self, words): return 7\nclass L(B):\n    def ended(self): ...")
    assert load_methods("my_extension:L", "callbacks", Listener).heard([]) == 7


def test_some_of_the_methods_are_enough_where_they_are_optional(here: Path):
    write(here, "class L:\n    def ended(self): ...\n    def _own(self): ...\n    def helper(self, x): ...")
    load_methods("my_extension:L", "callbacks", Listener, optional=True)
    with pytest.raises(UsageError, match="it lacks heard"):
        load_methods("my_extension:L", "callbacks", Listener)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("class L:\n    def endedd(self): ...", "`endedd` is not a callback; did you mean `ended`?"),
        ("class L: ...", "it lacks ended, heard"),
        ("class L:\n    def heard(self): ...", "my_extension:L.heard`, whose signature is"),
        ("def L(): ...", "which is not a class"),
        ("class L:\n    def __init__(self, x): ...\n    def ended(self): ...", "cannot be created without arguments"),
    ],
)
def test_a_wrong_class_is_answered_with_what_it_should_define(here: Path, code: str, says: str):
    write(here, code)
    with pytest.raises(UsageError) as raised:
        load_methods("my_extension:L", "callbacks", Listener, optional=True)
    assert says in raised.value.message
    assert raised.value.hint


def test_a_function_that_failed_is_fixed_after_a_restart_of_the_process(here: Path):
    write(here, "def cut(text, length): return 1 / 0")
    cut = load_function("my_extension:cut", "grpo.cut", shorten)
    with pytest.raises(ZeroDivisionError) as raised:
        cut("", 0)
    error = failed_call(raised.value, "my_extension:cut", "grpo.cut", "a text")
    assert error.message.endswith(f"failed on a text: ZeroDivisionError: division by zero ({here}/my_extension.py:1)")
    assert "`--resume` the run" in error.hint
    assert "in a notebook, restart the Python process first" in error.hint
    write(here, "def cut(text, length): return 1")
    assert load_function("my_extension:cut", "grpo.cut", shorten) is cut  # hence the hint


METHODS = "    def heard(self, words): ...\n    def ended(self): ...\n"


@pytest.mark.parametrize("fails", ["int('x')", "raise SystemExit(2)"])
def test_a_constructor_that_fails_is_an_error_with_its_line(here: Path, fails: str):
    write(here, f"class L:\n    def __init__(self):\n        {fails}\n{METHODS}")
    with pytest.raises(UsageError) as raised:
        load_methods("my_extension:L", "callbacks", Listener)
    assert raised.value.message.startswith("`callbacks` is `my_extension:L`, which cannot be created: ")
    assert raised.value.message.endswith(f" (`{here}/my_extension.py`, line 3)")


def test_a_constructor_may_have_arguments_of_any_name(here: Path):
    write(here, f"class L:\n    def __init__(self, kind, reference, setting):\n        self.kind = kind\n{METHODS}")
    given = {"kind": 1, "reference": 2, "setting": 3}
    assert load_methods("my_extension:L", "tasks.source", Listener, kwargs=given).kind == 1


def test_a_class_whose_constructor_has_no_signature_is_created(here: Path):
    write(here, f"class L(dict):\n{METHODS}")
    assert load_methods("my_extension:L", "callbacks", Listener) == {}
