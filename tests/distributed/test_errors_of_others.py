"""What the other processes say of an error that one of them met."""

import json

import pytest

from jaxformer.distributed.control_plane import _deserialize, _serialize
from jaxformer.errors import DeviceError, Setting, StoppedError, as_flag


@pytest.mark.parametrize(
    ("error", "as_keyword", "code"),
    [
        (
            DeviceError(Setting("fsdp", value="3"), " is too much"),
            "process 1: fsdp=3 is too much",
            9,
        ),
        (StoppedError("saved step 3", 15), "process 1: saved step 3", 143),
        (OSError(28, "No space left on device"), "process 1: No space left on device", 7),
    ],
)
def test_an_error_of_another_process_names_settings_as_its_caller_does(error, as_keyword, code):
    sent = json.loads(json.dumps(_serialize(error)))
    found = _deserialize(1, sent, already_reported=False)
    assert str(found) == as_keyword
    assert found.message(as_flag) == as_keyword.replace("fsdp=", "--fsdp ")
    assert found.exit_code == code
