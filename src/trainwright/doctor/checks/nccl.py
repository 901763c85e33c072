"""Check the variables that change NCCL, Gloo and torch's process groups, and say what each that is set does."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainwright.doctor.checks.check import CheckContext, CheckResult, Finding, Severity

# Variable, pattern of its values, and why such a value is a problem.
_COSTLY = (
    ("NCCL_P2P_DISABLE", "1", "GPUs of a node exchange through the host's memory, which is several times slower"),
    ("NCCL_SHM_DISABLE", "1", "GPUs that cannot reach each other directly exchange through the network"),
    ("NCCL_IB_DISABLE", "1", "nodes exchange through sockets, even with InfiniBand"),
    ("NCCL_DEBUG", "(?i)trace", "every call is printed, which slows steps and fills disks"),
    ("NCCL_CHECK_POINTERS", "1", "every call checks its pointers"),
    ("NCCL_ALGO", ".+", "NCCL cannot choose the fastest algorithm for each size"),
    ("NCCL_PROTO", ".+", "NCCL cannot choose the fastest protocol for each size"),
    ("NCCL_MAX_NCHANNELS", "[1-3]", "too few channels to reach the speed of the links"),
    ("TORCH_NCCL_NAN_CHECK", "1", "every tensor is searched for NaN before it is exchanged"),
    ("TORCH_NCCL_BLOCKING_WAIT", "1", "the host waits for every collective"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "a failed collective hangs until someone ends the run"),
    ("TORCH_DISTRIBUTED_DEBUG", "(?i)detail", "every collective is compared between ranks first"),
    ("CUDA_LAUNCH_BLOCKING", "1", "the host waits for every kernel"),
)
_OURS = re.compile(
    r"(?:TORCH_)?NCCL_\w+|(?:GLOO|TP|TORCH_FR|TORCH_GLOO)_\w+|TORCH_DISTRIBUTED_DEBUG|TORCH_CPP_LOG_LEVEL|CUDA_\w+|PYTORCH_\w*ALLOC_CONF|OMP_NUM_THREADS"
)
_FILES = ("/etc/nccl.conf", "~/.nccl.conf")


def check(context: CheckContext) -> CheckResult:
    """Explain every variable that is set, in the environment or in NCCL's files."""
    settings = dict(_of_files(context.variables))
    settings |= {name: (value, "") for name, value in context.variables.items() if _OURS.fullmatch(name)}
    documented = {name: origin for name, origin in settings.items() if name in EFFECTS}
    facts = [f"{name}={value}{origin}: {EFFECTS[name]}" for name, (value, origin) in sorted(documented.items())]
    findings = (*_unknown(settings), *_costly(settings))
    return CheckResult(tuple(facts) or ("none is set",), findings)


def _of_files(variables: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the variables of NCCL's configuration files, which the environment overrides."""
    chosen = variables.get("NCCL_CONF_FILE")
    for name in (_FILES[0], chosen or _FILES[1]):
        try:
            text = Path(name).expanduser().read_text(encoding="utf-8", errors="replace")
        except (OSError, RuntimeError):
            continue
        for line in text.splitlines():
            variable, equals, value = line.partition("#")[0].strip().partition("=")
            if equals:
                yield variable.strip(), (value.strip(), f" (in {name})")


def _unknown(settings: Mapping[str, tuple[str, str]]) -> Iterator[Finding]:
    for name, (value, origin) in sorted(settings.items()):
        if name in EFFECTS or not name.startswith(("NCCL_", "TORCH_NCCL_", "GLOO_")):
            continue
        if name in OLD_NAMES:
            why = "torch reads the new name, and may ignore the old one"
            yield Finding(
                Severity.WARNING, f"{name}={value}{origin} is an old name", why, f"set {OLD_NAMES[name]} instead"
            )
            continue
        near = difflib.get_close_matches(name, EFFECTS, n=1, cutoff=0.8)
        hint = f"did you mean {near[0]}?" if near else f"look it up in NCCL's user guide, or unset {name}"
        why = "NCCL ignores variables that it does not know, without a message"
        yield Finding(Severity.WARNING, f"{name}={value}{origin} is not a documented variable", why, hint)


def _costly(settings: Mapping[str, tuple[str, str]]) -> Iterator[Finding]:
    for name, pattern, why in _COSTLY:
        value, origin = settings.get(name, ("", ""))
        if value and re.fullmatch(pattern, value.strip()):
            where = f"remove it from {origin[5:-1]}" if origin else f"unset {name}"
            yield Finding(
                Severity.WARNING,
                f"{name}={value}{origin} slows training or hides failures",
                why,
                f"{where}, unless it is a workaround for a known problem",
            )


# NCCL's user guide, "Environment Variables"; torch/csrc/distributed/c10d.
EFFECTS = {
    "NCCL_SOCKET_IFNAME": "the interfaces that NCCL connects through",
    "NCCL_SOCKET_FAMILY": "IPv4 or IPv6 for NCCL's sockets",
    "NCCL_SOCKET_NTHREADS": "threads for each connection of the network",
    "NCCL_NSOCKS_PERTHREAD": "sockets of each of these threads",
    "NCCL_SOCKET_RETRY_CNT": "how often a failed connection is tried again",
    "NCCL_COMM_ID": "address and port where a communicator without torch's store meets",
    "NCCL_NET": "the network's implementation: IB, Socket or a plugin's name",
    "NCCL_NET_PLUGIN": "the library with the network's implementation, such as that of a cloud's network",
    "NCCL_TUNER_PLUGIN": "the library that chooses algorithms",
    "NCCL_CROSS_NIC": "whether a ring may use another adapter on each node",
    "NCCL_IB_DISABLE": "1: no InfiniBand or RoCE, sockets instead",
    "NCCL_IB_HCA": "the InfiniBand adapters to use",
    "NCCL_IB_GID_INDEX": "the index of the address for RoCE",
    "NCCL_IB_TIMEOUT": "how long InfiniBand waits for an answer, as a power of two",
    "NCCL_IB_RETRY_CNT": "how often InfiniBand sends again",
    "NCCL_IB_SL": "the service level of InfiniBand",
    "NCCL_IB_TC": "the traffic class of InfiniBand",
    "NCCL_IB_QPS_PER_CONNECTION": "queue pairs of each connection",
    "NCCL_IB_PCI_RELAXED_ORDERING": "whether PCIe may reorder writes",
    "NCCL_IB_ADAPTIVE_ROUTING": "whether the switch chooses paths",
    "NCCL_IB_CUDA_SUPPORT": "old name of NCCL_NET_GDR_LEVEL",
    "NCCL_NET_GDR_LEVEL": "up to which distance an adapter reads GPU memory directly",
    "NCCL_NET_GDR_READ": "whether an adapter also reads GPU memory to send it",
    "NCCL_NET_SHARED_BUFFERS": "whether connections share their buffers",
    "NCCL_P2P_DISABLE": "1: GPUs of a node exchange through the host's memory instead of directly",
    "NCCL_P2P_LEVEL": "up to which distance GPUs exchange directly",
    "NCCL_P2P_DIRECT_DISABLE": "1: threads of one process do not write into each other's memory",
    "NCCL_SHM_DISABLE": "1: no shared memory between GPUs of a node, the network instead",
    "NCCL_NVLS_ENABLE": "whether NVSwitch adds up gradients",
    "NCCL_CUMEM_ENABLE": "whether memory is allocated by CUDA's virtual memory functions",
    "NCCL_CUMEM_HOST_ENABLE": "the same for the host's memory",
    "NCCL_MNNVL_ENABLE": "whether NVLink between nodes is used",
    "NCCL_COLLNET_ENABLE": "whether switches of the network add up gradients",
    "NCCL_ALGO": "the algorithms that NCCL may use",
    "NCCL_PROTO": "the protocols that NCCL may use",
    "NCCL_NTHREADS": "threads of each of NCCL's blocks on the GPU",
    "NCCL_MIN_NCHANNELS": "the least number of channels, which use the GPU's multiprocessors",
    "NCCL_MAX_NCHANNELS": "the largest number of channels",
    "NCCL_MIN_CTAS": "the least number of blocks on the GPU",
    "NCCL_MAX_CTAS": "the largest number of blocks on the GPU",
    "NCCL_BUFFSIZE": "bytes of the buffer between two GPUs",
    "NCCL_CHECKS_DISABLE": "old; has no effect",
    "NCCL_CHECK_POINTERS": "1: check the pointers of every call, which is slow",
    "NCCL_LAUNCH_MODE": "how kernels of several GPUs of one process are launched",
    "NCCL_GRAPH_FILE": "a file with the rings and trees to use",
    "NCCL_GRAPH_DUMP_FILE": "where the rings and trees are written",
    "NCCL_GRAPH_REGISTER": "whether buffers of CUDA graphs are registered",
    "NCCL_GRAPH_MIXING_SUPPORT": "whether calls with and without CUDA graphs may be mixed",
    "NCCL_LOCAL_REGISTER": "whether buffers that the user registered are used",
    "NCCL_TOPO_FILE": "a file with the topology, read instead of looking at the machine",
    "NCCL_TOPO_DUMP_FILE": "where the topology is written",
    "NCCL_IGNORE_CPU_AFFINITY": "1: bind threads to the GPU's cores, whatever the process may use",
    "NCCL_SET_THREAD_NAME": "whether threads have names",
    "NCCL_CONF_FILE": "a file with further variables",
    "NCCL_DEBUG": "what NCCL prints: VERSION, WARN, INFO or TRACE",
    "NCCL_DEBUG_FILE": "where NCCL prints",
    "NCCL_DEBUG_SUBSYS": "the parts that print",
    "NCCL_DMABUF_ENABLE": "whether adapters reach GPU memory through the kernel's DMA-BUF",
    "NCCL_RAS_ENABLE": "whether the service that ncclras asks runs",
    "NCCL_RUNTIME_CONNECT": "1: connections are made when they are first used",
    "NCCL_WORK_FIFO_BYTES": "bytes of the queue of work",
    "NCCL_PXN_DISABLE": "1: a GPU does not send through another one's adapter",
    "NCCL_NVB_DISABLE": "1: a GPU does not send through another one's NVLink",
    "NCCL_PROFILER_PLUGIN": "the library that records events",
    "NCCL_ALLOC_P2P_NET_LL_BUFFERS": "1: buffers of low latency for all sends and receives through the network",
    "NCCL_CGA_CLUSTER_SIZE": "blocks of a cluster on the GPU",
    "NCCL_CHECK_MODE": "whether arguments of calls are checked, on this rank or on all",
    "NCCL_COLLNET_NODE_THRESHOLD": "from how many nodes switches of the network add up gradients",
    "NCCL_COMM_BLOCKING": "whether NCCL's calls may block",
    "NCCL_CTA_POLICY": "whether NCCL uses few of the GPU's multiprocessors, or none where it can",
    "NCCL_DEBUG_TIMESTAMP_FORMAT": "how times are printed",
    "NCCL_DEBUG_TIMESTAMP_LEVELS": "which printed lines have a time",
    "NCCL_ENV_PLUGIN": "a library that sets further variables",
    "NCCL_GRAPH_STREAM_ORDERING": "whether NCCL orders its kernels while a CUDA graph is captured",
    "NCCL_IB_ADDR_FAMILY": "IPv4 or IPv6 where NCCL chooses the address for RoCE",
    "NCCL_IB_ADDR_RANGE": "the range in which NCCL chooses the address for RoCE",
    "NCCL_IB_AR_THRESHOLD": "from how many bytes the switch may choose paths",
    "NCCL_IB_ECE_ENABLE": "whether adapters agree on features such as congestion control",
    "NCCL_IB_FIFO_TC": "the traffic class of InfiniBand for control messages",
    "NCCL_IB_MERGE_NICS": "whether the two ports of an adapter are used as one",
    "NCCL_IB_OOO_RQ": "1: an adapter may receive out of order",
    "NCCL_IB_RETURN_ASYNC_EVENTS": "whether fatal events of an adapter stop NCCL",
    "NCCL_IB_ROCE_VERSION_NUM": "the version of RoCE for which NCCL chooses the address",
    "NCCL_IB_SPLIT_DATA_ON_QPS": "1: each message is split over the queue pairs",
    "NCCL_IGNORE_COLLNET_MISMATCH": "1: ranks may have different numbers of adapters that add up gradients",
    "NCCL_IGNORE_NET_MISMATCH": "whether ranks may have different numbers of adapters",
    "NCCL_IPC_USE_ABSTRACT_SOCKET": "whether GPUs of a node meet at a socket without a file; containers may need 0",
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1: calls of several communicators run in the program's order",
    "NCCL_LAUNCH_RACE_FATAL": "whether threads that launch at the same time are an error",
    "NCCL_LEGACY_CUDA_REGISTER": "1: buffers of cudaMalloc are registered, which may hang",
    "NCCL_LL_THRESHOLD": "old; read up to NCCL 2.4",
    "NCCL_MEM_SYNC_DOMAIN": "whether NCCL's kernels wait for other kernels' writes",
    "NCCL_MNNVL_CLIQUE_ID": "the group of nodes that share NVLink",
    "NCCL_MNNVL_UUID": "the name of the NVLink fabric",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1: several ranks may use one GPU",
    "NCCL_NETDEVS_POLICY": "how many adapters a GPU uses",
    "NCCL_NET_GDR_C2C": "whether an adapter of the processor reads GPU memory over NVLink-C2C",
    "NCCL_NET_MERGE_POLICY": "which adapters are used as one",
    "NCCL_NET_SHARED_COMMS": "whether connections that pass another GPU are shared",
    "NCCL_OOB_NET_ENABLE": "1: the setup of a communicator uses the fast network",
    "NCCL_OOB_NET_IFNAME": "the adapters for that",
    "NCCL_P2P_LL_THRESHOLD": "up to how many bytes sends and receives use the protocol of low latency",
    "NCCL_P2P_NET_CHUNKSIZE": "bytes of a message of sends and receives through the network",
    "NCCL_P2P_PXN_LEVEL": "when sends and receives pass another GPU's adapter",
    "NCCL_PXN_C2C": "whether a GPU sends through an adapter that another one reaches over NVLink-C2C",
    "NCCL_RAS_ADDR": "address and port of the service that ncclras asks",
    "NCCL_RAS_TIMEOUT_FACTOR": "by how much that service waits longer",
    "NCCL_SET_STACK_SIZE": "1: set the stack of kernels once, so that loading them does not reconfigure memory",
    "NCCL_SINGLE_RING_THRESHOLD": "old; read up to NCCL 2.2",
    "NCCL_SOCKET_MAGIC": "the number by which NCCL recognizes its own connections",
    "NCCL_SOCKET_POLL_TIMEOUT_MSEC": "how long NCCL sleeps while it waits for connections",
    "NCCL_SOCKET_RETRY_SLEEP_MSEC": "how long NCCL waits before it tries a connection again",
    "NCCL_SYM_GIN_KERNELS_ENABLE": "whether kernels of symmetric memory start transfers over the network",
    "NCCL_TREE_THRESHOLD": "old; read in NCCL 2.4",
    "NCCL_UID_STAGGER_RATE": "how many ranks a second report to the first one",
    "NCCL_UID_STAGGER_THRESHOLD": "from how many ranks they report one after another",
    "NCCL_WIN_ENABLE": "whether memory can be registered as a window",
    "NCCL_NET_MERGE_LEVEL": "up to which distance adapters are used as one",
    "NCCL_NVLS_NCHANNELS": "channels with which NVSwitch adds up gradients",
    "NCCL_NCHANNELS_PER_NET_PEER": "channels of sends and receives with each peer on the network",
    "NCCL_VERSION": "set by container images; NCCL does not read it",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "what a failed collective does: 0 nothing, 1 ends the process, 3 (usual) ends "
    "it after others could finish",
    "TORCH_NCCL_BLOCKING_WAIT": "1: wait for every collective on the host, which is slow",
    "TORCH_NCCL_ENABLE_MONITORING": "whether a thread ends a process whose watchdog hangs",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "seconds until that thread ends it",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "whether the last collectives are written when one times out",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "how many collectives are remembered for that",
    "TORCH_NCCL_DESYNC_DEBUG": "1: report which rank was behind after a timeout",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1: create communicators without blocking",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "whether memory of collectives is reused earlier",
    "TORCH_NCCL_HIGH_PRIORITY": "1: collectives run on a stream of high priority",
    "TORCH_NCCL_BCAST_UNIQUEID": "whether rank 0 hands out the identifier of a communicator",
    "TORCH_NCCL_COORD_CHECK_MILSEC": "how often ranks look whether another one timed out",
    "TORCH_NCCL_CUDA_EVENT_CACHE": "whether events are kept for later collectives",
    "TORCH_NCCL_ENABLE_TIMING": "1: measure the time of every collective",
    "TORCH_NCCL_EXTRA_DUMP_ON_EXEC": "1: write the last collectives when an exception was found",
    "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN": "whether the C++ stack is printed when a process is ended",
    "TORCH_NCCL_NAN_CHECK": "1: look for NaN in every tensor that is exchanged, which is slow",
    "TORCH_NCCL_PROPAGATE_ERROR": "1: an error of one rank is reported to all",
    "TORCH_NCCL_RANKS_PER_ROOT": "ranks that meet at each root while a communicator is made",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "whether CUDA errors in the watchdog end the process",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "whether a warning about sends and receives is shown",
    "TORCH_NCCL_TRACE_CPP_STACK": "old; TORCH_FR_CPP_STACK",
    "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1: memory of tensors is registered with NCCL",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "how long a rank that timed out waits for others to write theirs",
    "TORCH_FR_BUFFER_SIZE": "how many collectives the flight recorder remembers",
    "TORCH_FR_CPP_STACK": "1: the flight recorder keeps C++ stacks",
    "TORCH_GLOO_LAZY_INIT": "1: Gloo connects ranks when they first exchange something",
    "TORCH_DISTRIBUTED_DEBUG": "OFF, INFO or DETAIL: checks of every collective",
    "TORCH_CPP_LOG_LEVEL": "what torch's process groups print",
    "GLOO_SOCKET_IFNAME": "the interface that Gloo connects through",
    "GLOO_DEVICE_TRANSPORT": "the transport of Gloo",
    "TP_SOCKET_IFNAME": "the interface of torch's RPC",
    "CUDA_LAUNCH_BLOCKING": "1: the host waits for every kernel, which is slow",
    "CUDA_DEVICE_MAX_CONNECTIONS": "queues between the host and a GPU",
    "CUDA_VISIBLE_DEVICES": "the GPUs that programs see",
    "CUDA_DEVICE_ORDER": "how GPUs are counted",
    "PYTORCH_CUDA_ALLOC_CONF": "options of the GPU memory's allocator",
    "PYTORCH_ALLOC_CONF": "options of the memory's allocator",
    "OMP_NUM_THREADS": "threads of a process on the CPU",
}
# Names that torch read before 2.2, and the new ones.
OLD_NAMES = {
    name: f"TORCH_{name}"
    for name in (
        "NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_BLOCKING_WAIT",
        "NCCL_DESYNC_DEBUG",
        "NCCL_ENABLE_TIMING",
        "NCCL_AVOID_RECORD_STREAMS",
        "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
    )
}
