"""A verified network of the zoo, and a headless browser that opens pages."""

import shutil
import subprocess

import pytest

from tests.build import quantized
from tests.zoo import make


@pytest.fixture(scope="module")
def result():
    model, batch = make("residual_gelu")
    result = quantized(model, batch)
    result.verify([batch])
    return result


@pytest.fixture(scope="session")
def browse(tmp_path_factory):
    """A function from HTML to (the DOM after scripts ran, what the console said)."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium is installed")
    quiet = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
    quiet += "disable-component-update disable-sync"

    def open_page(text, width=1280):
        folder = tmp_path_factory.mktemp("browser")
        (folder / "r.html").write_text(text)
        own = f"enable-logging=stderr v=0 window-size={width},900 user-data-dir={folder / 'profile'}"
        flags = [f"--{f}" for f in f"{quiet} {own}".split()]
        command = [browser, *flags, "--virtual-time-budget=3000", "--dump-dom", (folder / "r.html").as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
        return done.stdout, [x for x in done.stderr.splitlines() if "CONSOLE" in x]

    return open_page
