"""What ``jaxformer port`` does: open, plan, write, compare, certify, and say so."""

import contextlib
import dataclasses
import json
import math
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from jaxformer.cli.port_options import PortOptions
from jaxformer.errors import UsageError
from jaxformer.hardware.units import format_count
from jaxformer.porting import outputs
from jaxformer.porting.certificate import certificate, file_record
from jaxformer.porting.checkpoint import Checkpoint, open_checkpoint
from jaxformer.porting.formats.download import fetched, is_address
from jaxformer.porting.formats.text import FORMATS
from jaxformer.porting.mapping.casts import DTYPES, cast
from jaxformer.porting.mapping.plans import Plan
from jaxformer.porting.outputs import CERTIFICATE
from jaxformer.porting.writers import FOLDERS, Format, Output, declared_order

Rows = dict[str, str]


def port(options: PortOptions, command: list[str]) -> None:
    """Moves a checkpoint; what it did is said on standard error.

    Args:
        options: the settings.
        command: as it was given, for the certificate.

    Raises:
        JaxformerError: it was refused, and nothing is left of it.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    kind = outputs.choose_format(options.target, options.to)
    outputs.check_free(options.target, kind, overwrite=options.overwrite)
    for extra in _certificates(options, kind):
        if extra.exists() and not options.overwrite:
            raise UsageError(f"{extra} exists: give another --certificate, or --overwrite")
    with _local(options, console) as source:
        _port(source, kind, options, command, console)


def _port(
    source: Path, kind: Format, options: PortOptions, command: list[str], console: Console
) -> None:
    began = time.monotonic()
    checkpoint = open_checkpoint(
        source,
        dialect=options.dialect,
        config=options.config,
        meta=options.meta,
        step=options.step,
        best=options.best,
    )
    for warning in checkpoint.contents.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}")
    imported = checkpoint.plan(options.ignore)
    rounding: dict[str, float] = {}
    plan = imported
    if options.dtype is not None:
        tensors, rounding = cast(imported.tensors, DTYPES[options.dtype])
        plan = dataclasses.replace(imported, tensors=tensors)
    output = _output(checkpoint, imported, plan, kind, options)
    with ThreadPoolExecutor(1) as pool, _bar(console, "writing", _total(output)) as advance:
        # Hashing needs no Python while it runs: the source is hashed while the target is written.
        hashes = pool.submit(_file_records, checkpoint.contents.files, source)

        def certify(folder: Path, digests: dict[str, str]) -> str:
            return _certificate(
                checkpoint, imported, output, digests, rounding, folder, hashes, options, command
            )

        written = outputs.write_output(
            output,
            options.target,
            certify,
            _certificates(options, kind),
            overwrite=options.overwrite,
            progress=advance,
        )
    rows = _summary(checkpoint, imported, output, rounding, options)
    rows["time"] = f"{time.monotonic() - began:.1f} s, {len(written)} arrays read back and compared"
    for name, value in rows.items():
        console.print(f"[dim]{name:<11}[/]  {escape(value)}")


def _output(
    checkpoint: Checkpoint, imported: Plan, plan: Plan, kind: Format, options: PortOptions
) -> Output:
    recorded = checkpoint.contents.record.get("origin") or {}
    exported = outputs.choose_plan(plan, kind, options.as_, recorded)
    same = exported.origin.dialect.name == imported.origin.dialect.name
    optimizer = None
    if not options.weights_only and kind in ("torch", "run"):
        optimizer = checkpoint.optimizer_state(imported)
    origin = {
        "dialect": imported.origin.dialect.name,
        "class": imported.origin.kind,
        "order": list(imported.order),
    }
    step = checkpoint.contents.record.get("step")
    companions = {path.name: path for path in checkpoint.contents.companions}
    if checkpoint.tokenizer_file is not None:
        # One that was given by hand may have any name.
        companions["tokenizer.json"] = checkpoint.tokenizer_file
    return Output(
        kind,
        exported,
        vocabulary=checkpoint.vocabulary,
        token_ids=checkpoint.token_ids,
        companions=companions,
        step=(optimizer.count if optimizer is not None else step) or None,
        optimizer=optimizer,
        order=_order(exported, imported.order if same else None, recorded)
        if kind == "torch"
        else None,
        origin=recorded if origin["dialect"] == "jaxformer" else origin,
        source_config=imported.origin.config if same else {},
    )


def _order(
    exported: Plan, came_in: Sequence[str] | None, recorded: Mapping[str, Any]
) -> Sequence[str]:
    """Their arrays in the order of their model's parameters, by which PyTorch's optimizers count.

    That is how they came in; otherwise that of our modules, which torch_ref shares.
    """
    if came_in is not None and exported.origin.dialect.name != "jaxformer":
        return came_in
    if recorded.get("dialect") == exported.origin.dialect.name and recorded.get("order"):
        return list(recorded["order"])
    links = {name: link for link in exported.links for name in link.target}
    return list(
        dict.fromkeys(
            name for target in declared_order(exported.module) for name in links[target].source
        )
    )


def _certificate(
    checkpoint: Checkpoint,
    imported: Plan,
    output: Output,
    digests: dict[str, str],
    rounding: dict[str, float],
    folder: Path,
    hashes: "Future[list[dict[str, Any]]]",
    options: PortOptions,
    command: list[str],
) -> str:
    target = options.target
    files = [folder / target.name]
    if output.is_folder:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
    contents = certificate(
        command=shlex.join(["jaxformer", "port", *command]),
        source={
            "path": options.source,
            "format": checkpoint.contents.kind,
            "files": hashes.result(),
        },
        target={
            "path": str(target),
            "format": output.format,
            "files": [file_record(path, folder) for path in files],
        },
        imported=imported,
        exported=output.plan,
        digests=digests,
        rounding=rounding,
    )
    return json.dumps(contents, indent=1, ensure_ascii=False) + "\n"


def _summary(
    checkpoint: Checkpoint,
    imported: Plan,
    output: Output,
    rounding: dict[str, float],
    options: PortOptions,
) -> Rows:
    exported = output.plan
    dtypes = sorted({tensor.dtype.name for tensor in imported.tensors.values()})
    count = sum(math.prod(shape) for link in imported.links for shape in link.target_shapes)
    rows = {
        "from": f"{options.source} · {FORMATS[checkpoint.contents.kind]} · {_whose(imported)}",
        "to": f"{options.target} · {FORMATS[output.format]} · {_whose(exported)}",
        "model": f"{len(exported.tensors)} arrays, {format_count(count)} parameters, "
        + ", ".join(dtypes)
        + (f" to {options.dtype}" if rounding else ""),
    }
    if imported.dropped:
        rows["left out"] = ", ".join(imported.dropped)
    if rounding:
        worst = max(rounding, key=lambda name: rounding[name])
        found = f"at most {rounding[worst]:.3g} ({worst})"
        rows["rounding"] = found if rounding[worst] else "none: every number is exact"
    if output.optimizer is not None:
        rows["optimizer"] = f"AdamW after {output.optimizer.count} steps"
    elif checkpoint.contents.optimizer is not None:
        rows["optimizer"] = "left out" + (
            "" if options.weights_only else f": {FORMATS[output.format]}s hold none"
        )
    if output.vocabulary is not None:
        rows["vocabulary"] = f"{len(output.vocabulary)} characters"
    elif checkpoint.tokenizer_file is not None:
        copied = "copied" if output.is_folder else "left where it is, for sample's --meta"
        rows["tokenizer"] = f"{checkpoint.tokenizer_file.name}: {copied}"
    if imported.origin.buffers and output.format != "torch":
        same = exported.origin.dialect.name == imported.origin.dialect.name
        if not same:
            rows["tables"] = (
                f"the last bits of {', '.join(imported.origin.buffers)} were not those that we "
                "compute; ours are used"
            )
    places = [options.target / CERTIFICATE] if output.is_folder else []
    rows["certificate"] = ", ".join(
        str(path) for path in (*places, *_certificates(options, output.format))
    )
    return rows


def _whose(plan: Plan) -> str:
    return f"{plan.origin.dialect.name} {plan.origin.kind}"


def _total(output: Output) -> int:
    """How many bytes will be read."""
    tensors = list(output.plan.tensors.values())
    if output.optimizer is not None:
        tensors += [*output.optimizer.mu.values(), *output.optimizer.nu.values()]
    return sum(tensor.nbytes for tensor in tensors)


def _certificates(options: PortOptions, kind: Format) -> list[Path]:
    """Where a certificate goes, beside the one in a folder."""
    if options.certificate is not None:
        return [options.certificate]
    if kind in FOLDERS:
        return []
    return [options.target.with_name(options.target.name + ".certificate.json")]


def _file_records(files: tuple[Path, ...], source: Path) -> list[dict[str, Any]]:
    root = source if source.is_dir() else source.parent
    return [file_record(path, root) for path in files]


@contextlib.contextmanager
def _local(options: PortOptions, console: Console) -> Iterator[Path]:
    """The source as a path, fetched if need be."""
    if not is_address(options.source):
        yield Path(options.source)
        return
    if not options.download or options.sha256 is None:
        raise UsageError(
            f"{options.source} is not on this machine, and nothing is fetched unasked: give "
            "--download and --sha256 with the hash of the file"
        )
    folder = next(path for path in options.target.absolute().parents if path.is_dir())
    with (
        _bar(console, "fetching", None) as advance,
        fetched(options.source, options.sha256, folder, advance) as path,
    ):
        yield path


@contextlib.contextmanager
def _bar(console: Console, what: str, total: int | None) -> Iterator[Any]:
    """A progress bar over bytes, where there is a terminal."""
    bar = Progress(
        TextColumn(f"[bold]{what}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
