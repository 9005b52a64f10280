"""Eyas: train EAGLE-3 draft models for a large language model that SGLang already serves.

The library needs no orchestrator: every phase is a plain function over a run folder.
"""

__version__ = "0.1.0"
