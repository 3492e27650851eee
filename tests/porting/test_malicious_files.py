from pathlib import Path

import pytest

from jaxformer.errors import JaxformerError
from jaxformer.porting.formats.detection import detect
from jaxformer.porting.formats.plain_pickle import read_plain_pickle
from jaxformer.porting.formats.safetensors_files import read_safetensors, read_sharded
from jaxformer.porting.formats.torch_files import read_torch_file
from jaxformer.porting.formats.trees import walk
from tests.support.malicious_files import corpus
from tests.support.malicious_pickles import TRACE
from tests.support.memory import run_python
from tests.support.tiny import snapshot

LARGE = 1_000_000
KINDS = {
    "torch": {"torch"},
    "safetensors": {"safetensors"},
    "index": {"safetensors_index"},
    "pickle": {"pickle"},
}


def read_all(kind, path):
    """Reads a file to the last byte, in the way of its kind."""
    if kind == "pickle":
        return read_plain_pickle(path)
    if kind == "torch":
        tensors = [tensor for _, tensor in walk(read_torch_file(path), "")]
    else:
        reader = read_safetensors if kind == "safetensors" else read_sharded
        tensors = list(reader(path)[0].values())
    return [tensor.read() for tensor in tensors]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("malicious"))


def test_every_bad_file_is_rejected(files, empty_folder):
    """The right class, in one line that can be shown, naming the file, with nothing written."""
    folder = files[0].path.parent.parent.parent
    before = snapshot(folder)
    wrong = []
    for bad in files:
        # The large ones are slow beside JAX's objects: they have a process of their own, below.
        if bad.path.stat().st_size > LARGE:
            continue
        try:
            read_all(bad.kind, bad.path)
            wrong.append(f"{bad.kind} {bad.name}: read")
        except JaxformerError as error:
            text = str(error)
            fine = (
                error.exit_code == bad.exit_code
                and text.isprintable()
                and str(bad.path.parent) in text
                and len(text) < len(str(bad.path)) * 2 + 400
                and not any(word in text for word in FOREIGN)
            )
            if not fine:
                wrong.append(f"{bad.kind} {bad.name}: {error.exit_code} {text}")
    assert wrong == []
    assert snapshot(folder) == before
    assert list(empty_folder.iterdir()) == []
    assert not Path(TRACE).exists()


# No words of other libraries: no traceback, and no advice to switch a guard off.
FOREIGN = ("Traceback", "weights_only", "safe_globals", "allow_pickle", "set_int_max", "Error")


def test_detection_agrees(files):
    """A command that detects first ends with the same code."""
    for bad in files:
        try:
            found, code, text = detect(bad.path), None, ""
        except JaxformerError as error:
            found, code, text = None, error.exit_code, str(error)
        assert code in (None, bad.exit_code), bad
        assert found in KINDS[bad.kind] | {None, "torch_legacy", "pickle"}, bad
        assert text.isprintable()


def test_the_corpus_covers_both_codes_of_every_kind(files):
    found = {(bad.kind, bad.exit_code) for bad in files}
    assert found == {(kind, code) for kind in KINDS for code in (4, 5)}
    assert len({(bad.kind, bad.name) for bad in files}) == len(files) > 230


BOMBS = """
import resource, time
from pathlib import Path
from jaxformer.errors import JaxformerError
from tests.porting.test_malicious_files import read_all
reset()
limit = status("VmSize") + (2 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
worst = {}
for line in Path(sys.argv[1]).read_text().splitlines():
    code, kind, path = line.split(" ", 2)
    before, start = reset(), time.perf_counter()
    try:
        read_all(kind, path)
        raise SystemExit(f"{path} was read")
    except JaxformerError as error:
        assert error.exit_code == int(code), error
    worst[path] = (status("VmHWM") - before) / 2**20, time.perf_counter() - start
memory = max(worst, key=lambda p: worst[p][0])
slow = max(worst, key=lambda p: worst[p][1])
print(json.dumps([memory, *worst[memory], slow, *worst[slow]]))
"""


@pytest.mark.tier("full")
def test_memory_and_time_are_bounded(files, tmp_path):
    """In 2 GiB, no file rises above what a small file may, and none takes for ever."""
    (tmp_path / "list").write_text(
        "".join(f"{bad.exit_code} {bad.kind} {bad.path}\n" for bad in files)
    )
    memory_path, mebibytes, _, slow_path, _, seconds = run_python(BOMBS, tmp_path / "list")
    assert mebibytes < 800, memory_path
    assert seconds < 60, slow_path


def test_the_small_bombs_stay_small(files, tmp_path):
    """A file of some kilobytes never costs more than a few MiB."""
    listed = [bad for bad in files if bad.path.stat().st_size < 10_000]
    assert len(listed) > 200
    (tmp_path / "list").write_text(
        "".join(f"{bad.exit_code} {bad.kind} {bad.path}\n" for bad in listed)
    )
    memory_path, mebibytes, *_ = run_python(BOMBS, tmp_path / "list")
    assert mebibytes < 16, memory_path
