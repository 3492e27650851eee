"""Commands that must fail: one line, the right exit code, and not a byte changed."""

import json
import os
import shutil
import struct
from pathlib import Path
from unittest import mock

from tests.faults.tally import Tally
from tests.faults.workbench import SELDOM, Workbench, snapshot, unchanged, words
from tests.support.malicious_files import corpus
from tests.support.malicious_pickles import TRACE

# Exit code, and the command as it is given in a folder that holds what ``_furnish`` makes.
FAILING = """
2 train --steps -5
2 train --steps 1e3
2 train --steps nan
2 train --learning-rate nan
2 train --learning-rate=-inf
2 train --learning-rate 1e39
2 train --min-learning-rate=-1
2 train --norm-eps 1e-300
2 train --beta1 1
2 train --beta2 0.99999999999
2 train --residual-dropout 1.5
2 train --num-heads 3
2 train --num-heads 0
2 train --num-layers 100000000000
2 train --seed=-1
2 train --seed 9223372036854775808
2 train --batch-size 0
2 train --batch-size 99999999999999999999
2 train --accumulation 5
2 train --devices 0
2 train --preset nope
2 train --stepz 5
2 train surplus
2 train --data nowhere.txt
2 train --data folder
2 train --data /dev/null
2 train --data text.txt --encoding klingon
2 train --data tiny-shakespeare --out new
2 train --tracker nosuch
2 train --vocab-size 2 --data text.txt
2 train --data text.txt --out run
2 train --data text.txt --out run --resume --init-from other.safetensors
2 train --out run --resume --d-model 32
2 train --out run --resume --seed 2
2 train --out run --resume --data other.txt
2 train --out run --resume --batch-size 8
2 train --data text.txt --d-model 4096000 --num-heads 4 --out new
2 train --data text.txt --batch-size 2000000000 --out new
2 train --data text.txt --steps-per-call 2000000000 --out new
3 train --data empty.txt --out new
3 train --data short.txt --out new
3 train --data latin.txt --out new
3 train --data utf16.txt --out new
3 train --data half.txt --encoding utf-7 --out new
3 train --data text.txt --encoding ascii --context-length 100000 --out new
4 train --out nothing --resume
4 train --out empty --resume
4 train --out broken --resume
4 train --data text.txt --out new --init-from nowhere.safetensors
4 train --data text.txt --out new --init-from cut.safetensors
5 train --data text.txt --out new --init-from attack.pt
7 train --data text.txt --out text.txt
7 train --data text.txt --out text.txt/run
7 train --data text.txt --out LONG
9 train --data text.txt --out new --devices 3 --batch-size 4
9 train --data text.txt --out new --devices 99
2 sample run --temperature 0
2 sample run --temperature nan
2 sample run --temperature inf
2 sample run --top-k 0
2 sample run --top-p 1.5
2 sample run --top-p nan
2 sample run --tokens 0
2 sample run --tokens=-1
2 sample run --samples 0
2 sample run --seed=-1
2 sample run --step 4 --best
2 sample run --prompt a --prompt-ids 1
2 sample run --prompt-ids 1,x
2 sample run --prompt-ids=-1
2 sample run --prompt-ids 99999999999
2 sample run --dialect klingon
2 sample run --temprature 1
2 sample
3 sample run --prompt-ids 999
3 sample run --prompt-ids 2147483647
3 sample run --prompt ☃
4 sample run --step 5
4 sample run --step=-1
4 sample damaged --step 4
4 sample nothing
4 sample empty
4 sample broken
4 sample text.txt
4 sample cut.safetensors
5 sample attack.pt
2 port
2 port run
2 port run out --dtype int8
2 port run out --to nowhere
2 port run out --as klingon
2 port run out.safetensors --dialect klingon
2 port run out --step 4 --best
2 port run other.safetensors
2 port run folder
2 port https://example.invalid/model.safetensors out
2 port https://example.invalid/model.safetensors out --download
5 port other.safetensors out --config deep.json
2 port bare.safetensors out.pt --config nan.json
2 port bare.safetensors out.pt --config layers.json
2 port bare.safetensors out.pt --config types.json
2 port bare.safetensors out.pt --config negative.json
4 port nothing out
4 port empty out
4 port broken out
4 port cut.safetensors out
4 port damaged out --step 4
4 port run out --step 5
4 port run out --config missing.json
5 port attack.pt out
5 port bomb.safetensors out
2 verify
2 verify run
2 verify run run --mode nope
2 verify run run --batch 0
2 verify run run --length=-1
2 verify run run --seed=-1
2 verify run run --steps 5
2 verify run run --length 99999
2 verify run run --dialect-a klingon
2 verify run run --html x --json x
2 verify run run --repro folder
2 verify run run --data nowhere.txt
3 verify run run --data strange.txt
3 verify run run --data short.txt --length 8 --batch 50
4 verify nothing run
4 verify run nothing
4 verify run cut.safetensors
5 verify run attack.pt
5 verify bomb.safetensors run
7 verify run run --html nowhere/x.html
2 inspect
2 inspect nonsense
2 inspect run --step 4 --best
2 inspect run --dialect klingon
2 inspect attention run --layer 7
2 inspect attention run --head 99
2 inspect attention run --head nan
2 inspect attention run --text LONG
2 inspect attention run --out x.txt
2 inspect norms run --layers 0
2 inspect norms run --layers 100000000
2 inspect positions run --length 0
2 inspect positions run --length 100000000000
2 inspect masks run --length 0
2 inspect masks run --length 100000000
2 inspect masks run --window 0
2 inspect masks run --padded 99
2 inspect scaling run --head-sizes 0
2 inspect scaling run --head-sizes 1000000000000
2 inspect scaling run --keys 1
2 inspect scaling run --keys 100000000000
2 inspect scaling run --seed=-1
2 inspect costs run --lengths 0
2 inspect costs run --lengths 10000000 --widths 1 2 3
2 inspect costs run --widths 100000 200000 300000
2 inspect costs run --rounds 0
3 inspect attention run --text ☃
4 inspect ./nothing
4 inspect empty
4 inspect broken
4 inspect attention nothing
4 inspect attention run --step 5
4 inspect gradients damaged --step 4
4 inspect cut.safetensors
5 inspect attack.pt
5 inspect bomb.safetensors
7 inspect masks run --out text.txt/x.png
2 plan --steps -5
2 plan --preset nope
2 plan --learning-rate nan
2 plan --num-heads 3
2 plan --num-layers 100000000
2 plan --topologie v5e:2x2
2 plan --data nowhere.txt
2 plan --d-model 2147483647 --num-heads 1
3 plan --data empty.txt
3 plan --data short.txt
9 plan --data text.txt --devices 99
9 plan --data text.txt --devices 3 --batch-size 4
2
2 trian
"""


def failed_commands(bench: Workbench, tally: Tally, count: int) -> None:
    """Wrong settings, texts, files and folders for every command."""
    with mock.patch.dict(os.environ):
        # A corpus that lies on this machine would be no reason to fail.
        os.environ.pop("JAXFORMER_DATA_DIR", None)
        _fail_each(bench, tally, count)


def _fail_each(bench: Workbench, tally: Tally, count: int) -> None:
    folder = bench.folder / "failing"
    _furnish(bench, folder)
    rng = bench.random("failed commands")
    lines = FAILING.strip().splitlines()
    for line in lines if count >= len(lines) else rng.sample(lines, count):
        code, _, command = line.partition(" ")
        arguments = words(command.replace("LONG", "a" * 5000))
        if arguments[:1] in (["train"], ["plan"]) and "--devices" not in arguments:
            arguments += ["--devices", "1"]
        with tally.injection(f"jaxformer {command}") as check, unchanged(folder, tally, check):
            done = bench.call(arguments, folder)
            fine = done.is_rejected(int(code))
            # Without a command there is help.
            check.that(fine or (not arguments and done.code == 2), done.summary)


def _furnish(bench: Workbench, folder: Path) -> None:
    """Fills a folder with what the commands are given: good, damaged, hostile."""
    folder.mkdir()
    for name in ("folder", "empty", "broken"):
        (folder / name).mkdir()
    (folder / "folder" / "keep").write_text("mine")
    (folder / "broken" / "config.json").write_text("[" * 99_999)
    texts = {
        "text": bench.text.read_bytes(), "other": bench.text.read_bytes()[::-1], "empty": b"",
        "short": b"short", "latin": b"caf\xe9 " * 99, "utf16": "text ".encode("utf-16") * 99,
        "half": b"+2AA- text " * 99, "strange": "☃ text ".encode() * 99,
    }  # fmt: skip
    for name, data in texts.items():
        (folder / f"{name}.txt").write_bytes(data)
    run = folder / "run"
    flags = [*SELDOM, "--steps", 4, "--checkpoint-interval", 2]
    for arguments in (
        bench.train(run, *flags, text=folder / "text.txt"),
        ["port", run, folder / "other.safetensors"],
        ["port", run, folder / "bare.pt", "--weights-only"],
    ):
        done = bench.call(arguments)
        assert done.code == 0, done.summary
    shutil.copytree(run, folder / "damaged")
    manifest = folder / "damaged" / "checkpoints" / "4" / "MANIFEST.json"
    manifest.write_text(manifest.read_text() + " ")
    good = (folder / "other.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(good[: len(good) // 2])
    (folder / "bare.safetensors").write_bytes(_without_metadata(good))
    (folder / "bomb.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    (folder / "attack.pt").write_bytes(b"\x80\x02cos\nsystem\nX\x0b\0\0\0touch pwned\x85R.")
    model = json.loads((run / "config.json").read_text())["model"] | {"vocab_size": 31}
    settings = {
        "nan": {**model, "norm_eps": float("nan")}, "layers": {**model, "num_layers": 10**9},
        "types": {**model, "d_model": "16"}, "negative": {**model, "d_ff": -1},
    }  # fmt: skip
    for name, values in settings.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    (folder / "deep.json").write_text('{"a":' * 50_000)


def _without_metadata(data: bytes) -> bytes:
    """A safetensors file that does not say whose it is."""
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    content = json.dumps(header).encode()
    return struct.pack("<Q", len(content)) + content + data[8 + length :]


def malicious_files(bench: Workbench, tally: Tally, count: int) -> None:
    """The corpus of hostile .pt, .safetensors, index and pickle files, through two commands."""
    folder = bench.folder / "malicious"
    folder.mkdir()
    files, rng = corpus(folder), bench.random("malicious files")
    source = bench.folder / "plain.safetensors"
    if not source.exists():
        run = bench.folder / "plain"
        for arguments in (
            bench.train(run, *SELDOM, "--steps", 1),
            ["port", run, source],
        ):
            done = bench.call(arguments)
            assert done.code == 0, done.summary
    before = snapshot(folder)
    for bad in files if count >= len(files) else rng.sample(files, count):
        with tally.injection(f"{bad.kind} {bad.name}") as check:
            commands = [["inspect", bad.path], ["port", bad.path, folder / "out.pt"]]
            if bad.kind == "pickle":
                commands = [["port", source, folder / "out.pt", "--meta", bad.path]]
            for command in commands:
                done = bench.call(command, folder)
                # Some are known for what they are only once an array is read.
                unasked = "no dialect has these arrays" in done.err and done.is_rejected(2)
                listed = command[0] == "inspect" and bad.name == "boolean of two"
                fine = done.is_rejected(bad.exit_code) or unasked or (listed and done.code == 0)
                check.that(fine, f"{command[0]}, not {bad.exit_code}: {done.summary}")
    with tally.aside("all of them together") as check:
        after = snapshot(folder)
        tally.files_changed += len(before.keys() ^ after.keys())
        check.that(before == after, "files were made or changed")
        check.that(not (folder / TRACE).exists(), "a file was run")
