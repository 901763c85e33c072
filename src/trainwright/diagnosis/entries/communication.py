"""NCCL, gloo and the network between ranks."""

from __future__ import annotations

from trainwright.diagnosis.known_error import KnownError, Role

ERRORS = (
    KnownError(
        name="collective-mismatch",
        title="ranks run different collectives",
        patterns=(
            r"Detected mismatch between collectives on ranks",
            r"Mismatched collective detected",
            r"Mismatched? between collective operations|collective operations? .{0,30}mismatch",
            r"op_?type mismatch|tensor shapes? mismatch .{0,40}rank",
            r"Detected .{0,40}collective desync|collective desync",
            r"Message truncated ?: received \d+ bytes instead of",
            r"op\.preamble\.length <= op\.nbytes",
            r"Bootstrap ?: (?:socket )?received \d+ bytes instead of",
            r"ranks? .{0,60}(?:has|have|with) (?:different|inconsistent) (?:number of parameters|param)",
            r"appears not to match (?:sizes|strides) of the same param in process",
            r"params? .{0,30}in process \d.{0,60}appears not to match",
            r"DDP expects same model across all ranks",
            r"Different ranks? disagree|disagreement between rank",
        ),
        cause="Every rank has to call the same collectives with the same sizes in the same order. One rank took "
        "another branch, has another model, skipped a batch, or ran out of data earlier.",
        fixes=(
            "look for code that only some ranks run around collectives: if rank == 0: ..., logging of reduced values, "
            "saving a sharded state, unequal numbers of batches",
            "have torch report the operation: TORCH_DISTRIBUTED_DEBUG=DETAIL, TORCH_NCCL_TRACE_BUFFER_SIZE=2000",
            "start all ranks with the same code, versions, arguments and data",
        ),
    ),
    KnownError(
        name="world-size-mismatch",
        title="the processes that joined do not make up the world size",
        patterns=(
            r"Timed out initializing process group in store based barrier",
            r"mismatch(?:ed)? (?:in )?world[_ ]size",
            r"world[_ ]size .{0,60}(?:does not match|doesn't match|mismatch|not equal|is not divisible)",
            r"Inconsistent .{0,30}world[_ ]size",
            r"Rank (?:must be|should be) (?:less than|in).{0,30}world",
            r"Bootstrap Root ?: (?:mismatch in rank count|rank \d+ of \d+ ranks has already checked in)",
            r"mismatch in rank count from procs",
            r"ranks has already checked in",
            r"Invalid rank (?:requested|-?\d+)",
            r"parameter: rank, expected .{0,20}but got",
            r"clients joined|Timed out after \d+ seconds waiting for clients\. \d+/\d+ clients joined",
            r"Check batch related parameters\. train_batch_size is not equal",
            r"environment variable (?:RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected, but not set",
            r"KeyError: '(?:RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT)'",
        ),
        unless=(r"Check batch related parameters", r"expected, but not set", r"KeyError", r"is not divisible"),
        cause="The processes were started with different numbers of nodes or processes, two nodes got the same rank, "
        "or some nodes did not start at all.",
        fixes=(
            "give every node the same number of nodes, processes per node, address and port, and a unique node rank",
            "if clients are missing: check the logs of the nodes that did not join, and at firewalls between them",
            "end processes of an earlier start that still use the port",
        ),
    ),
    KnownError(
        name="launcher-variables-missing",
        title="the process was not started by a launcher",
        patterns=(
            r"environment variable (?:RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected, but not set",
            r"KeyError: '(?:RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT)'",
            r"Default process group has not been initialized",
        ),
        cause="The script reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or uses collectives, and nothing set "
        "them up: it was started with python instead of a launcher.",
        fixes=(
            "start it with trainwright train, torchrun --nproc_per_node=N SCRIPT, accelerate launch or srun",
            "call torch.distributed.init_process_group before collectives and wrappers",
        ),
    ),
    KnownError(
        name="nccl-no-interface",
        title="NCCL or gloo found no usable network interface",
        patterns=(
            r"WARN Socket creation failed ?: Address family not supported",
            r"no socket interface found",
            r"Bootstrap ?: no (?:socket )?interface",
            r"NCCL WARN .{0,40}no (?:matching )?(?:network )?interface",
            r"Unable to find address for: ",
            r"No usable interface|found no (?:usable )?interface",
            r"connecting to address\s.{0,80}with family \d+ is neither AF_INET",
            r"Unable to resolve hostname to a \(local\) address",
            r"ifa != nullptr\. Unable to find address for",
            r"makeDeviceForHostname\(\).{0,40}unsupported gloo device",
            r"makeDeviceForInterface\(\).{0,40}unsupported gloo device",
            r"NET/Socket ?: No (?:usable )?(?:socket )?interface",
        ),
        cause="The interface that NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names is not on this machine, or the host "
        "name does not resolve to an address of this machine.",
        fixes=(
            "list interfaces: ip -br addr; name one that is up on every node: NCCL_SOCKET_IFNAME=eth0 "
            "GLOO_SOCKET_IFNAME=eth0 (a prefix matches too; ^docker,lo excludes)",
            "unset the variable if it was meant for another machine",
            "make the host name resolve: getent hosts $(hostname) must show the address that other nodes reach",
        ),
    ),
    KnownError(
        name="infiniband",
        title="InfiniBand or RoCE failed",
        patterns=(
            r"WARN NET/OFI .{0,120}(?:error|fail|unable|could not|not found)",
            r"NET/IB ?: Got (?:completion|async event|async fatal event)",
            r"NET/IB.{0,80}(?:error|failed|timeout)",
            r"Got completion (?:from peer .{0,40})?with (?:error|status=\d+)",
            r"Call to ibv_(?!reg_mr)\w+ failed",
            r"ibv_modify_qp (?:failed|returned)",
            r"ibv_(?:poll_cq|create_qp|create_cq|open_device|query_\w+).{0,40}(?:failed|error)",
            r"Failed to modify QP",
            r"mlx5_\d+.{0,60}(?:port is down|local access violation|transport retry counter exceeded)",
            r"transport retry counter exceeded",
            r"local catastrophic error",
            r"vendor err(?:or)? (?:129|130|136|244|249)\b",
        ),
        unless=(r"No device found|failed to open libibverbs|Failed to open libibverbs",),
        role=Role.SYMPTOM,
        cause="A connection between two network adapters failed: a port or cable is down, adapters of different "
        "fabrics were paired, the GID index of RoCE is wrong, or the peer died.",
        fixes=(
            "check the ports: ibstat and ibv_devinfo must show Active and LinkUp on every node; test a pair of "
            "nodes with ib_write_bw",
            "use adapters that all nodes can reach: NCCL_IB_HCA=mlx5_0,mlx5_1; for RoCE set NCCL_IB_GID_INDEX=3 "
            "(show_gids "
            "lists them)",
            "for a busy fabric: NCCL_IB_TIMEOUT=22 NCCL_IB_RETRY_CNT=7; to see whether InfiniBand is the cause: "
            "NCCL_IB_DISABLE=1",
        ),
    ),
    KnownError(
        name="locked-memory-limit",
        title="the limit on locked memory is too low for RDMA",
        patterns=(
            r"Call to ibv_reg_mr\w* failed",
            r"ibv_reg_mr\w*.{0,60}(?:failed|cannot allocate memory)",
            r"RLIMIT_MEMLOCK",
            r"ibv_create_(?:cq|qp|srq) failed with error Cannot allocate memory",
            r"(?:max )?locked memory.{0,40}(?:too low|limit|unlimited)",
            r"Cannot allocate memory.{0,80}(?:memlock|ulimit -l)",
        ),
        in_notices=True,
        cause="Network adapters need locked memory. The limit on it (ulimit -l) is small, or, for "
        "GPUDirect, the module nvidia_peermem is missing.",
        fixes=(
            "raise it: ulimit -l unlimited; docker run --ulimit memlock=-1 --cap-add=IPC_LOCK; for Slurm "
            "LimitMEMLOCK=infinity in the service file of slurmd",
            "for GPU memory: lsmod | grep nvidia_peermem, else sudo modprobe nvidia_peermem, or NCCL_NET_GDR_LEVEL=LOC",
        ),
    ),
    KnownError(
        name="nccl-version-mismatch",
        title="NCCL versions of ranks or libraries differ",
        patterns=(
            r"NCCL WARN .{0,60}(?:mismatched|different|incompatible) (?:NCCL )?version",
            r"Mismatched (?:NCCL )?(?:library )?versions?",
            r"unexpected version \d.{0,40}NCCL",
            r"symbol lookup error.{0,120}nccl\w+",
            r"undefined symbol: nccl\w+",
            r"NCCL version .{0,40}(?:does not match|mismatch)",
        ),
        cause="The loaded libnccl is not the one that torch was built with, or nodes have different installations.",
        fixes=(
            "see which is loaded: python -c 'import torch; print(torch.cuda.nccl.version())' on every node, and pip "
            "list | grep nccl",
            "unset LD_LIBRARY_PATH and LD_PRELOAD, and reinstall torch with its own nvidia-nccl package",
        ),
    ),
    KnownError(
        name="nccl-timeout",
        title="a collective did not complete in time: some ranks waited for one that did not call it",
        patterns=(
            r"ProcessGroupNCCL watchdog hang",
            r"Watchdog caught collective operation timeout",
            r"Timeout at NCCL work",
            r"collective operation timeout: Work(?:NCCL|HCCL|XCCL|RCCL)",
            r"NCCL (?:operation|collective)s? (?:have |has )?timed out",
            r"(?:Torch)?Dist(?:Backend)?Error: .{0,60}(?:NCCL).{0,60}timed? ?out",
            r"RuntimeError: NCCL (?:communicator was aborted|timeout)",
            r"heartbeat monitor timed out",
            r"ProcessGroupNCCL's watchdog got stuck for",
            r"Timed out waiting \d+ms for (?:send|recv) operation to complete",
            r"monitoredBarrier.{0,80}(?:timed? ?out|failed)",
            r"\[Rank \d+\] (?:Ranks? .{0,40} failed to pass monitoredBarrier|Rank \d+ failed to pass)",
            r"Timed out waiting for (?:send|recv)",
            r"reached monitoredBarrier, but received errors",
        ),
        role=Role.REACTION,
        in_notices=True,
        cause="All ranks of a group have to call a collective. One was killed, hung, was much slower (saving, "
        "evaluating or preparing data alone), or called something else; the others waited until the timeout.",
        fixes=(
            "look for the first error on the rank that did not report the timeout, or was behind; its log or the "
            "kernel's (dmesg -T) has the cause",
            "do slow work of one rank before the process group exists, or raise the timeout: "
            "init_process_group(timeout=timedelta(hours=2)), ddp_timeout in Hugging Face arguments",
            "give all ranks the same number of batches and the same branches around collectives",
            "if no rank failed: test the links with NCCL_DEBUG=INFO and nccl-tests; NCCL_P2P_DISABLE=1 shows whether "
            "PCIe peer access hangs (ACS, IOMMU)",
        ),
        recipe_fixes=(
            "look for the first error on the rank that did not report the time-out, or was behind; its log or the "
            "kernel's (dmesg -T) has the cause",
            "if a rank is only slow: raise parallel.timeout, which is how long ranks wait for each other",
            "if a rank hangs: faults.on_hang: restart ends the run earlier and goes on from the newest checkpoint",
            "if no rank failed: test the links with NCCL_DEBUG=INFO and nccl-tests; NCCL_P2P_DISABLE=1 shows whether "
            "PCIe peer access hangs (ACS, IOMMU)",
        ),
    ),
    KnownError(
        name="nccl-cuda-error",
        title="NCCL stopped because a CUDA call failed",
        patterns=(
            r"ncclUnhandledCudaError",
            r"unhandled cuda error",
            r"NCCL WARN Cuda failure",
            r"Cuda failure \d* ?'",
        ),
        unless=(
            r"out of memory",
            r"illegal memory access|misaligned address|unspecified launch failure",
            r"ECC|NVLink",
        ),
        role=Role.REACTION,
        cause="A CUDA call inside NCCL failed. The error of CUDA itself is in another line, or shows with "
        "NCCL_DEBUG=INFO. Without one it is often a GPU that two ranks share, full GPU memory, or an incompatible "
        "driver.",
        fixes=(
            "run once more with NCCL_DEBUG=INFO and look for the line NCCL WARN Cuda failure",
            "check that each rank uses its own GPU, and that the driver is new enough: nvidia-smi",
            "if GPUs cannot reach each other's memory: NCCL_P2P_DISABLE=1; NCCL_NVLS_ENABLE=0; NCCL_CUMEM_ENABLE=0",
        ),
    ),
    KnownError(
        name="nccl-system-error",
        title="NCCL stopped because a call of the operating system failed",
        patterns=(
            r"WARN Proxy Call to rank \d+ failed",
            r"ncclSystemError",
            r"ncclUnhandledSystemError",
            r"unhandled system error",
            r"\bWARN (?:Call to|socket|Net).{0,80}fail",
            r"\bWARN\b.{0,80}(?:Connection refused|timed out|No route to host|Software caused connection abort)",
            r"System call \(e\.g\. socket, malloc\) or external library call failed",
        ),
        unless=(r"No space left", r"ibv_", r"shared memory segment", r"Call to (?:recv|send) .{0,80}Broken pipe"),
        role=Role.REACTION,
        cause="Opening a socket, shared memory or a network card failed. NCCL says which only with NCCL_DEBUG=INFO. "
        "Common causes: an interface that other nodes cannot reach, a firewall, a full /dev/shm, a rank that has "
        "ended.",
        fixes=(
            "run once more with NCCL_DEBUG=INFO and look at the first NCCL WARN line",
            "choose the interface: NCCL_SOCKET_IFNAME=eth0 (ip -br addr lists them); open all ports between the nodes",
            "check df -h /dev/shm; in containers use --ipc=host --network=host",
        ),
    ),
    KnownError(
        name="nccl-invalid-usage",
        title="NCCL rejected the arguments of a call",
        patterns=(
            r"NCCL error.{0,200}invalid (?:usage|argument)",
            r"ncclInvalidUsage",
            r"ncclInvalidArgument",
            r"invalid usage \(run with NCCL_DEBUG",
        ),
        role=Role.REACTION,
        cause="Usually two ranks on one GPU, more processes than GPUs, a tensor that is not on the GPU of its rank, or "
        "ranks with different settings.",
        fixes=(
            "set the device of each process from its local rank: torch.cuda.set_device(int(os.environ['LOCAL_RANK']))",
            "start as many processes per machine as it has visible GPUs; run once more with NCCL_DEBUG=WARN for the "
            "reason",
        ),
    ),
    KnownError(
        name="nccl-internal-error",
        title="NCCL reported an internal error",
        patterns=(
            r"ncclInternalError",
            r"NCCL error.{0,80}internal error",
            r"NCCL WARN .{0,80}internal error",
            r"NCCL WARN Could not find a path|NCCL WARN Couldn't find a path",
            r"NCCL WARN Failed to find .{0,60}(?:topology|CPU|path)",
        ),
        role=Role.REACTION,
        cause="Usually the topology: GPUs or network cards whose place in the topology NCCL cannot determine (virtual "
        "machines, containers "
        "without /sys), nodes of different kinds, or a bug of this NCCL version.",
        fixes=(
            "run once more with NCCL_DEBUG=INFO and look at the first NCCL WARN line before it",
            "unset NCCL variables that were set for another machine (NCCL_TOPO_FILE, NCCL_IB_HCA, NCCL_SOCKET_IFNAME)",
            "update NCCL: pip install -U nvidia-nccl-cu12 (the version that torch allows)",
        ),
    ),
    KnownError(
        name="rank-lost",
        title="the connection to another rank broke, because that rank ended",
        patterns=(
            r"ncclRemoteError",
            r"remote process exited or there was a network error",
            r"connection (?:was )?(?:closed|reset|aborted)",
            r"closed by (?:remote )?peer",
            r"broken ?pipe",
            r"socket (?:is )?closed",
            r"peer (?:is )?gone",
            r"recvvalue failed",
            r"sendbytes failed",
            r"application timeout caused pair closure",
            r"gloo/transport",
            r"distnetworkerror",
            r"diststoreerror",
            r"waitforinput",
            r"store->get",
            r"socket timeout",
            r"Stop_waiting response is expected",
            r"Received a (?:dump|abort|global) signal .{0,60}from rank \d+",
            r"Observed flight recorder dump signal from another rank",
            r"another rank .{0,60}(?:failed|reported|timeout|exception)",
            r"NCCL communicator was aborted",
            r"ncclInProgress.{0,40}aborted",
            r"failed to recv, got 0 bytes",
            r"Timeout waiting for key.{0,80}(?:default_pg|store_based_barrier)",
        ),
        role=Role.FOLLOW_UP,
        in_notices=True,
        cause="The process at the other end of a connection failed, was killed, or its machine was lost.",
        fixes=(
            "look at the logs of the other ranks and nodes for the first error; this rank only noticed",
            "if no log has one: look for kills (dmesg -T | grep -i -E 'oom|xid', sacct -j JOB) and for lost nodes",
        ),
    ),
    KnownError(
        name="collective-on-wrong-device",
        title="a collective was given a tensor on a device that its backend does not support",
        patterns=(
            r"No backend type associated with device type",
            r"Tensors must be CUDA and dense",
            r"tensors? must be (?:on )?(?:a )?(?:CUDA|GPU).{0,40}(?:nccl|dense)",
        ),
        cause="NCCL moves GPU tensors only, and gloo CPU tensors; offloaded parameters and counters are often on the "
        "CPU.",
        fixes=(
            "move the tensor to the GPU of the rank before the collective",
            "or use both backends: torch.distributed.init_process_group('cpu:gloo,cuda:nccl')",
        ),
    ),
    KnownError(
        name="nccl-plugin",
        title="NCCL's network plugin is missing or does not work",
        patterns=(
            r"WARN Error ?: network \S+ not found",
            r"Failed to initialize any NET plugin",
            r"NCCL_NET \S+ .{0,40}not (?:found|available)",
        ),
        cause="NCCL_NET or the container asks for a network plugin (such as AWS's OFI plugin) that cannot be loaded "
        "here.",
        fixes=(
            "unset NCCL_NET and NCCL_NET_PLUGIN, or install the plugin and put its directory into LD_LIBRARY_PATH",
            "look at the lines NET/Plugin with NCCL_DEBUG=INFO",
        ),
    ),
    KnownError(
        name="peer-access-unsupported",
        title="GPUs of this kind do not support direct access to each other",
        patterns=(
            r"RTX [34]000 series doesn't support faster communication broadband via P2P or IB",
            r"peer access is not supported between these two devices",
            r"cudaErrorPeerAccessUnsupported",
        ),
        cause="GeForce cards of these series have no peer-to-peer access over PCIe.",
        fixes=("disable it: NCCL_P2P_DISABLE=1 NCCL_IB_DISABLE=1",),
    ),
)
