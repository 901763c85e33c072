"""An accelerator that cannot be trained on is never passed over for the CPU: by files as drivers make them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pynvml
import pytest

from trainwright.errors import MachineError
from trainwright.machine.accelerators import (
    Build,
    Nvml,
    explain_unusable,
    find_other_vendor,
    refuse_unusable,
    restrict_to_device,
)
from trainwright.machine.describe import build_cluster
from trainwright.machine.detect import _read_gpu_memory, parse_gpu_rows
from trainwright.machine.machine import Gpu, Machine

CUDA, CPU, ROCM = Build("2.13.0", "12.8"), Build("2.13.0+cpu", None), Build("2.13.0", None, "6.4")
XPU = Build("2.13.0+xpu", None, None, "20250302")
PLAIN = Machine("node", "a processor", 8, 2**34, ())
WITH_GPU = replace(PLAIN, gpus=(Gpu("NVIDIA H100", 80 * 2**30, (9, 0)),))


def pci(root: Path, address: str, vendor: str, kind: str) -> None:
    device = root / "sys/bus/pci/devices" / address
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")


def kfd(root: Path, *nodes: tuple[int, int]) -> None:
    """Nodes of amdkfd's topology, each with so many cores and SIMD units."""
    (root / "dev").mkdir(exist_ok=True)
    (root / "dev/kfd").touch()
    for number, (cores, simds) in enumerate(nodes):
        node = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        (node / "properties").write_text(f"cpu_cores_count {cores}\nsimd_count {simds}\nname \n")


def reasons(root: Path, chosen: int = 0, nvml: Nvml | None = None, build: Build = CUDA, **variables: str) -> str:
    return "; ".join(explain_unusable(chosen, nvml or Nvml(error="Driver Not Loaded"), build, root, variables))


def test_a_machine_without_accelerators_has_no_reasons(tmp_path: Path) -> None:
    assert reasons(tmp_path) == ""
    pci(tmp_path, "0000:00:02.0", "0x8086", "0x030000")  # the graphics unit of a processor
    pci(tmp_path, "0000:05:00.0", "0x1a03", "0x030000")  # a server's console
    pci(tmp_path, "0000:06:00.0", "0x10de", "0x040300")  # the sound of a card
    kfd(tmp_path, (16, 0), (8, 8))  # a processor, and one with a graphics unit
    assert reasons(tmp_path) == ""


def test_an_nvidia_gpu_without_its_driver(tmp_path: Path) -> None:
    pci(tmp_path, "0000:41:00.0", "0x10de", "0x030200")
    assert reasons(tmp_path).startswith(
        "there is 1 NVIDIA GPU that NVIDIA's driver does not give to this process (NVML: Driver"
    )
    assert reasons(tmp_path, CUDA_VISIBLE_DEVICES="") == reasons(tmp_path, CUDA_VISIBLE_DEVICES="-1") == ""


def test_devices_of_the_driver_that_nvml_cannot_open(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert "there are 2 NVIDIA GPUs" in reasons(tmp_path)


@pytest.mark.parametrize(
    ("chosen", "nvml", "build", "visible", "says"),
    [
        (2, Nvml(2, None, 12), CPU, None, "there are 2 NVIDIA GPUs, and torch 2.13.0+cpu is a build for CPUs"),
        (1, Nvml(1, None, 12), ROCM, None, "torch 2.13.0 is a ROCm build"),
        (1, Nvml(1, None, 11), CUDA, None, "the NVIDIA driver runs CUDA 11, and torch 2.13.0 needs CUDA 12.8: update"),
        (1, Nvml(1, None, 12, (0,)), CUDA, None, "GPU 0 is split by MIG"),
        (0, Nvml(1, None, 12), CUDA, "MIG-5a8b", "slices of a GPU split by MIG are not supported"),
        (0, Nvml(4, None, 12), CUDA, "7", "CUDA_VISIBLE_DEVICES is '7', which selects none of the 4 NVIDIA GPUs"),
        (0, Nvml(4, None, 12), CUDA, "NoDevFiles", "selects none of the 4"),
        (4, Nvml(4, None, 12), CUDA, None, ""),
        (1, Nvml(4, None, 13), CUDA, "2", ""),
        (1, Nvml(4, None, None), CUDA, "2", ""),
    ],
)
def test_gpus_that_nvml_knows(
    tmp_path: Path, chosen: int, nvml: Nvml, build: Build, visible: str | None, says: str
) -> None:
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = reasons(tmp_path, chosen, nvml, build, **variables)
    assert says in found and bool(found) == bool(says)


def test_accelerators_of_others(tmp_path: Path) -> None:
    kfd(tmp_path, (64, 0), (0, 304), (0, 304))
    pci(tmp_path, "0000:9a:00.0", "0x8086", "0x038000")
    pci(tmp_path, "0000:9b:00.0", "0x1da3", "0x120000")
    (tmp_path / "dev/neuron0").touch()
    found = reasons(tmp_path)
    for name in ("2 AMD GPUs (ROCm), and torch 2.13.0 is a CUDA build: install one for ROCm", "1 Intel GPU (XPU), and"):
        assert name in found
    assert (
        "1 Gaudi (Intel) and 1 AWS Neuron device cannot be used: training runs on NVIDIA, AMD and Intel GPUs" in found
    )
    assert reasons(tmp_path, CUDA_VISIBLE_DEVICES="") == ""
    assert reasons(tmp_path, 1, Nvml(1, None, 12)) == ""  # there is a better one, which is used


def test_amd_gpus_that_were_not_given_to_a_container(tmp_path: Path) -> None:
    pci(tmp_path, "0000:05:00.0", "0x1002", "0x030000")  # a processor's, or a card for a display
    assert reasons(tmp_path) == ""
    pci(tmp_path, "0000:c1:00.0", "0x1002", "0x120000")
    pci(tmp_path, "0000:c2:00.0", "0x1002", "0x038000")
    assert "there are 2 AMD GPUs (ROCm), and torch 2.13.0+cpu is a build for CPUs" in reasons(tmp_path, build=CPU)


def test_gpus_of_other_vendors_are_those_that_a_torch_of_theirs_lists(tmp_path: Path) -> None:
    kfd(tmp_path, (64, 0), (0, 304), (0, 304))
    assert [find_other_vendor(build, tmp_path) for build in (ROCM, XPU, CUDA)] == ["AMD", None, None]
    found = reasons(tmp_path, build=ROCM)
    assert "torch 2.13.0 does not list the 2 AMD GPUs (ROCm) (it finds none): give this process /dev/kfd" in found
    assert reasons(tmp_path, 2, build=ROCM) == ""
    row = {"name": "AMD Instinct MI300X", "memory_bytes": 191 * 2**30, "capability": [9, 4], "free_bytes": 2**30}
    gpus = parse_gpu_rows("AMD", [{**row, "uuid": f"GPU-{index}"} for index in range(2)])
    machine = replace(PLAIN, gpus=gpus, is_here=True)
    cluster = build_cluster(machine)
    assert (machine.device, machine.has_bf16, cluster.planned_only) == ("cuda", True, None)
    assert (cluster.card.name, cluster.card.vendor, cluster.device_free_bytes) == ("MI300X", "AMD", 2**30)
    assert cluster.link.kind == "infinity_fabric"


def test_an_intel_gpu_is_an_xpu(tmp_path: Path) -> None:
    pci(tmp_path, "0000:9a:00.0", "0x8086", "0x038000")
    assert find_other_vendor(XPU, tmp_path) == "Intel"
    row = {"memory_bytes": 11 * 2**30, "capability": [0, 0], "free_bytes": None, "uuid": "86"}
    (known,) = parse_gpu_rows("Intel", [{**row, "name": "Intel(R) Arc(TM) B580 Graphics"}])
    (unknown,) = parse_gpu_rows("Intel", [{**row, "name": "Intel(R) Arc(TM) B999 Graphics"}])
    machine = replace(PLAIN, gpus=(known,))
    assert (machine.device, known.capability, build_cluster(machine).card.name) == ("xpu", (20, 1), "B580")
    assumed = build_cluster(replace(PLAIN, gpus=(unknown,)))
    assert (assumed.device, assumed.card.vendor) == ("xpu", "Intel") and "not in the catalog" in assumed.assumptions[0]
    assert restrict_to_device(machine, "xpu") is machine
    with pytest.raises(
        MachineError, match=r"cuda, but the GPUs are of Intel, whose type in torch is xpu .*set it to xpu"
    ):
        restrict_to_device(machine, "cuda")


@pytest.mark.parametrize("name", ["nvhost-gpu", "nvgpu"])
def test_the_gpu_of_a_jetson_that_nvml_does_not_show(tmp_path: Path, name: str) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / name).touch()
    assert reasons(tmp_path).startswith("there is 1 NVIDIA GPU that NVIDIA's driver does not give to this process")


def test_a_gpu_without_memory_of_its_own_has_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NVML answers on DGX Spark."""

    def refuse(handle: object, **version: object) -> object:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", refuse)
    assert _read_gpu_memory(None) is None


def test_gpus_that_were_set_aside_and_are_not_there(tmp_path: Path) -> None:
    assert "SLURM_GPUS_ON_NODE is 4, but no GPU was found" in reasons(tmp_path, SLURM_GPUS_ON_NODE="4")
    assert "CUDA_VISIBLE_DEVICES is 0,1, but no GPU was found" in reasons(tmp_path, CUDA_VISIBLE_DEVICES="0,1")
    assert reasons(tmp_path, SLURM_GPUS_ON_NODE="0") == ""
    assert reasons(tmp_path, SLURM_GPUS_ON_NODE="4", CUDA_VISIBLE_DEVICES="") == ""


def test_a_recipe_that_leaves_the_device_open_stops_where_one_cannot_be_used() -> None:
    broken = replace(WITH_GPU, unusable=("torch is a build for CPUs: install another",))
    for asked in ("auto", "cuda"):
        with pytest.raises(MachineError, match=rf"^parallel\.device: {asked}, but torch is .*set parallel\.device=cpu"):
            restrict_to_device(broken, asked)
    with pytest.raises(MachineError, match=r"^torch is .*CUDA_VISIBLE_DEVICES= to use the CPU"):
        refuse_unusable(broken)
    assert restrict_to_device(broken, "cpu") == PLAIN
    assert restrict_to_device(PLAIN, "auto") == PLAIN and restrict_to_device(WITH_GPU, "auto") == WITH_GPU


def test_a_recipe_that_asks_for_a_gpu_does_not_train_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert restrict_to_device(WITH_GPU, "cuda") == WITH_GPU
    with pytest.raises(MachineError, match=r"parallel\.device: cuda, but no GPU was found .*a processor"):
        restrict_to_device(PLAIN, "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(MachineError, match="CUDA_VISIBLE_DEVICES is '', which hides them"):
        restrict_to_device(PLAIN, "cuda")


def test_a_recipe_that_asks_for_the_cpu_has_it_beside_gpus() -> None:
    assert restrict_to_device(WITH_GPU, "cpu") == PLAIN
