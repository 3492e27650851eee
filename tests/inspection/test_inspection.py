"""``jaxformer inspect``: a picture and its numbers for every inspection, or one line of refusal."""

import base64
import importlib.util
import io
import json
import subprocess
import sys

import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
from flax import nnx

import jaxformer as jf
from jaxformer import analysis
from jaxformer.char_data import CharTokenizer
from jaxformer.cli.inspect import OPTIONS
from jaxformer.cli.main import main
from jaxformer.errors import UsageError
from jaxformer.experts import balance_loss
from jaxformer.inspection.charts import _model_order
from jaxformer.inspection.maps import visible
from jaxformer.inspection.pictures import save_picture
from jaxformer.porting.api import build
from jaxformer.porting.checkpoint import open_checkpoint
from jaxformer.porting.text_models import plan_language_model
from tests.cli.test_sample_ported import write_tokenizer
from tests.support.ported import gpt2_state, hugging_face
from tests.support.tiny import ROOT, TEXT, train_arguments
from tests.support.tokens import write_t5

LETTERS = " acehnost"
QUICK = {"costs": ["--lengths", "8", "16", "24", "--widths", "3", "--rounds", "1"]}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of 10 steps with 2 layers, only to be read."""
    folder = tmp_path_factory.mktemp("inspected")
    (folder / "text.txt").write_text(TEXT)
    arguments = train_arguments(folder / "text.txt", folder / "run", "--steps", 10)
    assert main([*arguments, "--num-layers", "2"]) == 0
    return folder / "run"


@pytest.fixture
def inspect(run, capsys, tmp_path):
    """Runs an inspection into a folder of its own and returns its numbers, the picture checked."""

    def check(what, *more):
        picture = tmp_path / f"{what}.png"
        arguments = [*QUICK.get(what, []), *map(str, more)]
        capsys.readouterr()
        assert main(["inspect", what, str(run), "--json", "--out", str(picture), *arguments]) == 0
        numbers = picture.with_suffix(".json")
        assert capsys.readouterr().out == f"{picture}\n{numbers}\n"
        pixels = matplotlib.image.imread(picture)
        assert min(pixels.shape[:2]) > 300
        colours = np.ascontiguousarray(np.round(pixels[::3, ::3] * 255), np.uint8).view(np.uint32)
        assert len(np.unique(colours)) > 30
        return json.loads(numbers.read_text())

    return check


@pytest.fixture
def refuse(run, capsys, tmp_path):
    """Runs an inspection that must end with ``code``, one line, and no file."""

    def check(arguments, code, *words):
        capsys.readouterr()
        out = ["--out", str(tmp_path / "refused.png")]
        assert main(["inspect", arguments[0], str(run), *out, *arguments[1:]]) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        assert len(captured.err.splitlines()) == 1, captured.err
        for word in words:
            assert word in captured.err
        assert not list(tmp_path.glob("refused*"))

    return check


def load(run):
    checkpoint = open_checkpoint(run)
    return build(plan_language_model(checkpoint)), CharTokenizer(checkpoint.vocabulary)


def test_attention_is_that_of_the_model(inspect, run):
    model, tokenizer = load(run)
    tokens = jnp.asarray(tokenizer.encode("the cat."))[None]
    maps = analysis.attention_maps(model, tokens)[:, 0]
    found = inspect("attention", "--text", "the cat.", "--head", "all")
    assert (found["text"], found["layers"], found["heads"]) == ("the cat.", [0, 1], [0, 1])
    np.testing.assert_allclose(found["weights"], maps, atol=1e-6)
    found = inspect("attention", "--text", "the cat.", "--layer", "1")
    assert (found["layers"], found["heads"]) == ([1], ["mean"])
    np.testing.assert_allclose(found["weights"], maps[1:].mean(axis=1, keepdims=True), atol=1e-6)
    found = inspect("attention", "--text", "the $$ cat", "--unknown", "skip", "--head", "0")
    assert found["text"] == "the  cat"
    assert np.shape(found["weights"])[:2] == (2, 1)


def test_attention_is_between_tokens_where_they_are_not_characters(tmp_path, capsys):
    folder = hugging_face(tmp_path / "hf", gpt2_state())
    write_tokenizer(folder / "tokenizer.json")
    picture = tmp_path / "attention.png"
    arguments = ["--text", " that hat, the cat", "--json", "--out", str(picture)]
    assert main(["inspect", "attention", str(folder), *arguments]) == 0, capsys.readouterr().err
    found = json.loads(picture.with_suffix(".json").read_text())
    assert "".join(found["tokens"]) == found["text"] == " that hat, the cat"
    assert len(found["tokens"]) < len(found["text"])
    assert np.shape(found["weights"])[2:] == (len(found["tokens"]),) * 2


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "t5"
    write_t5(folder)
    return folder


@pytest.mark.tier("full")
def test_attention_of_an_encoder_and_decoder_goes_to_the_source(t5, tmp_path, capsys):
    picture = tmp_path / "maps.png"
    flags = ["--text", "the value of a name", "--json", "--out", str(picture)]
    assert main(["inspect", "attention", str(t5), *flags, "--head", "all"]) == 0
    capsys.readouterr()
    assert min(matplotlib.image.imread(picture).shape[:2]) > 300
    found = json.loads(picture.with_suffix(".json").read_text())
    assert "".join(found["keys"][:-1]).replace(" ", "") == "thevalueofaname"
    # The end of a text is no text, and neither is what a target begins with.
    assert found["keys"][-1] == "<1>"
    weights = np.array(found["weights"])
    assert weights.shape == (2, 3, len(found["tokens"]), len(found["keys"]))
    np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)


@pytest.mark.parametrize(("kind", "layers"), [("encoder", 3), ("decoder", 2), ("cross", 2)])
def test_each_attention_of_an_encoder_and_decoder_is_one_of_its_model(t5, kind, layers):
    model = jf.load(t5)
    maps = model.attention("the value", target="of a", kind=kind, layer=1)
    source, target = model.tokenizer.encode("the value"), model.tokenizer.encode("of a")
    model.module.eval()
    found = analysis.sequence_attention_maps(
        model.module, source[None], np.concatenate([[0], target])[None], head="mean"
    )[kind]
    assert found.shape[0] == layers
    np.testing.assert_allclose(maps.weights[0, 0], found[1, 0], atol=1e-6)
    assert maps.weights.shape[2:] == (len(maps.tokens), len(maps.keys))


def test_attention_in_a_notebook(run):
    model = jf.load(run)
    maps = model.attention("the cat.", head="all")
    assert repr(maps) == "<AttentionMaps: 2 layers, heads 0, 1, 8 queries of 8 keys>"
    page = maps._repr_html_()
    picture = base64.b64decode(page.partition("base64,")[2].partition('"')[0])
    assert min(matplotlib.image.imread(io.BytesIO(picture)).shape[:2]) > 300
    np.testing.assert_allclose(np.sum(maps.weights, axis=-1), 1, atol=1e-5)
    with pytest.raises(UsageError, match="kind is of encoders and decoders"):
        model.attention("the cat.", kind="cross")
    with pytest.raises(UsageError, match=r"layer must be in \[0, 2\): got 2"):
        model.attention("the cat.", layer=2)


def test_other_inspections_are_of_language_models(t5, capsys, tmp_path):
    out = ["--out", str(tmp_path / "a.png")]
    assert main(["inspect", "masks", str(t5), *out]) == 2
    assert "this inspection is of language models" in capsys.readouterr().err


@pytest.mark.tier("full")
def test_the_load_of_experts_is_that_of_the_routers(tmp_path):
    config = jf.TransformerLMConfig(
        vocab_size=37, d_model=20, num_heads=2, num_layers=2, context_length=29, num_experts=5,
        experts_per_token=2, activation="swiglu", dense_layers=(0,), initialization="torch",
    )  # fmt: skip
    module = jf.TransformerLM(config, rngs=nnx.Rngs(0))
    text = "the cat sat on that hat"
    found = jf.Model(module, CharTokenizer(LETTERS)).expert_load(text)
    assert (found["layers"], "".join(found["tokens"])) == ([1], text)
    ids = CharTokenizer(LETTERS).encode(text)
    hidden = nnx.jit(lambda model, ids: model.hidden(ids, return_routing=True))
    _, routings = hidden(module, jnp.asarray(ids)[None])
    for layer, routing in enumerate(routings):
        assert (found["choices"][layer] == routing.experts).all()
        # One by one, as the definition says it.
        shares = [np.mean([n in chosen for chosen in found["choices"][layer]]) for n in range(5)]
        np.testing.assert_allclose(found["load"][layer], shares)
        assert found["balance"][layer] == pytest.approx(float(balance_loss([routing])), rel=1e-5)
    np.testing.assert_allclose(found["load"].sum(axis=1), 2)
    save_picture("experts", found, tmp_path / "experts.png")
    assert min(matplotlib.image.imread(tmp_path / "experts.png").shape[:2]) > 300


def test_gradients_are_those_of_the_models_own_text(inspect, run):
    model, tokenizer = load(run)
    found = inspect("gradients")
    assert len(found["text"]) == 8
    tokens = jnp.asarray(tokenizer.encode(found["text"]))[None]
    expected = analysis.gradient_norms(model, tokens)
    assert found["norms"].keys() == expected.keys()
    for name, norm in expected.items():
        np.testing.assert_allclose(found["norms"][name], norm, rtol=1e-4)


def test_initializations_leave_the_model_out_of_it(inspect):
    found = inspect("init", "--seed", "3")
    assert list(found) == ["xavier_uniform", "kaiming_uniform", "normal"]
    for scheme in found.values():
        assert scheme["min"] < scheme["mean"] < scheme["max"]
        widths = np.diff(scheme["edges"])
        np.testing.assert_allclose(np.sum(scheme["density"] * widths), 1, rtol=1e-6)
    assert found["normal"]["std"] < found["xavier_uniform"]["std"]


def test_norm_orders_are_drawn_over_any_depth(inspect):
    found = inspect("norms", "--layers", "5")
    np.testing.assert_allclose(found["post_norm"]["std"][1:], [1] * 5, atol=1e-4)
    assert found["pre_norm"]["std"][5] > found["pre_norm"]["std"][1] > 1


@pytest.mark.tier("full")
def test_positions_are_the_trained_ones_and_the_fixed_ones(inspect, run):
    assert np.shape(inspect("positions", "--length", "1")["tables"]["alibi"]) == (2, 1, 1)
    found = inspect("positions", "--dimensions", "1", "6")
    assert list(found["tables"]) == ["learned", "sinusoidal", "rotary_cos", "rotary_sin", "alibi"]
    model, _ = load(run)
    np.testing.assert_allclose(
        found["tables"]["learned"], model.position_embedding.embedding[...], atol=1e-7
    )
    assert found["dimensions"]["sinusoidal"] == [1, 6]
    assert found["dimensions"]["rotary_cos"] == [1]


def test_masks_have_the_sizes_asked_for(inspect):
    found = inspect("masks", "--length", "9", "--window", "2", "--padded", "3")
    causal, padding = np.array(found["causal"]), np.array(found["padding"])
    assert (causal == np.tril(np.ones((9, 9)))).all()
    assert (padding.sum(axis=1) == 6).all()
    assert np.array(found["combined"]).sum() == 2 * 6


def test_scaling_covers_the_runs_own_head(inspect):
    found = inspect("scaling", "--head-sizes", "16", "64", "--keys", "12")
    assert (found["head_sizes"], found["keys"]) == ([8, 16, 64], 12)
    assert max(found["unscaled"]["entropy"]) < min(found["scaled"]["entropy"]) < np.log(12)


@pytest.mark.tier("full")
def test_costs_are_measured_and_fitted(inspect):
    found = inspect("costs")
    measured = found["measured"]
    assert list(zip(measured["d_model"], measured["length"], strict=True)) == [
        (48, 8), (48, 16), (48, 24),
    ]  # fmt: skip
    assert measured["attention_operations"][1] == 3 * 4 * 16**2 * 48
    assert min(measured["seconds"]) > 0
    assert {"constant", "dense_operations", "error"} <= found["fit"]["seconds"].keys()


def test_every_inspection_is_covered():
    assert list(OPTIONS) == [
        "attention", "experts", "gradients", "init", "norms", "positions", "masks", "scaling",
        "costs",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["attention", "--layer", "2"], 2, ["--layer must be in [0, 2): got 2"]),
        (["attention", "--head", "-1"], 2, []),
        (["attention", "--head", "2"], 2, ["--head must be in [0, 2), mean or all: got 2"]),
        (["attention", "--head", "some"], 2, ["--head"]),
        (["attention", "--text", ""], 2, ["--text must not be empty"]),
        (["attention", "--text", "the cat sat on"], 2, ["1 to 8 tokens", "got 14"]),
        (["experts", "--text", "the cat."], 2, ["is of experts: this model has none"]),
        (["gradients", "--text", "ÿ"], 3, ["U+00FF"]),
        (["gradients", "--text", "ÿ", "--unknown", "skip"], 2, ["got 0"]),
        (["gradients", "--step", "7"], 4, ["no step 7"]),
        (["init", "--seed", "-1"], 2, ["--seed"]),
        (["norms", "--layers", "0"], 2, ["--layers must be in [1, 1000]"]),
        (["positions", "--length", "9"], 2, ["--length 9 is too long"]),
        (["positions", "--dimensions", "16"], 2, ["--dimensions must be in [0, 16): got 16"]),
        (["masks", "--padded", "25"], 2, ["--padded must be in [0, 24]"]),
        (["scaling", "--head-sizes", "0"], 2, ["--head-sizes must be in [1, 65536]"]),
        (["costs", "--lengths", "8", "--widths", "1"], 2, ["at least 3 points"]),
        (["masks", "--step", "1", "--best"], 2, ["exclude"]),
        (["masks", "--out", "mask.gif"], 2, ["--out must end in"]),
        (["mask"], 2, ["mask is not to be inspected: use attention, experts, grad"]),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else str(x),
)
def test_what_does_not_fit_is_refused_in_one_line(refuse, arguments, code, words):
    refuse(arguments, code, *words)


def test_without_matplotlib_the_extra_is_named_and_the_numbers_remain(
    refuse, run, tmp_path, monkeypatch, capsys
):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "matplotlib" else find(name, *more),
    )
    refuse(["masks"], 2, "[plot]'")
    path = tmp_path / "masks.json"
    assert main(["inspect", "masks", str(run), "--out", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert len(json.loads(path.read_text())["causal"]) == 24


def test_the_picture_lies_in_the_run_unless_told_otherwise(run, capsys):
    capsys.readouterr()
    assert main(["inspect", "masks", str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'inspect' / 'masks.png'}\n"
    assert (run / "inspect" / "masks.png").stat().st_size > 5000
    assert not (run / "inspect" / "masks.json").exists()


HELP = """
import sys
from jaxformer.cli.main import main
from jaxformer.errors import UsageError
try:
    main(["inspect", *{arguments!r}])
except SystemExit:
    pass
print([name for name in ("jax", "flax", "torch", "matplotlib") if name in sys.modules])
"""


@pytest.mark.parametrize(
    ("arguments", "word"), [(["--help"], "scaling"), (["attention", "--help"], "--layer")]
)
def test_help_imports_neither_jax_nor_matplotlib(arguments, word):
    done = subprocess.run(
        [sys.executable, "-c", HELP.format(arguments=arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert word in done.stdout
    assert done.stdout.endswith("[]\n")


def test_characters_are_made_visible():
    shown = [visible(c) for c in "a\n \t$é漢\x07"]
    assert shown == ["a", "↵", "␣", "⇥", "$", "é", "6F22", "7"]


def test_parameters_stand_in_the_order_of_computation():
    names = [
        "final_norm.scale",
        "blocks.10.attention.q_proj.kernel",
        "blocks.2.feed_forward.down_proj.kernel",
        "blocks.2.feed_forward.up_proj.bias",
        "blocks.2.attention.o_proj.kernel",
        "blocks.2.attention.v_proj.kernel",
        "blocks.2.attention_norm.scale",
        "token_embedding.embedding",
    ]
    assert sorted(names, key=_model_order) == names[::-1]
