"""A headless Chromium of a test's own, with a fresh profile that is gone at the end."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import JavascriptException
from selenium.webdriver.chrome.service import Service

from celery_redlock.testing.reaper import reaper

__all__ = ["Browser", "browser", "find_chromium"]

#: So that it asks nobody but us for anything, and runs where there is no sandbox.
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--proxy-server=direct://",
)
#: Longest wait for a page, and for a script of the test's [s].
PATIENCE = 60


def find_chromium() -> tuple[str, str]:
    """Return the paths of Chromium and of its driver."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        what = "chromium" if chromium is None else "chromedriver"
        msg = f"no {what} found: install it (on Debian the packages chromium, chromium-driver)"
        raise RuntimeError(msg)
    return chromium, driver


class Browser:
    """One window."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(url)

    def find(self, selector: str) -> Any:
        """Return the first element that fits a CSS selector, waiting for it."""
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        """
        Return all text below the first element that fits, "" if there is none.

        Read in one step: the page may replace its elements at any time.
        """
        script = "const it = document.querySelector(arguments[0]); return it ? it.innerText : ''"
        try:
            return str(self.driver.execute_script(script, selector))
        except JavascriptException:  # the page went away under it
            return ""

    def click(self, selector: str) -> None:
        """Click the first element that fits; in one step, as `text`."""
        self.driver.execute_script("document.querySelector(arguments[0]).click()", selector)

    def is_shown(self, selector: str) -> bool:
        """Return whether the first element that fits takes any room; in one step, as `text`."""
        script = "return document.querySelector(arguments[0])?.getBoundingClientRect().width > 0"
        return bool(self.driver.execute_script(script, selector))

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def complaints(self) -> list[str]:
        """Return what the console has had to complain about since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


@contextlib.contextmanager
def browser(programs: tuple[str, str], *more: str) -> Iterator[Browser]:
    """Start a browser with a profile of its own, and end it whatever happens."""
    chromium, driver = programs
    with tempfile.TemporaryDirectory(prefix="redlock-chromium-", ignore_cleanup_errors=True) as at:
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for option in (*OPTIONS, f"--user-data-dir={at}", *more):
            options.add_argument(option)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        # A session of its own, so that all of it can be ended, should the test run be killed.
        service = Service(driver, popen_kw={"start_new_session": True})
        window = webdriver.Chrome(options=options, service=service)
        reaper.watch(at, service.process.pid, group=True, folder=Path(at))
        try:
            window.set_page_load_timeout(PATIENCE)
            window.set_script_timeout(PATIENCE)
            window.implicitly_wait(PATIENCE)
            yield Browser(window)
        finally:
            window.quit()
            reaper.forget(at)
