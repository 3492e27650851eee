"""The mirror and the import rules, read from the source."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Files of jaxformer that have no twin.
# ``few_row_layers`` is about how XLA multiplies on a CPU, ``split_once`` about modules of Flax.
WITHOUT_TWIN = {"__init__", "__main__", "errors", "few_row_layers", "split_once"}
JAX_ONLY_KEYWORDS = {"rngs"}
TORCH_ONLY_KEYWORDS = {"generator"}


def modules(package: str) -> dict[str, ast.Module]:
    """The parsed files of a package's top level, by name."""
    return {
        path.stem: ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / package).glob("*.py"))
    }


JAXFORMER, TORCH_REF = modules("jaxformer"), modules("torch_ref")
SHARED = sorted((JAXFORMER.keys() & TORCH_REF.keys()) - {"__init__"})


def classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    """The public classes of a file."""
    return {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }


def keywords(function: ast.FunctionDef) -> list[str]:
    """The names of a function's parameters, in order."""
    arguments = function.args
    return [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def method(node: ast.ClassDef, *names: str) -> ast.FunctionDef | None:
    """The first method of that name."""
    return next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name in names), None)


def attributes(node: ast.ClassDef) -> set[str]:
    """The public attributes that a constructor sets: the paths of parameters and sub-modules."""
    constructor = method(node, "__init__")
    if constructor is None:
        return set()
    found = set()
    for statement in ast.walk(constructor):
        targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
        for target in targets:
            if (
                isinstance(target, ast.Attribute)
                and isinstance(target.value, ast.Name)
                and target.value.id == "self"
                and not target.attr.startswith("_")
            ):
                found.add(target.attr)
    return found


def test_the_same_files():
    assert JAXFORMER.keys() - WITHOUT_TWIN == TORCH_REF.keys() - {"__init__"}


@pytest.mark.parametrize("name", SHARED)
def test_the_same_public_classes(name):
    jax, torch = classes(JAXFORMER[name]), classes(TORCH_REF[name])
    # The torch side defines its own TextError, as it may not import jaxformer's.
    assert jax.keys() == torch.keys() - {"TextError"}


@pytest.mark.parametrize("name", SHARED)
def test_the_same_public_functions(name):
    def functions(tree: ast.Module) -> set[str]:
        return {
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        }

    # What only one framework needs: JAX takes modules apart and widens by hand, torch copies out.
    one_side_only = {"widen", "in_float32", "random_bits", "to_numpy"}
    one_side_only |= {"by_row", "fused_attention", "evaluating", "generating_programs"}
    one_side_only |= {"round_programs"}
    # An optimizer of torch holds its parameters, one of optax is given them.
    one_side_only |= {"optimizer_of"}
    # A loop on devices leaves out an update that is not finite, so a step of JAX's has two parts.
    one_side_only |= {"average_gradients", "update_state", "update_parameters"}
    one_side_only |= {"is_narrow", "look_up"}
    # With a custom call the gradient of a norm is added to that of what goes on beside it.
    one_side_only |= {"norm_beside"}
    one_side_only |= {"most_probable", "draw", "project"}
    one_side_only |= {
        "split",
        "merge",
        "abstract",
        "abstract_module",
        "cast_parameters",
        "join_path",
        "split_path",
        "map_parameters",
    }
    assert functions(JAXFORMER[name]) - one_side_only == functions(TORCH_REF[name]) - one_side_only


@pytest.mark.parametrize(
    ("name", "cls"), [(name, cls) for name in SHARED for cls in classes(JAXFORMER[name])]
)
def test_the_same_constructor_keywords_and_attributes(name, cls):
    jax, torch = classes(JAXFORMER[name])[cls], classes(TORCH_REF[name])[cls]
    jax_init, torch_init = method(jax, "__init__"), method(torch, "__init__")
    if jax_init is not None and torch_init is not None:
        assert [k for k in keywords(jax_init) if k not in JAX_ONLY_KEYWORDS] == [
            k for k in keywords(torch_init) if k not in TORCH_ONLY_KEYWORDS
        ]
    leaves = {"kernel", "scale", "embedding", "weight", "bias"}
    dropout = {"deterministic", "key", "recording", "last_keep", "generator", "first_row"}
    inherited = {"eps"}
    ignored = leaves | dropout | inherited
    assert attributes(jax) - ignored == attributes(torch) - ignored


@pytest.mark.parametrize(
    ("name", "cls"), [(name, cls) for name in SHARED for cls in classes(JAXFORMER[name])]
)
def test_the_same_call_arguments(name, cls):
    jax = method(classes(JAXFORMER[name])[cls], "__call__")
    torch = method(classes(TORCH_REF[name])[cls], "forward")
    if jax is not None and torch is not None:
        assert keywords(jax) == keywords(torch)


@pytest.mark.parametrize(
    "name",
    [
        "config.py",
        "config_attention.py",
        "config_classifiers.py",
        "config_dual_encoder.py",
        "config_experts.py",
        "config_heads.py",
        "config_optimizers.py",
        "config_parts.py",
        "config_positions.py",
        "config_speech.py",
        "config_tree.py",
        "config_vision.py",
        "checks.py",
        "position_tables.py",
    ],
)
def test_settings_are_the_same_text(name):
    twin = ROOT / "torch_ref" / name
    assert (ROOT / "jaxformer" / name).read_text() == twin.read_text()


def imports(tree: ast.AST) -> set[str]:
    """The packages that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_torch_ref_imports_neither_jax_nor_jaxformer():
    for path in (ROOT / "torch_ref").rglob("*.py"):
        tops = {name.partition(".")[0] for name in imports(ast.parse(path.read_text()))}
        assert not tops & {"jax", "jaxlib", "flax", "optax", "jaxformer", "jaxtyping"}, path


def test_jaxformer_imports_no_torch():
    for path in (ROOT / "jaxformer").rglob("*.py"):
        if path.is_relative_to(ROOT / "jaxformer/parity"):
            continue
        tops = {name.partition(".")[0] for name in imports(ast.parse(path.read_text()))}
        assert not tops & {"torch", "torch_ref"}, path


LAYERS = [
    {"config", "errors"},
    {"initializers", "losses", "parameters", "position_tables"},
    {"layers", "masks"},
    {"norms", "positions", "feed_forward", "attention_core"},
    {"attention", "experts"},
    {"latent_attention"},
    {"blocks"},
    {"position_builders"},
    {"builders"},
    {"transformer_lm", "encoder_decoder"},
]


@pytest.mark.parametrize("package", ["jaxformer", "torch_ref"])
def test_leaves_know_nothing_of_what_is_built_of_them(package):
    level = {name: i for i, names in enumerate(LAYERS) for name in names}
    files = JAXFORMER if package == "jaxformer" else TORCH_REF
    for name, tree in files.items():
        for imported in imports(tree):
            target = imported.removeprefix(f"{package}.")
            if name in level and target in level:
                assert level[target] < level[name], f"{name} imports {target}"


def test_leaves_see_no_config():
    for name in ("layers", "masks", "norms", "positions", "attention", "feed_forward", "blocks"):
        assert not any("config" in path for path in imports(JAXFORMER[name])), name
