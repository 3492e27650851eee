"""Every setting of every model type, changed alone: the same numbers, or a rejection by its name.

The types come from ``CASES``: a new one is covered without a line here. In the slow tier a setting
gets all of its other values, and a type the settings of all others too, which transformers may
read.
"""

import copy
import functools
import itertools

import pytest
import torch

from jaxformer.errors import JaxformerError
from jaxformer.porting.api import build as build_jax
from jaxformer.porting.api import import_plan
from tests.support.hugging_face.building import build, randomize
from tests.support.hugging_face.cases import CASES
from tests.support.hugging_face.evaluated import evaluate_target
from tests.support.hugging_face.precision import in_float64
from tests.support.hugging_face.random_settings import own_settings
from tests.support.hugging_face.running import assert_close, run_source, tokens
from tests.support.tiers import SLOW, full_except

pytestmark = pytest.mark.usefixtures("float64")

DIALECTS = list(dict.fromkeys(case.dialect for case in CASES.values()))
FIRST = {case.dialect: case for case in reversed(CASES.values())}
# Beyond the windows of the cases.
LENGTH = 29
# Settings that no class of the cases declares, and that transformers or its models know.
MORE = {
    "is_causal": [False, None],
    "hidden_activation": ["relu", "silu"],
    "rope_theta": [700.0],
    "rope_scaling": [
        {"rope_type": "linear", "factor": 3.0},
        {"type": "linear", "factor": 3.0},
        {"rope_type": "dynamic", "factor": 3.0},
        {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 8},
    ],
    "rope_parameters": [
        {"rope_type": "default", "rope_theta": 300.0},
        {"rope_type": "default", "rope_theta": 300.0, "factor": 7.0},
        {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
        {"full_attention": {"rope_type": "default", "rope_theta": 300.0}},
    ],
    "partial_rotary_factor": [0.5],
    "rotary_pct": [0.5],
    "rotary_emb_base": [700],
    "n_embed": [48],
    "n_embd": [48],
    "hidden_size": [48],
    "num_attention_heads": [2],
    "num_hidden_layers": [1],
    "max_position_embeddings": [64],
    "head_dim": [4],
    "position_embedding_type": ["relative_key"],
    "per_layer_config": [{"1": {"intermediate_size": 12}}],
    "pruned_heads": [{"0": [1]}],
    "tie_encoder_decoder": [True],
}
# What a config.json has of the models in a pair.
PARTS = ("text_config", "vision_config")
ABSENT = object()
# Who wrote the file, which class it is of, and in which form it answers.
OF_THE_FILE = {
    "model_type",
    "architectures",
    "transformers_version",
    "_name_or_path",
    "dtype",
    "return_dict",
}
NAMES = {
    "act": ["gelu", "relu", "silu", "gelu_new", "gelu_pytorch_tanh", "tanh"],
    "layer_types": [["full_attention"] * 2, ["sliding_attention"] * 2],
}


def others_of(name, value):
    """A few other values of the same kind."""
    if name == "layer_types":
        return NAMES["layer_types"]
    if isinstance(value, bool):
        return [not value, None]
    if isinstance(value, int):
        return [value * 2, max(value // 2, 1), 0, None]
    if isinstance(value, float):
        return [value * 0.5 + 0.25, 0.0, 1.0, None]
    if isinstance(value, str):
        return [*(NAMES["act"] if "act" in name else []), "another", None]
    if value is None:
        return [True, 1, 0.5, "relu"]
    return [None]


@functools.cache
def settings_of(dialect):
    """The settings of a type's first case, made once: every type asks for those of all."""
    return own_settings(FIRST[dialect])


def mutations(dialect):
    """Every setting of this and of all other types with each of its other values."""
    own = settings_of(dialect)
    known = {}
    for other in DIALECTS:
        for name, value in settings_of(other).items():
            known.setdefault(name, [value, *others_of(name, value)])
    for name, value in own.items():
        known[name] = others_of(name, value)
        if name in PARTS:
            # Without it a model has the sizes of its class, whose rounding is large.
            known[name] = []
            inner = value.items()
            known |= {f"{name}.{n}": others_of(n, v) for n, v in inner if n not in OF_THE_FILE}
    for name, values in MORE.items():
        known[name] = [*known.get(name, []), *values]
    for name in sorted(known.keys() - OF_THE_FILE):
        for value in known[name]:
            before = _read(own, name)
            if before is ABSENT or before != value or type(before) is not type(value):
                yield name, value


def _read(settings, name):
    """The value of a setting, which may be one of a part: ``text_config.hidden_act``."""
    part, _, inner = name.rpartition(".")
    return (settings[part] if part else settings).get(inner, ABSENT)


def changed(settings, name, value):
    """A copy of settings in which one differs."""
    part, _, inner = name.rpartition(".")
    found = copy.deepcopy(settings)
    (found[part] if part else found)[inner] = copy.deepcopy(value)
    return found


class Judge:
    """Says of a case with one other setting what becomes of it.

    Args:
        dialect: the type, of which it is the first case.
    """

    def __init__(self, dialect):
        self.case = FIRST[dialect]
        self.ids = tokens(3, (1, LENGTH))
        # The configs that were ported to, and the outputs that were compared.
        self.seen = []
        outcome = self("nothing", None, settings_of(dialect))
        assert outcome == "equal", outcome

    def __call__(self, name, value, settings):
        """A word, or what is wrong."""
        case, ids = self.case, self.ids
        try:
            source = build(case.kind, settings, attention=case.attention, **case.arguments)
            source = randomize(source.double(), copies=case.copies)
            expected = [array.detach() for array in run_source(source, ids)]
        # transformers raises errors of many kinds, and then there is nothing to compare.
        except Exception:
            return "broken"
        try:
            plan = import_plan(source.state_dict(), config={**settings, "class": case.kind})
        except JaxformerError as error:
            inside = value if isinstance(value, dict) else ()
            words = [name.rpartition(".")[2], repr(value), "these settings make no", *inside]
            said = any(word in str(error) for word in words)
            return "rejected" if said else f"rejected without its name: {error}"
        # What was compared before need not be compared again.
        config = plan.module.config
        known = [arrays for before, arrays in self.seen if before == config]
        if any(all(map(torch.equal, arrays, expected)) for arrays in known):
            return "equal"
        target = build_jax(plan)
        for found, array in zip(evaluate_target(target, ids), expected, strict=True):
            try:
                assert_close(found, array, 1e-12)
            except AssertionError as error:
                return f"differs: {error}"
        self.seen.append((config, expected))
        return "equal"


def check(dialect, changes):
    """Judges all changes of a type, and returns how many came to what."""
    own = settings_of(dialect)
    judge = Judge(dialect)
    counts = dict.fromkeys(("broken", "rejected", "equal"), 0)
    wrong = []
    for name, value in changes:
        outcome = judge(name, value, changed(own, name, value))
        if outcome in counts:
            counts[outcome] += 1
        else:
            wrong.append(f"{name}={value!r}: {outcome}")
    assert not wrong, "\n".join(wrong)
    return counts


def own_changes(dialect, count=1):
    """The mutations of a type's own settings, but of sizes: each of those is compiled anew.

    Args:
        dialect: the type.
        count: how many other values a setting gets at most.
    """
    own = settings_of(dialect)
    changes = [
        (name, value)
        for name, value in mutations(dialect)
        if (_read(own, name) is not ABSENT or name in MORE)
        and (type(value) is not int or value == 0)
    ]
    for _, of_one in itertools.groupby(changes, key=lambda change: change[0]):
        yield from itertools.islice(of_one, count)


# One type of each kind of model stands in full, the others in slow.
KINDS = ("gpt2", "mixtral", "deepseek_v3", "deberta-v2", "modernbert", "bart", "t5", "vit")


# transformers warns of what it does not know.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "dialect",
    full_except(full_except(DIALECTS, lambda name: name in KINDS, SLOW), lambda n: n == "gpt2"),
)
def test_no_setting_of_its_own_is_silently_ignored(dialect):
    with in_float64():
        counts = check(dialect, own_changes(dialect))
    # The check can fail: all three outcomes are there, and of GPT-2's many settings often.
    assert min(counts.values()) > (5 if dialect == "gpt2" else 0), counts


@pytest.mark.filterwarnings("ignore")
@pytest.mark.tier("slow")
@pytest.mark.parametrize("dialect", DIALECTS)
def test_no_setting_of_any_type_is_silently_ignored(dialect):
    with in_float64():
        counts = check(dialect, mutations(dialect))
    assert min(counts.values()) > 5, counts
