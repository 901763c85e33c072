"""GPUs, their drivers, and errors of CUDA's libraries."""

from __future__ import annotations

from trainwright.diagnosis.known_error import KnownError, Role

ERRORS = (
    KnownError(
        name="gpu-hardware",
        title="a GPU reported a hardware error",
        patterns=(
            r"caused by previous Xid (?:48|63|64|74|79|9[245]|1[1-5]\d)\b",
            r"NVRM: fallen off the bus",
            r"RmInitAdapter failed",
            r"uncorrectable ECC error",
            r"uncorrectable NVLink error",
            r"cudaErrorECCUncorrectable|CUDA_ERROR_ECC_UNCORRECTABLE",
            r"double[- ]bit ECC",
            r"Xid\b.{0,40}?[:,]\s*(?:48|63|64|74|79|92|94|95|1[1-5]\d)\s*(?:,|$)",
            r"has fallen off the bus",
            r"GPU is lost",
            r"GPU requires reset",
            r"Unable to determine the device handle for GPU",
            r"cudaErrorNvlinkUncorrectable|CUDA_ERROR_NVLINK_UNCORRECTABLE",
            r"Row Remapp(?:er|ing) (?:failure|failed)",
            r"cudaErrorHardwareStackError",
            r"CUDA-capable device\(s\) is/are busy or unavailable.{0,40}Xid",
        ),
        in_notices=True,
        cause="The GPU's memory, its link or its connection to the bus failed. The job is not the cause.",
        fixes=(
            "inspect the GPU: nvidia-smi -q -d ECC,ROW_REMAPPER,PAGE_RETIREMENT and dmesg -T | grep -i xid",
            "resume the run without this machine: trainwright train --resume RUN",
            "have the GPU reset or the machine rebooted by its administrator; replace the GPU if it repeats",
        ),
    ),
    KnownError(
        name="fabric-manager",
        title="the NVSwitch fabric is not ready",
        patterns=(
            r"system not yet initialized",
            r"cudaErrorSystemNotReady|CUDA_ERROR_SYSTEM_NOT_READY",
            r"\bError 802\b",
            r"fabric ?manager.{0,80}(?:not running|failed|mismatch|version|inactive|dead)",
        ),
        in_notices=True,
        cause="GPUs with NVSwitch work only while NVIDIA's Fabric Manager runs, in exactly the driver's version.",
        fixes=(
            "check it: systemctl status nvidia-fabricmanager; nvidia-smi -q | grep -A2 -i fabric must show Completed",
            "install the package of the driver's version, then: sudo systemctl enable --now nvidia-fabricmanager",
        ),
    ),
    KnownError(
        name="no-kernel-image",
        title="a library has no kernels for this GPU",
        patterns=(
            r"no kernel image is available",
            r"cudaErrorNoKernelImageForDevice|CUDA_ERROR_NO_BINARY_FOR_GPU",
            r"sm_\d+ is not compatible with the current PyTorch installation",
            r"invalid device function",
            r"device kernel image is invalid",
            r"the provided PTX was compiled with an unsupported toolchain",
            r"cudaErrorUnsupportedPtxVersion|CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
            r"PTX JIT compilation failed|a PTX JIT compilation failed",
            r"nvcc fatal\s*:\s*Unsupported gpu architecture",
            r"(?:Value|Runtime)Error: Unknown CUDA arch|Unknown CUDA arch \(\d",
            r"ptxas fatal\s*:\s*Value 'sm_\w+' is not defined",
            r"'sm_\w+' is not (?:defined|recognized|a recognized processor)",
            r"architecture 'sm_\w+' is not supported",
        ),
        in_notices=True,
        cause="torch, or an extension such as flash-attn, bitsandbytes or xformers, was built for other compute "
        "capabilities than this GPU's: the GPU is newer than the build, or so old that support was dropped.",
        fixes=(
            'compare: python -c "import torch; print(torch.version.cuda, torch.cuda.get_arch_list(), '
            'torch.cuda.get_device_capability())"',
            "install a torch build with kernels for the GPU (a newer CUDA for new GPUs, an older one for old GPUs) "
            "from https://pytorch.org/get-started/locally",
            "rebuild extensions for it: TORCH_CUDA_ARCH_LIST=9.0 pip install --no-cache-dir --no-build-isolation "
            "PACKAGE",
        ),
    ),
    KnownError(
        name="driver-too-old",
        title="the NVIDIA driver is too old for this CUDA build",
        patterns=(
            r"API call is not supported in the installed CUDA driver",
            r"driver version is insufficient for CUDA runtime version",
            r"NVIDIA driver on your system is too old",
            r"cudaErrorInsufficientDriver",
            r"forward compatibility was attempted on non supported HW",
            r"unsupported display driver / cuda driver combination",
            r"cudaErrorCompatNotSupportedOnDevice|cudaErrorSystemDriverMismatch",
            r"nvidia-container-cli: requirement error: unsatisfied condition: cuda",
            r"Driver/library version mismatch",
            r"API mismatch: the client has the version",
        ),
        in_notices=True,
        cause="The driver in the kernel is older than the CUDA version that torch or the container was built with, or "
        "it was updated and the old module is still loaded.",
        fixes=(
            "compare: nvidia-smi (driver, highest CUDA version) and python -c 'import torch; "
            "print(torch.version.cuda)'",
            "update the driver, or install a torch build or container image for the driver's CUDA version",
            "after an update of the driver: reboot the machine; remove a cuda-compat library that does not fit from "
            "LD_LIBRARY_PATH",
        ),
    ),
    KnownError(
        name="no-gpu",
        title="CUDA sees no GPU",
        patterns=(
            r"Failed to open libnvidia-ml\.so",
            r"Failed to initialize NVML: Unknown Error",
            r"Found no NVIDIA driver on your system",
            r"no CUDA-capable device is detected",
            r"No CUDA GPUs are available",
            r"Torch not compiled with CUDA enabled",
            r"cudaErrorNoDevice|CUDA_ERROR_NO_DEVICE",
            r"NVIDIA-SMI has failed because it couldn't communicate",
            r"ProcessGroupNCCL is only supported with GPUs, no GPUs found",
            r"could not select device driver .{0,30}capabilities: \[\[gpu\]\]",
            r"No HIP GPUs are available",
            r"libcuda\.so(?:\.1)?: cannot open shared object file",
            r"fp16 mixed precision requires a (?:GPU|\(not)",
            r"Attempting to deserialize object on a CUDA device but torch\.cuda\.is_available\(\) is False",
        ),
        cause="The process cannot see a GPU: torch is a CPU build, the container was started without GPUs, "
        "CUDA_VISIBLE_DEVICES is empty, no driver is loaded, or no GPU was allocated to the job.",
        fixes=(
            "check: nvidia-smi; echo $CUDA_VISIBLE_DEVICES; python -c 'import torch; print(torch.version.cuda)' "
            "(None: a CPU build, install one with CUDA)",
            "start a container with docker run --gpus all; ask Slurm for GPUs with --gres=gpu:N",
            "to train on the CPU on purpose: parallel.device: cpu",
        ),
    ),
    KnownError(
        name="wrong-device-number",
        title="a process uses a GPU index that does not exist",
        patterns=(
            r"Invalid device argument",
            r"Invalid CUDA 'device",
            r"invalid device ordinal",
            r"cudaErrorInvalidDevice\b|CUDA_ERROR_INVALID_DEVICE",
            r"Invalid device id",
            r"device >= 0 && device < num_gpus",
            r"deserialize object on CUDA device \d+ but torch\.cuda\.device_count\(\) is",
        ),
        unless=(r"p2p\.cc|shareable",),
        cause="More processes were started on a machine than it has visible GPUs, or CUDA_VISIBLE_DEVICES hides some.",
        fixes=(
            "compare: nvidia-smi -L; echo $CUDA_VISIBLE_DEVICES; and the processes per machine (--nproc_per_node, "
            "--num_processes, ntasks)",
            "leave the number to the plan: parallel.num_processes: auto",
        ),
    ),
    KnownError(
        name="gpu-shared-by-ranks",
        title="two processes use the same GPU",
        patterns=(
            r"Duplicate GPU detected",
            r"CUDA-capable device\(s\) is/are busy or unavailable",
            r"all CUDA-capable devices are busy or unavailable",
            r"cudaErrorDevicesUnavailable|exclusive[- ]process.{0,40}busy",
        ),
        cause="Two ranks were given the same GPU (NCCL refuses it), or another process has it in exclusive mode.",
        fixes=(
            "set the device of each process from its local rank before anything else: "
            "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))",
            "start at most as many processes per machine as it has GPUs; give every node a distinct node rank",
            "see which processes use the GPU, and its mode: nvidia-smi; reset the mode with sudo nvidia-smi -c DEFAULT",
        ),
    ),
    KnownError(
        name="index-out-of-range",
        title="an index is out of range: often a token id beyond the vocabulary, or a wrong label",
        patterns=(
            r"device-side assert triggered",
            r"Assertion `?.{0,80}(?:srcIndex|index|idx|ind|t|cur_target|label)\b.{0,60}` failed",
            r"vectorized_gather_kernel.{0,120}(?:index out of bounds|Assertion)",
            r"(?:indexSelect|indexing|Loss|ScatterGather)\w*\.cu:?\d*.{0,80}Assertion",
            r"nll_loss\w*.{0,60}Assertion",
            r"^\W*(?:\w+\.)*IndexError: (?:Target -?\d+ is out of bounds|index out of range in self)",
            r"index out of range in self",
            r"Target -?\d+ is out of bounds",
        ),
        unless=(r"probability tensor contains", r"input value should be between 0~1|input_val"),
        cause="An embedding or a loss received an index outside its range: the tokenizer has more tokens than "
        "the model's embedding, positions exceed the longest length, or labels do not fit the number of classes.",
        fixes=(
            "compare len(tokenizer) with model.config.vocab_size and data.max_length with "
            "model.config.max_position_embeddings; after adding tokens: model.resize_token_embeddings(len(tokenizer))",
            "labels to ignore must be -100; all others lie in [0, vocab_size)",
            "find the operation: run once more with CUDA_LAUNCH_BLOCKING=1, or on the CPU, where the error has its "
            "line",
            "with Trainwright: trainwright data check RECIPE",
        ),
    ),
    KnownError(
        name="invalid-probabilities",
        title="sampling got probabilities that are NaN, infinite or negative",
        patterns=(
            r"probability tensor contains either `?inf`?",
            r"Assertion `?.{0,40}(?:input value should be between 0~1|input_val >= zero).{0,40}failed",
        ),
        cause="The logits are NaN or infinite: weights damaged by training, fp16 overflow, or a quantized model that "
        "is loaded wrongly.",
        fixes=(
            "use bf16 instead of fp16: train.mixed_precision: bf16",
            "check the model for NaN; generate with sampling turned off to see whether its logits are finite",
        ),
    ),
    KnownError(
        name="illegal-memory-access",
        title="a GPU kernel accessed invalid memory",
        patterns=(
            r"an illegal memory access was encountered",
            r"cudaErrorIllegalAddress|CUDA_ERROR_ILLEGAL_ADDRESS",
            r"CUDA error: (?:misaligned address|unspecified launch failure|an illegal instruction was encountered|"
            r"invalid "
            r"program counter|operation not supported on global/shared address space)",
            r"cudaError(?:LaunchFailure|MisalignedAddress|IllegalInstruction)\b",
            r"CUDA_ERROR_(?:LAUNCH_FAILED|MISALIGNED_ADDRESS|ILLEGAL_INSTRUCTION)",
            r"Cuda failure '?(?:an illegal memory access|misaligned address|unspecified launch failure)",
            r"Xid\b.{0,40}?[:,]\s*(?:13|31|43)\s*,",
            r"Memory access fault by GPU node",
        ),
        role=Role.SYMPTOM,
        in_notices=True,
        cause="A kernel read or wrote outside of its tensors: a bug in a custom or compiled kernel, sizes beyond 2^31 "
        "elements, a tensor freed while another stream used it, or, rarely, a faulty GPU. The line that Python shows "
        "is a later one, since kernels run asynchronously.",
        fixes=(
            "find the kernel: CUDA_LAUNCH_BLOCKING=1, or compute-sanitizer --tool memcheck python ...",
            "disable custom kernels one at a time: train.compile: false, attention without flash-attn, no fused "
            "optimizer; update torch, Triton and flash-attn",
            "if it always occurs on the same GPU, check dmesg -T | grep -i xid and have the GPU checked",
        ),
    ),
    KnownError(
        name="cublas",
        title="cuBLAS failed",
        patterns=(
            r"CUBLAS_STATUS_(?!ALLOC_FAILED|SUCCESS)[A-Z_]+",
            r"cublasLt ran into an error",
        ),
        role=Role.SYMPTOM,
        cause="A matrix product failed. Common causes: GPU memory is nearly full (NOT_INITIALIZED), an index error in "
        "an earlier kernel (EXECUTION_FAILED), a shape or type that the GPU does not support (NOT_SUPPORTED, "
        "INVALID_VALUE), or two versions of cuBLAS in one process.",
        fixes=(
            "check memory first: halve train.micro_batch_size and see nvidia-smi",
            "run once with CUDA_LAUNCH_BLOCKING=1, or on the CPU, to see whether an earlier operation failed",
            "load only torch's own libraries: unset LD_LIBRARY_PATH, and pip list | grep -i nvidia must show the "
            "versions that torch requires",
        ),
    ),
    KnownError(
        name="cudnn",
        title="cuDNN failed or does not fit",
        patterns=(
            r"CUDNN_STATUS_(?!ALLOC_FAILED|SUCCESS)[A-Z_]+",
            r"cuDNN version incompatibility",
            r"Unable to find a valid cuDNN algorithm",
            r"GET was unable to find an engine to execute this computation",
            r"cuDNN Frontend error",
            r"Could not load library libcudnn",
            r"Unable to load any of \{libcudnn",
        ),
        role=Role.SYMPTOM,
        cause="A cuDNN other than torch's own was loaded, GPU memory was nearly full, or the shape is not supported.",
        fixes=(
            "load only torch's own: unset LD_LIBRARY_PATH; pip list | grep -i cudnn must show the version that torch "
            "requires",
            "halve train.micro_batch_size in case memory is short",
            "to see whether cuDNN is the reason: torch.backends.cudnn.enabled = False",
        ),
    ),
    KnownError(
        name="cuda-initialization",
        title="CUDA could not be initialized",
        patterns=(
            r"Cuda failure (?:\d+ )?'initialization error'",
            r"Unexpected error from cudaGetDeviceCount.{0,300}Error (?:3|999)\b",
            r"CUDA (?:driver )?initialization (?:failed|error)",
            r"CUDA unknown error - this may be due to an incorrectly set up environment",
            r"CUDA error: initialization error",
            r"cudaErrorInitializationError|CUDA_ERROR_NOT_INITIALIZED",
            r"cudaGetDeviceCount\(\) returned cudaErrorNotSupported",
        ),
        role=Role.SYMPTOM,
        cause="The driver answered with an error: it is not loaded completely (nvidia_uvm), the container lacks "
        "devices, the machine was suspended, or a forked process uses CUDA that its parent had initialized.",
        fixes=(
            "check: nvidia-smi; sudo modprobe nvidia_uvm; in a container: ls /dev/nvidia*",
            "reboot, or reload the module: sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm",
        ),
    ),
    KnownError(
        name="cuda-in-forked-process",
        title="CUDA was used before a fork",
        patterns=(r"Cannot re-initialize CUDA in forked subprocess",),
        cause="The parent process initialized CUDA, then forked data loader workers or ranks that use it too.",
        fixes=(
            "do not use CUDA in the parent or in Dataset.__getitem__: return CPU tensors and move them in the loop",
            "or spawn processes instead of forking: multiprocessing_context='spawn', "
            "torch.multiprocessing.set_start_method('spawn')",
        ),
    ),
    KnownError(
        name="mixed-devices",
        title="tensors of one operation are on different devices",
        patterns=(
            r"Expected all tensors to be on the same device",
            r"Input type \(torch\.cuda\.\w+\) and weight type \(torch\.\w+Tensor\) should be the same",
            r"is on (?:cpu|cuda:\d), different from other tensors",
            r"module must have its parameters and buffers on device cuda:\d",
            r"Pointer argument .{0,30}cannot be accessed from Triton \(cpu tensor\?\)",
        ),
        cause="A tensor or module was not moved to the GPU of this rank, or device_map spread the model over several "
        "GPUs.",
        fixes=(
            "move inputs, buffers and modules made in forward to the device of the model",
            "for training in several processes load without device_map='auto' (or with device_map={'': LOCAL_RANK})",
        ),
    ),
    KnownError(
        name="kernel-time-limit",
        title="a GPU kernel ran longer than the driver allows",
        patterns=(r"the launch timed out and was terminated", r"cudaErrorLaunchTimeout|CUDA_ERROR_LAUNCH_TIMEOUT"),
        cause="A GPU that drives a display ends kernels after a few seconds.",
        fixes=("train on a GPU without a display, or in smaller pieces: train.micro_batch_size",),
    ),
    KnownError(
        name="cuda-error",
        title="a CUDA operation failed",
        patterns=(
            r"Triton Error \[CUDA\]",
            r"CUDA error: \w",
            r"\bCUDA_ERROR_(?!OUT_OF_MEMORY)[A-Z_]+",
            r"cuda runtime error \(\d+\)",
        ),
        role=Role.REACTION,
        cause="The line has CUDA's reason. Kernels run asynchronously, so the traceback may name a later operation.",
        fixes=(
            "find the operation: run once more with CUDA_LAUNCH_BLOCKING=1",
            "disable custom kernels one at a time (train.compile: false), and check dmesg -T | grep -i xid",
        ),
    ),
)
