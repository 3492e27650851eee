"""``jaxformer plan``: what a run would take, as a table or as JSON."""

import json
import sys

from rich.console import Console
from rich.table import Table

from jaxformer.cli.plan_options import PlanOptions
from jaxformer.data.corpora import load_corpus
from jaxformer.hardware.accelerators import describe_rate
from jaxformer.hardware.units import format_count, format_duration, format_memory
from jaxformer.planning.collectives import Collective
from jaxformer.planning.gpu_topologies import describe_gpus
from jaxformer.planning.needs import ResourceEstimate, find_needs, guess_needs
from jaxformer.planning.programs import compile_for_topology, compile_run, describe_topology
from jaxformer.planning.targets import Target
from jaxformer.training.experiment import Experiment, check_devices, choose_devices, run_as
from jaxformer.training.memory import check_countable

SECONDS_OF_A_DAY = 86400


def plan(options: PlanOptions) -> None:
    """Prints what the run of ``options.config`` would take.

    Raises:
        JaxformerError: one of its kinds, for whatever training would refuse before its first step.
    """
    needs = find_plan(options)
    if options.json:
        print(json.dumps(needs.to_dict(), indent=1))
        return
    _show(needs, Console(file=sys.stdout, highlight=False, soft_wrap=True))


def find_plan(options: PlanOptions) -> ResourceEstimate:
    """What the run of ``options.config`` would take.

    It is compiled for the devices that are here, or for a TPU slice or GPUs that need not be; where
    JAX has no compiler for them, and on request, the model's arithmetic stands in.

    Raises:
        JaxformerError: one of its kinds, for whatever training would refuse before its first step.
    """
    config = options.config
    target = None if options.topology is None else Target.read(options.topology)
    devices, topology = [], None
    if target is None:
        devices = choose_devices(config)
    else:
        check_devices(config, target.count)
    if target is not None and not options.model_only:
        name = options.topology or ""
        topology = describe_topology(name) if target.is_tpu else describe_gpus(target)
        devices = [] if topology is None else list(topology.devices)
    corpus = load_corpus(config.data, encoding=config.encoding, download=options.download)
    experiment = Experiment.prepare(config, corpus)
    check_countable(experiment.config)
    if target is not None and topology is None:
        return guess_needs(experiment, target)
    with run_as(experiment.config):
        programs = (
            compile_run(experiment, devices)
            if target is None
            else compile_for_topology(experiment, devices)
        )
    return find_needs(experiment, devices, programs, target)


def _show(needs: ResourceEstimate, console: Console) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column()
    _show_memory(needs, table)
    _show_work(needs, table)
    console.print(table)
    fits = needs.fits()
    for verdict in (True, False):
        names = [name for name, fitting in fits.items() if fitting == verdict]
        if names:
            words = "fits" if verdict else "does not fit"
            console.print(f"[dim]{words}[/]  {', '.join(names)}")


def _show_memory(needs: ResourceEstimate, table: Table) -> None:
    verb = "compiled for" if needs.source == "compiled" else "a model's estimate for"
    here = f"{verb} {needs.devices} × {needs.device_kind}"
    mesh = " × ".join(f"{axis} {size}" for axis, size in needs.mesh.items() if size > 1)
    size = format_count(needs.parameter_count)
    if mesh:
        table.add_row("mesh", mesh, "what follows is of one device")
    table.add_row("parameters", format_memory(needs.parameters), f"{size}, float32")
    table.add_row("AdamW's moments", format_memory(needs.moments), "two for each parameter")
    if needs.corpus:
        table.add_row("corpus", format_memory(needs.corpus), "ids of the whole text")
    table.add_row("training", format_memory(needs.training), f"temporary, {here}; of it")
    table.add_row(
        "  gradients", format_memory(needs.gradients), "for the update, a model's estimate"
    )
    table.add_row("  activations", format_memory(needs.activations), "kept, a model's estimate")
    if needs.evaluation is not None:
        table.add_row(
            "evaluation", format_memory(needs.evaluation), "temporary, never beside training's"
        )
    table.add_row("each device", format_memory(needs.total), _verdict(needs))


def _show_work(needs: ResourceEstimate, table: Table) -> None:
    table.add_row("tokens", f"{needs.tokens_per_step:,}", "a step, over all devices")
    table.add_row("operations", f"{needs.operations_per_step:.3g}", "a step, in matrix products")
    for one in needs.collectives:
        table.add_row(one.kind, format_memory(int(one.sent)), _describe(one))
    roofline = needs.roofline
    if roofline is None:
        return
    if roofline.compute is not None and needs.peak:
        words = f"what is computed, at the peak of {describe_rate(needs.peak)}"
        table.add_row("compute", format_duration(roofline.compute), words)
    table.add_row(
        "memory", format_duration(roofline.memory), "what passes through a device's memory"
    )
    if needs.collectives:
        time = roofline.interconnect
        table.add_row(
            "interconnect",
            "unknown" if time is None else format_duration(time),
            "what a device sends",
        )
    if roofline.seconds is not None and needs.tokens_per_second is not None:
        a_day = f"{needs.tokens_per_second * SECONDS_OF_A_DAY:.3g} tokens a day"
        share = "" if roofline.utilization is None else f"{100 * roofline.utilization:.0f}% MFU, "
        words = f"a step, if all else hides behind {roofline.bound}: {share}{a_day}, an estimate"
        table.add_row("no faster than", format_duration(roofline.seconds), words)


def _describe(one: Collective) -> str:
    over = " and ".join(one.axes) or "one device"
    return f"sent by each device, {one.count:,} a step over {over} ({one.devices} devices)"


def _verdict(needs: ResourceEstimate) -> str:
    if needs.capacity is None:
        return "of an unknown amount"
    fits = "fits" if needs.total <= needs.capacity else "[bold red]does not fit[/]"
    return f"of {format_memory(needs.capacity)}: {fits}"
