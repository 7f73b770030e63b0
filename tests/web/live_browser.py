"""A Chromium that stays open and is driven over a pipe: pages, scripts in them, pictures."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable

from browser import DEADLINE_S, QUIET


class Page:
    """The only tab. `complaints`: what the console said, refusals of the content policy included."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, os.fdopen(from_browser, "rb")
        self._number, self._session, self._rest = 0, "", b""
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        request: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            request["sessionId"] = self._session
        os.write(self._to, json.dumps(request).encode() + b"\0")
        while True:
            reply = self._read()
            if reply.get("id") == self._number:
                assert "error" not in reply, reply
                return dict(reply["result"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._from.fileno(), 1 << 20)
            assert more, "the browser has ended"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if message.get("method") == "Log.entryAdded":
            self.complaints.append(str(message["params"]["entry"]["text"]))
        if message.get("method") in ("Runtime.exceptionThrown",):
            self.complaints.append(str(message["params"]["exceptionDetails"]))
        return message

    def run(self, script: str) -> Any:
        """The value of an expression in the page, awaited."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script: str, *, seconds: float = DEADLINE_S) -> Any:
        """The value of an expression as soon as it is true."""
        until = time.monotonic() + seconds
        while True:
            try:
                found = self.run(script)
            except AssertionError:  # between two pages
                found = None
            if found:
                return found
            assert time.monotonic() < until, f"never true: {script}\n{self.run('document.body.innerText')}"
            time.sleep(0.05)

    def open(self, url: str, *, ready: str = "document.readyState === 'complete'") -> None:
        self.call("Page.navigate", url=url)
        self.wait(ready)

    def show_as(self, width: int, *, dark: bool = False, lang: str = "en") -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Network.setExtraHTTPHeaders", headers={"Accept-Language": lang})

    def picture(self, path: Path) -> None:
        import base64

        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def open_browser(browser: str, folder: Path, place: Callable[[list[str]], list[str]] = list) -> Iterator[Page]:
    """`place`: the command line that runs another one where its pages are."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()

    quiet = [option for option in QUIET if not option.startswith(("--virtual-time", "--enable-logging"))]
    command = [browser, *quiet, "--remote-debugging-pipe", f"--user-data-dir={folder / 'live'}"]
    if os.geteuid() == 0:
        command.append("--no-sandbox")
    at_3_and_4 = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash"]  # where it reads and writes
    ran = subprocess.Popen(
        place([*at_3_and_4, *command]),
        pass_fds=[theirs_in, theirs_out],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder)},
    )
    os.close(theirs_in)
    os.close(theirs_out)
    page = None
    try:
        page = Page(ours_out, ours_in)
        yield page
    finally:
        ran.terminate()
        ran.wait(30)
        os.close(ours_out)
        if page is not None:
            page._from.close()
