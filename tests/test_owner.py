"""`make owner`, tried on copies, and the page of the package index."""

import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools.publish import owner
from tools.publish.build import REPOSITORY

ROOT = owner.ROOT
ALICE = "alice-of-a-test"
HERE = REPOSITORY.split("/")[3]  # OWNER, until somebody has put a name in
README = (ROOT / "README.md").read_text(encoding="utf-8")


def copy_to(folder: Path) -> Path:
    for path in owner.places():
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    return folder


def all_text(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in files}


def test_an_owner_is_named_everywhere_and_a_second_name_replaces_the_first(tmp_path: Path) -> None:
    one, other = copy_to(tmp_path / "one"), copy_to(tmp_path / "other")
    before = all_text(one)
    changed = {str(path.relative_to(one)) for path in owner.stamp(ALICE, one)}
    notebooks = {name for name in before if name.endswith(".ipynb")}
    assert notebooks | {"README.md", "CITATION.cff", "pyproject.toml"} <= changed
    assert "tools/publish/build.py" in changed
    after = all_text(one)
    for name, text in after.items():
        assert not re.search(rf"\b{HERE}(/|\.github\.io/)tutorial_engine", text), name
    assert f"https://{ALICE}.github.io/tutorial_engine/players.html" in after["README.md"]
    assert "make owner" not in after["README.md"]
    assert README.count("\n\n") - after["README.md"].count("\n\n") == README.count("make owner -->")
    assert owner.stamp(ALICE, one) == [], "a second time changes nothing"

    owner.stamp("bob-of-a-test", one)
    owner.stamp("bob-of-a-test", other)
    assert all_text(one) == all_text(other), "by way of another name, or at once"


def test_other_repositories_keep_their_owners(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(
        "https://github.com/vllm-project/vllm https://github.com/OWNER/tutorial_engine_fork "
        "https://github.com/OWNER/tutorial_engine/blob/HEAD/a.md MAX_OWNERS\n"
    )
    owner.stamp("dora", tmp_path)
    assert (tmp_path / "README.md").read_text() == (
        "https://github.com/vllm-project/vllm https://github.com/OWNER/tutorial_engine_fork "
        "https://github.com/dora/tutorial_engine/blob/HEAD/a.md MAX_OWNERS\n"
    )
    (tmp_path / "notebooks").mkdir()
    mine = tmp_path / "notebooks" / "my_01.ipynb"
    mine.write_text("https://github.com/OWNER/tutorial_engine")
    assert owner.stamp("emil", tmp_path) == [tmp_path / "README.md"], "a learner's copy is left"


@pytest.mark.parametrize("name", ["", "-a", "a--b", "a/b", "a" * 40, "a\n"])
def test_what_is_no_account_changes_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / "README.md").write_text("https://github.com/OWNER/tutorial_engine")
    with pytest.raises(ValueError, match="is no GitHub account"):
        owner.stamp(name, tmp_path)
    assert "OWNER" in (tmp_path / "README.md").read_text()


def test_the_page_of_the_package_index_has_whole_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every link and picture of the README; the build, which has hatchling, calls the same."""
    stub = SimpleNamespace(MetadataHookInterface=object)
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", stub)
    monkeypatch.delitem(sys.modules, "tools.publish.long_description", raising=False)
    from tools.publish.long_description import LongDescription

    metadata = {"urls": {"Repository": REPOSITORY}}
    LongDescription().update(metadata)
    monkeypatch.delitem(sys.modules, "tools.publish.long_description")
    text = str(metadata["readme"]["text"])
    goals = re.findall(r"\]\(([^)\s]+)", text) + re.findall(r'(?:src|srcset)="([^"]+)', text)
    assert len(goals) == len(re.findall(r"\]\(|(?:src|srcset)=", README)) > 30
    assert [goal for goal in goals if not goal.startswith(("https://", "#"))] == []
    raw = f"https://raw.githubusercontent.com/{HERE}/tutorial_engine/HEAD"
    own = [goal.removeprefix(f"{raw}/") for goal in goals if goal.startswith(raw)]
    assert len(own) >= 7 and all((ROOT / name).is_file() for name in own)
