"""``jaxformer verify``: every format against every other, bugs named, every mode."""

import importlib.util
import itertools
import json
from pathlib import Path

import jax
import pytest

from jaxformer.config import EncoderDecoderConfig
from jaxformer.parity.report.files import load_report
from jaxformer.parity.sources.checkpoints import make_twin
from jaxformer.porting.formats.safetensors_files import read_safetensors, write_safetensors
from jaxformer.porting.formats.tensors import StoredTensor
from tests.support.ported import VOCABULARY, port, run_rejected
from tests.support.tiers import FULL, SLOW, first_of_each, full_except
from tests.support.verified import (
    changed,
    gpt2_formats,
    is_installed,
    llama,
    nano_run,
    nudged,
    verify,
)

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
FORMATS = ("folder", "run", "safetensors", "pt")
SHORT = ("--length", 9)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return gpt2_formats(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def llamas(tmp_path_factory):
    """A folder with a Llama, as transformers has it and as a jaxformer file."""
    here = tmp_path_factory.mktemp("llama")
    llama(here)
    return here


@pytest.fixture(scope="module")
def nano(tmp_path_factory):
    return nano_run(tmp_path_factory.mktemp("nano"))


# Each once as A and once as B; the slow run has every pair.
PAIRS = [
    pytest.param(a, b, marks=() if "folder" in (a, b) else SLOW)
    for a, b in itertools.product(FORMATS, FORMATS)
]


@pytest.mark.parametrize(("a", "b"), first_of_each(PAIRS, lambda a, _: a == "folder"))
@pytest.mark.tier("full")
def test_every_format_equals_every_other(gpt2, a, b):
    code, lines = verify(gpt2[a], gpt2[b], "--mode", "forward", *SHORT)
    assert code == 0
    assert lines[-1] in ("equal (rounding)", "equal (amplified)")
    library = "transformers" if a == "folder" and is_installed("transformers") else "torch_ref"
    assert library in lines[0]
    assert "jaxformer.TransformerLM in JAX" in lines[1]


BUGS = {
    "weight": (
        {"arrays": {"blocks.1.feed_forward.down_proj.weight": nudged}},
        "blocks.1.feed_forward.down_proj (reference: ",
        "its weights differ: kernel (1 of its 960 elements differ)",
    ),
    "rotary layout": (
        {"config": {"rotary_interleaved": True}},
        "blocks.0.attention (reference: ",
        "its position.interleaved is True (reference: False)",
    ),
    "eps": (
        {"config": {"norm_eps": 1e-6}},
        "blocks.0.attention_norm (reference: ",
        "its eps is 1e-06 (reference: 1e-05)",
    ),
    "activation": (
        {"config": {"activation": "geglu"}},
        "blocks.0.feed_forward (reference: ",
        "its activation is gelu (reference: silu)",
    ),
    "rotary base": ({"config": {"rotary_base": 500.0}}, "blocks.0.attention", "500.0"),
    "scale": (
        {"config": {"attention_scale": 0.5}},
        "blocks.0.attention (reference: ",
        "its scale is 0.5 (reference: 0.40824829",
    ),
    "window": (
        {"config": {"sliding_window": 5}},
        "the whole model (reference: the whole model)",
        "its sliding_window is 5 (reference: absent)",
    ),
}


SOME = (("llama.safetensors", "weight"),)
USUAL = ("eps", "activation", "rotary base", "scale", "window")
# By transformers and by torch_ref; what the latter finds too is left to the slow run.
RUN_BY = [
    pytest.param(a, bug, marks=SLOW if a != "llama" and bug in USUAL else ())
    for a, bug in itertools.product(["llama", "llama.safetensors"], BUGS)
]


@pytest.mark.parametrize(("a", "bug"), full_except(RUN_BY, lambda a, bug: (a, bug) in SOME))
def test_a_bug_is_code_1_and_the_last_line_names_the_node(llamas, tmp_path, a, bug):
    changes, node, words = BUGS[bug]
    wrong = changed(llamas / "llama.safetensors", tmp_path / "wrong.safetensors", **changes)
    code, lines = verify(llamas / a, wrong, "--mode", "forward", *SHORT)
    assert code == 1
    assert lines[-1].startswith(f"bug: {node}")
    assert words in lines[-1]


@pytest.mark.tier("full")
def test_gradients_are_compared_by_default(llamas):
    code, lines = verify(llamas / "llama", llamas / "llama.safetensors", *SHORT)
    assert code == 0
    assert "TransformerLM against" in "\n".join(lines)
    assert ", grad, float32" in "\n".join(lines)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.tier("full")
def test_rounding_is_measured_in_another_dtype(gpt2, dtype):
    code, lines = verify(gpt2["run"], gpt2["pt"], "--mode", "forward", "--dtype", dtype, *SHORT)
    assert code == 0
    assert f"forward, {dtype}" in "\n".join(lines)


@pytest.mark.tier("full")
def test_weights_that_were_rounded_once_are_no_bug(gpt2, tmp_path):
    port(gpt2["safetensors"], tmp_path / "low.safetensors", "--dtype", "bfloat16")
    code, lines = verify(gpt2["safetensors"], tmp_path / "low.safetensors", *SHORT)
    assert code == 0
    assert "float32" in lines[0]
    assert "bfloat16" in lines[1]
    code, lines = verify(tmp_path / "low.safetensors", tmp_path / "low.safetensors", *SHORT)
    assert code == 0


@pytest.mark.parametrize(
    "mode",
    [
        ("train", "--steps", 2, "--dropout"),
        pytest.param(("generate", "--tokens", 4), marks=FULL),
        pytest.param(("train", "--steps", 3), marks=FULL),
    ],
)
def test_training_and_generation(llamas, tmp_path, mode):
    dropout = {"attention_dropout": 0.1, "residual_dropout": 0.2}
    right = changed(llamas / "llama.safetensors", tmp_path / "right.safetensors", config=dropout)
    wrong = changed(right, tmp_path / "wrong.safetensors", config={"rotary_interleaved": True})
    code, lines = verify(right, right, "--mode", *mode, *SHORT)
    assert code == 0
    # Two losses may be the same to the last bit.
    assert lines[-1] in ("equal (rounding)", "equal (exact)")
    code, lines = verify(right, wrong, "--mode", *mode, *SHORT)
    assert code == 1
    unit = "token" if mode[0] == "generate" else "step"
    assert lines[-1].startswith(f"bug: {unit} 0: candidate ")
    assert any("blocks.*.attention.position.interleaved  True" in line for line in lines)


@pytest.mark.tier("full")
def test_a_wrong_rotary_base_parts_training_and_generation(llamas, tmp_path):
    """The reference's tables are shared only if the candidate's are right."""
    wrong = changed(
        llamas / "llama.safetensors", tmp_path / "wrong.safetensors", config={"rotary_base": 500.0}
    )
    for mode in (("train", "--steps", 1), ("generate", "--tokens", 2)):
        code, lines = verify(llamas / "llama", wrong, "--mode", *mode, *SHORT)
        assert code == 1, lines


@pytest.mark.tier("full")
def test_a_text_is_read_with_the_vocabulary_of_either(nano, tmp_path):
    path, run = nano
    text = tmp_path / "letters.txt"
    text.write_text("abc hid\n" * 20)
    modes = ("forward",), ("train", "--steps", 2), ("generate", "--tokens", 3)
    for a, b, *mode in [*((path, run, *mode) for mode in modes), (run, path, *modes[0])]:
        code, lines = verify(a, b, "--mode", *mode, "--data", text, *SHORT)
        assert code == 0
        assert f"{text}, " in lines[2]
    assert set("abc hid\n") <= set(VOCABULARY)


@pytest.mark.tier("full")
def test_the_other_rotary_layout_is_no_bug_where_the_weights_fit_it(llamas, tmp_path):
    """Neighbours turned, with the weights of each head in that order: the same model."""

    def neighbours(array):
        # Six features a head: 0 1 2 and 3 4 5 are the halves.
        heads = array.reshape(-1, 6, *array.shape[1:])
        return heads[:, [0, 3, 1, 4, 2, 5]].reshape(array.shape)

    names = [f"blocks.{n}.attention.{p}_proj.weight" for n in range(2) for p in "qk"]
    other = changed(
        llamas / "llama.safetensors",
        tmp_path / "other.safetensors",
        config={"rotary_interleaved": True},
        arrays=dict.fromkeys(names, neighbours),
    )
    code, lines = verify(llamas / "llama", other, *SHORT)
    assert code == 0
    assert "reordered to A's rotary layout" in lines[1]
    code, lines = verify(other, llamas / "llama", *SHORT)
    assert code == 0
    # And with a bug beside it, only that bug is found.
    wrong = changed(other, tmp_path / "wrong.safetensors", arrays={names[3]: nudged})
    code, lines = verify(llamas / "llama", wrong, *SHORT)
    assert code == 1
    assert lines[-1].startswith("bug: blocks.1.attention.k_proj (reference: ")
    assert sum(line.startswith("bug ") for line in lines) == 0


def test_reports_are_written(llamas, tmp_path):
    page, numbers = tmp_path / "report.html", tmp_path / "report.json"
    a, b = llamas / "llama", llamas / "llama.safetensors"
    code, _ = verify(a, b, *SHORT, "--html", page, "--json", numbers, "--seed", 5)
    assert code == 0
    report = load_report(numbers)
    assert report.verdict == "rounding"
    assert report.mode == "grad"
    assert str(a) in report.about["reference"]
    assert str(b) in report.about["candidate"]
    assert report.about["data"] == "random tokens, seed 5"
    assert report.about["inputs"] == "int64 (1, 9)"
    assert "Content-Security-Policy" in page.read_text()


@pytest.mark.tier("full")
def test_what_got_worse_since_an_earlier_report_is_an_error(llamas, tmp_path):
    before = tmp_path / "before.json"
    a, b = llamas / "llama", llamas / "llama.safetensors"
    assert verify(a, b, "--mode", "forward", *SHORT, "--json", before)[0] == 0
    code, lines = verify(a, b, "--mode", "forward", *SHORT, "--against", before)
    assert code == 0
    assert lines[-1] == "equal (rounding)"
    assert any(f"{before}: nothing got worse" in line for line in lines)

    report = json.loads(before.read_text())
    gone = next(n for n in report["nodes"] if n["path"] == "blocks.1.feed_forward")
    report["nodes"].remove(gone)
    before.write_text(json.dumps(report))
    code, lines = verify(a, b, "--mode", "forward", *SHORT, "--against", before)
    assert code == 1
    assert lines[-1] == f"worse than {before}: blocks.1.feed_forward: new, rounding"

    wrong = changed(b, tmp_path / "wrong.safetensors", config={"norm_eps": 1e-6})
    code, lines = verify(a, wrong, "--mode", "forward", *SHORT, "--against", before)
    assert code == 1
    assert lines[-1].startswith("bug: blocks.0.attention_norm ")
    assert any("bug, it was rounding" in line for line in lines)


@pytest.mark.tier("full")
def test_an_encoder_and_decoder(tmp_path):
    config = EncoderDecoderConfig(
        d_model=24, num_heads=3, d_ff=35, context_length=17, source_vocab_size=31,
        target_vocab_size=37, num_encoder_layers=2, num_decoder_layers=2,
    )  # fmt: skip
    torch.manual_seed(0)
    module = make_twin(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    record = {"dialect": "torch_ref", "class": "EncoderDecoder"}
    path, wrong = tmp_path / "right.pt", tmp_path / "wrong.pt"
    settings = config.settings()
    torch.save({"model": module.state_dict(), "config": settings, **record}, path)
    settings["activation"] = "gelu"
    torch.save({"model": module.state_dict(), "config": settings, **record}, wrong)
    code, lines = verify(path, path, "--mode", "forward")
    assert code == 0
    assert "int64 (1, 17) and int64 (1, 13)" in lines[2]
    code, lines = verify(path, wrong, "--mode", "forward")
    assert code == 1
    assert lines[-1].startswith("bug: encoder.blocks.0.feed_forward ")
    code, line = run_rejected("verify", path, path, "--mode", "train")
    assert code == 2
    assert "an encoder and a decoder" in line
    code, line = run_rejected("verify", path, path, "--data", "python-docs")
    assert code == 2
    assert "leave out --data" in line


@pytest.mark.tier("full")
def test_a_bert_with_and_without_its_pooler(tmp_path):
    transformers = pytest.importorskip("transformers")
    settings = transformers.BertConfig(
        vocab_size=31, hidden_size=24, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=44, max_position_embeddings=19,
    )  # fmt: skip
    for pooler in (True, False):
        torch.manual_seed(0)
        module = transformers.BertModel(settings, add_pooling_layer=pooler)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        folder = tmp_path / f"bert-{pooler}"
        module.save_pretrained(folder)
        code, lines = verify(folder, folder)
        assert code == 0
        assert any("pooler" in line for line in lines) is pooler
        code, line = run_rejected("verify", folder, folder, "--mode", "train")
        assert code == 2
        assert "without a head" in line


@pytest.mark.tier("full")
def test_without_transformers_torch_ref_runs_the_folder(gpt2, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else found(name)
    )
    code, lines = verify(gpt2["folder"], gpt2["run"], "--mode", "forward", *SHORT)
    assert code == 0
    assert "torch_ref TransformerLM" in lines[0]
    assert "as transformers is not installed" in lines[0]


@pytest.mark.tier("full")
def test_jax_may_be_set_to_float64_or_not(gpt2):
    for wide in (False, True):
        with jax.enable_x64(wide):
            assert verify(gpt2["pt"], gpt2["run"], "--mode", "forward", *SHORT)[0] == 0
            assert jax.config.jax_enable_x64 is wide


@pytest.mark.tier("full")
def test_a_head_that_is_the_embedding_is_no_bug(llamas, tmp_path):
    """A model with a tied head, and the same with a head of its own that holds equal numbers."""
    tensors, metadata = read_safetensors(llamas / "llama.safetensors")
    record = json.loads(metadata["jaxformer"])
    table = tensors["token_embedding.weight"].read()
    del tensors["lm_head.weight"]

    def write(name, **head):
        record["config"]["tie_embeddings"] = not head
        arrays = tensors | {name: StoredTensor.of(array) for name, array in head.items()}
        path = tmp_path / f"{name}.safetensors"
        write_safetensors(path, arrays, {"jaxformer": json.dumps(record)})
        return path

    tied = write("tied")
    own = write("own", **{"lm_head.weight": table})
    wrong = write("wrong", **{"lm_head.weight": nudged(table)})
    for a, b, words in (
        (tied, own, "its head tied to the embedding, which is equal"),
        (own, tied, "its head no longer tied to the embedding"),
    ):
        code, lines = verify(a, b, *SHORT)
        assert code == 0
        assert words in lines[1]
    code, lines = verify(wrong, tied, *SHORT)
    assert code == 1
    assert "its weights differ: kernel (1 of its" in lines[-1]
    code, error = run_rejected("verify", tied, wrong, *SHORT)
    assert code == 4
    assert "unexpected lm_head.kernel" in error
