"""Counts, sizes and times as people read them."""


def format_count(count: int) -> str:
    """Returns a number of parameters or operations: 3,512, 0.8 M, 124.4 M, 70.6 G."""
    for size, unit in ((10**18, "E"), (10**15, "P"), (10**12, "T"), (10**9, "G")):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 10**6:.1f} M" if count >= 100_000 else f"{count:,}"


def format_file_size(count: int) -> str:
    """Returns a number of bytes on a disk, in powers of ten: 17 B, 1.2 kB, 497.8 MB."""
    for size, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def format_memory(count: int) -> str:
    """Returns a number of bytes in memory, in powers of two: 0.5 KiB, 15.6 GiB."""
    for power, unit in ((60, "EiB"), (50, "PiB"), (40, "TiB"), (30, "GiB"), (20, "MiB")):
        if count >= 2**power:
            return f"{count / 2**power:,.1f} {unit}"
    return f"{count / 2**10:.1f} KiB"


def format_thousands(value: float) -> str:
    """Returns a number of things a second: 812, 12.3k."""
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"


def format_duration(seconds: float) -> str:
    """Returns a duration that was measured or estimated: 3.21 ms, 1.5 s."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def format_clock(seconds: float) -> str:
    """Returns the time that is left as hours, minutes and seconds: 0:01:02."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def format_rate(operations_per_second: float) -> str:
    """Returns operations per second as people write them: 112 GFLOP/s, 1.4 TFLOP/s."""
    sizes = ((1e15, "P"), (1e12, "T"), (1e9, "G"))
    size, prefix = next((s for s in sizes if operations_per_second >= s[0]), sizes[-1])
    value = operations_per_second / size
    return f"{value:.{0 if value >= 10 else 1}f} {prefix}FLOP/s"
