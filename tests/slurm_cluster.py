"""A cluster of one node on this machine: SLURM's own daemons, in a folder of their own, stopped at the end."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import time

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol")
SBIN = "/usr/sbin:/usr/local/sbin:/sbin"

CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
InactiveLimit=0
KillWait=2
MinJobAge=300
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=1000 State=UNKNOWN
PartitionName=tests Nodes=localhost Default=YES MaxTime=INFINITE State=UP
"""


class NoClusterError(Exception):
    """Why there is no cluster here."""


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def said(*command):
    """Return what a command of SLURM prints."""
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout


@contextlib.contextmanager
def cluster(folder):
    """Start the daemons, point SLURM's commands to them, and stop them again.

    Raises:
        NoClusterError: they cannot be started here; the message says why.
    """
    path = os.environ["PATH"]
    os.environ["PATH"] = f"{path}:{SBIN}"
    processes = []
    try:
        missing = [program for program in PROGRAMS if shutil.which(program) is None]
        if missing:
            raise NoClusterError(f"{', '.join(missing)} not installed (Debian: slurm-wlm, munge)")
        if os.geteuid() != 0:
            raise NoClusterError("the daemons of SLURM need root")
        for name in ("state", "spool"):
            (folder / name).mkdir()
        configuration = CONFIGURATION.format(
            folder=folder, host=socket.gethostname(), controller=free_port(), daemon=free_port(), cpus=os.cpu_count()
        )
        (folder / "slurm.conf").write_text(configuration)
        version = tuple(int(part) for part in re.findall(r"\d+", said("slurmd", "-V"))[:2])
        # Versions before 23.02 load a plugin for cgroups even where nothing uses it.
        (folder / "cgroup.conf").write_text(
            f"{'CgroupPlugin=disabled' if version >= (23, 2) else 'IgnoreSystemd=yes'}\n"
        )
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        _start(processes, folder)
        try:
            yield
        finally:
            _cancel_everything()
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            process.kill()
            process.wait()
        os.environ["PATH"] = path
        os.environ.pop("SLURM_CONF", None)


def _cancel_everything():
    """Cancel all jobs and wait for their processes to end, which the daemons do."""
    with contextlib.suppress(subprocess.SubprocessError):
        said("scancel", "--user=root", "--full")
        deadline = time.monotonic() + 20
        while said("squeue", "--noheader").strip() and time.monotonic() < deadline:
            time.sleep(0.1)


def _start(processes, folder):
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
    commands = [
        ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files],
        ["slurmctld", "-D", "-c"],
        ["slurmd", "-D", "-N", "localhost"],
    ]
    for command in commands:
        log = (folder / f"{command[0]}.out").open("w")
        processes.append(subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
        log.close()
        if command[0] == "munged":
            _wait(lambda: (folder / "munge.socket").exists(), processes, folder)
    _wait(lambda: said("sinfo", "--noheader", "--format=%T").strip() == "idle", processes, folder)


def _wait(condition, processes, folder, seconds=30):
    """Wait until something is so; give up when a daemon is gone, or after a time."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(subprocess.SubprocessError):
            if condition():
                return
        gone = [process.args[0] for process in processes if process.poll() is not None]
        if gone or time.monotonic() > deadline:
            logs = [path for name in gone or ["slurmctld", "slurmd"] for path in folder.glob(f"{name}.out")]
            last = "; ".join(line for path in logs for line in path.read_text().splitlines()[-2:])
            raise NoClusterError(f"{', '.join(gone) or 'the node'} does not come up: {last}")
        time.sleep(0.1)
