"""The calls of a reference's modules, recorded beside its operators."""

import numpy as np
import pytest

from jaxformer.parity.recording.operators.torch_run import run_torch

torch = pytest.importorskip("torch")


class Collecting(torch.nn.Module):
    """Writes what it was given and what it makes to a list and a dict."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x, seen, caches):
        made = self.linear(x)
        seen[0].append((x, made))
        seen[0].append(x)
        caches["last"] = made
        caches.pop("old", None)
        return made


class Around(torch.nn.Module):
    """Gives the list and the dict twice, each to one module after the other."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Collecting(), Collecting()

    def forward(self, x):
        seen, caches = [], {"old": x, "kept": x}
        made = self.second(self.first(x, (seen, seen), caches), (seen, seen), caches)
        assert len(seen) == 4
        assert sorted(caches) == ["kept", "last"]
        assert seen[1] is caches["kept"] is x
        return made + seen[0][1] * caches["last"]


def test_what_a_module_writes_to_a_list_or_a_dict_others_read():
    torch.manual_seed(0)
    model = Around().double()
    x = np.random.default_rng(0).normal(size=(2, 3))
    run = run_torch(model, [x], {}, True, (), watched={"", "first", "second"})
    wanted = model(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(run.tape.outputs[0].data, wanted, rtol=1e-12)
    assert {path: len(calls) for path, calls in run.calls.items()} == {
        "": 1, "first": 1, "second": 1
    }  # fmt: skip
    run.close()
