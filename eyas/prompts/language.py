"""The language filter: py3langid's n-gram classifier, 0.1 ms a prompt, loaded only where a run filters.

Code and very short texts are no language to such a classifier; a prompt is therefore rejected only
where another language is clearly more likely than every wanted one.
"""

from __future__ import annotations

from typing import Any

from eyas.errors import ConfigError, RecordError

_MIN_CONFIDENCE = 0.8
_MAX_CHARS = 2_000


class LanguageFilter:
    """Rejects texts of other languages than the wanted ones (ISO 639-1); without any, accepts all."""

    def __init__(self, languages: list[str]) -> None:
        self._wanted = set(languages)
        self._identifier: Any = None
        if not self._wanted:
            return
        from py3langid.langid import MODEL_FILE, LanguageIdentifier

        self._identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
        unknown = sorted(self._wanted - {str(label) for label in self._identifier.labels})
        if unknown:
            raise ConfigError(f"prompts.languages names {', '.join(unknown)}, wanted two-letter codes such as en, de, zh")

    def check(self, texts: list[str]) -> None:
        """Raise `RecordError("language")` where another language is at least 80 % sure."""
        if self._identifier is None:
            return
        language, confidence = self._identifier.classify("\n".join(texts)[:_MAX_CHARS])
        if language not in self._wanted and confidence >= _MIN_CONFIDENCE:
            raise RecordError("language", f"the text is {language} ({confidence:.2f}), wanted {', '.join(sorted(self._wanted))}")
