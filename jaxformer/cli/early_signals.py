"""How a signal ends a training run that has not begun."""

import contextlib
import os
import signal
import threading
import types
from collections.abc import Iterator

STOPS = (signal.SIGINT, signal.SIGTERM)
LINE = b"jaxformer: stopped before the run began: its folder is as it was\n"


@contextlib.contextmanager
def stopped_at_once() -> Iterator[None]:
    """Lets SIGINT and SIGTERM end the process with one line, until training sets its own handlers.

    A KeyboardInterrupt that comes while a module is imported can be lost there, and the run would
    then begin. A handler of Python's waits until the main thread is back from what it waits for in
    C++, such as other processes that never come: so a thread receives the signal, and ends all.
    """

    def wait_for_end(_number: int, _frame: types.FrameType | None) -> None:
        threading.Event().wait()

    def watch() -> None:
        while numbers := os.read(reading, 64):
            for number in STOPS:
                if number in numbers and signal.getsignal(number) is wait_for_end:
                    os.write(2, LINE)
                    os._exit(128 + number)
        os.close(reading)

    before = {number: signal.signal(number, wait_for_end) for number in STOPS}
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    told_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=watch, daemon=True, name="jaxformer-watch-signals").start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(told_before)
        os.close(writing)
        for number, handler in before.items():
            signal.signal(number, handler)
