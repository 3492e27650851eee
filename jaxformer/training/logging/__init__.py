"""What a run reports: numbers for programs, lines and a progress bar for people.

In go the numbers of each step and evaluation; out come ``metrics.jsonl``, the records of a metrics
service, the lines of the terminal, and at the end a picture of the losses.

- ``run_log``: all of a run's reports, of which only the primary process makes any.
- ``metrics``: the file, the services and the picture.
- ``report_page``: the page of a run: curves, samples, settings.
- ``noise_scale``: what the gradients of a step's parts say of its noise.
- ``progress``: the terminal; ``dashboard``: the same, on one screen.
"""
