"""Looks at the runs from outside, on a schedule: a run that stands still cannot say so itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

from prefect import flow, get_run_logger
from prefect.artifacts import acreate_table_artifact

from tasks.watch import Finding, look


@flow(name="watch", flow_run_name="watch {runs}")
async def watch(runs: str = "runs") -> list[str]:
    """Look at every run that somebody works on: stalls, breached gates, disk, servers. Findings become events.

    Args:
        runs: Folder that holds the run folders; a relative one lies below the worker's folder.
    """
    logger = get_run_logger()
    findings: list[Finding] = await asyncio.to_thread(look, Path(runs))
    for finding in findings:
        logger.warning("%s run=%s %s", finding.alert, finding.run, finding.message)
        finding.tell()
    rows = [{"run": finding.run.name, "what": finding.alert, "details": finding.message} for finding in findings]
    description = f"{len(findings)} finding(s) in {runs}" if findings else f"all well in {runs}"
    await acreate_table_artifact(rows, key="watch", description=description)
    return [f"{finding.run.name}: {finding.alert}: {finding.message}" for finding in findings]
