import pytest

from tests.tiny import TEXT


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Every test stands in a folder of its own, with no cache to find data in."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path
