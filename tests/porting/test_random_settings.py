"""Random settings of every model type: the same numbers there and back, or a rejection in a line.

The settings are those that the type's class really has, see ``random_settings``. Draws that
transformers itself rejects do not count.
"""

import copy

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, event, given, note, settings
from hypothesis import strategies as st

from jaxformer.errors import JaxformerError
from jaxformer.porting.api import build as build_jax
from jaxformer.porting.api import export_plan, import_plan
from jaxformer.porting.dialects import HUGGING_FACE
from tests.support.hugging_face.building import build, randomize
from tests.support.hugging_face.evaluated import evaluate_target
from tests.support.hugging_face.precision import in_float64
from tests.support.hugging_face.random_settings import changed_cases, own_settings
from tests.support.hugging_face.running import assert_close, run_source, tokens

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.filterwarnings("ignore")]

# Beyond the windows of most draws.
IDS = tokens(3, (1, 29))
# In place of the padding's id: where transformers finds that, it counts no position, and jaxformer
# knows padding by the mask, and there is none.
NOT_PADDING = 36
SLOW_CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def run(case, config, ids, weights=None):
    """The model of transformers, and what it computes; None where it makes none of these settings.

    Args:
        case: of which class and attention it is.
        config: its settings.
        ids: the text.
        weights: its arrays; default random ones.
    """
    try:
        model = build(case.kind, config, attention=case.attention, **case.arguments).double()
        randomize(model, copies=case.copies)
        if weights is not None:
            model.load_state_dict(weights)
        outputs = [array.detach() for array in run_source(model, ids)]
    # transformers raises errors of many kinds, and then there is nothing to compare.
    except Exception:
        if weights is not None:
            raise
        return None
    return (model, outputs) if all(map(_is_finite, outputs)) else None


def _is_finite(array):
    return bool(torch.isfinite(array).all())


def check_there_and_back(case, config):
    """Compares both sides, and with what comes back, unless the settings are rejected in a line.

    Returns:
        what became of them: "equal", or "rejected".
    """
    ids = np.where(config.get("pad_token_id") == IDS, NOT_PADDING, IDS)
    found = run(case, config, ids)
    assume(found is not None)
    source, expected = found
    rejected, target = "", None
    # Falcon's two paths add different biases; a config names the one that is not usual.
    given = {**config, "class": case.kind, "attn_implementation": case.attention}
    try:
        target = build_jax(import_plan(source.state_dict(), config=given))
    except JaxformerError as error:
        rejected = str(error)
    if target is None:
        assert len(rejected.splitlines()) == 1
        return "rejected"
    for output, array in zip(evaluate_target(target, ids), expected, strict=True):
        assert_close(output, array, 1e-12)
    plan = export_plan(target)
    weights = {name: torch.as_tensor(np.array(t.read())) for name, t in plan.tensors.items()}
    weights = {name: array for name, array in weights.items() if name in source.state_dict()}
    _, outputs = run(case, plan.module_mapping.settings(target), ids, weights)
    for output, array in zip(outputs, expected, strict=True):
        assert_close(output, array, 1e-12)
    return "equal"


def check(drawn):
    """Checks a drawn case with its changes.

    ``--hypothesis-show-statistics`` counts the outcomes.
    """
    case, changes = drawn
    note(f"{case.dialect} {case.kind}: {changes} of {case.settings}")
    with in_float64():
        event(check_there_and_back(case, {**own_settings(case), **copy.deepcopy(changes)}))


@pytest.mark.tier("full")
@settings(
    max_examples=8, deadline=None, derandomize=True, database=None,
    suppress_health_check=SLOW_CHECKS,
)  # fmt: skip
@given(drawn=st.sampled_from(list(HUGGING_FACE)).flatmap(changed_cases))
def test_random_settings_of_some_types(drawn):
    check(drawn)


# 81 types with five draws each.
@pytest.mark.tier("slow")
@pytest.mark.parametrize("dialect", HUGGING_FACE)
def test_random_settings_of_every_type(dialect):
    @settings(max_examples=5, deadline=None, suppress_health_check=SLOW_CHECKS)
    @given(drawn=changed_cases(dialect))
    def of_one_type(drawn):
        check(drawn)

    of_one_type()
