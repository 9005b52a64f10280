"""Whether later phases may work while generation runs: only where they do not take processors from it.

The rule, in this order, unless `operate.overlap` says yes or no:

1. The embedded engine: no. It computes on every core of this machine.
2. Probabilities of the draft vocabulary (`hidden.codec` int4_top): no. The merge makes the vocabulary, after generation.
3. States from SGLang or vLLM: yes where `hidden.urls` names servers that do not generate; one host has one mode at a time.
4. States from transformers: yes on a Ray cluster elsewhere, or where no generating server stands on this machine.
"""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from eyas.config import RunConfig
from eyas.hidden.codec import CODECS

_HERE = {"127.0.0.1", "localhost", "::1", "0.0.0.0"}


def may_overlap(config: RunConfig) -> tuple[bool, str]:
    """The rule's answer and its reason in a few words."""
    operate, server, hidden = config.operate, config.server, config.hidden
    if operate.overlap != "auto":
        return operate.overlap == "yes", f"operate.overlap is {operate.overlap}"
    if server.kind == "embedded":
        return False, "the embedded engine computes on every core of this machine"
    if CODECS[hidden.codec].final is None:
        return False, f"hidden.codec {hidden.codec} needs the vocabulary that the merge makes"
    if hidden.source != "transformers":
        if not hidden.urls:
            return False, "the servers of server.urls generate first and give states afterwards"
        shared = sorted({_place(url) for url in hidden.urls} & {_place(url) for url in server.urls})
        return not shared, f"{', '.join(shared)} would do both" if shared else "hidden.urls has servers of its own"
    if operate.runner.kind == "ray" and operate.runner.address:
        return True, f"states are computed on the Ray cluster {operate.runner.address}"
    local = sorted(url for url in server.urls if urlsplit(url).hostname in _HERE | {socket.gethostname()})
    return not local, f"{', '.join(local)} generates on this machine" if local else "no server generates on this machine"


def _place(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port}"
