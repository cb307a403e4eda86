"""The import rule: pallas_kernels -> jax only; moejax -> pallas_kernels; gin and absl flags only under experiments/."""
import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FORBIDDEN = {
    "pallas_kernels": {"moejax", "experiments", "flax", "optax", "orbax", "absl", "gin", "torch", "tokenizers"},
    "moejax": {"experiments", "gin", "absl.flags", "absl.app"},
    "experiments": {"tests"},
}


def imported(path: pathlib.Path) -> set[str]:
    """Full dotted names of everything a module imports, lazily or not."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def violations(package: str) -> list[str]:
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        for name in imported(path):
            bad = [f for f in FORBIDDEN[package] if name == f or name.startswith(f + ".")]
            found += [f"{path.relative_to(ROOT)} imports {name}" for _ in bad]
    return found


@pytest.mark.parametrize("package", FORBIDDEN)
def test_import_rule(package):
    assert list((ROOT / package).rglob("*.py"))
    assert violations(package) == []


def test_the_rule_sees_lazy_and_from_imports(tmp_path):
    module = tmp_path / "m.py"
    module.write_text("def f():\n    from absl import flags\n    import gin.config\n")
    assert {"absl.flags", "gin.config"} <= imported(module)
