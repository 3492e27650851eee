"""What one version of Python runs and another does not, found by reading the code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("jaxformer", "torch_ref", "parity_tests", "tests", "benchmarks", "docs", "examples")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
HIDDEN = """
def outer(name, pairs):
    def middle():
        def inner():
            return name
        return inner, {key: name for key, name in pairs}
    return middle
"""


def read(node: ast.AST) -> set[str]:
    """Returns the names that a node, and what is in it, reads."""
    found = (each for each in ast.walk(node) if isinstance(each, ast.Name))
    return {each.id for each in found if isinstance(each.ctx, ast.Load)}


def bound(node: ast.AST) -> set[str]:
    """Returns the names that a node, and what is in it, binds."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            found.add(each.id)
        elif isinstance(each, ast.arg):
            found.add(each.arg)
        elif isinstance(each, ast.FunctionDef):
            found.add(each.name)
    return found


def split(function: ast.AST) -> tuple[list[ast.AST], list[ast.AST], list[ast.AST]]:
    """Returns a function's inner functions, its comprehensions' targets, and its other names."""
    inner: list[ast.AST] = []
    targets: list[ast.AST] = []
    others: list[ast.AST] = []
    nodes = list(ast.iter_child_nodes(function))
    while nodes:
        node = nodes.pop()
        if isinstance(node, FUNCTIONS):
            inner.append(node)
        elif isinstance(node, COMPREHENSIONS):
            targets += [n.target for n in ast.walk(node) if isinstance(n, ast.comprehension)]
        else:
            others += [node] * isinstance(node, ast.Name)
            nodes.extend(ast.iter_child_nodes(node))
    return inner, targets, others


def hidden_names(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields line and name where a comprehension hides what a function beside it reads.

    If the name comes from a function further out, Python 3.12.1 and 3.13.0 run the comprehension in
    place (PEP 709) and lose it: the function beside it ends with a NameError. 3.11 does not.
    """
    for function in (node for node in ast.walk(module) if isinstance(node, FUNCTIONS)):
        inner, targets, others = split(function)
        own = [*others, function.args]
        hidden = set().union(*map(bound, targets)) - set().union(*map(bound, own))
        for each in inner if hidden else ():
            for name in hidden & (read(each) - bound(each)):
                yield each.lineno, name


@pytest.mark.tier("full")
def test_no_comprehension_hides_a_name_of_a_function_beside_it():
    assert list(hidden_names(ast.parse(HIDDEN))) == [(4, "name")]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, name in hidden_names(ast.parse(path.read_text("utf-8")))
    ]
    assert found == []
