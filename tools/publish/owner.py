"""Writes the account that hosts the repository: `python -m tools.publish.owner NAME`.

In the place of OWNER, or of an earlier name, in every address of the repository. A notebook's text
is changed and nothing is run. Needs nothing but Python.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACES = (
    "README.md",
    "CITATION.cff",
    "pyproject.toml",
    "tools/publish/build.py",
    "docs/**/*.md",
    ".github/**/*.yml",
    "notebooks/**/*.ipynb",
)
ADDRESS = re.compile(
    r"((?:github\.com|githubusercontent\.com|mybinder\.org/v2/gh|research\.google\.com/github)/|https://)"
    r"([\w-]+)(/|\.github\.io/)(?=tutorial_engine\b)"
)
ABOUT = re.compile(r"^(?:.+\n)*.*<!-- make owner -->\n\n", re.M)  # the paragraph about this command
ACCOUNT = re.compile(r"[A-Za-z0-9](?:-?[A-Za-z0-9])*")  # as GitHub wants it


def places(root: Path = ROOT) -> Iterator[Path]:
    """The files that have the address; a learner's own notebooks are left alone."""
    for place in PLACES:
        for path in sorted(root.glob(place)):
            if not path.name.startswith("my_") and ".ipynb_checkpoints" not in path.parts:
                yield path


def stamp(name: str, root: Path = ROOT) -> list[Path]:
    """Put the account into all addresses → the files that changed. ValueError for no account."""
    if not ACCOUNT.fullmatch(name) or len(name) > 39:
        raise ValueError(f"{name!r} is no GitHub account: letters, digits and single hyphens")
    changed = []
    for path in places(root):
        before = path.read_bytes().decode("utf-8")
        after = ADDRESS.sub(rf"\g<1>{name}\g<3>", before)
        if path.name == "README.md" and path.parent == root:
            after = ABOUT.sub("", after)
        if after != before:
            path.write_bytes(after.encode("utf-8"))
            changed.append(path)
    return changed


def main() -> None:
    """Stamp this checkout, and say what changed."""
    if len(sys.argv) != 2:
        sys.exit("name the account that hosts the repository: make owner NAME=account")
    try:
        changed = stamp(sys.argv[1])
    except ValueError as problem:
        sys.exit(str(problem))
    for path in changed:
        print(f"wrote {path.relative_to(ROOT)}")
    print(f"{len(changed)} files now name {sys.argv[1]}; see git diff, and commit them.")


if __name__ == "__main__":
    main()
