"""Words of a text: the unit in which duplicates and contamination are measured.

Case and punctuation do not count; a CJK character is a word, since such text has no spaces.
"""

from __future__ import annotations

import re

_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(f"[{_CJK}]|[^\\W{_CJK}]+")


def words_of(texts: list[str]) -> list[str]:
    """Lower-case words of the texts, in order."""
    return _WORD.findall("\n".join(texts).lower())
