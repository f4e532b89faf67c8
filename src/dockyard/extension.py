"""Load what a run file names as `module:name`: a function or class of the user's, checked before it is used.

The module is searched in the current folder first, then among the installed packages. The folder of the run file is not
searched: a resumed run has no run file.
"""

import difflib
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from dockyard.errors import DockyardError, UsageError

REFERENCE = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
"""`module:name`, as a regular expression."""
RESTART = "in a notebook, restart the Python process first, which otherwise keeps the module as it was imported"
"""A part of hints to fix a module."""


def load(reference: str, setting: str) -> Any:
    """Return the object that `setting` names. An error says whether the module, the name or the import is wrong."""
    module_name, _, name = reference.partition(":")
    module = _import(module_name, reference, setting)
    try:
        return getattr(module, name)  # a module may define `__getattr__`
    except AttributeError:
        pass
    where = _file_of(module) or module_name  # modules of the interpreter and folders of modules have no file
    raise UsageError(f"`{setting}` is `{reference}`, but `{where}` defines no `{name}`", hint=_names_hint(module, name))


def _names_hint(module: ModuleType, name: str) -> str:
    if near := difflib.get_close_matches(name, vars(module), 1):
        return f"did you mean `{module.__name__}:{near[0]}`?"
    if "__path__" in vars(module) and not _file_of(module):
        return f"it is a folder: name one of its modules, as in `{module.__name__}.MODULE:{name}`"
    public = [known for known in vars(module) if not known.startswith("_")]
    return f"it defines {', '.join(public) or 'nothing'}"


def load_function[**P, T](reference: str, setting: str, like: Callable[P, T]) -> Callable[P, T]:
    """Return the function that `setting` names. It must be callable with the arguments of `like`."""
    function = load(reference, setting)
    _check_call(function, reference, setting, like)
    return function


def load_methods(
    reference: str, setting: str, like: type, *, optional: bool = False, kwargs: Mapping[str, Any] | None = None
) -> Any:
    """An instance of the class that `setting` names, as `load_class` returns it.

    `kwargs` are the keyword arguments of its constructor, which the setting `kwargs` of the same section holds.
    """
    kind = check_methods(reference, setting, like, optional=optional, kwargs=kwargs)
    return create(kind, reference, setting, **(kwargs or {}))


def check_methods(
    reference: str, setting: str, like: type, *, optional: bool = False, kwargs: Mapping[str, Any] | None = None
) -> type[Any]:
    """The class of which `load_methods` returns an instance. Its constructor must accept `kwargs`; it is not called."""
    kind = load_class(reference, setting, like, optional=optional)
    if problem := constructor_problem(kind, **(kwargs or {})):
        if kwargs is None:
            how, hint = "without arguments", f"give the parameters of `{kind.__name__}.__init__` default values"
        else:
            section = f"{setting.rpartition('.')[0]}.kwargs"
            how, hint = f"with the arguments in `{section}`", f"it is `{_signature(kind, kind.__name__)[4:]}`"
        raise UsageError(f"`{setting}` is `{reference}`, which cannot be created {how}: {problem}", hint=hint)
    return kind


def constructor_problem(kind: type, /, *arguments: object, **kwargs: object) -> str | None:
    """Why the constructor does not accept these arguments, or None. It is not called."""
    try:
        signature = inspect.signature(kind)
    except ValueError:  # inherited from a class that is written in C
        return None
    try:
        signature.bind(*arguments, **kwargs)
    except TypeError as error:
        return str(error)
    return None


def create(kind: type[Any], reference: str, setting: str, /, *arguments: object, **kwargs: object) -> Any:
    """An instance of the class that `setting` names. Raise UsageError with the line if its constructor fails."""
    try:
        return kind(*arguments, **kwargs)
    except DockyardError:
        raise
    except (Exception, SystemExit) as error:  # code of the user's
        raise UsageError(
            f"`{setting}` is `{reference}`, which cannot be created: {type(error).__name__}: {error}"
            f"{line_of(error, sys.modules.get(kind.__module__))}",
            hint=f"correct `{kind.__name__}.__init__` ({RESTART})",
        ) from error


def load_class(reference: str, setting: str, like: type, *, optional: bool = False) -> type[Any]:
    """The class that `setting` names, whose methods must be callable as those of `like`.

    With `optional` it may define some of them, at least one. A method whose name looks like one of theirs misspelt is
    then a mistake; other methods are its own.
    """
    kind = load(reference, setting)
    if not inspect.isclass(kind):
        raise UsageError(
            f"`{setting}` is `{reference}`, which is not a class", hint=f"it must define {_outline(like, optional)}"
        )
    expected, methods = _methods(like), _methods(kind)
    missing = sorted(expected.keys() - methods.keys())
    problem = _misspelt(methods, expected) if optional else None
    if not problem and missing and (not optional or len(missing) == len(expected)):
        problem = f"it lacks {', '.join(missing)}"
    if problem:
        raise UsageError(
            f"`{setting}` is `{reference}`: {problem}", hint=f"such a class defines {_outline(like, optional)}"
        )
    for name in filter(methods.__contains__, expected):
        has_self = not isinstance(inspect.getattr_static(kind, name), staticmethod | classmethod)
        _check_call(methods[name], f"{reference}.{name}", setting, expected[name], skip=0 if has_self else 1)
    return kind


def _misspelt(methods: Collection[str], expected: Collection[str]) -> str | None:
    """The problem of a method that looks like an expected one: the same first word, or almost the same name."""
    first_words = tuple({f"{name.partition('_')[0]}_" for name in expected if "_" in name})
    for name in methods:
        near = difflib.get_close_matches(name, expected, 1, cutoff=0.8)
        if name not in expected and (near or name.startswith(first_words)):
            return f"`{name}` is not a callback" + (f"; did you mean `{near[0]}`?" if near else "")
    return None


def _import(name: str, reference: str, setting: str) -> ModuleType:
    if os.getcwd() not in sys.path:  # a console script has its own folder there instead
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _broken(error, name, reference, setting) from error
        raise UsageError(
            f"`{setting}` is `{reference}`, but there is no module `{error.name}`",
            hint=f"it is searched in the current folder, `{os.getcwd()}`, then among the installed packages: "
            f"`cd` to the folder that holds `{error.name.partition('.')[0]}`, or add that folder to `PYTHONPATH`",
        ) from error
    except (Exception, SystemExit) as error:
        raise _broken(error, name, reference, setting) from error


def _file_of(module: ModuleType) -> str | None:
    return vars(module).get("__file__")


def _broken(error: BaseException, name: str, reference: str, setting: str) -> UsageError:
    if isinstance(error, SystemExit):
        return UsageError(
            f"`{setting}` is `{reference}`, but importing `{name}` exits: SystemExit: {error}{line_of(error)}",
            hint="move what a script does below `if __name__ == '__main__':`",
        )
    return UsageError(
        f"`{setting}` is `{reference}`, but importing `{name}` failed: {type(error).__name__}: {error}",
        hint=f"`python -c 'import {name}'` shows where",
    )


def _check_call(function: Any, reference: str, setting: str, like: Callable[..., Any], *, skip: int = 0) -> None:
    """Raise an error that shows the right signature unless the function takes the positional arguments of `like`.

    `skip`: the number of its first arguments that the function does not take, such as `self` of a static method.
    """
    right = _signature(like, reference.rpartition(":")[2].rpartition(".")[2])
    if inspect.isclass(function):
        raise UsageError(f"`{setting}` is `{reference}`, which is a class, not a function", hint=f"define `{right}`")
    if not callable(function):
        raise UsageError(f"`{setting}` is `{reference}`, which is not a function", hint=f"define `{right}`")
    if _is_async(function) != _is_async(like):
        kind = "async def" if _is_async(like) else "def"
        raise UsageError(f"`{setting}` is `{reference}`, which must be a plain `{kind}`", hint=f"define `{right}`")
    parameters = list(inspect.signature(like).parameters)[skip:]
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:  # some functions that are written in C have none
        raise UsageError(
            f"`{setting}` is `{reference}`, whose signature cannot be checked: {error}",
            hint=f"call it in a function of yours: define `{right}`",
        ) from error
    try:
        signature.bind(*parameters)
    except TypeError as error:
        found = _signature(function, reference.rpartition(":")[2].rpartition(".")[2])
        raise UsageError(
            f"`{setting}` is `{reference}`, whose signature is `{found}`: {error}", hint=f"define `{right}`"
        ) from error


def _is_async(function: Callable[..., Any]) -> bool:
    """Whether it is an `async def`, or an object whose `__call__` is one."""
    own = (function, type(function).__call__)
    return any(inspect.iscoroutinefunction(one) or inspect.isasyncgenfunction(one) for one in own)


@dataclass(frozen=True, slots=True)
class _Annotation:
    """An annotation whose representation is its text, with the short names of types."""

    text: str

    @classmethod
    def of(cls, annotation: Any) -> Any:
        if annotation is inspect.Signature.empty:
            return annotation
        text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
        return cls(re.sub(r"(?:\w+\.)+(?=\w)", "", text))

    def __repr__(self) -> str:
        return self.text


def _signature(function: Callable[..., Any], name: str) -> str:
    """Return the signature as in source code, with the short names of types."""
    signature = inspect.signature(function)
    shown = signature.replace(
        parameters=[one.replace(annotation=_Annotation.of(one.annotation)) for one in signature.parameters.values()],
        return_annotation=_Annotation.of(signature.return_annotation),
    )
    return f"{'async def' if _is_async(function) else 'def'} {name}{shown}"


def _methods(kind: type) -> dict[str, Callable[..., Any]]:
    """The public methods as attributes of the class: those that are static or of the class are bound to it."""
    return {
        name: getattr(kind, name)
        for base in reversed(kind.__mro__)
        if base is not object
        for name, member in vars(base).items()
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, staticmethod | classmethod))
    }


def _outline(like: type, optional: bool) -> str:
    lines = [f"`{_signature(method, name)}`" for name, method in _methods(like).items()]
    return ("one or more of " if optional else "") + ", ".join(lines)


def failed_call(error: Exception, reference: str, setting: str, about: str) -> DockyardError:
    """The error of a run that stops because a user's function raised `error` when it was called about something."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return DockyardError(
        f"`{setting}` is `{reference}`, which failed on {about}: {type(error).__name__}: {error}{place}",
        hint=f"fix the function, then `--resume` the run: what was recorded is kept ({RESTART})",
    )


def line_of(error: BaseException, module: ModuleType | None = None) -> str:
    """Where user code that was called here failed: the last line of the module in the traceback, else the last line."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first frame is the call
    own = [frame for frame in frames if module and frame.filename == _file_of(module)]
    return "".join(f" (`{frame.filename}`, line {frame.lineno})" for frame in (own or frames)[-1:])
