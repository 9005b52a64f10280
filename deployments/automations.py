"""Automations in code, by name: zombie runs are ended, and events go where the Alert blocks say.

A flow run sends a heartbeat; one that neither ends nor sends any for three of them is marked Crashed
(nothing else notices when the worker dies with it). A run that had already finished is left alone: its
manifests decide, and Prefect refuses to change a final state.
"""

from __future__ import annotations

import json
from datetime import timedelta

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound

from blocks import Alert
from blocks.alerts import AlertEvent
from deployments.catalogue import TAG
from eyas.errors import ConfigError
from tasks.events import EVENT_PREFIX, event_name

HEARTBEAT_S = 30
"""Seconds between heartbeats of a flow run started by `up` (PREFECT_FLOWS_HEARTBEAT_FREQUENCY)."""

JSON_DATA = {"event": "{{subject}}", "text": "{{body}}"}
"""What a Custom Webhook block is best given to send: Prefect fills the two placeholders of an alert."""

_HEARTBEAT = "prefect.flow-run.heartbeat"
_ENDS = [f"prefect.flow-run.{name}" for name in ("Completed", "Failed", "Cancelled", "Crashed")]
_TAGGED = ResourceSpecification({"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{TAG}"})
_FLOW_RUNS = ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"})
_STATES: dict[str, set[str]] = {
    "zombie run": {"prefect.flow-run.Crashed"},
    "run failed": {"prefect.flow-run.Failed", "prefect.flow-run.Crashed"},
    "run finished": {"prefect.flow-run.Completed"},
}
_MESSAGE = "(event.payload.message or (event.payload.validated_state or {}).message or '')"
_RUN = "(event.resource.name or event.resource['prefect.resource.name'] or event.resource.id)"
_BODY = f"{{{{ [{_RUN}, {_MESSAGE}] | select | join(': ') }}}}"


async def register_automations(client: PrefectClient, *, silence_s: float = 3 * HEARTBEAT_S) -> None:
    """Create or update every automation; those of Alert blocks that are gone are deleted."""
    wanted = [zombie_automation(silence_s), *await _alert_automations(client)]
    existing = {automation.name: automation for automation in await client.read_automations()}
    for automation in wanted:
        if automation.name in existing:
            await client.update_automation(existing[automation.name].id, automation)
        else:
            await client.create_automation(automation)
    for name in existing.keys() - {automation.name for automation in wanted}:
        if name.startswith("Eyas: "):
            await client.delete_automation(existing[name].id)


def zombie_automation(silence_s: float) -> AutomationCore:
    """Ends a run that sent heartbeats and then, for `silence_s` seconds, neither one nor an end."""
    return AutomationCore(
        name="Eyas: end zombie runs",
        description=f"A flow run that is silent for {silence_s:.0f} s is marked Crashed; run it again to continue.",
        trigger=EventTrigger(
            match=_FLOW_RUNS,
            match_related=_TAGGED,
            after={_HEARTBEAT},
            expect={_HEARTBEAT, *_ENDS},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=silence_s),
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, name="Crashed", message="zombie: no heartbeat; retry to continue")],
    )


async def _alert_automations(client: PrefectClient) -> list[AutomationCore]:
    alerts: dict[str, Alert] = {}
    for document in await client.read_block_documents_by_type(Alert.get_block_type_slug()):
        alerts[str(document.name)] = Alert._from_block_document(document)
    return [
        automation
        for name, alert in sorted(alerts.items())
        for event in alert.events
        for automation in [await _alert_automation(client, name, alert, event)]
    ]


async def _alert_automation(client: PrefectClient, name: str, alert: Alert, event: AlertEvent) -> AutomationCore:
    if event in _STATES:
        trigger = EventTrigger(
            match=_FLOW_RUNS, match_related=_TAGGED, expect=_STATES[event], posture=Posture.Reactive, threshold=1
        )
    else:
        trigger = EventTrigger(
            match=ResourceSpecification({"prefect.resource.id": f"{EVENT_PREFIX}run.*"}),
            expect={event_name(event)},
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(hours=1),  # the watch finds the same thing every few minutes: tell it once an hour
        )
    return AutomationCore(
        name=f"Eyas: {event} → {name}",
        description=f"Sends {event!r} to {', '.join(alert.to)}; made from the Alert block {name!r}.",
        trigger=trigger,
        actions=[await _action(client, reference, event) for reference in alert.to],
    )


async def _action(client: PrefectClient, reference: str, event: str) -> SendNotification:
    slug, separator, name = reference.partition("/")
    if not separator:
        raise ConfigError(f"Alert delivers to {reference!r}; write type/name, for instance slack-webhook/ops")
    if slug == "webhook":
        # Its calls share one connection pool, which the first call to end closes under every other: two events of one moment, as a
        # crash is, lose one of their alerts, and nothing sends it again.
        raise ConfigError(
            f"Alert delivers to {reference!r}, but a Webhook block loses calls that are made at the same moment; create a "
            f"Custom Webhook block with its URL and the JSON data {json.dumps(JSON_DATA)}, and deliver to custom-webhook/{name}"
        )
    try:
        document = await client.read_block_document_by_name(name, slug)
    except ObjectNotFound as error:
        raise ConfigError(f"Alert delivers to {reference!r}, which does not exist; create that block first") from error
    return SendNotification(block_document_id=document.id, subject=f"Eyas: {event}", body=_BODY)
