"""The report in a real browser: it draws, in light, in dark and on a phone's width, and the console stays silent."""

import os
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.report.page import write_report

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--enable-logging=stderr",
)  # fmt: skip
NASTY = '<script>console.error("owned")</script><img src=x onerror=console.error(1)>'
DARK = "--blink-settings=preferredColorScheme=0"


@pytest.fixture(scope="module")
def browser() -> str:
    """Path of a browser. Its absence skips the test, or fails it where GOVERNOR_REQUIRE_BROWSER is 1."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        reason = f"none of {', '.join(NAMES)} on PATH"
        if os.environ.get("GOVERNOR_REQUIRE_BROWSER") == "1":
            pytest.fail(f"GOVERNOR_REQUIRE_BROWSER=1, but {reason}; install one (apt-get install chromium)")
        pytest.skip(reason)
    return found


def draw(browser: str, page: Path, *, width: int, height: int, flags: tuple[str, ...] = ()) -> tuple[bytes, str]:
    """A screenshot of a page, and what the browser wrote to stderr."""
    picture = page.with_suffix(".png")
    done = subprocess.run(
        [
            browser, *FLAGS, f"--user-data-dir={page.parent / 'profile'}", f"--window-size={width},{height}",
            f"--screenshot={picture}", *flags, page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return picture.read_bytes(), done.stderr


def console_lines(stderr: str) -> list[str]:
    """Lines that the page itself brought about, as `[…:INFO:CONSOLE:1] "…"`."""
    return [line for line in stderr.splitlines() if re.search(r"\bCONSOLE\b", line)]


def pixels(png: bytes, num_rows: int) -> tuple[int, int, list[bytes]]:
    """Width, height and the first rows, as RGB, of a picture of 8 bits a channel."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height, depth, colour = struct.unpack(">IIBB", png[16:26])
    assert depth == 8
    size = {2: 3, 6: 4}[colour]
    data, place = b"", 8
    while place < len(png):
        length, kind = struct.unpack(">I4s", png[place : place + 8])
        data += png[place + 8 : place + 8 + length] if kind == b"IDAT" else b""
        place += length + 12
    raw, above, rows = zlib.decompress(data), bytes(width * size), []
    for start in range(0, num_rows * (width * size + 1), width * size + 1):
        above = _unfiltered(raw[start], bytearray(raw[start + 1 : start + 1 + width * size]), above, size)
        rows.append(bytes(above))
    return width, height, [b"".join(row[x : x + 3] for x in range(0, len(row), size)) for row in rows]


def _unfiltered(kind: int, row: bytearray, above: bytes, size: int) -> bytes:
    for i in range(len(row)) if kind else ():
        left = row[i - size] if i >= size else 0
        corner = above[i - size] if i >= size else 0
        guess = left + above[i] - corner
        nearest = min((left, above[i], corner), key=lambda value: abs(guess - value))
        row[i] = (row[i] + (0, left, above[i], (left + above[i]) // 2, nearest)[kind]) & 255
    return bytes(row)


@pytest.mark.parametrize(
    ("width", "flags", "is_light"),
    [(1200, (), True), (1200, (DARK,), False), (500, (), True)],
    ids=["light", "dark", "narrow"],
)
def test_the_page_draws_without_a_console_error(
    browser: str, make_run: Callable[..., Path], width: int, flags: tuple[str, ...], is_light: bool
) -> None:
    page = write_report(make_run(num_steps=30, sample_every=10, text=NASTY))
    png, stderr = draw(browser, page, width=width, height=700, flags=flags)
    assert console_lines(stderr) == []
    drawn_width, drawn_height, rows = pixels(png, 250)
    assert (drawn_width, drawn_height) == (width, 700)
    colours = {row[x : x + 3] for row in rows for x in range(0, len(row), 21)}
    assert len(colours) > 20  # not blank
    corner = rows[0][:3]
    assert (sum(corner) > 600) == is_light


def test_the_console_is_heard(browser: str, tmp_path: Path) -> None:
    page = tmp_path / "loud.html"
    page.write_text("<script>console.error('loud')</script>")
    _, stderr = draw(browser, page, width=500, height=300)
    assert len(console_lines(stderr)) == 1


@pytest.mark.parametrize("width", [390, 768, 1200])
def test_nothing_is_wider_than_the_page(browser: str, make_run: Callable[..., Path], width: int) -> None:
    """Measured in a frame of that width, since a headless window is never narrower than 500 pixels."""
    page = write_report(make_run(num_steps=30, sample_every=10, text="W" * 300))
    frame = page.parent / "frame.html"
    frame.write_text(
        f'<iframe src="report.html" style="width:{width}px;height:900px;border:0"></iframe><pre></pre><script>onload=()=>{{'
        "const d=document.querySelector('iframe').contentDocument.documentElement;"
        "document.querySelector('pre').textContent='width '+d.scrollWidth+' of '+d.clientWidth}</script>"
    )
    done = subprocess.run(
        [
            browser, *FLAGS, f"--user-data-dir={page.parent / 'profile'}", "--allow-file-access-from-files", "--dump-dom",
            frame.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    found = re.search(r"width (\d+) of (\d+)", done.stdout)
    assert found, done.stdout[:500]
    assert (int(found[1]), int(found[2])) == (width, width)
