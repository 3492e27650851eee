"""deploy/: the scripts are sound, the manifests have the fields that Kubernetes knows, runs resume.

No cluster is at hand: SLURM's, Google's and jaxformer's own commands are replaced by scripts that
write down how they were called.
"""

import itertools
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.support.pages import ROOT
from tests.support.tiny import TEXT, TINY

DEPLOY = ROOT / "deploy"
SCRIPTS = ("start_or_resume.sh", "slurm.sbatch", "tpu_slice.sh")
yaml = pytest.importorskip("yaml")

NAMED = {"name": str}
MOUNT = {"name": str, "mountPath": str, "readOnly?": bool}
CONTAINER = {
    **NAMED, "image": str, "args": [str], "ports": [{"containerPort": int}],
    "resources": {"limits": {"nvidia.com/gpu": int}}, "volumeMounts": [MOUNT],
}  # fmt: skip
VOLUME = {
    **NAMED, "persistentVolumeClaim?": {"claimName": str}, "emptyDir?": {"medium": str},
}  # fmt: skip
RULE = {
    "action": str,
    "onExitCodes?": {"containerName": str, "operator": str, "values": [int]},
    "onPodConditions?": [{"type": str}],
}
POD = {
    "subdomain?": str, "restartPolicy": str, "terminationGracePeriodSeconds": int,
    "containers": [CONTAINER], "volumes": [VOLUME],
}  # fmt: skip
JOB = {
    "completionMode": str, "completions": int, "parallelism": int, "backoffLimit": int,
    "podFailurePolicy": {"rules": [RULE]}, "template": {"spec": POD},
}  # fmt: skip
# By kind what a manifest may hold: a field with ? may be missing, a list holds any number of such.
SCHEMAS = {
    ("v1", "Service"): {
        "clusterIP": str, "publishNotReadyAddresses": bool, "selector": {"job-name": str},
        "ports": [{"name": str, "port": int}],
    },
    ("batch/v1", "Job"): JOB,
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): {
        "network": {"enableDNSHostnames": bool, "publishNotReadyAddresses": bool},
        "failurePolicy": {
            "maxRestarts": int,
            "rules": [{**NAMED, "action": str, "onJobFailureReasons": [str]}],
        },
        "replicatedJobs": [{**NAMED, "replicas": int, "template": {"spec": JOB}}],
    },
}  # fmt: skip


def problems(value, schema, place=""):
    """What does not fit a schema, by place."""
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return [f"{place} is no mapping"]
        known = {name.removesuffix("?"): name for name in schema}
        found = [f"{place}.{name} is unknown" for name in value.keys() - known.keys()]
        for name, written in known.items():
            if name in value:
                found += problems(value[name], schema[written], f"{place}.{name}")
            elif not written.endswith("?"):
                found.append(f"{place}.{name} is missing")
        return found
    if isinstance(schema, list):
        if not isinstance(value, list) or not value:
            return [f"{place} is no list"]
        return [p for n, one in enumerate(value) for p in problems(one, schema[0], f"{place}[{n}]")]
    return [] if type(value) is schema else [f"{place} is no {schema.__name__}: {value!r}"]


def manifests(name):
    return list(yaml.safe_load_all((DEPLOY / name).read_text("utf-8")))


def job_of(name):
    """The job and the name under which the first process is reached."""
    last = manifests(name)[-1]
    if last["kind"] == "JobSet":
        (replicated,) = last["spec"]["replicatedJobs"]
        run = last["metadata"]["name"]
        return replicated["template"]["spec"], f"{run}-{replicated['name']}-0-0.{run}"
    run = last["metadata"]["name"]
    return last["spec"], f"{run}-0.{last['spec']['template']['spec']['subdomain']}"


@pytest.mark.parametrize("name", ["jobset.yaml", "indexed_job.yaml"])
def test_manifests_have_known_fields(name):
    for manifest in manifests(name):
        head = {"apiVersion": str, "kind": str, "metadata": NAMED}
        schema = {**head, "spec": SCHEMAS[manifest["apiVersion"], manifest["kind"]]}
        assert problems(manifest, schema) == []


@pytest.mark.parametrize("name", ["jobset.yaml", "indexed_job.yaml"])
def test_the_number_of_pods_is_the_same_everywhere(name):
    job, first = job_of(name)
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    arguments = container["args"]
    flags = dict(itertools.pairwise(arguments))
    assert job["completions"] == job["parallelism"] == int(flags["--num-processes"])
    assert flags["--coordinator"] == f"{first}:{container['ports'][0]['containerPort']}"
    assert flags["--process-id"] == "$(JOB_COMPLETION_INDEX)"
    assert job["completionMode"] == "Indexed"
    # Only a pod that is not restarted in place has a failure policy.
    assert pod["restartPolicy"] == "Never"
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_a_service_has_the_name_that_pods_look_for():
    service, job = manifests("indexed_job.yaml")
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}


@pytest.mark.parametrize("name", ["jobset.yaml", "indexed_job.yaml"])
def test_what_trying_again_does_not_mend_ends_the_job(name):
    """Those of docs/reference/exit_codes.md; 9, a lost process, is not among them."""
    job, _ = job_of(name)
    (found,) = [r["onExitCodes"] for r in job["podFailurePolicy"]["rules"] if "onExitCodes" in r]
    assert found["values"] == [2, 3, 4, 5, 6]


def test_the_dockerfile_takes_what_is_there():
    text = (DEPLOY / "Dockerfile").read_text("utf-8")
    assert set(re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE)) == {"base", "cpu", "cuda"}
    for line in re.findall(r"^COPY (?:--\S+ )?(.+) \S+$", text, re.MULTILINE):
        for name in line.split():
            assert (ROOT / name).exists(), name
    extras = (ROOT / "pyproject.toml").read_text("utf-8")
    for found in re.findall(r"'\.\[(.+)\]'", text):
        for extra in found.split(","):
            assert f"\n{extra} = [" in extras


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_sound(name):
    subprocess.run(["bash", "-n", DEPLOY / name], check=True)
    assert os.access(DEPLOY / name, os.X_OK)
    shellcheck = shutil.which("shellcheck", path=os.path.dirname(sys.executable))
    if shellcheck is None:
        pytest.skip("there is no shellcheck")
    subprocess.run([shellcheck, DEPLOY / name], check=True)


@pytest.fixture
def command(empty_folder, monkeypatch):
    """Makes a command that writes its arguments into ``calls`` and ends with the codes in turn."""
    folder = empty_folder / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def make(name, *codes, then=""):
        (folder / f"{name}.codes").write_text("\n".join(map(str, codes)))
        script = folder / name
        script.write_text(
            "#!/usr/bin/env bash\n"
            f'echo "{name} $*" >> "{empty_folder}/calls"\n{then}\n'
            f'codes="{folder}/{name}.codes"; code=$(head -n 1 "$codes"); sed -i 1d "$codes"\n'
            'exit "${code:-0}"\n'
        )
        script.chmod(0o755)

    return make


def calls():
    return open("calls", encoding="utf-8").read().splitlines()


def test_a_run_that_is_there_is_resumed(command, empty_folder):
    command("jaxformer")
    start = [DEPLOY / "start_or_resume.sh", "run", "--process", "--distributed", "--"]
    subprocess.run([*start, "--data", "a b"], check=True)
    (empty_folder / "run").mkdir()
    (empty_folder / "run" / "config.json").touch()
    subprocess.run([*start, "--data", "a b"], check=True)
    assert calls() == [
        "jaxformer train --out run --distributed --data a b",
        "jaxformer train --out run --distributed --resume",
    ]


@pytest.mark.parametrize(
    ("code", "restarts", "ends_with", "queued"),
    [(0, 0, 0, 0), (9, 3, 0, 1), (143, 0, 0, 1), (9, 20, 9, 0), (2, 0, 2, 0)],
)
def test_slurm_queues_what_can_be_resumed(command, code, restarts, ends_with, queued):
    command("srun", code)
    command("scontrol")
    environment = {
        **os.environ, "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "x", "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_RESTART_COUNT": str(restarts), "OUT": "run",
    }  # fmt: skip
    done = subprocess.run([DEPLOY / "slurm.sbatch", "--steps", "9"], env=environment, check=False)
    assert done.returncode == ends_with
    first, *rest = calls()
    assert first.endswith("start_or_resume.sh run --process --distributed -- --steps 9")
    assert rest == ["scontrol requeue 7"] * queued


def test_a_tpu_slice_that_is_lost_is_made_again(command):
    """The first try loses a host, and then the slice; the second ends well."""
    command("gcloud", 1, 0, 0, 0, 9, 1, 0, 0, 0, 0, 0)
    environment = {**os.environ, "TPU": "v5litepod-16", "ZONE": "z", "OUT": "/run", "WAIT": "0"}
    subprocess.run([DEPLOY / "tpu_slice.sh", "--steps", "9"], env=environment, check=True)
    verbs = [line.split()[4] for line in calls() if line.startswith("gcloud compute tpus tpu-vm")]
    once = ["describe", "delete", "create", "ssh", "ssh"]
    assert verbs == [*once, *once, "delete"]


# tests/distributed loses processes in the full tier.
@pytest.mark.tier("slow")
def test_a_killed_process_costs_the_steps_since_the_last_save(empty_folder):
    """Two processes on this machine; one is killed, both are started again by the same command."""
    import json
    import signal
    import socket
    import time

    (empty_folder / "text.txt").write_text(TEXT)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "JAXFORMER": f"{sys.executable} -m jaxformer",
    }  # fmt: skip

    def start(number, steps):
        command = [
            DEPLOY / "start_or_resume.sh", "run", "--process", "--coordinator",
            f"127.0.0.1:{port}", "--num-processes", "2", "--process-id", str(number),
            "--peer-timeout", "12", "--steps", str(steps), "--", "--data", "text.txt", *TINY,
        ]  # fmt: skip
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    pair = [start(number, 100_000) for number in range(2)]
    saved = empty_folder / "run" / "checkpoints" / "10" / "MANIFEST.json"
    end = time.monotonic() + 240
    while not saved.exists() and time.monotonic() < end:
        assert pair[0].poll() is None, pair[0].stderr.read()
        time.sleep(0.2)
    pair[1].send_signal(signal.SIGKILL)
    assert pair[0].wait(timeout=120) == 9
    pair[1].wait()
    steps = [int(path.name) for path in saved.parent.parent.iterdir() if path.name.isdigit()]
    last = max(steps) + 20
    again = [start(number, last) for number in range(2)]
    assert [process.wait(timeout=240) for process in again] == [0, 0], again[0].stderr.read()
    lines = (empty_folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    found = [json.loads(line)["step"] for line in lines if "train_loss" in line]
    assert found == list(range(1, last + 1))
