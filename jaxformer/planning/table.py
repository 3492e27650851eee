"""An estimate of resources as a table in the terminal."""

from rich.table import Table

from jaxformer.hardware.screen import Screen
from jaxformer.hardware.units import format_count, format_duration, format_memory, format_rate
from jaxformer.planning.collectives import Collective
from jaxformer.planning.resources import ResourceEstimate

SECONDS_OF_A_DAY = 86400


def print_table(estimate: ResourceEstimate) -> None:
    """Prints an estimate on standard output, as a table and the devices that have room for it."""
    console = Screen(highlight=False, soft_wrap=True)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column()
    _add_memory(estimate, table)
    _add_work(estimate, table)
    console.print(table)
    fits = estimate.fits()
    for verdict in (True, False):
        names = [name for name, fitting in fits.items() if fitting == verdict]
        if names:
            words = "fits" if verdict else "does not fit"
            console.print(f"[dim]{words}[/]  {', '.join(names)}")


def _add_memory(estimate: ResourceEstimate, table: Table) -> None:
    verb = "compiled for" if estimate.source == "compiled" else "a model's estimate for"
    here = f"{verb} {estimate.devices} × {estimate.device_kind}"
    mesh = " × ".join(f"{axis} {size}" for axis, size in estimate.mesh.items() if size > 1)
    size = format_count(estimate.parameter_count)
    if mesh:
        table.add_row("mesh", mesh, "what follows is of one device")
    active = estimate.active_count
    chosen = "" if active == estimate.parameter_count else f", {format_count(active)} for a token"
    table.add_row("parameters", format_memory(estimate.parameters), f"{size}, float32{chosen}")
    numbers = f"{estimate.moments / estimate.parameters:.2g} for each parameter"
    table.add_row(f"{estimate.optimizer}'s moments", format_memory(estimate.moments), numbers)
    if estimate.corpus:
        table.add_row("corpus", format_memory(estimate.corpus), "ids of the whole text")
    table.add_row("training", format_memory(estimate.training), f"temporary, {here}; of it")
    table.add_row(
        "  gradients", format_memory(estimate.gradients), "for the update, a model's estimate"
    )
    table.add_row("  activations", format_memory(estimate.activations), "kept, a model's estimate")
    if estimate.evaluation is not None:
        table.add_row(
            "evaluation", format_memory(estimate.evaluation), "temporary, never beside training's"
        )
    table.add_row("each device", format_memory(estimate.total), _verdict(estimate))
    if estimate.process is not None:
        words = "Python, JAX, compiled programs, beside that"
        table.add_row("process", format_memory(estimate.process), words)


def _add_work(estimate: ResourceEstimate, table: Table) -> None:
    table.add_row("tokens", f"{estimate.tokens_per_step:,}", "a step, over all devices")
    table.add_row("operations", f"{estimate.operations_per_step:.3g}", "a step, in matrix products")
    for one in estimate.collectives:
        table.add_row(one.kind, format_memory(int(one.sent)), _describe(one))
    roofline = estimate.roofline
    if roofline is None or not estimate.fits_here:
        # How fast a run is that cannot be made is no question.
        return
    if roofline.compute is not None and estimate.peak:
        words = f"what is computed, at the peak of {format_rate(estimate.peak)}"
        table.add_row("compute", format_duration(roofline.compute), words)
    table.add_row(
        "memory", format_duration(roofline.memory), "what passes through a device's memory"
    )
    if estimate.collectives:
        time = roofline.interconnect
        table.add_row(
            "interconnect",
            "unknown" if time is None else format_duration(time),
            "what a device sends",
        )
    if roofline.seconds is not None and estimate.tokens_per_second is not None:
        a_day = f"{estimate.tokens_per_second * SECONDS_OF_A_DAY:.3g} tokens a day"
        share = roofline.utilization
        limit = "" if share is None else f"at most {100 * share:.0f}% MFU, "
        words = f"a step, if all else hides behind {roofline.bound}: {limit}{a_day}, an estimate"
        table.add_row("no faster than", format_duration(roofline.seconds), words)


def _describe(one: Collective) -> str:
    over = " and ".join(one.axes) or "one device"
    return f"sent by each device, {one.count:,} a step over {over} ({one.devices} devices)"


def _verdict(estimate: ResourceEstimate) -> str:
    if estimate.capacity is None:
        return "of an unknown amount"
    fits = "fits" if estimate.fits_here else "[bold red]does not fit[/]"
    return f"of {format_memory(estimate.capacity)}: {fits}"
