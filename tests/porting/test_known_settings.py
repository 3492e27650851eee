"""Settings of a config.json: every one is read, known to be without effect, or rejected."""

import json
import math

import jax
import numpy as np
import pytest
import transformers
from flax import nnx

from jaxformer.cli.main import main
from jaxformer.config import TransformerLMConfig
from jaxformer.errors import UsageError
from jaxformer.parity import compare
from jaxformer.porting import from_torch, open_checkpoint
from jaxformer.porting.api import export_plan
from jaxformer.porting.dialects import HUGGING_FACE, detect_dialect, find_dialect
from jaxformer.porting.mapping.abstract_modules import abstract_model, build_abstract
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.transformer_lm import TransformerLM
from tests.support.hugging_face.building import build_case
from tests.support.hugging_face.cases import CASES
from tests.support.hugging_face.cases.rotary import LONG
from tests.support.hugging_face.folders import change_config, save_folder
from tests.support.tiers import SLOW, first_of_each, full_except


def config_of(name, settings):
    """What a config.json of a dialect becomes, by a mapping of its settings."""
    mapping = find_dialect(name).module_mappings[0]
    kind = mapping.source[0]
    return build_abstract(mapping, SourceModel({}, kind=kind, config=settings), None).config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_folder(tmp_path_factory.mktemp("llama") / "hf")


@pytest.fixture
def changed(folder):
    """Changes settings of the folder for one test."""
    before = (folder / "config.json").read_text()
    yield lambda **changes: change_config(folder, **changes)
    (folder / "config.json").write_text(before)


def test_a_dialect_that_contradicts_the_model_type_needs_force(folder, changed, tmp_path, capsys):
    changed(model_type="smollm3", architectures=["SmolLM3ForCausalLM"])
    arguments = ["port", str(folder), str(tmp_path / "out.pt"), "--dialect", "llama"]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "the dialect llama contradicts the config, its model_type is 'smollm3'" in error
    assert "--force" in error
    assert len(error.splitlines()) == 1
    assert main(["sample", str(folder), "--prompt-ids", "1", "--dialect", "llama"]) == 2
    assert "model_type is 'smollm3'" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"with force$"):
        open_checkpoint(folder, dialect="llama").plan()
    assert open_checkpoint(folder, dialect="llama", force=True).plan()
    assert main([*arguments, "--force"]) == 0


def test_a_dialect_that_contradicts_the_architectures_needs_force(folder, changed):
    changed(model_type=..., architectures=["GraniteForCausalLM"])
    with pytest.raises(UsageError, match=r"architectures are \['GraniteForCausalLM'\], not Llama"):
        open_checkpoint(folder, dialect="llama").plan()
    changed(architectures=["LlamaForCausalLM"])
    assert open_checkpoint(folder, dialect="llama").plan()


@pytest.mark.tier("full")
def test_a_dialect_that_contradicts_a_module_needs_force():
    source = build_case(CASES["mistral no window"]).float()
    with pytest.raises(UsageError, match="its model_type is 'mistral', not 'llama'"):
        from_torch(source, "llama")
    with pytest.raises(UsageError, match="its model_type is 'mistral', not 'llama'"):
        from_torch(source.state_dict(), "llama", source.config.to_dict())
    ids = np.array([[3, 5, 4]])
    with pytest.raises(UsageError, match=r"with force$"):
        compare(source, inputs=ids, dialect="llama")
    report = compare(source, inputs=ids, dialect="llama", force=True, backward=False)
    assert report.verdict != "bug"


def test_a_model_type_that_is_not_known_says_what_is_nearest_and_what_is_missing(folder, changed):
    changed(model_type="lama", embedding_factor=12.0, residual_factor=0.5)
    with pytest.raises(UsageError) as caught:
        open_checkpoint(folder).plan()
    words = "embedding_factor=12.0, residual_factor=0.5 does"
    nearest = f"the nearest is llama, which does not know what {words}"
    assert f"model_type 'lama' is not known; {nearest}" in str(caught.value)
    with pytest.raises(
        UsageError, match="'mistrall' is not known; the nearest name is mistral; known"
    ):
        detect_dialect({}, config={"model_type": "mistrall"})


@pytest.mark.parametrize(
    ("case", "changes", "words"),
    [
        ("llama", {"embedding_multiplier": 12.0}, "embedding_multiplier=12.0"),
        ("llama", {"is_causal": False}, "is_causal must be True: got False"),
        ("bloom", {"pretraining_tp": 2, "slow_but_exact": True}, "slow_but_exact must be False"),
        ("gemma", {"hidden_activation": "relu"}, "hidden_activation must be one of"),
        ("gemma", {"hidden_activation": "silu"}, "hidden_activation must mean activation"),
        ("opt", {"layerdrop": 0.1}, "layerdrop must be 0.0: got 0.1"),
        ("gpt2", {"hidden_size": 25}, "n_embd and hidden_size must be the same: got [24, 25]"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 2}, "layer_types must be"),
        ("qwen2", {"layer_types": ["full_attention"] * 9}, "layer_types must have 2 entries: got"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [1]}}, "mrope_section="),
        # transformers 4 puts the ratio of the lengths, 5, in place of this factor; 5 does not.
        ("llama", {"rope_scaling": {**LONG, "factor": 4.5}, "original_max_position_embeddings": 64},
         "rope_scaling's factor must follow from the two lengths"),
        # transformers 4 takes the whole context for the trained length; 5 reads this one.
        ("llama", {"rope_scaling": LONG},
         "rope_scaling's original_max_position_embeddings must stand beside it"),
    ],
)  # fmt: skip
def test_a_setting_that_would_be_ignored_is_rejected_by_name(case, changes, words):
    settings = {**build_case(CASES[case]).config.to_dict(), **changes}
    with pytest.raises(UsageError) as caught:
        config_of(CASES[case].dialect, settings)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_factor_of_longrope_is_written_as_every_version_reads_it():
    settings = build_case(CASES["llama"]).config.to_dict()
    config = config_of("llama", settings | {"rope_parameters": {**LONG, "factor": 4.5}})
    model = TransformerLM(config, rngs=nnx.Rngs(0))
    written = export_plan(model, "llama").module_mapping.settings(model)
    factor = math.sqrt(1 + math.log(4.5) / math.log(64))
    assert written["rope_scaling"]["attention_factor"] == factor
    assert written["rope_parameters"]["attention_factor"] == factor
    again = config_of("llama", written)
    assert again.position.rotary.scaling.rotary_attention_factor == factor


def test_longrope_needs_a_factor_for_each_pair(folder, changed, tmp_path, capsys):
    changed(rope_parameters={**LONG, "short_factor": [1.0], "rope_theta": 10000.0})
    assert main(["port", str(folder), str(tmp_path / "out.pt")]) == 2
    error = capsys.readouterr().err
    assert "longrope needs one factor for each pair: got 1 for" in error
    assert len(error.splitlines()) == 1


def test_settings_without_effect_are_named_to_be_ignored(folder, changed, tmp_path, capsys):
    changed(trained_by="me", runs=3)
    arguments = ["port", str(folder), str(tmp_path / "out.pt")]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "llama does not know what the config's runs=3, trained_by='me' does" in error
    assert "--ignore" in error
    for command in (
        arguments, ["inspect", str(folder)], ["inspect", "masks", str(folder), "--out",
        str(tmp_path / "m.json")],
    ):  # fmt: skip
        assert main([*command, "--ignore", "runs", "trained_*"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    "dialect",
    full_except(
        first_of_each(HUGGING_FACE, lambda name: HUGGING_FACE[name], SLOW),
        lambda name: name in ("gpt2", "mistral"),
    ),
)
def test_a_setting_that_is_missing_has_the_default_of_transformers(dialect):
    kind = next(case.kind for case in CASES.values() if case.dialect == dialect)
    cls = getattr(transformers, kind).config_class
    # Only that it takes less time.
    small = {cls.attribute_map.get("num_hidden_layers", "num_hidden_layers"): 1}
    # Two models side by side have their own numbers of layers.
    small = {} if getattr(cls, "sub_configs", {}) else small
    small |= {name: 1 for name in ("decoder_layers", "num_decoder_layers") if hasattr(cls, name)}
    if dialect == "gpt_neo":
        # Its class wants a type for each layer.
        small["attention_types"] = [[["global"], 1]]
    settings = json.loads(json.dumps(cls(**small).to_dict()))
    expected = config_of(dialect, settings)
    # What follows from others is no default of its own.
    for name in settings.keys() - small.keys() - {"layer_types", "head_dim", "model_type"}:
        fewer = {k: v for k, v in settings.items() if k != name}
        assert config_of(dialect, fewer) == expected, name
    assert config_of(dialect, {"model_type": dialect, **small}) == expected


def test_abstract_models_of_equal_settings_are_apart():
    config = TransformerLMConfig(
        vocab_size=7, d_model=8, num_heads=2, num_layers=1, context_length=5
    )
    first, second = abstract_model(config), abstract_model(config)
    first.token_embedding.embedding.set_value(np.zeros((7, 8)))
    first.blocks[0].attention.scale = 3.0
    for other in (second, abstract_model(config)):
        assert isinstance(other.token_embedding.embedding.get_value(), jax.ShapeDtypeStruct)
        assert other.blocks[0].attention.scale != 3.0
    # It equals 1, which is known.
    with pytest.raises(ValueError, match=r"num_layers must be an integer: got 1\.0"):
        abstract_model(config.replace(num_layers=1.0))
