import jax
import pytest

from jaxformer.cli.main import main
from tests.support.quick_compiling import compiling_quickly
from tests.support.tiny import DROPOUT, TEXT, snapshot, train


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Every test stands in a folder of its own, with no cache to find data in."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.fixture(autouse=True)
def nothing_built_ahead(monkeypatch):
    """No compiler works beside other tests; the test of a whole command lets it."""
    monkeypatch.setattr("jaxformer.training.product_conditions.build_ahead", lambda names: None)


@pytest.fixture(autouse=True)
def no_curves(request, monkeypatch):
    """Runs of a test draw no curves, a quarter of a small one's time, unless it is about them."""
    if request.node.get_closest_marker("curves") is None:
        monkeypatch.setattr("jaxformer.training.logging.report_page._draw", lambda records: "")
        monkeypatch.setattr("jaxformer.training.logging.run_log.plot_losses", lambda *_: True)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """A run of 30 steps with dropout, in one go."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "text.txt").write_text(TEXT)
    # As most tests compile, whichever is the first to ask for it: others have other bits.
    with compiling_quickly():
        assert train(folder / "text.txt", folder / "run", "--steps", 30, *DROPOUT) == 0
    return folder / "run"


@pytest.fixture
def whole_text(whole):
    return whole.parent / "text.txt"


@pytest.fixture
def refuse(capsys, caplog, tmp_path):
    """Runs a command that must end with ``code``, one line, nothing compiled, nothing changed."""

    def check(arguments, code, *words):
        before = snapshot(tmp_path)
        with jax.log_compiles():
            assert main([str(a) for a in arguments]) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        lines = captured.err.splitlines()
        assert len(lines) == 1, captured.err
        assert lines[0].startswith("jaxformer: ")
        for word in words:
            assert word in lines[0]
        assert [r.getMessage() for r in caplog.records if "Compiling" in r.getMessage()] == []
        assert snapshot(tmp_path) == before
        return lines[0]

    return check
