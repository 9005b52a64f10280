"""Words of a text: the unit in which duplicates and contamination are measured.

Case and punctuation do not count; a CJK character is a word, since such text has no spaces.
"""

from __future__ import annotations

import re

_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(f"[{_CJK}]|[^\\W{_CJK}]+")
_TYPOGRAPHIC = "’‘“”–—…•\u00a0"
_ASCII_SPACES = {code: " " for code in range(128) if not (chr(code).isalnum() or chr(code) == "_")}


def words_of(texts: list[str]) -> list[str]:
    """Lower-case words of the texts, in order. ASCII but for typographic marks, most of what comes, is five times faster."""
    text = "\n".join(texts).lower()
    if not text.isascii():
        for mark in _TYPOGRAPHIC:
            text = text.replace(mark, " ")
    return text.translate(_ASCII_SPACES).split() if text.isascii() else _WORD.findall(text)
