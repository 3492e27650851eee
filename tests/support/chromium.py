"""Chromium without a window, over its debugging pipe: nothing to install beside the browser."""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
EXECUTABLE = next(filter(None, map(shutil.which, NAMES)), None)
PATIENCE = 60
# The browser reads commands at descriptor 3 and writes answers at 4.
BEGIN = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for place, pipe in enumerate(pipes, 3):
    os.dup2(pipe, place)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One browser with one page.

    Attributes:
        complaints: exceptions, console errors and requests other than for the page itself.
    """

    def __init__(self, folder):
        to_browser, write_end = os.pipe()
        read_end, from_browser = os.pipe()
        self._write, self._read = write_end, read_end
        self._process = subprocess.Popen(
            [sys.executable, "-c", BEGIN, str(to_browser), str(from_browser), EXECUTABLE,
             "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu",
             "--hide-scrollbars", "--no-first-run", "--disable-dev-shm-usage",
             f"--user-data-dir={folder}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._numbers = itertools.count(1)
        self._session = None
        self._loaded = set()
        self._url = "about:blank"
        self.complaints = []
        targets = self._command("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        attached = self._command("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._command(f"{domain}.enable")
        self._command("Page.setLifecycleEventsEnabled", enabled=True)

    def open(self, path, width=1280, height=900, dark=False):
        """Shows a file in a window of that size, and forgets old complaints."""
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._command("Emulation.setEmulatedMedia", features=[scheme])
        url = path.as_uri() if hasattr(path, "as_uri") else path
        # From a page to a place in itself nothing would be loaded.
        self._load("about:blank")
        self.complaints.clear()
        self._url = url
        self._load(url)

    def resize(self, width, height):
        self._command(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip

    def evaluate(self, expression):
        """The value of a JavaScript expression, promises awaited."""
        answer = self._command(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def click(self, selector):
        """Clicks with the mouse in the middle of an element, scrolled into view first."""
        x, y = self.evaluate(
            f"""(() => {{
                const element = document.querySelector({json.dumps(selector)});
                element.scrollIntoView({{block: "center"}});
                const box = element.getBoundingClientRect();
                return [box.left + box.width / 2, box.top + box.height / 2];
            }})()"""
        )
        self.click_at(x, y)

    def click_at(self, x, y):
        for kind in ("mousePressed", "mouseReleased"):
            self._command(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1
            )

    def press(self, *keys):
        """Presses keys, one after the other."""
        for key in keys:
            code = {"Enter": 13, "Tab": 9, "Home": 36, "End": 35, "ArrowLeft": 37, "ArrowUp": 38,
                    "ArrowRight": 39, "ArrowDown": 40}[key]  # fmt: skip
            for kind in ("rawKeyDown", "keyUp"):
                self._command(
                    "Input.dispatchKeyEvent", type=kind, key=key, code=key,
                    windowsVirtualKeyCode=code,
                )  # fmt: skip

    def screenshot(self, path, whole=True):
        """Writes a picture of the page, or of what the window shows of it."""
        answer = self._command("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self):
        os.close(self._write)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)

    def _command(self, method, **parameters):
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _load(self, url):
        loader = self._command("Page.navigate", url=url)["loaderId"]
        while loader not in self._loaded:
            self._receive()

    def _receive(self):
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], deadline - time.monotonic())
            data = os.read(self._read, 1 << 20) if ready else b""
            assert data, "the browser does not answer"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(message)
        self._note(message.get("method"), message.get("params"))
        return message

    def _note(self, event, what):
        if event == "Page.lifecycleEvent" and what["name"] == "load":
            self._loaded.add(what["loaderId"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(what["exceptionDetails"])
        elif event == "Log.entryAdded":
            self.complaints.append(what["entry"])
        elif event == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning"):
            self.complaints.append(what)
        elif event == "Network.requestWillBeSent":
            url = what["request"]["url"].partition("#")[0]
            if url not in ("about:blank", self._url.partition("#")[0]):
                self.complaints.append(url)
