"""A fixed sample of one-edit mutants: none is accepted, and none raises out of its check."""

import pytest

from tools import mutants


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "find", "why_finished"])
def test_no_wrong_edit_passes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = mutants.main([name])
    said = capsys.readouterr().out
    assert code == 0, said
    assert said.count(": an error]") + said.count(": other facts]") > 10
