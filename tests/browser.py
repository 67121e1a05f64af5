"""JupyterLab as `make lab` starts it, and a headless Chromium that looks at it."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def need_chromium() -> str:
    """Chromium's path. Without it: a skip for a learner, a failure where it is required (CI)."""
    if CHROMIUM is None:
        if os.environ.get("REQUIRE_BROWSER"):
            pytest.fail("chromium is not installed, and REQUIRE_BROWSER is set")
        pytest.skip("chromium is not installed (only the browser tests need it)")
    return CHROMIUM


@contextmanager
def chromium() -> Iterator[Browser]:
    """A fresh headless browser."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=need_chromium(), args=FLAGS)
        yield browser
        browser.close()


# Contrast is slow to find and depends on colours and letters alone: ask for one text of each look.
_LOOKS = """() => {
    const behind = new Map([[null, ""]]), seen = new Set();
    const back = (one) => {
        if (!behind.has(one)) {
            const { backgroundImage, backgroundColor, opacity } = getComputedStyle(one);
            const own = `${backgroundImage} ${backgroundColor} ${opacity};`;
            const clear = own === "none rgba(0, 0, 0, 0) 1;";
            behind.set(one, back(one.parentElement) + (clear ? "" : own));
        }
        return behind.get(one);
    };
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const one = texts.currentNode.parentElement;
        if (!texts.currentNode.data.trim() || !one.checkVisibility()) continue;
        const { color, fontSize, fontWeight } = getComputedStyle(one);
        const look = [one.tagName, one.className, color, fontSize, fontWeight, back(one)].join("|");
        if (!seen.has(look)) one.dataset.look = "";
        seen.add(look);
    }
    axe.configure({ rules: [{ id: "color-contrast", selector: "[data-look]" }] });
}"""
# what axe-core asks about colours and sizes, and not about the markup
APPEARANCE = ("color-contrast", "link-in-text-block", "scrollable-region-focusable", "target-size")


def barriers(page: Page, only: Sequence[str] = ()) -> list[str]:
    """What axe-core calls serious or critical for readers with a keyboard or a screen reader.

    `only`: these of its rules. It may run on any page, whatever that page forbids: the script comes
    from the test's side.
    """
    page.evaluate(Axe().axe_script)
    page.evaluate(_LOOKS)
    options: dict[str, object] = {"resultTypes": ["violations"], "iframes": False, "preload": False}
    options |= {"runOnly": list(only)} if only else {"rules": {"region": {"enabled": False}}}
    found = page.evaluate("(options) => axe.run(document, options)", options)
    return [
        f"{one['id']}: {part['html'][:150]}"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
        for part in one["nodes"]
    ]


def reached_by_tab(page: Page, most: int = 60) -> list[str]:
    """The ids (else the kinds) of what Tab reaches from the top of a page, until it repeats."""
    page.evaluate("document.activeElement.blur()")
    found: list[str] = []
    for _ in range(most):
        page.keyboard.press("Tab")
        at = page.evaluate("document.activeElement.id || document.activeElement.tagName")
        if at in found or at == "BODY":
            break
        found.append(at)
    return found


def free_port() -> int:
    """A TCP port that nobody listens on just now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextmanager
def lab(folder: Path, home: Path) -> Iterator[str]:
    """JupyterLab on `folder`, as `make lab` starts it for somebody new; yields its address."""
    port = free_port()
    arguments = (
        f"--no-browser --port={port} --ServerApp.port_retries=0 --IdentityProvider.token= "
        "--LabApp.expose_app_in_browser=True"
    )
    environment = os.environ | {
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
    }
    log = home / "lab.log"
    command = ["make", "lab", f"VENV={sys.prefix}", f"LAB_DIR={folder}", f"LAB_ARGS={arguments}"]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            if process.poll() is not None:
                raise RuntimeError(f"make lab ended:\n{log.read_text()[-3000:]}")
            try:
                urllib.request.urlopen(f"{address}/api", timeout=2).read()
                break
            except OSError:
                time.sleep(0.25)
        else:
            raise RuntimeError(f"make lab did not answer within a minute:\n{log.read_text()}")
        yield address
    finally:
        with suppress(ProcessLookupError):  # it has ended, and said why above
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=30)


def open_notebook(windows: BrowserContext, address: str, name: str) -> Page:
    """The notebook in Lab, its kernel ready. Windows of one context share what they have loaded."""
    page = windows.new_page()
    page.set_default_timeout(60_000)
    page.goto(f"{address}/lab/tree/{name}?reset")
    page.wait_for_function("window.jupyterapp && jupyterapp.shell.currentWidget?.context?.isReady")
    wait_for(page, f"async () => {{ {KERNEL_IS_READY} }}")
    return page


KERNEL_IS_READY = """
    const panel = jupyterapp.shell.currentWidget;
    await panel.context.ready;
    await panel.sessionContext.ready;
    await panel.sessionContext.session.kernel.info;
"""


def open_another(page: Page, name: str) -> None:
    """Another notebook in a tab of its own, its kernel ready; the first one is behind it now."""
    opens = f"await jupyterapp.commands.execute('docmanager:open', {{ path: '{name}' }});"
    wait_for(page, f"async () => {{ {opens} {KERNEL_IS_READY} }}")


def wait_for(page: Page, function: str, argument: int | None = None, seconds: int = 120) -> None:
    """Call an async JavaScript function in the page; an error if it does not end in time."""
    page.evaluate(
        f"""(argument) => Promise.race([
            ({function})(argument),
            new Promise((_, fail) => setTimeout(() => fail('over {seconds} s'), {seconds * 1000})),
        ])""",
        argument,
    )


def run_all(page: Page) -> list[str]:
    """Run every cell, wait for the last, and return the errors that the cells gave."""
    wait_for(page, "() => jupyterapp.commands.execute('notebook:run-all-cells')")
    return page.evaluate(
        """() => {
            const errors = [];
            for (const cell of jupyterapp.shell.currentWidget.content.widgets) {
                if (cell.model.type !== 'code') continue;
                const outputs = cell.model.outputs;
                if (cell.model.executionCount === null) errors.push('not run: ' + cell.model.id);
                for (let i = 0; i < outputs.length; i++) {
                    const output = outputs.get(i).toJSON();
                    if (output.output_type === 'error') errors.push(output.ename + output.evalue);
                }
            }
            return errors;
        }"""
    )


def run_cell(page: Page, index: int) -> None:
    """Run one cell, as Ctrl+Enter does, and wait for it."""
    wait_for(
        page,
        """async (index) => {
            jupyterapp.shell.currentWidget.content.activeCellIndex = index;
            await jupyterapp.commands.execute('notebook:run-cell');
        }""",
        index,
    )
