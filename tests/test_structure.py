"""Dependencies point one way: deployments → flows → tasks → eyas, blocks → eyas, phases never forwards."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = {
    "eyas": {"eyas"},
    "blocks": {"eyas", "blocks"},
    "tasks": {"eyas", "blocks", "tasks"},
    "flows": {"eyas", "blocks", "tasks", "flows"},
    "deployments": {"eyas", "blocks", "tasks", "flows", "deployments"},
}
PHASES = ["target", "prompts", "sglang", "generation", "merging", "hidden", "draft", "speculate"]
ORCHESTRATORS = {"prefect", "prefect_ray"}


def imported_modules(path: Path) -> set[str]:
    """Absolute module names that a file imports anywhere, function bodies included."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            modules.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return modules


def python_files(package: str) -> list[Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"{package} has no files"
    return files


@pytest.mark.parametrize("package", sorted(LAYERS))
def test_packages_import_only_downwards(package: str) -> None:
    ours = set(LAYERS)
    for path in python_files(package):
        used = {module.split(".")[0] for module in imported_modules(path)}
        assert used & ours <= LAYERS[package], f"{path} imports {used & ours - LAYERS[package]}"


def test_the_library_knows_no_orchestrator() -> None:
    for path in python_files("eyas"):
        used = {module.split(".")[0] for module in imported_modules(path)}
        assert not used & ORCHESTRATORS, f"{path} imports {used & ORCHESTRATORS}"


@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_never_imports_a_later_phase(phase: str) -> None:
    later = {f"eyas.{name}" for name in [*PHASES[PHASES.index(phase) + 1 :], "operate"]}
    for path in python_files(f"eyas/{phase}"):
        used = {".".join(module.split(".")[:2]) for module in imported_modules(path)}
        assert not used & later, f"{path} imports {used & later}"


def test_the_library_does_not_read_the_environment() -> None:
    """Only the edges do: the command line, the entry points of child processes, and what marks those that it starts."""
    edges = {"eyas/hidden/sources/sglang_plugin.py", "eyas/operate/cli.py", "eyas/operate/children.py"}
    for path in python_files("eyas"):
        if str(path.relative_to(ROOT)) in edges:
            continue
        text = path.read_text(encoding="utf-8")
        assert "os.environ[" not in text, path
        assert "os.environ.get" not in text, path
        assert "os.getenv" not in text, path
