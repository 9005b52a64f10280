"""Events of a run for Prefect's event feed; automations and Alert blocks act on them."""

from __future__ import annotations

from pathlib import Path

from prefect.events import emit_event

from blocks.alerts import AlertEvent

EVENT_PREFIX = "eyas."


def event_name(alert: AlertEvent) -> str:
    """The event's name in Prefect, for instance eyas.gate-breached."""
    return EVENT_PREFIX + alert.replace(" ", "-")


def emit(alert: AlertEvent, run: Path, message: str, **payload: str | int | float) -> None:
    """Tell Prefect what happened to a run; `message` is what a person reads in the notification."""
    resource = {"prefect.resource.id": f"{EVENT_PREFIX}run.{run.name}", "prefect.resource.name": run.name, "eyas.folder": str(run)}
    emit_event(event=event_name(alert), resource=resource, payload={"message": message, **payload})
