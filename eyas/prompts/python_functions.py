"""Functions of open-source Python code as prompts: explain what this does. Read as text, never imported.

Only documented functions of a size that a small model can follow; the docstring is left out of the
prompt, so that the answer is the model's own.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path

from eyas.prompts.readers import Row

_MIN_LINES, _MAX_LINES = 5, 24
_MIN_CHARS, _MAX_CHARS = 160, 900
_REQUESTS = (
    "Explain what this Python function does.",
    "What does this Python function return, and how does it get there?",
    "Write a docstring for this Python function, with one example of a call.",
    "Review this Python function: what does it do, and what could go wrong?",
)


def python_functions(path: Path, *, name: str) -> Iterator[Row]:
    """One prompt for each documented function of 5 to 24 lines in a Python file; files of tests give none."""
    if any(part in ("tests", "testing", "conftest.py") or part.startswith("test_") for part in Path(name).parts):
        return
    source = path.read_text(encoding="utf-8", errors="replace")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in other people's strings
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not ast.get_docstring(node, clean=False) or len(node.body) < 2:
            continue
        node.body = node.body[1:]
        node.decorator_list = []
        code = ast.unparse(node)
        if _MIN_LINES <= code.count("\n") + 1 <= _MAX_LINES and _MIN_CHARS <= len(code) <= _MAX_CHARS:
            request = _REQUESTS[len(code) % len(_REQUESTS)]
            yield Row(where=f"{name}:{node.lineno}", value={"prompt": f"{request}\n\n```python\n{code}\n```"})
