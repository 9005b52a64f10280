"""Tokenizers without torch: what a process that only makes prompts or drives servers does not load.

transformers imports torch wherever it is installed, though a tokenizer never touches it: 180 MB of the
resident memory of a process that renders prompts or sends them for days.
"""

from __future__ import annotations

import os
import sys

from eyas.target.spec import TargetSpec


def leave_torch_out(spec: TargetSpec) -> bool:
    """Make torch unimportable in this process, before transformers is imported; False where that cannot be.

    It cannot where torch or transformers is loaded already, or where a permitted Python file of the target asks
    for torch. Nothing in the process may load a model afterwards: call it only where the process ends with its work.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        return False
    if any(b"torch" in (spec.folder / name).read_bytes() for name in spec.remote_code_sha256):
        return False
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would say that no model can be loaded
    sys.modules["torch"] = None  # type: ignore[assignment]  # an import of it fails, and is_torch_available is False
    return True
