"""The machine's Chromium, in which pages are looked at: `python -m tests.report.browser` makes the README's picture."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, FloatRect, Page, sync_playwright

from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.rounds.executor import InlineExecutor
from rayfl.run_directory.description import Description
from rayfl.run_directory.play_run import RunOutput, play_run
from rayfl.run_directory.run_folder import create_run_directory
from tests import machine

ROOT = Path(__file__).resolve().parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_TIMEOUT_MS = 60_000


def executable() -> str | None:
    """The browser, or None where the machine has none."""
    return machine.find(*BROWSERS)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A running browser."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable(), args=["--no-sandbox"])
        yield browser
        browser.close()


def open_page(browser: Browser, path: Path, width: int, scheme: str, complaints: list[str]) -> Page:
    """Open a page of ours and wait until it is drawn; what the browser complains of, and what it loads, goes into
    `complaints`."""
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if scheme == "dark" else "light",
        device_scale_factor=1,
    )
    # Tests of Ray beside this one may leave little of the machine for a while.
    context.set_default_timeout(_TIMEOUT_MS)
    page = context.new_page()
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
    page.on("request", lambda one: complaints.extend([f"request: {one.url[:80]}"] * (one.url != path.as_uri())))
    page.goto(path.as_uri())
    drawn(page)
    return page


def drawn(page: Page) -> None:
    """Wait until no chart is to be drawn again."""
    page.wait_for_selector("html[data-drawn]", state="attached", timeout=_TIMEOUT_MS)


# Any: settings of an experiment.
def played(directory: Path, **settings: Any) -> Path:
    """A run of these settings, in this process."""
    experiment = Experiment(**{"data": "digits", "partition": "iid", **settings})
    setup = prepare(experiment)
    create_run_directory(directory)
    Description(experiment.as_dict()).write(directory, {"torch": "2.13.0"})
    play_run(setup, InlineExecutor(setup), RunOutput(directory))
    return directory


def draw_picture(path: Path = ROOT / "docs" / "report.png") -> None:
    """Run the README's comparison in one process, and take the picture of its page."""
    with tempfile.TemporaryDirectory() as scratch, chromium() as browser:
        folder = Path(scratch) / "sweep"
        command = [sys.executable, "-m", "rayfl", "sweep", "compare-digits", "--inline", "--dir", str(folder)]
        subprocess.run(command, cwd=ROOT, check=True)
        page = open_page(browser, folder / "comparison.html", 1200, "light", [])
        # The first curve and the tables of the target.
        end = page.locator("#runs").bounding_box()
        assert end
        clip: FloatRect = {"x": 0, "y": 0, "width": 1200, "height": round(end["y"])}
        picture = Image.open(BytesIO(page.screenshot(clip=clip, full_page=True))).convert("RGB")
        picture.quantize(128).save(path, optimize=True)


if __name__ == "__main__":
    draw_picture()
