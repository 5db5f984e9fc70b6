"""The package as a newcomer meets it: the wheel, the imports it needs, the documents' examples."""

from __future__ import annotations

import ast
import subprocess
import sys
import venv
from collections.abc import Collection
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def python(*command: str, cwd: Path, interpreter: str = sys.executable) -> str:
    done = subprocess.run([interpreter, *command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.wheel
def test_the_built_wheel_works_in_a_clean_environment(tmp_path):
    python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT), cwd=tmp_path)
    (wheel,) = tmp_path.glob("evenhand-*.whl")
    home = tmp_path / "clean"
    venv.create(home, with_pip=True)
    clean = str(home / "bin" / "python")
    python("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", str(wheel), cwd=tmp_path, interpreter=clean)
    # The heavy dependencies are borrowed from here, behind the environment's own packages.
    site = python("-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path, interpreter=clean).strip()
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    (Path(site) / "borrowed.pth").write_text("\n".join(borrowed))
    used = """
import pathlib, sys
import numpy as np, evenhand as eh
assert pathlib.Path(eh.__file__).is_relative_to(sys.prefix), eh.__file__
out = eh.aggregate("fedlf", np.eye(3), losses=[1.0, 2.0, 3.0], clients=["a", "b", "c"])
out.state.save("state.safetensors")
print(eh.__version__, len(eh.methods()), eh.State.load("state.safetensors"))
"""
    said = python("-c", used, cwd=tmp_path, interpreter=clean)
    assert "3 updates remembered" in said


def test_a_room_behind_the_function_of_its_name_can_be_imported():
    import evenhand as eh
    import evenhand.methods.even as room

    assert isinstance(eh.method("even").rule, room.Even)
    assert "even" in {entry.name for entry in eh.methods()}


def test_the_core_needs_torch_numpy_and_scipy_alone(tmp_path):
    blocked = """
import sys
for name in ("daqp", "piqp", "safetensors", "matplotlib", "rich", "typer", "pandas", "sklearn", "flwr", "pydantic"):
    sys.modules[name] = None
import numpy as np, evenhand as eh
updates = np.random.default_rng(0).standard_normal((5, 40))
for entry in eh.methods():
    out = eh.aggregate(entry.name, updates, losses=np.arange(1.0, 6.0), sizes=np.ones(5), accuracies=np.ones(5), lr=0.1,
                       fairness=np.zeros(5), fairness_global=0.0)
    assert np.isfinite(out.update).all(), entry.name
    print(entry.name, *out.diagnostics.notes)
"""
    said = python("-c", blocked, cwd=ROOT)
    assert "pivoting" in said  # the simplex without daqp
    assert "slsqp" in said  # the box without daqp and piqp
    assert "NOT verified" not in said


def loaded_with(name: str, tree: ast.Module, rooms: Collection[str]) -> set[str]:
    """What a module needs of us while it is loaded; of the packages it lies in, those are begun before."""
    found: set[str] = set()
    statements: list[ast.AST] = [tree]
    while statements:
        for entry in ast.iter_child_nodes(statements.pop()):
            if isinstance(entry, ast.Import):
                found |= {alias.name for alias in entry.names}
            elif isinstance(entry, ast.ImportFrom) and entry.module:
                found |= {entry.module, *(f"{entry.module}.{alias.name}" for alias in entry.names)}
            elif isinstance(entry, ast.If) and ast.unparse(entry.test) == "TYPE_CHECKING":
                continue
            elif not isinstance(entry, (ast.FunctionDef, ast.expr)):
                statements.append(entry)
    found &= set(rooms)
    return found.union(*map(packages, found)) - {name, *packages(name)}


def packages(name: str) -> list[str]:
    words = name.split(".")
    return [".".join(words[:count]) for count in range(1, len(words))]


def test_imports_point_one_way():
    """So that any room can be entered first; and no room knows of those above it (docs: CONTRIBUTING.md)."""
    rooms = {}
    for path in sorted((ROOT / "evenhand").rglob("*.py")):
        words = path.relative_to(ROOT).with_suffix("").parts
        rooms[".".join(words[:-1] if words[-1] == "__init__" else words)] = ast.parse(path.read_text())
    needs = {name: loaded_with(name, tree, rooms) for name, tree in rooms.items()}
    assert "evenhand.geometry" in needs["evenhand.aggregation"]
    order = list(TopologicalSorter(needs).static_order())  # raises where there is a circle, and names it
    reached: dict[str, set[str]] = {}
    for name in order:
        reached[name] = needs[name].union(*(reached[room] for room in needs[name]))
    assert [name for name in rooms if "evenhand.cli" in reached[name]] == ["evenhand.__main__"]
    for room in ("evenhand.data", "evenhand.models", "evenhand.fairness", "evenhand.geometry", "evenhand.solvers"):
        assert not {"evenhand.methods", "evenhand.engine", "evenhand.experiment"} & reached[room], room
    assert not any(name.startswith("evenhand.experiment") for name in reached["evenhand.engine.simulation"])
