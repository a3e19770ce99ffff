"""Chromium over the DevTools protocol on a pipe, with the standard library alone."""

import importlib.util
import json
import os
import pathlib
import select
import shutil
import subprocess
import sys
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # root in a container has none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    # The page can reach no other machine.
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--remote-debugging-pipe",
)
# The browser speaks the protocol on its descriptors 3 and 4.
_LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
    "os.execvp(sys.argv[3], sys.argv[3:])"
)
# The paths of selectors of the nodes that pass take half the time of a long page.
_AXE = """
axe.run(document, {runOnly: %s, resultTypes: ["violations"], selectors: false}).then((found) =>
  found.violations.flatMap((rule) => rule.nodes.map((node) =>
    rule.id + ": " + node.html.slice(0, 120) + " " + node.failureSummary)))
"""
_PATIENCE_S = 120.0


def find():
    """Return the browser's path, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A headless Chromium with one page.

    Args:
      folder: folder for the browser's profile.
    """

    def __init__(self, folder):
        ours_in, theirs_out = os.pipe()
        theirs_in, self._out = os.pipe()

        command = [
            sys.executable,
            "-c",
            _LAUNCH,
            str(theirs_in),
            str(theirs_out),
            find(),
            *_FLAGS,
            f"--user-data-dir={folder}",
        ]
        self._process = subprocess.Popen(
            command, pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL
        )

        os.close(theirs_in)
        os.close(theirs_out)
        self._in = ours_in
        self._buffer = b""
        self._count = 0
        self._session = None
        self.events = []

        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """Send a command and return its result; keep events that arrive in between."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _receive(self):
        deadline = time.monotonic() + _PATIENCE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._in, 1 << 20)
            assert part, "the browser is gone"
            self._buffer += part
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def open(self, url, width):
        """Show a page on a screen of this width and wait until it is loaded."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.call("Page.navigate", url=url)
        while not self.named("Page.loadEventFired"):
            self.events.append(self._receive())

    def print(self):
        """Pretend to print the page."""
        self.call("Emulation.setEmulatedMedia", media="print")

    def pixels(self, selector, places):
        """Return the colours [r, g, b] of an image at shares (x, y) of its size."""
        script = f"""(() => {{
            const image = document.querySelector({json.dumps(selector)});
            const canvas = document.createElement("canvas");
            canvas.width = 400;
            canvas.height = 300;
            const context = canvas.getContext("2d");
            context.drawImage(image, 0, 0, 400, 300);
            return {json.dumps(places)}.map(([x, y]) =>
                [...context.getImageData(400 * x, 300 * y, 1, 1).data].slice(0, 3));
        }})()"""
        return self.evaluate(script)

    def named(self, *methods):
        """Return the parameters of the events of these names."""
        return [event["params"] for event in self.events if event.get("method") in methods]

    def evaluate(self, expression):
        """Return the value of a JavaScript expression in the page, or what its promise gives."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def axe(self, rules):
        """Return what axe finds wrong on the page, by rules or by their tags."""
        home = pathlib.Path(importlib.util.find_spec("axe_core_python").origin).parent
        self.evaluate((home / "axe.min.js").read_text())
        return self.evaluate(_AXE % json.dumps(rules))

    def prefer(self, colour_scheme):
        """Let the system ask pages for "light" or "dark"."""
        feature = {"name": "prefers-color-scheme", "value": colour_scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    @property
    def requests(self):
        """Return every address the page asked for."""
        return [event["request"]["url"] for event in self.named("Network.requestWillBeSent")]

    @property
    def complaints(self):
        """Return everything written to the console."""
        return self.named("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")

    def close(self):
        """End the browser."""
        self.call("Browser.close")
        self._process.wait(_PATIENCE_S)
        os.close(self._in)
        os.close(self._out)
