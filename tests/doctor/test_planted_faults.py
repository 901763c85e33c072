"""`trainwright doctor` names faults that are really there, each with its fix."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import environment
from tests.support.conditions import NotHere, as_user
from tests.support.doctor import NEEDS_ROOT, Checked, checked, doctor, driver, group, in_shell
from trainwright.machine.accelerators import read_installed_build

PORT = "45123"
NOBODY = 65534


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken


def test_a_port_that_is_taken_and_who_has_it(listener: socket.socket, tmp_path: Path) -> None:
    port = listener.getsockname()[1]
    found = doctor("ports", "--port", str(port), cwd=tmp_path)
    finding = found.finding("ports", f"port {port} is taken by process {os.getpid()}: ")
    assert found.code == 3 and finding["severity"] == "broken"
    assert f"MASTER_PORT={port + 1}" in finding["fix"]
    named = doctor("ports", cwd=tmp_path, MASTER_PORT=str(port))
    assert named.code == 3 and named.finding("ports", f"port {port} is taken")


@NEEDS_ROOT
def test_what_another_user_may_not_see_or_write_is_said(listener: socket.socket, this_machine: None) -> None:
    try:
        nobody = as_user(NOBODY)
    except NotHere as error:
        pytest.skip(str(error))
    port, place = listener.getsockname()[1], Path(tempfile.mkdtemp(dir="/tmp"))
    place.chmod(0o755)
    arguments = ("ports", "disks", "--port", str(port), "--directory", str(place))
    try:
        found = doctor(*arguments, cwd=Path("/"), before=nobody)
    finally:
        place.rmdir()
    assert "a program of another user, whose name only root can see" in found.finding("ports", f"port {port}")["what"]
    assert found.finding("disks", f"{place}: cannot be written: Permission denied")["severity"] == "broken"


@pytest.fixture(scope="module")
def cramped(tmp_path_factory: pytest.TempPathFactory) -> Checked:
    """A machine with 16 MiB of /dev/shm, a full disk, and a name that leads to itself."""
    place = tmp_path_factory.mktemp("cramped")
    (place / "full").mkdir()
    (place / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 planted\n")
    plant = (
        "mount -t tmpfs -o size=16m none /dev/shm",
        f"mount -t tmpfs -o size=64k none {place}/full",
        f"dd if=/dev/zero of={place}/full/file bs=64k count=1 2> /dev/null",
        f"hostname planted; mount --bind {place}/hosts /etc/hosts",
    )
    before = in_shell("; ".join(plant), "--mount", "--uts")
    checks = ("shared-memory", "disks", "interfaces", "--directory", str(place / "full"))
    return doctor(*checks, cwd=place, before=before)


@NEEDS_ROOT
def test_16_megabytes_of_dev_shm(cramped: Checked) -> None:
    finding = cramped.finding("shared-memory", "/dev/shm has only 16.0 MiB")
    assert "--shm-size" in finding["fix"]


@NEEDS_ROOT
def test_a_full_disk(cramped: Checked) -> None:
    finding = cramped.finding("disks", "/full: cannot be written: No space left on device")
    assert cramped.code == 3 and "remove old checkpoints" in finding["fix"]


@NEEDS_ROOT
def test_a_name_that_leads_to_loopback(cramped: Checked) -> None:
    finding = cramped.finding("interfaces", "planted, resolves to the loopback")
    assert "127.0.1.1" in finding["what"] and "--rendezvous" in finding["fix"]


def test_64_open_files_and_what_cannot_be_checked_then(tmp_path: Path) -> None:
    found = doctor("limits", "links", cwd=tmp_path, before=in_shell("ulimit -n 64"))
    finding = found.finding("limits", "the limit of open files is 64 (ulimit -n)")
    assert found.code == 3 and finding["severity"] == "broken" and "ulimit -n 65536" in finding["fix"]
    assert found.check("links")["skipped"] == "limits must be fixed first"


def test_a_limit_of_memory_and_of_file_sizes(tmp_path: Path) -> None:
    found = doctor("limits", cwd=tmp_path, before=in_shell("ulimit -f 2048; ulimit -v 16777216"))
    assert "ulimit -f unlimited" in found.finding("limits", "(ulimit -f)")["fix"]
    assert "16.0 GiB" in found.finding("limits", "(ulimit -v)")["what"]
    assert found.code == 0


def cpu_quota(microseconds: int) -> tuple[str, dict[str, str], dict[str, str]]:
    """The controller and its files for so many microseconds of computing in every tenth of a second."""
    old = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": str(microseconds)}
    return "cpu", old, {"cpu.max": f"{microseconds} 100000"}


@pytest.fixture(scope="module")
def rationed(tmp_path_factory: pytest.TempPathFactory) -> Checked:
    """A machine in control groups of half a core and of 100 processes."""
    pids = {"pids.max": "100"}
    with group(*cpu_quota(50_000)) as cores, group("pids", pids, pids) as processes:
        before = in_shell(f"echo $$ > {cores}; echo $$ > {processes}")
        return doctor("control-groups", cwd=tmp_path_factory.mktemp("rationed"), before=before)


@NEEDS_ROOT
def test_a_quota_of_half_a_core(rationed: Checked) -> None:
    finding = rationed.finding("control-groups", "throttled: the control group may use 0.5 of ")
    assert "--cpus" in finding["fix"] and "OMP_NUM_THREADS=1" in finding["fix"]


@NEEDS_ROOT
def test_too_few_processes_are_left(rationed: Checked) -> None:
    found = rationed.finding("control-groups", "of at most 100 processes")
    assert rationed.code == 3 and "--pids-limit" in found["fix"]


@pytest.mark.slow  # so small a quota is used up also where other programs have the cores, and takes its time
@NEEDS_ROOT
def test_a_core_that_is_throttled(tmp_path: Path) -> None:
    with group(*cpu_quota(10_000)) as processes:
        found = doctor("cores", cwd=tmp_path, before=in_shell(f"echo $$ > {processes}"))
    assert "quota" in found.finding("cores", "throttled: the quota of the control group was used up")["fix"]


@pytest.mark.slow
def test_a_core_that_is_taken_away_in_turns(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainwright", "doctor", "cores", "--json"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:  # as cpulimit does
            for number, seconds in ((signal.SIGSTOP, 0.06), (signal.SIGCONT, 0.02)):
                process.send_signal(number)
                time.sleep(seconds)
        assert process.stdout is not None
        found = checked(process.stdout.read(), process.returncode)
    finding = found.finding("cores", "throttled: this process was stopped for ")
    assert "cpulimit" in finding["fix"] and found.code == 0


@contextlib.contextmanager
def loop_device(image: Path) -> Iterator[str]:
    """A block device with a file system in a file; skips where none can be made."""
    if shutil.which("losetup") is None or shutil.which("mkfs.ext4") is None:
        pytest.skip("there is no losetup or mkfs.ext4")
    image.write_bytes(b"")
    os.truncate(image, 2**26)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, capture_output=True)
    made = subprocess.run(["losetup", "--find", "--show", str(image)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no loop device: {made.stderr.strip()}")
    device = made.stdout.strip()
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


@NEEDS_ROOT
def test_a_slow_disk(tmp_path: Path) -> None:
    rate, place = 16 * 2**20, tmp_path / "mounted"
    place.mkdir()
    with loop_device(tmp_path / "image") as device:
        number = os.stat(device).st_rdev
        limit = f"{os.major(number)}:{os.minor(number)} {rate}"
        old = {f"blkio.throttle.{kind}_bps_device": limit for kind in ("read", "write")}
        new = {"io.max": f"{limit.partition(' ')[0]} rbps={rate} wbps={rate}"}
        with group("blkio", old, new) as processes:
            before = in_shell(f"mount {device} {place}; echo $$ > {processes}", "--mount")
            found = doctor("disks", "--directory", str(place), cwd=tmp_path, before=before)
    finding = found.finding("disks", "slow disk", str(place))
    shown = float(finding["what"].partition("MB/s")[0].rpartition(": ")[2])
    assert 0.5 < shown < 50 and "logging.run_directory" in finding["fix"]
    assert "ext4 on loop" in found.check("disks")["facts"][0]


DEAD = "ip link add tw0 type veth peer name tw1; ip address add 10.9.9.1/24 dev tw0; ip link set tw0 up"
LOOPBACK = "ip link set lo up"


@pytest.fixture(scope="module")
def cut_off(tmp_path_factory: pytest.TempPathFactory) -> Checked:
    """A machine with a full /dev/shm, an interface without a cable, and loopback turned off."""
    if shutil.which("ip") is None:
        pytest.skip("there is no ip")
    fill = "mount -t tmpfs -o size=64k none /dev/shm; dd if=/dev/zero of=/dev/shm/full bs=64k count=1 2> /dev/null"
    before = in_shell(f"{DEAD}; {fill}", "--net", "--mount")
    checks = ("shared-memory", "ports", "interfaces", "--port", PORT)
    return doctor(*checks, cwd=tmp_path_factory.mktemp("cut-off"), before=before)


@NEEDS_ROOT
def test_a_full_dev_shm(cut_off: Checked) -> None:
    assert "remove files" in cut_off.finding("shared-memory", "/dev/shm has 0 bytes free")["fix"]


@NEEDS_ROOT
def test_a_dead_loopback_interface(cut_off: Checked) -> None:
    finding = cut_off.finding("ports", "the loopback interface does not work")
    assert cut_off.code == 3 and "ip link set lo up" in finding["fix"]


@NEEDS_ROOT
def test_a_dead_interface(cut_off: Checked, tmp_path: Path) -> None:
    finding = cut_off.finding("interfaces", "dead interface: tw0 dead: no carrier", "10.9.9.1")
    assert "NCCL_SOCKET_IFNAME=^tw0" in finding["fix"]
    # The one that processes are to use is worse.
    before = in_shell(f"{LOOPBACK}; {DEAD}", "--net")
    chosen = doctor("interfaces", cwd=tmp_path, before=before, GLOO_SOCKET_IFNAME="tw0")
    assert chosen.code == 3 and chosen.finding("interfaces", "GLOO_SOCKET_IFNAME=tw0: dead interface")
    before = in_shell(f"{LOOPBACK}; {DEAD}; ip link set tw1 up", "--net")
    alive = doctor("interfaces", cwd=tmp_path, before=before)
    assert not [each for each in alive.check("interfaces")["findings"] if "dead" in each["what"]]


def test_interfaces_that_are_not_there_and_names_that_only_nccl_understands(tmp_path: Path) -> None:
    variables = {"GLOO_SOCKET_IFNAME": "eth77", "TP_SOCKET_IFNAME": "^docker,lo", "NCCL_SOCKET_IFNAME": "^docker,lo"}
    found = doctor("interfaces", cwd=tmp_path, **variables)
    missing = found.finding("interfaces", "GLOO_SOCKET_IFNAME=eth77: there is no interface eth77")
    assert found.code == 3 and "set GLOO_SOCKET_IFNAME to one that is up" in missing["fix"]
    wrong = found.finding("interfaces", "TP_SOCKET_IFNAME=^docker,lo: only NCCL_SOCKET_IFNAME may begin with ^")
    assert wrong["severity"] == "broken" and "TP_SOCKET_IFNAME=" in wrong["fix"]
    assert not [each for each in found.check("interfaces")["findings"] if each["what"].startswith("NCCL_")]


def other_torch(site: Path, version: str) -> str:
    """The metadata of another torch before that of the one that is installed; returns the path for Python."""
    metadata = site / f"torch-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    return os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])


def planted(site: Path, path: str) -> list[str]:
    """A command that starts Python with another path before its own."""
    return ["env", f"PYTHONPATH={path}{os.pathsep}{Path(__file__).parents[2] / 'src'}"]


@pytest.mark.slow
def test_metadata_of_another_torch(tmp_path: Path) -> None:
    before = planted(tmp_path, other_torch(tmp_path / "site", "2.6.0"))
    found = doctor("packages", "torch", "kernels", cwd=tmp_path, before=before)
    assert found.code == 3
    mixed = found.finding("torch", "wrong torch build: its files are of ", "its metadata says 2.6.0")
    assert "pip uninstall torch" in mixed["fix"]
    if found.check("packages")["skipped"] is None:
        assert found.finding("packages", "trainwright needs torch>=", "torch 2.6.0 is installed")["fix"].startswith(
            "pip "
        )
    assert "must be fixed first" in found.check("kernels")["skipped"]


def test_a_torch_that_cannot_be_imported(tmp_path: Path) -> None:
    package = tmp_path / "site" / "torch"
    package.mkdir(parents=True)
    (package / "version.py").write_text("__version__ = '2.13.0+cu126'\ncuda: Optional[str] = '12.6'\n")
    missing = "libcudart.so.12: cannot open shared object file: No such file or directory"
    (package / "__init__.py").write_text(f"raise ImportError({missing!r})\n")
    found = doctor("torch", "kernels", cwd=tmp_path, before=planted(tmp_path, str(tmp_path / "site")))
    finding = found.finding("torch", "wrong torch build: `import torch` fails", missing)
    assert found.code == 3 and finding["severity"] == "broken" and finding["fix"]
    assert found.check("kernels")["skipped"] == "torch must be fixed first"


def test_a_machine_without_compilers(tmp_path: Path) -> None:
    found = doctor("compilers", cwd=tmp_path, PATH=str(tmp_path))
    assert "g++" in found.finding("compilers", "there is no C++ compiler")["fix"]
    assert "pip install ninja" in found.finding("compilers", "ninja is not in PATH")["fix"]


def test_a_compiler_that_fails(tmp_path: Path) -> None:
    compiler = tmp_path / "broken++"
    compiler.write_text("#!/bin/sh\necho 'fatal error: the disk of the compiler is gone' >&2; exit 1\n")
    compiler.chmod(0o755)
    finding = doctor("compilers", cwd=tmp_path, CXX=str(compiler)).finding("compilers", f"{compiler} cannot compile")
    assert "the disk of the compiler is gone" in finding["what"]


def test_variables_of_nccl_are_explained_and_misspelled_ones_found(tmp_path: Path) -> None:
    (tmp_path / "nccl.conf").write_text("NCCL_ALGO=Ring # for a trial\n")
    given = {"NCCL_DEBUG": "INFO", "NCCL_P2P_DISABEL": "1", "NCCL_BLOCKING_WAIT": "1", "CUDA_LAUNCH_BLOCKING": "1"}
    found = doctor("nccl", cwd=tmp_path, NCCL_CONF_FILE="nccl.conf", **given)
    facts = found.check("nccl")["facts"]
    assert "NCCL_DEBUG=INFO: what NCCL prints: VERSION, WARN, INFO or TRACE" in facts
    assert any(fact.startswith("NCCL_ALGO=Ring (in nccl.conf): ") for fact in facts)
    assert found.finding("nccl", "NCCL_P2P_DISABEL=1")["fix"] == "did you mean NCCL_P2P_DISABLE?"
    assert "TORCH_NCCL_BLOCKING_WAIT" in found.finding("nccl", "NCCL_BLOCKING_WAIT=1 is an old name")["fix"]
    assert found.finding("nccl", "CUDA_LAUNCH_BLOCKING=1 slows")["fix"].startswith("unset CUDA_LAUNCH_BLOCKING")
    assert found.finding("nccl", "NCCL_ALGO=Ring (in nccl.conf)")["fix"].startswith("remove it from nccl.conf")


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A command that shows a GPU with faults to what follows it."""
    return driver(tmp_path_factory.mktemp("driver"))


def test_a_gpu_that_is_not_healthy(gpu: list[str], this_machine: None, tmp_path: Path) -> None:
    found = doctor("gpus", cwd=tmp_path, before=gpu)
    assert found.code == 3
    facts = found.check("gpus")["facts"]
    assert facts[:2] == ["driver 580.65.06", "GPU 0: NVIDIA H100 80GB HBM3, 91 °C, 350 W, 300 of 1980 MHz"]
    errors = found.finding("gpus", "GPU 0: 2 uncorrectable memory errors (ECC) since the driver was loaded")
    assert errors["severity"] == "broken" and "--gpu-reset" in errors["fix"]
    expected = {
        "a row of its memory has to be remapped": "reset the GPU",
        "throttled by heat (hardware)": "cooling",
        "91 °C": "cooling",
        "NVLinks 3 are down, 3 are up": "Fabric Manager",
        "NVLink errors, replays: 17 on link 1": "--errorcounters",
        "its slot uses 8 of 16 PCIe lanes": "reseat the card",
        "process 4242 uses 3.0 GiB": "ps -fp 4242",
    }
    for what, fix in expected.items():
        assert fix in found.finding("gpus", f"GPU 0: {what}")["fix"]
    of_gpu = [each for each in found.check("gpus")["findings"] if each["what"].startswith("GPU 0")]
    assert len(of_gpu) == len(expected) + 1


def test_a_gpu_at_the_end_of_its_life(this_machine: None, tmp_path: Path) -> None:
    found = doctor("gpus", cwd=tmp_path, before=driver(tmp_path, "WORN"))
    broken = found.finding("gpus", "GPU 0: a row of its memory could not be remapped")
    assert found.code == 3 and broken["severity"] == "broken" and "CUDA_VISIBLE_DEVICES" in broken["fix"]
    assert found.finding("gpus", "GPU 0: 2 uncorrectable", "in its lifetime, none since")["severity"] == "note"
    assert "reset" in found.finding("gpus", "GPU 0: pages of its memory have to be retired")["fix"]
    assert "power" in found.finding("gpus", "GPU 0: throttled by the power brake of the machine")["fix"]
    assert "cooling" in found.finding("gpus", "GPU 0: throttled by heat (driver)")["fix"]


def test_a_gpu_that_is_lost_hides_nothing_of_the_others(this_machine: None, tmp_path: Path) -> None:
    found = doctor("gpus", cwd=tmp_path, before=driver(tmp_path, "LOST"), CUDA_VISIBLE_DEVICES="0")
    lost = found.finding("gpus", "GPU 1: GPU is lost")
    assert found.code == 3 and lost["severity"] == "broken" and "restart the machine" in lost["fix"]
    assert found.finding("gpus", "GPU 0: throttled by heat")


def test_what_a_user_may_not_ask_a_gpu_is_said(this_machine: None, tmp_path: Path) -> None:
    found = doctor("gpus", cwd=tmp_path, before=driver(tmp_path, "DENIED"))
    denied = "ECC errors, remapped rows, throttling, NVLink errors, other programs"
    assert f"GPU 0: not checked, requires root: {denied}" in found.check("gpus")["facts"]
    shown = " ".join(each["what"] for each in found.check("gpus")["findings"])
    assert "ECC" not in shown and "process" not in shown and "91 °C" in shown


@pytest.mark.slow
@pytest.mark.skipif(read_installed_build().cuda is not None, reason="torch is built for GPUs here")
def test_a_torch_for_cpus_on_a_machine_with_a_gpu(gpu: list[str], this_machine: None, tmp_path: Path) -> None:
    found = doctor("torch", "kernels", "offload", cwd=tmp_path, before=gpu)
    finding = found.finding("torch", "1 NVIDIA GPU, and torch ", " is a build for CPUs")
    assert found.code == 3 and finding["fix"].startswith("install one for CUDA (https://pytorch.org")
    assert [found.check(name)["skipped"] for name in ("kernels", "offload")] == ["torch must be fixed first"] * 2
    hidden = doctor("gpus", cwd=tmp_path, before=[*gpu, "CUDA_VISIBLE_DEVICES="])
    assert hidden.code == 0 and hidden.check("gpus")["skipped"] == "this machine has no GPU that can be used"
