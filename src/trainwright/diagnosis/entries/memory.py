"""Memory of GPUs, of the host, and memory shared by processes."""

from __future__ import annotations

from trainwright.diagnosis.known_error import KnownError, Role

ERRORS = (
    KnownError(
        name="shared-memory-full",
        title="/dev/shm is full or too small",
        patterns=(
            r"out of shared memory",
            r"unable to (?:write|resize|allocate|mmap).{0,80}(?:shared memory|/torch_)",
            r"shared memory.{0,200}no space left",
            r"no space left on device.{0,80}/dev/shm",
            r"/dev/shm.{0,120}(?:no space left|too small|cannot allocate)",
            r"shm\.(?:h|cc).{0,60}(?:posix_fallocate|ftruncate|fallocate).{0,20}failed",
            r"call to posix_fallocate failed\s*:\s*no space left",
            r"error while (?:creating|allocating|extending) shared memory segment",
            r"insufficient shared memory \(shm\)",
            r"unable to allocate shared memory\(shm\)",
            r"failed to (?:create|allocate|map).{0,40}/dev/shm",
            r"DataLoader worker .{0,40}killed by signal: Bus error",
            r"torch_\d+_\d+_\d+.{0,40}no space left",
        ),
        unless=(
            r"permission denied",
            r"too many open files",
            r"triton|required: \d+, hardware limit",
            r"no such file or directory",
            r"unable to mmap \d+ bytes.{0,120}cannot allocate memory",
        ),
        cause="NCCL and data loader workers exchange data through /dev/shm. Containers get 64 MiB of it by default; "
        "files left by killed processes also take space.",
        fixes=(
            "check its size: df -h /dev/shm; remove files of processes that have ended: ls /dev/shm",
            "start the container with more: docker run --ipc=host, or --shm-size=16g; on Kubernetes mount an emptyDir "
            "with medium: Memory at /dev/shm",
            "if it cannot be increased: NCCL_SHM_DISABLE=1 (slower), or fewer data loader workers",
        ),
    ),
    KnownError(
        name="memory-maps",
        title="no more memory can be mapped",
        patterns=(r"unable to mmap \d+ bytes.{0,120}cannot allocate memory",),
        cause="The system refused a mapping. A process may have 65,530 of them by default, and every tensor in shared "
        "memory needs one; a limit on address space or on committed memory has the same effect. /dev/shm is "
        "not full.",
        fixes=(
            "keep fewer tensors that data loader workers or other processes share: copy what you keep "
            "(tensor.clone()), make one large tensor of many small ones",
            "allow more mappings: sudo sysctl -w vm.max_map_count=1048576 (wc -l /proc/PID/maps counts those of a "
            "process)",
            "see other limits: ulimit -v; cat /proc/sys/vm/overcommit_memory",
        ),
    ),
    KnownError(
        name="shared-memory-denied",
        title="shared memory in /dev/shm cannot be opened",
        patterns=(
            r"shm_open failed\s*:?\s*permission denied",
            r"/dev/shm.{0,120}permission denied",
            r"permission denied.{0,40}/dev/shm",
            r"error while attaching to shared memory segment",
        ),
        cause="A process may not open a segment of /dev/shm: the permissions of the directory are wrong, or the "
        "processes of one machine run in containers that do not share it.",
        fixes=(
            "check the permissions: ls -ld /dev/shm must show drwxrwxrwt; if not: sudo chmod 1777 /dev/shm",
            "run all processes of a machine in one container, or start each with --ipc=host",
            "otherwise NCCL_SHM_DISABLE=1 (slower)",
        ),
    ),
    KnownError(
        name="gpu-out-of-memory",
        title="GPU memory ran out",
        patterns=(
            r"cudaGetDeviceCount.{0,200}Error 2: out of memory",
            r"Free memory on device .{0,80}is less than desired GPU memory utilization",
            r"larger than the maximum number of tokens that can be stored in KV cache",
            r"CUDA out of memory",
            r"HIP out of memory",
            r"XPU out of memory",
            r"(?:torch\.|torch\.cuda\.)?OutOfMemoryError: (?:CUDA|HIP|Allocation)",
            r"CUDA (?:error|failure|driver error|runtime error)\W{0,5}\s*(?:\d+\s*)?'?\(?out of memory",
            r"CUDA_ERROR_OUT_OF_MEMORY",
            r"cudaErrorMemoryAllocation|cuda runtime error \(2\)",
            r"cudaMalloc\w*.{0,60}out of memory",
            r"(?:CUBLAS|CUSOLVER|CUSPARSE|CUDNN)_STATUS_ALLOC_FAILED",
            r"Failed to CUDA (?:calloc|malloc|host alloc)",
            r"RESOURCE_EXHAUSTED: out of memory while trying to allocate",
            r"No available memory for the cache blocks",
            r"Tried to allocate [\d.]+ [KMG]iB.{0,40}GPU",
            r"MPS backend out of memory",
        ),
        unless=(r"more than 1EB memory|retry|retrying|will try again|falling back",),
        cause="Parameters, gradients, optimizer states and activations of one process need more than the GPU has, or "
        "another process uses the same GPU.",
        fixes=(
            "see what else uses the GPU: nvidia-smi; end processes left over from earlier runs",
            "halve train.micro_batch_size (train.gradient_accumulation_steps: auto keeps the global batch), then set "
            "train.activation_checkpointing: full, then lower data.max_length",
            "shard over the GPUs: parallel.strategy: fsdp or zero3; then parallel.offload_optimizer: true",
            "let the plan choose these settings: trainwright plan RECIPE",
        ),
    ),
    KnownError(
        name="host-out-of-memory",
        title="the host memory of the machine or the container ran out",
        patterns=(
            r"killed due to memory pressure",
            r"OOMKill\b",
            r"The paging file is too small",
            r"oom_reaper: reaped process",
            r"oom[-_ ]kill(?:er|ed)?\b",
            r"OOMKilled",
            r"Out of memory: Kill(?:ed)? process",
            r"Memory cgroup out of memory",
            r"exceeded (?:job |step )?memory limit",
            r"\bState: OUT_OF_MEMORY|OUT_OF_ME\+",
            r"some of your processes may have been killed by the cgroup",
            r"DefaultCPUAllocator: (?:can't allocate|not enough) memory",
            r"unable to allocate [\d.]+ [KMGT]iB for an array",
            r"std::bad_alloc",
            r"^\W*(?:\w+\.)*MemoryError\b",
            r"\[?Errno 12\]? Cannot allocate memory",
            r"ArrowMemoryError|pyarrow\.lib\.ArrowMemoryError",
            r"the kernel killed the process|killed by the kernel because the machine ran out of memory",
            r"running low on memory.{0,80}(?:killed|terminat)",
            r"a worker process .{0,60}(?:killed|terminated).{0,60}out of memory",
            r"killed due to .{0,40}running low on memory",
        ),
        unless=(
            r"ibv_reg_mr|ibv_create|RLIMIT_MEMLOCK|memlock",
            r"oom_score_adj",
            r"(?:potential root causes|possible reasons).{0,200}OOM killer",
        ),
        cause="All processes of the machine or of its container together used more host memory than is available: "
        "weights "
        "loaded once per process, data loader workers, offloaded states, or a merge or checkpoint made in memory.",
        fixes=(
            "request more: sbatch --mem=0 takes all of a node; raise the container's or the pod's memory limit",
            "use less: fewer processes (parallel.num_processes), parallel.offload_optimizer: false and "
            "parallel.offload_parameters: false, fewer data loader workers",
            "find what used it: dmesg -T | grep -i oom, or the file memory.events of the control group",
        ),
    ),
    KnownError(
        name="pinned-memory",
        title="pinned host memory could not be allocated",
        patterns=(
            r"cudaHostAlloc.{0,80}(?:failed|error|out of memory)",
            r"failed to (?:pin|page-?lock) (?:host )?memory",
            r"pin_memory.{0,60}(?:failed|cannot allocate)",
            r"cudaHostRegister.{0,80}(?:failed|error)",
        ),
        cause="Offloading and data loaders lock host memory for copies to the GPU. The host has too little, or the "
        "limit on locked memory is low.",
        fixes=(
            "raise the limit on locked memory: ulimit -l unlimited; in a container: docker run --ulimit memlock=-1",
            "offload less: parallel.offload_optimizer: false",
        ),
    ),
    KnownError(
        name="too-little-gpu-shared-memory",
        title="a kernel needs more on-chip memory than this GPU has",
        patterns=(
            r"out of resource: shared memory",
            r"OutOfResources.{0,80}shared memory",
            r"uses too much shared data",
            r"Required: \d+, Hardware limit: \d+",
            r"No valid triton configs",
            r"too many resources requested for launch",
        ),
        cause="A Triton or CUDA kernel was tuned for a GPU with more shared memory or registers per block. This is "
        "not /dev/shm and not the GPU's main memory.",
        fixes=(
            "turn off the feature that uses the kernel: train.compile: false, or the fused kernel of the library that "
            "the "
            "traceback names",
            "use smaller blocks (BLOCK_SIZE, num_stages) if the kernel is yours; update Triton and the library",
        ),
    ),
    KnownError(
        name="impossible-allocation",
        title="memory of an impossible size was requested",
        patterns=(r"Tried to allocate more than 1EB memory", r"Storage size calculation overflowed"),
        role=Role.REACTION,
        cause="A size was read from a tensor with undefined content: a collective that should have filled it failed or "
        "timed out, or an earlier kernel wrote outside of its memory. Memory is not short.",
        fixes=(
            "look for the error before this one, on all ranks: a timeout, a lost rank, an illegal access",
            "if there is none: run once more with CUDA_LAUNCH_BLOCKING=1",
        ),
    ),
)
