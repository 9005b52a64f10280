"""A headless Chromium spoken to over its own debugging protocol: navigate, ask, click, type, take pictures."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

from eyas.operate.children import child_process

PATIENCE_S = 600.0
"""Only a page that hangs takes as long, on the slowest machine too."""

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--force-device-scale-factor=1",
]  # fmt: skip


class Page:
    """One tab."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._number = 0

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol and its reply; events in between are passed over."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            reply = json.loads(self._socket.recv(timeout=PATIENCE_S))
            if reply.get("id") == self._number:
                assert "error" not in reply, reply
                return dict(reply["result"])

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        reply = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)

    def wait(self, expression: str) -> Any:
        """Poll until the expression is truthy; its value."""
        deadline = time.monotonic() + PATIENCE_S
        while not (value := self.ask(expression)):
            assert time.monotonic() < deadline, f"never true: {expression}; the page says: {self.text()[:1500]}"
            time.sleep(0.2)
        return value

    def wait_text(self, text: str) -> None:
        """Poll until the page shows `text`."""
        self.wait(f"document.body !== null && document.body.innerText.includes({json.dumps(text)})")

    def text(self) -> str:
        return str(self.ask("document.body ? document.body.innerText : ''"))

    def click_text(self, text: str, selector: str = "button, a, [role=tab], [role=option], label") -> None:
        """Click the last shown element of `selector` whose text is `text`, with a real mouse."""
        find = f"""(() => {{ const hits = [...document.querySelectorAll({json.dumps(selector)})]
            .filter(e => e.innerText.trim() === {json.dumps(text)} && e.getClientRects().length);
            if (!hits.length) return null; const hit = hits[hits.length - 1];
            hit.scrollIntoView({{block: "center", behavior: "instant"}});
            const box = hit.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; }})()"""
        found, before = self.wait(find), None
        while found != before:  # a page that still fills itself moves what is to be clicked
            time.sleep(0.3)
            found, before = self.wait(find), found
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=found[0], y=found[1], button="left", clickCount=1)

    def fill(self, selector: str, value: str) -> None:
        """Replace the text of an input as typing does."""
        find = f"const field = document.querySelector({json.dumps(selector)}); if (!field) return false;"
        self.wait(f"(() => {{ {find} field.focus(); field.select(); return true; }})()")
        self.send("Input.insertText", text=value)

    def picture(self, path: Path, *, height: int = 0) -> None:
        """A PNG of the page; `height` pixels high if given."""
        if height:
            self.send("Emulation.setDeviceMetricsOverride", width=1400, height=height, deviceScaleFactor=1, mobile=False)
        time.sleep(1.5)  # what fades in has done so, and the page has laid itself out again
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))
        if height:
            self.send("Emulation.clearDeviceMetricsOverride")  # a tall page that moves takes a whole core

    def rest(self) -> None:
        """Show nothing: the UI's moving timeline, drawn without a GPU, would starve what is waited for."""
        self.open("about:blank")


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Page]:
    """A fresh Chromium with its profile in `folder`, ended with the block."""
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    assert binary, "install chromium"
    command = [binary, *FLAGS, "--window-size=1400,1000", "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
    with child_process(command, log=folder.parent / "chromium.log", grace_s=5):
        port_file = folder / "DevToolsActivePort"
        deadline = time.monotonic() + PATIENCE_S
        while not (address := _first_tab(port_file)):
            assert time.monotonic() < deadline, "chromium did not start"
            time.sleep(0.1)
        with connect(address, max_size=None, open_timeout=PATIENCE_S, ping_interval=None) as socket:
            yield Page(socket)


def _first_tab(port_file: Path) -> str:
    """Address of the first tab; "" while there is none, for the file is there before the tab is."""
    if not port_file.is_file() or not (port := port_file.read_text().split("\n")[0].strip()):
        return ""
    tabs = httpx.get(f"http://127.0.0.1:{port}/json", timeout=PATIENCE_S).json()
    return next((str(tab["webSocketDebuggerUrl"]) for tab in tabs if tab["type"] == "page"), "")
