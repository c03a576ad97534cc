"""A reader's first minute: `wqlab lab`, open a notebook, run all, move the slider, and the figure follows. In a real browser."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

pytestmark = pytest.mark.browser

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


@pytest.fixture
def lab(tmp_path):
    """Start ``wqlab lab`` with settings of its own and give its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = (
        "JUPYTER_CONFIG_DIR",
        "JUPYTER_DATA_DIR",
        "JUPYTER_RUNTIME_DIR",
        "JUPYTERLAB_SETTINGS_DIR",
        "JUPYTERLAB_WORKSPACES_DIR",
    )
    folders = {name: str(tmp_path / name.lower()) for name in (*variables, "IPYTHONDIR")}
    news = tmp_path / "jupyterlab_settings_dir" / "@jupyterlab" / "apputils-extension"
    news.mkdir(parents=True)
    (news / "notification.jupyterlab-settings").write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False}))
    options = [
        "--no-browser",
        "--allow-root",
        f"--ServerApp.port={port}",
        "--ServerApp.ip=127.0.0.1",
        "--IdentityProvider.token=",
        "--LabApp.expose_app_in_browser=True",
    ]
    with (tmp_path / "lab.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "wqlab.cli", "lab", "--copy-to", "notebooks", *options],
            env={**os.environ, **folders},
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=tmp_path,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    until = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(f"{address}/api", timeout=2).read()
            break
        except OSError:
            assert server.poll() is None, (tmp_path / "lab.log").read_text()
            assert time.monotonic() < until, "JupyterLab did not start in two minutes"
            time.sleep(0.3)
    yield address
    os.killpg(server.pid, 15)
    server.wait(30)


@pytest.mark.skipif(_CHROMIUM is None, reason="no chromium on the PATH: apt-get install chromium")
def test_the_figure_follows_the_slider(lab, tmp_path):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_CHROMIUM, args=list(_QUIET))
        page = browser.new_page(viewport={"width": 1360, "height": 1000})
        failures = []
        page.on("pageerror", lambda error: failures.append(str(error)))
        page.goto(f"{lab}/lab/tree/alpha_sweep.ipynb?reset")
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=120_000)
        page.wait_for_function("() => window.jupyterapp?.shell.currentWidget?.sessionContext", timeout=60_000)
        page.evaluate(
            """async () => {
                const widget = window.jupyterapp.shell.currentWidget;
                await widget.context.ready;
                await widget.sessionContext.ready;
                await widget.sessionContext.session.kernel.info;
                await widget.content.revealed;
            }"""
        )
        page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")
        handle = page.locator(".jp-OutputArea-output .noUi-handle").first
        handle.wait_for(timeout=180_000)
        image = page.locator(".jp-OutputArea-output .widget-image, .jp-OutputArea-output img.jupyter-widgets").first
        image.wait_for(timeout=60_000)
        # A running cell's prompt is [*].
        idle = "() => ![...document.querySelectorAll('.jp-InputPrompt')].some(prompt => prompt.textContent.includes('*'))"
        page.wait_for_function(idle, timeout=180_000)
        before = image.get_attribute("src")
        handle.focus()
        for _ in range(10):
            page.keyboard.press("ArrowRight")
        page.get_by_text("3.00", exact=True).wait_for(timeout=30_000)  # the slider's own read-out: 2.0 and ten steps of 0.1
        page.wait_for_function("([image, src]) => image.src !== src", arg=[image.element_handle(), before], timeout=60_000)
        page.wait_for_timeout(1500)
        handle.scroll_into_view_if_needed()
        page.screenshot(path=os.environ.get("WQLAB_SCREENSHOT", str(tmp_path / "lab.png")))
        assert not failures
        assert not page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.stderr']").count()
        browser.close()
