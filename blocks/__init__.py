"""Prefect blocks: servers, hosts, storage and alerts."""

from blocks.alerts import Alert
from blocks.hosts import TargetHost
from blocks.servers import SGLangServer
from blocks.storage import RunStorage

__all__ = ["Alert", "RunStorage", "SGLangServer", "TargetHost"]
