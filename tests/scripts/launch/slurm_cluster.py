"""A SLURM cluster of two nodes on this machine: munge, slurmctld and two slurmd."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol")
_EXPIRE_S = 3
"""Until nodes take a job of the same number again."""
# linuxproc signals every process of a step: a supervisor and its run. Other plugins signal the first alone.
CONFIG = """
ClusterName=mupax
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={expire}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 RealMemory=1000
NodeName={host}-2 NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=1000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Return what this machine lacks for a cluster, in words."""
    if os.geteuid():
        return "SLURM's daemons run as root"
    if lacking := [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]:
        return f"{', '.join(lacking)} not installed (Debian: slurm-wlm, munge)"
    host = socket.gethostname().partition(".")[0]
    try:  # the node's name is where the run's processes meet
        socket.gethostbyname(host)
    except OSError:
        return f"the host's own name, {host}, does not resolve"
    return None


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for bound in sockets:
            bound.bind(("127.0.0.1", 0))
        return [bound.getsockname()[1] for bound in sockets]


class Cluster:
    """Talks to the cluster as a person does.

    Args:
        environment: of its commands, `SLURM_CONF` among them.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment

    def output(self, *command: str) -> str:
        """Run a command that must succeed, and return what it prints."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        return re.findall(r"JobState=(\S+)", self.output("scontrol", "show", "job", job))[0]

    def requeue(self, job: str) -> None:
        """Start a job again that has ended, without the two minutes that SLURM would wait."""
        self.output("scontrol", "requeue", job)
        time.sleep(_EXPIRE_S + 1)
        self.output("scontrol", "update", f"JobId={job}", "StartTime=now")

    def wait(self, job: str, states: tuple[str, ...], seconds: float = 240) -> str:
        """The state of a job, as soon as it is one of these."""
        deadline = time.monotonic() + seconds
        while (state := self.state(job)) not in states:
            assert time.monotonic() < deadline, f"job {job} is {state}, not {states}"
            time.sleep(0.1)
        return state


@contextlib.contextmanager
def cluster(folder: Path, environment: dict[str, str]) -> Iterator[Cluster]:
    """A cluster while entered.

    Args:
        folder: for its files; every user must be able to enter it.
        environment: of its jobs.
    """
    host = socket.gethostname().partition(".")[0]
    if reason := missing():
        pytest.skip(f"SLURM: {reason}")
    for path in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            path.chmod(path.stat().st_mode | 0o111)  # munge's socket is for all users
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    text = CONFIG.format(host=host, folder=folder, ports=_free_ports(3), expire=_EXPIRE_S)
    (folder / "slurm.conf").write_text(text)
    variables = {**environment, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}
    munge = [
        f"--{name}={folder}/munge.{name.removesuffix('-file')}"
        for name in ("key-file", "pid-file", "log-file")
    ]
    commands = [
        [
            "munged",
            "--foreground",
            "--force",
            f"--socket={folder}/munge.socket",
            f"--seed-file={folder}/seed",
            *munge,
        ],
        ["slurmctld", "-D"],
        *(["slurmd", "-D", "-N", name] for name in (host, f"{host}-2")),
    ]
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        with (folder / "daemons.log").open("w") as log:
            for command in commands:
                daemons.append(
                    subprocess.Popen(command, env=variables, cwd=folder, stdout=log, stderr=log)
                )
                deadline = time.monotonic() + 20
                while command[0] == "munged" and not (folder / "munge.socket").exists():
                    assert time.monotonic() < deadline, (folder / "daemons.log").read_text()
                    time.sleep(0.05)
        slurm = Cluster(variables)
        deadline = time.monotonic() + 60
        while (
            "2"
            not in subprocess.run(
                ["sinfo", "-h", "-t", "idle", "-o", "%D"],
                env=variables,
                capture_output=True,
                text=True,
            ).stdout
        ):
            assert time.monotonic() < deadline, (folder / "daemons.log").read_text()[-3000:]
            time.sleep(0.2)
        yield slurm
    finally:
        with contextlib.suppress(Exception):
            subprocess.run(["scancel", "--user=root"], env=variables, timeout=20)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
