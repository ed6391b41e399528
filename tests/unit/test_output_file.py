"""Options that name a file to be written: a wrong one is refused before the work."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_pat.cli.main import main
from sglang_pat.output_file import output_file


@pytest.mark.parametrize(
    "words", ["doctor --json", "demo --json", "replay --json", "replay --html"]
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, message in (
        (tmp_path / "no" / "result.json", "its folder does not exist"),
        (tmp_path, "is a folder"),
    ):
        with pytest.raises(SystemExit) as stop:
            main([*words.split(), str(path)])
        assert stop.value.code == 2
        error = capsys.readouterr().err
        assert f"argument --{words[-4:]}: {path}" in error
        assert message in error


def test_a_file_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert output_file("result.json") == Path("result.json")
    (tmp_path / "old.json").touch()
    assert output_file(f"{tmp_path}/old.json") == tmp_path / "old.json"
