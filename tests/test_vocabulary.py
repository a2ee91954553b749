"""One word for a thing: types are named once, and variables say what they hold."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = [path for package in ("rayfl", "actors", "jobs") for path in sorted((ROOT / package).rglob("*.py"))]
TWICE = {
    "QSGD": "a compressor, and the method that uses it: both have the paper's name",
    "TernGrad": "a compressor, and the method that uses it: both have the paper's name",
}
"""The types that are defined twice, each with its reason."""
EMPTY = {"one", "found", "own", "of"}
"""Words that say of a variable only that it was looked up, or whose it is."""


def test_a_type_is_defined_once():
    places = defaultdict[str, list[str]](list)
    for path in FILES:
        for name, line in types(ast.parse(path.read_text())):
            places[name].append(f"{path.relative_to(ROOT)}:{line}")
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert twice.keys() == TWICE.keys(), {name: where for name, where in twice.items() if name not in TWICE}


def test_a_variable_says_what_it_holds():
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in FILES
        for name, line in variables(ast.parse(path.read_text()))
        if name in EMPTY
    ]
    assert not wrong, f"{len(wrong)} variables: {', '.join(wrong[:20])}"


def test_both_rules_see_what_they_look_for():
    lines = [
        "class Ab: pass",
        "Cd = int",
        "def f(one, *, own): return [found for found in one if (of := found)]",
        "try: 1",
        "except E as one: 2",
    ]
    module = ast.parse("\n".join(lines))
    assert [*types(module)] == [("Ab", 1), ("Cd", 2)]
    assert {*variables(module)} >= {(name, 3) for name in EMPTY} | {("one", 5)}


def types(module: ast.Module) -> Iterator[tuple[str, int]]:
    """The classes of a module, and the aliases of types at its top."""
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            yield node.name, node.lineno
    for node in module.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            # Constants are in capitals, and so are variables for types, such as T.
            if isinstance(target, ast.Name) and target.id[0].isupper() and not target.id.isupper():
                yield target.id, node.lineno


def variables(module: ast.Module) -> Iterator[tuple[str, int]]:
    """The variables and parameters that a module binds; fields of classes are none."""
    fields = {
        id(node.target)
        for kind in ast.walk(module)
        if isinstance(kind, ast.ClassDef)
        for node in kind.body
        if isinstance(node, ast.AnnAssign)
    }
    for node in ast.walk(module):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in fields:
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name, node.lineno
