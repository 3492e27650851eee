"""Huge pages are asked for once, and only where the kernel gives them on request."""

import os
import subprocess
import sys

import pytest

from jaxformer.hardware.huge_pages import KERNEL, TUNABLES, huge_page_environment

ON_REQUEST = "always [madvise] never\n"


@pytest.mark.parametrize("kernel", ["[always] madvise never\n", "always madvise [never]\n", ""])
def test_nothing_changes_where_asking_is_of_no_use(kernel):
    assert huge_page_environment({}, kernel) is None


def test_other_tunables_stay():
    before = {"HOME": "/", TUNABLES: "glibc.malloc.arena_max=2"}
    after = huge_page_environment(before, ON_REQUEST)
    assert after == {**before, TUNABLES: "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"}
    assert huge_page_environment(after, ON_REQUEST) is None
    assert huge_page_environment({TUNABLES: "glibc.malloc.hugetlb=0"}, ON_REQUEST) is None


@pytest.mark.skipif(
    not KERNEL.exists() or "[madvise]" not in KERNEL.read_text(),
    reason="this kernel gives huge pages to all or to nobody",
)
def test_a_program_begins_anew_with_its_arguments_and_in_its_process(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "from jaxformer.hardware.huge_pages import reexec_with_huge_pages\n"
        "print(os.getpid(), *sys.argv[1:], os.environ.get('GLIBC_TUNABLES'), flush=True)\n"
        "reexec_with_huge_pages()\n"
        "print('continues', sys.flags.dev_mode)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != TUNABLES}
    command = [sys.executable, "-X", "dev", program, "an argument", "*"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        told = process.stdout.read().splitlines()
    assert told == [
        f"{process.pid} an argument * None",
        f"{process.pid} an argument * glibc.malloc.hugetlb=1",
        "continues True",
    ]
