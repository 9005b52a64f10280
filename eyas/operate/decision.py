"""The decision before the long phases: go on with the plan, or not; by the config or by a person, always recorded."""

from __future__ import annotations

import select
import sys
from collections.abc import Callable

from eyas.config import RunConfig
from eyas.errors import EyasError
from eyas.operate.plan import PlanKeeper, render_plan

Ask = Callable[[str, float], str | None]
"""Shows a text and waits so many seconds for an answer; None if nobody answered."""


class Declined(EyasError):
    """The plan was not accepted; nothing long was started."""


def decide(keeper: PlanKeeper, config: RunConfig, ask: Ask) -> None:
    """Accept the plan, or raise `Declined`. A decision that an earlier start of this run recorded stands."""
    if keeper.is_accepted:
        return
    if config.operate.decision == "accept":
        keeper.decide("accept", who="config", why="operate.decision is accept")
        return
    answer = ask(render_plan(keeper.ask()), config.operate.decision_timeout_s)
    if answer is None:
        choice, who = config.operate.decision_default, "config"
        why = f"nobody answered within {config.operate.decision_timeout_s:.0f} s"
    else:
        choice, who, why = ("accept" if answer.strip().lower() in ("y", "yes", "accept") else "abort"), "operator", "asked"
    keeper.decide(choice, who=who, why=why)
    if choice == "abort":
        raise Declined(
            f"the plan was not accepted ({why}); change the config (plan.md lists alternatives) and run again to be asked again"
        )


def nobody_answers(text: str, timeout_s: float) -> str | None:
    """Where nobody can be asked: the config's default holds."""
    return None


def ask_on_terminal(text: str, timeout_s: float) -> str | None:
    """Ask on standard input; None at once where there is no terminal."""
    if not sys.stdin.isatty():
        return None
    print(f"{text}\nGo on with this plan? [y/N] ", end="", file=sys.stderr, flush=True)
    ready, _, _ = select.select([sys.stdin], [], [], timeout_s)
    return sys.stdin.readline() if ready else None
