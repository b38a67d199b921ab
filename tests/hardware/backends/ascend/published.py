"""What torch_npu publishes of what the platform uses, and whether a use in the source fits it.

`torch_npu_schemas.yaml` holds, by version, the schemas of functions and the signatures of Python names that
`renew_schemas.py` read from torch_npu's wheels.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

import polyrec.hardware.backends.ascend as platform
from polyrec.hardware.base.runtime import Event, Stream

SOURCE = Path(platform.__file__).parent
FIXTURE = Path(__file__).with_name("torch_npu_schemas.yaml")

# Variables of the platform's source that hold torch_npu's objects -> their class.
RECEIVERS = {
    "gate": "npu.ExternalEvent",
    "_passed": "npu.Event",
    "copied": "npu.Event",
    "_captured": "npu.NPUGraph",
    "side": "npu.Stream",
    "before": "npu.Stream",
}
PLAIN = "attribute"  # stands in the fixture for a name that is no callable
Parameters = inspect.Signature


@dataclass(frozen=True)
class Use:
    """One place that names something of torch_npu. called: with so many positions and these keywords."""

    place: str
    name: str
    called: bool
    positions: int = 0
    keywords: tuple[str, ...] = ()


@cache
def published() -> dict[str, dict[str, str]]:
    """Version -> name -> schema or signature."""
    return yaml.safe_load(FIXTURE.read_text(encoding="utf-8"))


def signature(text: str) -> Parameters:
    """Of a schema, `name(Tensor self, *, float eps=1.0, Tensor(a!) out) -> …`, or of Python text, `(a, b=None)`.

    The first parameter of a schema has another name in Python when it is `self`, so it can only be given by position.
    A schema's results at the end (`Tensor(a!) …`, of an overload `.out`) are one list `out` in Python.
    """
    if text.startswith("("):
        return _of_python(text)
    head, _, inside = text.partition("(")
    inside = inside.rpartition(" -> ")[0].rstrip()[:-1]
    parameters, kind = [], inspect.Parameter.POSITIONAL_OR_KEYWORD
    for part in re.split(r",\s*(?![^(\[]*[)\]])", inside):
        if part == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
            continue
        declared, _, default = part.partition("=")
        name = declared.split()[-1]
        if head.endswith(".out") and "!" in declared:
            continue
        own = inspect.Parameter.POSITIONAL_ONLY if name == "self" else kind
        given = {"default": default} if default else {}
        parameters.append(inspect.Parameter(name, own, **given))
    if head.endswith(".out"):
        parameters.append(inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY))
    return inspect.Signature(parameters)


def fault(use: Use, names: dict[str, str]) -> str | None:
    """Why a use does not fit what one version publishes; None: it does."""
    if use.name not in names:
        return f"{use.place}: torch_npu has no {use.name}"
    if not use.called or names[use.name] == PLAIN:
        return f"{use.place}: {use.name} cannot be called" if use.called else None
    try:
        signature(names[use.name]).bind(*[None] * use.positions, **dict.fromkeys(use.keywords))
    except TypeError as error:
        return f"{use.place}: {use.name}: {error}"
    return None


def source_uses() -> list[Use]:
    """All uses in the platform's folder, and those of the objects that it hands out."""
    files = sorted(SOURCE.rglob("*.py"))
    found = [use for path in files for use in uses(path.read_text(encoding="utf-8"), str(path.relative_to(SOURCE)))]
    return found + contract_uses()


def contract_uses() -> list[Use]:
    """What callers of a runtime do with its streams and events, which are torch_npu's own objects."""
    found = []
    for cls in (Event, Stream):
        for name, method in inspect.getmembers(cls, inspect.isfunction):
            if not name.startswith("_"):
                positions = len(inspect.signature(method).parameters) - 1
                found.append(Use("base/runtime.py", f"npu.{cls.__name__}.{name}", True, positions))
    return found


def uses(source: str, file: str = "source") -> Iterator[Use]:
    """Each `self._library.…`, `library.…` and method of a receiver, the longest chain of names counting.

    `**options` stands for the keys of the file's one literal dict of that name; of anything else it is an error.
    """
    tree = ast.parse(source)
    options = _literal_dicts(tree)
    inner: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := _name(node.func)):
            inner |= {id(part) for part in ast.walk(node.func)}
            keywords: list[str] = []
            for keyword in node.keywords:
                if keyword.arg:
                    keywords.append(keyword.arg)
                elif isinstance(keyword.value, ast.Name) and len(keys := options.get(keyword.value.id, [])) == 1:
                    keywords += keys[0]
                else:
                    raise AssertionError(f"{file}:{node.lineno}: ** of something that is not one literal dict")
            yield Use(f"{file}:{node.lineno}", name, True, len(node.args), tuple(keywords))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner and (name := _name(node)):
            inner |= {id(part) for part in ast.walk(node)}
            yield Use(f"{file}:{node.lineno}", name, False)


def _name(node: ast.expr) -> str | None:
    """`npu.graph` for `self._library.npu.graph`, `npu.Event.record` for `self._passed.record`, else None."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        if names and node.attr == "_library":
            return ".".join(names)
        if names and node.attr in RECEIVERS:
            return ".".join([RECEIVERS[node.attr], *names])
        names.insert(0, node.attr)
        node = node.value
    if isinstance(node, ast.Name) and names:
        if node.id == "library":
            return ".".join(names)
        if node.id in RECEIVERS:
            return ".".join([RECEIVERS[node.id], *names])
    return None


def _literal_dicts(tree: ast.Module) -> dict[str, list[list[str]]]:
    """Variable -> the keys of each literal dict that it is given."""
    found: dict[str, list[list[str]]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and isinstance(node.targets[0], ast.Name):
            keys = [str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)]
            if len(keys) == len(node.value.keys):
                found.setdefault(node.targets[0].id, []).append(keys)
    return found


def _of_python(text: str) -> Parameters:
    """Defaults and annotations are not evaluated: only names, order and kinds count."""
    arguments = ast.parse(f"def f{text}: ...").body[0].args  # type: ignore[attr-defined]
    parameters = []
    positional = [(a, inspect.Parameter.POSITIONAL_ONLY) for a in arguments.posonlyargs]
    positional += [(a, inspect.Parameter.POSITIONAL_OR_KEYWORD) for a in arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    for place, (argument, kind) in enumerate(positional):
        given = {"default": None} if place >= first_default else {}
        parameters.append(inspect.Parameter(argument.arg, kind, **given))
    if arguments.vararg:
        parameters.append(inspect.Parameter(arguments.vararg.arg, inspect.Parameter.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        given = {} if default is None else {"default": None}
        parameters.append(inspect.Parameter(argument.arg, inspect.Parameter.KEYWORD_ONLY, **given))
    if arguments.kwarg:
        parameters.append(inspect.Parameter(arguments.kwarg.arg, inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)
