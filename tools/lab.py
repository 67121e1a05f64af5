"""JupyterLab on the learner's own copies: `python -m tools.lab [folder] [options of JupyterLab]`.

`make lab` calls it, and where there is no make it does the same. Runs no notebook.
"""

import os
import sys
from pathlib import Path
from typing import Any

from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager

from tools.mine import LESSON, copy_of, make_copies

OPTIONS = (
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    "--LabApp.extension_manager=readonly",
    "--ServerApp.contents_manager_class=tools.lab.OwnCopies",
    "--LabApp.default_url=/lab/tree/my_01.ipynb",
)


class OwnCopies(AsyncLargeFileManager):
    """Lists a lesson as the learner's own copy, where there is one, and not as the original too.

    `src`, of which the notebooks are made, is not listed either. A link still opens any file.
    """

    async def get(self, path: str, *args: Any, **options: Any) -> dict[str, Any]:
        model: dict[str, Any] = await super().get(path, *args, **options)
        if model["type"] == "directory" and model["content"] is not None:
            there = {entry["name"] for entry in model["content"]}
            model["content"] = [
                entry
                for entry in model["content"]
                if not ((found := LESSON.fullmatch(entry["name"])) and copy_of(found[1]) in there)
                and not (entry["name"] == "src" and copy_of("01") in there)
            ]
        return model


def main() -> None:
    """Copies first, then JupyterLab, in the folder that is named or in notebooks."""
    named, options = "notebooks", sys.argv[1:]
    if options and not options[0].startswith("-"):
        named, *options = options
    for sentence in make_copies(Path(named)):
        print(sentence, flush=True)
    root = ["--allow-root"] if getattr(os, "geteuid", lambda: 1)() == 0 else []
    from jupyterlab.labapp import main as start

    start([f"--notebook-dir={named}", *root, *OPTIONS, *options])


if __name__ == "__main__":
    main()
