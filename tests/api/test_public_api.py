"""``import jaxformer``: cheap, complete, documented, and typed."""

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import jaxformer

ROOT = Path(__file__).parents[2]
HEAVY = ("jax", "flax", "numpy", "torch", "rich", "tyro")


def typed_names():
    """The module of every name that a type checker sees in the package."""
    tree = ast.parse((ROOT / "jaxformer/__init__.py").read_text("utf-8"))
    block = next(
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    return {alias.name: node.module for node in block.body for alias in node.names}


def test_the_import_brings_nothing_heavy():
    code = f"import jaxformer, sys; print([n for n in {HEAVY} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_a_type_checker_sees_what_is_there():
    lazy = {name: f"jaxformer.{m}" for m, names in jaxformer._PUBLIC.items() for name in names}
    assert typed_names() == lazy
    assert sorted(jaxformer.__all__) == jaxformer.__all__ == sorted({*lazy, "errors"})
    assert set(dir(jaxformer)) >= set(jaxformer.__all__)


@pytest.mark.parametrize("name", jaxformer.__all__)
def test_every_name_is_there_and_documented(name):
    found = getattr(jaxformer, name)
    documentation = inspect.getdoc(found)
    assert documentation
    first = documentation.partition("\n\n")[0]
    assert first.endswith((".", ":")), first
    if inspect.isclass(found) or inspect.isfunction(found):
        assert found.__name__ == name


def public_attributes():
    """All public functions, methods and properties of the public names, by their place."""
    for name in jaxformer.__all__:
        found = getattr(jaxformer, name)
        if inspect.ismodule(found):
            for inner, value in vars(found).items():
                if getattr(value, "__module__", None) == found.__name__ and inner[0] != "_":
                    yield f"{name}.{inner}", value
                    yield from attributes_of_class(f"{name}.{inner}", value)
        else:
            yield name, found
            yield from attributes_of_class(name, found)


def attributes_of_class(name, cls):
    bases = inspect.getmro(cls) if inspect.isclass(cls) else ()
    for base in bases:
        if base.__module__.startswith("jaxformer"):
            for inner, value in vars(base).items():
                # A property is no function, but is read by one; a default of a setting is neither.
                is_code = callable(value) or hasattr(type(value), "__get__")
                if inner[0] != "_" and is_code:
                    yield f"{name}.{inner}", getattr(cls, inner)


def test_all_that_is_public_is_documented():
    found = dict(public_attributes())
    assert len(found) > 150
    assert {"Model.generate", "TrainConfig.window", "errors.UsageError"} <= found.keys()
    assert [name for name, value in found.items() if not inspect.getdoc(value)] == []


def test_a_name_is_the_function_whatever_was_imported_before():
    from jaxformer.parity.comparison.api import compare as the_function

    assert jaxformer.compare is the_function


def test_a_wrong_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'TransformerXL'"):
        jaxformer.TransformerXL  # noqa: B018


# mypy reads most of these programs in the full tier and in .ci/run.
@pytest.mark.tier("slow")
def test_pyright_is_clean_on_programs_of_a_user(tmp_path):
    """basedpyright is pyright with Node in the wheel; its mode ``standard`` is pyright's own."""
    pytest.importorskip("basedpyright")
    programs = [Path(__file__).with_name("typed_program.py"), *(ROOT / "examples").rglob("*.py")]
    settings = {
        "typeCheckingMode": "standard",
        "include": [str(path) for path in programs],
        # An example that is copied as a folder imports from it.
        "extraPaths": [str(ROOT / "examples" / "verify_in_ci")],
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable]
    done = subprocess.run(
        [*command, "--project", tmp_path, "--outputjson"], capture_output=True, text=True, cwd=ROOT
    )
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == len(programs)
    errors = [f"{one['file']}: {one['message']}" for one in found["generalDiagnostics"]]
    assert (done.returncode, errors) == (0, [])


@pytest.mark.tier("full")
def test_a_program_of_a_user_is_typed(tmp_path):
    program = Path(__file__).with_name("typed_program.py")
    # Of what the program does not use, and is slow to read, nothing is read.
    unused = ["torch", "transformers", "matplotlib", "IPython", "prompt_toolkit"]
    modules = ",".join(f"{name}.*" for name in unused)
    settings = f"[mypy]\nstrict = true\n[mypy-{modules}]\nfollow_imports = skip\n"
    (tmp_path / "mypy.ini").write_text(settings)
    command = [sys.executable, "-m", "mypy", "--no-incremental", "--follow-imports=silent"]
    done = subprocess.run(
        [*command, "--config-file", tmp_path / "mypy.ini", program],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
