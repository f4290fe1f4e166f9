"""The house keeps its floors: imports run downward, packages are listed, nothing shadows the Hub's `kernels`."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11 to read pyproject.toml")

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ["kernels", "convert", "distill", "recipes"]


def _sources(floor: str) -> list[Path]:
    return [p for p in (ROOT / floor).rglob("*.py") if "assets" not in p.parts]


def _imported_floors(source: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}: relative import; floors cannot be checked"
            names = [f"{node.module}.{a.name}" for a in node.names]
        found |= {n.split(".")[1] for n in names if n.startswith("linearize.")}
    return found


@pytest.mark.parametrize("floor", FLOORS)
def test_imports_run_only_down_the_floors(floor: str) -> None:
    above = set(FLOORS[FLOORS.index(floor) + 1 :])
    for source in _sources(floor):
        assert not _imported_floors(source) & above, f"{source} imports from a floor above"


def test_kernels_need_only_torch_and_triton() -> None:
    allowed = set(sys.stdlib_module_names) | {"torch", "triton", "linearize", "fla"}
    for source in _sources("kernels"):
        for node in ast.walk(ast.parse(source.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {n.split(".")[0] for n in names} <= allowed, f"{source} imports {names}"


def test_the_package_list_equals_the_tree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = project["tool"]["setuptools"]["packages"]
    tree = {
        "linearize." + ".".join(p.relative_to(ROOT).parts)
        for floor in FLOORS
        for p in {s.parent for s in _sources(floor)}
    }
    assert sorted(listed) == sorted(tree)


def test_every_module_says_what_it_is_for() -> None:
    for floor in FLOORS:
        for source in _sources(floor):
            assert ast.get_docstring(ast.parse(source.read_text())), f"{source} has no docstring"


def test_the_hubs_kernels_package_is_not_shadowed(tmp_path: Path) -> None:
    """From the repository root, `import kernels` must find an installed package of that name, not our folder."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("WHOSE = 'the Hub'\n")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import kernels; print(kernels.WHOSE)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "the Hub", done.stderr
