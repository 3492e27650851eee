"""A comparison block by block finds what one of whole models finds, and resumes."""

import dataclasses
import gc
import json
import math

import jax
import numpy as np
import pytest

from jaxformer.parity.findings import Difference
from jaxformer.parity.recording.operators.tape import Tape
from jaxformer.parity.session import ParitySession
from jaxformer.parity.sources.checkpoints import open_source
from jaxformer.parity.streaming import around, layout, products
from jaxformer.parity.streaming import session as streaming
from jaxformer.parity.streaming.choice import Streaming
from tests.support.memory import run_python
from tests.support.ported import port, run_rejected
from tests.support.tiers import FULL, full_after
from tests.support.verified import changed, gpt2_formats, llama, verify

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

GEMMA = {
    "vocab_size": 31, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "sliding_window": 5,
    "max_position_embeddings": 23, "query_pre_attn_scalar": 10, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
BERT = {
    "vocab_size": 31, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 23, "pad_token_id": None,
}  # fmt: skip
OPT = {
    "vocab_size": 31, "hidden_size": 24, "ffn_dim": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 23, "word_embed_proj_dim": 24,
    "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2,
}  # fmt: skip
T5 = {
    "vocab_size": 31, "d_model": 12, "d_kv": 6, "d_ff": 20, "num_layers": 3, "num_heads": 2,
    "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
BART = {
    "vocab_size": 31, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_ffn_dim": 20, "decoder_ffn_dim": 28, "encoder_attention_heads": 3,
    "decoder_attention_heads": 2, "max_position_embeddings": 16, "pad_token_id": 1,
}  # fmt: skip
WHISPER = {
    "vocab_size": 31, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_ffn_dim": 20, "decoder_ffn_dim": 28, "encoder_attention_heads": 3,
    "decoder_attention_heads": 2, "num_mel_bins": 5, "max_source_positions": 7,
    "max_target_positions": 16, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2,
    "decoder_start_token_id": 3,
}  # fmt: skip
MIXTRAL = {
    "vocab_size": 31, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 23,
    "num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": None,
}  # fmt: skip
CLASSES = {
    "gemma": ("Gemma2", "CausalLM", GEMMA),
    "bert": ("Bert", "MaskedLM", BERT),
    "opt": ("OPT", "CausalLM", OPT),
    "mixtral": ("Mixtral", "CausalLM", MIXTRAL),
    "t5": ("T5", "ConditionalGeneration", T5),
    "bart": ("Bart", "ConditionalGeneration", BART),
    "whisper": ("Whisper", "ConditionalGeneration", WHISPER),
}


def open_session(a, b, wanted, *, mode="grad", folder=None, progress=lambda done, total: None):
    sources = open_source(a, "a"), open_source(b, "b")
    return ParitySession(
        *sources, mode=mode, length=9, streaming=Streaming(wanted, folder), progress=progress
    )


def compare_both(a, b, folder, mode="grad"):
    """The reports of whole models, and block by block."""
    with jax.enable_x64(True):
        whole = open_session(a, b, "never", mode=mode).run()
        streamed = open_session(a, b, "always", mode=mode, folder=folder / "state").run()
    assert not (folder / "state").exists()
    return whole, streamed


def assert_same(streamed, whole):
    """Checks that two reports say the same, up to the rounding of their numbers."""
    assert [node.path for node in streamed] == [node.path for node in whole]
    assert streamed.settings == whole.settings
    # Why a bug has no lines is another reason where the model is never in memory as a whole.
    said = [
        [r for r in x.remarks if not r.startswith("no lines of code")] for x in (streamed, whole)
    ]
    assert said[0] == said[1]
    assert (streamed.mode, streamed.dtype) == (whole.mode, whole.dtype)
    for found, expected in zip(streamed, whole, strict=True):
        for field in dataclasses.fields(found):
            one, other = getattr(found, field.name), getattr(expected, field.name)
            if field.name in ("forward", "in_context"):
                assert_close(one, other)
                if field.name == "in_context" and other is not None:
                    # It is of one array.
                    assert one.scale == pytest.approx(other.scale, rel=1e-9, abs=1e-12)
            elif field.name == "parameters":
                assert list(one) == list(other), found.path
                for name in one:
                    assert_close(one[name], other[name])
            elif field.name == "backward":
                # Of a tied head by itself the gradient is known too.
                is_head = found.path.endswith(".attend")
                assert one.keys() >= other.keys() if is_head else one.keys() == other.keys()
                # Other cotangents come back to a block that is a model of its own.
                for name in other:
                    assert one[name].is_bug == other[name].is_bug
            elif field.name not in ("condition", "histogram", "maps", "verdict"):
                assert one == other, (found.path, field.name)
            elif field.name == "verdict":
                # What is exact in one may be rounded in the other.
                assert (one == "bug") == (other == "bug"), found.path
            else:
                assert (one is None) == (other is None), (found.path, field.name)


def assert_close(found: Difference | None, expected: Difference | None) -> None:
    if found is None or expected is None:
        assert found is expected
        return
    assert found.is_bug == expected.is_bug
    # Of several that are only rounded any may be the worst.
    if found.is_bug and math.isfinite(found.error):
        assert found.scale == pytest.approx(expected.scale, rel=1e-9, abs=1e-12)
        assert found.error == pytest.approx(expected.error, rel=1e-6)


def make(name, folder):
    """A Hugging Face folder of a family, and the same model as a file of jaxformer."""
    if name == "gpt2":
        paths = gpt2_formats(folder)
        return paths["folder"], paths["safetensors"]
    if name == "llama":
        return llama(folder), folder / "llama.safetensors"
    family, suffix, settings = CLASSES[name]
    torch.manual_seed(0)
    kind = f"{family}For{suffix}"
    model = getattr(transformers, kind)(getattr(transformers, f"{family}Config")(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder / name)
    port(folder / name, folder / f"{name}.safetensors", "--as", "torch_ref")
    return folder / name, folder / f"{name}.safetensors"


@pytest.mark.parametrize("name", full_after(0, ["gpt2", "llama", *CLASSES], slow_after=5))
def test_clean_families(tmp_path, name):
    whole, streamed = compare_both(*make(name, tmp_path), tmp_path)
    assert streamed.verdict != "bug"
    assert_same(streamed, whole)


@FULL
def test_a_block_that_changes_nothing(tmp_path):
    """Its result equals what it was given: new projections of blocks may be zero."""
    folder, file = make("llama", tmp_path)
    names = ["self_attn.o_proj", "mlp.down_proj"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for name in names:
            model.get_parameter(f"model.layers.1.{name}.weight").zero_()
    model.save_pretrained(folder)
    port(folder, file, "--as", "torch_ref", "--overwrite")
    whole, streamed = compare_both(folder, file, tmp_path)
    assert streamed.verdict != "bug"
    assert_same(streamed, whole)


def other_rows(array):
    """The array with two rows swapped, which the random tokens do not read."""
    array = array.copy()
    array[[3, 4]] = array[[4, 3]]
    return array


BUGS = {
    "weights": {
        "arrays": {
            "token_embedding.weight": other_rows,
            "blocks.1.attention.o_proj.weight": other_rows,
        }
    },
    "eps and base": {"config": {"norm_eps": 1e-6, "rotary_base": 500.0}},
    "window": {"config": {"sliding_window": 5}},
    "layout": {"config": {"rotary_interleaved": True}},
    "activation": {"config": {"activation": "geglu"}},
}


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    ("bug", "mode"),
    [
        ("eps and base", "grad"),
        ("weights", "grad"),
        ("window", "grad"),
        ("layout", "forward"),
        ("activation", "grad"),
    ],
)
def test_planted_bugs(tmp_path, bug, mode):
    a = llama(tmp_path)
    wrong = changed(tmp_path / "llama.safetensors", tmp_path / "wrong.safetensors", **BUGS[bug])
    whole, streamed = compare_both(a, wrong, tmp_path, mode)
    assert streamed.verdict == "bug"
    assert_same(streamed, whole)
    paths = [node.path for node in streamed.root_causes]
    expected = {
        "weights": ["token_embedding", "blocks.1.attention.o_proj"],
        "window": [""],
        "layout": ["blocks.0.attention", "blocks.1.attention"],
        "activation": ["blocks.0.feed_forward", "blocks.1.feed_forward"],
    }
    assert paths == expected.get(bug, paths)
    assert len(paths) == 7 or bug != "eps and base"
    # Around the blocks no lines are looked for.
    lines = {c.path: (c.jax_source, c.torch_source, c.diagnosis) for c in whole.root_causes}
    inside = [cause for cause in streamed.root_causes if cause.path.startswith("blocks.")]
    for cause in inside:
        assert (cause.jax_source, cause.torch_source, cause.diagnosis) == lines[cause.path]
    assert any(cause.diagnosis for cause in inside) == (
        bug in ("eps and base", "layout", "activation")
    )


@pytest.mark.tier("full")
def test_swapped_projections_and_layers(tmp_path):
    a = llama(tmp_path)
    from jaxformer.porting.formats.safetensors_files import read_safetensors

    tensors, _ = read_safetensors(tmp_path / "llama.safetensors")

    def take(name):
        return lambda array: tensors[name].read()

    names = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    arrays = {
        f"blocks.0.feed_forward.{n}.weight": take(f"blocks.0.feed_forward.{o}.weight")
        for n, o in names.items()
    }
    wrong = changed(
        tmp_path / "llama.safetensors", tmp_path / "wrong.safetensors", arrays=arrays
    )  # fmt: skip
    whole, streamed = compare_both(a, wrong, tmp_path)
    assert_same(streamed, whole)
    assert [n.path.rpartition(".")[2] for n in streamed.root_causes] == ["gate_proj", "up_proj"]
    assert "it is the reference's blocks.0.feed_forward.up_proj" in streamed.root_causes[0].message


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "llama" else FULL) for n in ("llama", "gemma", "opt")]
)
def test_large_arrays_are_held_in_parts(tmp_path, monkeypatch, name):
    paths = make(name, tmp_path)
    monkeypatch.setattr(layout, "WIDE", 300)
    monkeypatch.setattr(products, "SLICE", 24 * 7)
    whole, streamed = compare_both(*paths, tmp_path)
    assert streamed.verdict != "bug"
    assert_same(streamed, whole)


@pytest.mark.tier("full")
def test_what_a_slice_of_a_head_recorded_is_freed_before_the_next(tmp_path, monkeypatch):
    """It refers to itself, so that only the garbage collector frees it."""
    paths = make("llama", tmp_path)
    monkeypatch.setattr(layout, "WIDE", 300)
    monkeypatch.setattr(products, "SLICE", 24 * 7)
    left = []
    compare_slice = around._Head._compare_slice

    def counting(*arguments):
        left.append(sum(type(one) is Tape for one in gc.get_objects()))
        return compare_slice(*arguments)

    monkeypatch.setattr(around._Head, "_compare_slice", counting)
    gc.disable()
    try:
        with jax.enable_x64(True):
            open_session(*paths, "always", folder=tmp_path / "state").run()
    finally:
        gc.enable()
    # The first two slices may leave what is kept once.
    assert len(left) > 3
    assert len(set(left[2:])) == 1


@pytest.mark.tier("full")
def test_a_wrong_head_is_found_in_parts(tmp_path, monkeypatch):
    a = llama(tmp_path)
    wrong = changed(
        tmp_path / "llama.safetensors", tmp_path / "wrong.safetensors",
        arrays={"lm_head.weight": other_rows, "token_embedding.weight": other_rows},
    )  # fmt: skip
    monkeypatch.setattr(layout, "WIDE", 300)
    monkeypatch.setattr(products, "SLICE", 24 * 7)
    with jax.enable_x64(True):
        report = open_session(a, wrong, "always", mode="forward", folder=tmp_path / "s").run()
    assert [node.path for node in report.root_causes] == ["token_embedding", "lm_head"]


@pytest.mark.tier("full")
def test_it_resumes_from_the_last_finished_block(tmp_path, monkeypatch):
    a = llama(tmp_path)
    b = changed(tmp_path / "llama.safetensors", tmp_path / "b.safetensors", **BUGS["eps and base"])
    compared = []
    original = streaming.compare_block

    def record(sides, path):
        compared.append(path)
        return original(sides, path)

    monkeypatch.setattr(streaming, "compare_block", record)

    def stop(done, total):
        assert total == 2 * 5 + 1
        if done == 9:
            raise KeyboardInterrupt

    state = tmp_path / "state"
    with jax.enable_x64(True):
        with pytest.raises(KeyboardInterrupt):
            open_session(a, b, "always", folder=state, progress=stop).run()
        assert compared == ["blocks.1"]
        resumed = open_session(a, b, "always", folder=state).run()
        assert compared == ["blocks.1", "blocks.0"]
        assert resumed.about["compared"].endswith(f"; resumed from {state}")
        assert not state.exists()
        whole = open_session(a, b, "never").run()
    assert_same(resumed, whole)
    assert [node.order for node in resumed] == [node.order for node in whole]
    assert resumed.coverage == whole.coverage


def test_it_starts_again_where_a_file_changed(tmp_path):
    from jaxformer.parity.streaming.state import KEY, State

    state = State(tmp_path / "state", {"a": 1})
    state.save("part", [np.arange(3.0)], {"note": 1})
    again = State(tmp_path / "state", {"a": 1})
    arrays, notes = again.load("part")
    assert (arrays[0].tolist(), notes) == ([0.0, 1.0, 2.0], {"note": 1})
    assert again.note == f"; resumed from {tmp_path / 'state'}"
    other = State(tmp_path / "state", {"a": 2})
    assert "held another comparison" in other.note
    assert other.load("part") is None
    assert json.loads((tmp_path / "state" / KEY).read_text()) == {"a": 2}
    other.remove()
    assert not (tmp_path / "state").exists()


def test_the_command_says_how_it_compared(tmp_path):
    llama(tmp_path)
    paths = tmp_path / "llama", tmp_path / "llama.safetensors"
    state = ("--state", tmp_path / "state")
    code, lines = verify(*paths, "--stream", "always", *state, "--mode", "forward", "--length", 9)
    assert code == 0
    assert "block by block, as was asked for: 10,824 parameters need about" in lines[3]


def test_what_cannot_be_streamed_is_one_line(tmp_path):
    llama(tmp_path)
    paths = tmp_path / "llama", tmp_path / "llama.safetensors"
    _, line = run_rejected("verify", *paths, "--stream", "always", "--mode", "train")
    assert "--stream always is for --mode forward or grad" in line
    _, line = run_rejected("verify", *paths, "--stream", "never", "--state", tmp_path / "s")
    assert "--state is for --stream always and auto" in line
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("")
    _, line = run_rejected("verify", *paths, "--stream", "always", "--state", tmp_path / "used")
    assert "holds other files" in line


@FULL
def test_blocks_without_a_counterpart_are_compared_in_whole_models(tmp_path):
    """T5's first blocks make the positions of the others; here there are no others."""
    config = transformers.T5Config(
        vocab_size=31, d_model=12, d_kv=6, d_ff=20, num_layers=1, num_heads=2,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    paths = tmp_path / "t5", tmp_path / "t5", "--length", 5
    _, line = run_rejected("verify", *paths, "--stream", "always")
    assert "cannot be compared block by block: no modules of the reference are paired with" in line
    assert line.rstrip().endswith("compare whole models with --stream never")
    code, lines = verify(*paths, "--stream", "never", "--mode", "forward")
    assert code == 0
    assert "2 not compared by themselves" in lines[-2]
    assert "incomplete" not in "".join(lines)


@pytest.mark.tier("slow")
def test_memory_does_not_grow_with_the_number_of_blocks(tmp_path):
    code = """
import contextlib, io
from jaxformer.cli.main import main
with contextlib.redirect_stdout(io.StringIO()):
    code = main(["verify", *sys.argv[1:3], "--stream", "always", "--state", sys.argv[3],
                 "--length", "9"])
print(json.dumps([code, status("VmHWM")]))
"""
    peaks = []
    for layers in (2, 22):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=31, hidden_size=384, intermediate_size=1536, num_hidden_layers=layers,
            num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=23,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        folder = tmp_path / str(layers)
        model = transformers.LlamaForCausalLM(config)
        count = model.num_parameters()
        model.save_pretrained(folder)
        exit_code, peak = run_python(code, folder, folder, tmp_path / "state", timeout=900)
        assert exit_code == 0
        peaks.append(peak)
    # 43 million parameters more: in float64 344 MB of one side alone.
    assert count > 40e6
    assert peaks[1] - peaks[0] < 0.3 * 8 * count
