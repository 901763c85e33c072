"""Installed packages, extensions and compilers."""

from __future__ import annotations

from trainwright.diagnosis.known_error import KnownError, Role

ERRORS = (
    KnownError(
        name="numpy-abi",
        title="a package was built for another NumPy",
        patterns=(
            r"numpy\.dtype size changed, may indicate binary incompatibility",
            r"numpy\.ufunc size changed",
            r"numpy\.core\.multiarray failed to import",
            r"_ARRAY_API not found",
            r"A module that was compiled using NumPy 1\.x cannot be run in",
            r"module compiled against (?:API|ABI) version",
            r"`np\.\w+` was removed in the NumPy 2\.0 release",
            r"RuntimeError: Numpy is not available",
        ),
        in_notices=True,
        cause="NumPy 2 changed its binary interface; a compiled package in this environment still expects NumPy 1, or "
        "the reverse.",
        fixes=(
            "update the package that the traceback names: pip install -U PACKAGE",
            "or stay with NumPy 1 until it is: pip install 'numpy<2'",
        ),
    ),
    KnownError(
        name="flash-attention-missing",
        title="flash-attn is requested but not installed",
        patterns=(
            r"FlashAttention2? has been toggled on, but it cannot be used",
            r"the package flash_attn seems to be not installed",
            r"No module named '?flash_attn\w*",
            r"FlashAttention-?[23]? (?:is not installed|not available|not found)",
            r"flash_attn(?:_2)? is not (?:installed|available)",
            r"please install flash[-_ ]?attn",
        ),
        unless=(r"FlashAttention only supports",),
        cause="The model asks for the package flash-attn (attn_implementation='flash_attention_2'), which is not part "
        "of torch.",
        fixes=(
            "install it for this torch and CUDA: pip install flash-attn --no-build-isolation",
            "or use torch's own kernels: attn_implementation='sdpa' (the default of Trainwright's models)",
        ),
    ),
    KnownError(
        name="flash-attention-unsupported",
        title="flash attention does not support this GPU, type or head size",
        patterns=(
            r"Expected is_sm\d+",
            r"FlashAttention(?:-?\d)? only supports? (?:Ampere|Turing|Hopper|.{0,30}GPUs)",
            r"FlashAttention (?:forward |backward )?only supports? head dim(?:ension)?",
            r"FlashAttention (?:forward |backward |only ).{0,60}(?:head dim|multiple of 8)",
            r"(?:Flash ?Attention|flash_attn).{0,60}only supports? .{0,30}(?:fp16|bf16|float16|bfloat16)",
            r"(?:Flash Attention 2|FlashAttention).{0,40}only supports .{0,40}dtypes",
            r"FlashAttention only support fp16 and bf16 data type",
            r"Sliding window attention .{0,60}not supported by .{0,40}flash",
            r"No available kernel\.? Aborting execution",
            r"head_?dim(?:ension)? .{0,40}(?:must be|should be|not supported).{0,40}(?:256|multiple of 8)",
        ),
        unless=(r"without specifying a torch dtype",),
        cause="Flash attention 2 needs a GPU of compute capability 8.0 or higher, fp16 or bf16, and head sizes of at "
        "most 256 that are multiples of 8.",
        fixes=(
            "use torch's attention: attn_implementation='sdpa'",
            "on GPUs of capability 8.0 and higher train in bf16: train.mixed_precision: bf16, and load the model in it",
        ),
    ),
    KnownError(
        name="bitsandbytes-without-cuda",
        title="bitsandbytes cannot use the GPU",
        patterns=(
            r"bitsandbytes was compiled without GPU support",
            r"bitsandbytes.{0,60}(?:compiled without|not compiled with) (?:GPU|CUDA)",
            r"CUDA Setup failed despite (?:GPU|CUDA) being available",
            r"libbitsandbytes_c\w+\.so.{0,80}(?:not found|undefined symbol|cannot open)",
            r"Using `?bitsandbytes`? \d?-?bit quantization requires",
            r"requires the latest version of bitsandbytes",
            r"Required library version not found: libbitsandbytes",
            r"Configured CUDA binary not found at .{0,80}libbitsandbytes",
            r"(?:argument of type 'NoneType'|'NoneType' object has no attribute) .{0,10}'?cget_\w+|"
            r"cadam32bit_grad_fp32|"
            r"cquantize_blockwise|cget_managed_ptr",
            r"No package metadata was found for bitsandbytes",
            r"No module named '?bitsandbytes",
        ),
        unless=(r"^\W*WARN|UserWarning",),
        cause="bitsandbytes found no library for this CUDA version, or is missing or too old.",
        fixes=(
            "update it: pip install -U bitsandbytes; then: python -m bitsandbytes",
            "check that torch itself sees the GPU: python -c 'import torch; print(torch.cuda.is_available())'",
            "unset LD_LIBRARY_PATH and BNB_CUDA_VERSION if they name another CUDA",
        ),
    ),
    KnownError(
        name="build-tools-missing",
        title="code has to be compiled here, and the compiler or the CUDA toolkit is missing or incomplete",
        patterns=(
            r"CUDA_HOME (?:environment variable is not set|does not exist)",
            r"MissingCUDAException",
            r"unable to compile CUDA op\(s\)",
            r"No such file or directory: '?\S*/bin/nvcc",
            r"nvcc(?: was)? not found|nvcc: (?:command )?not found",
            r"Ninja is required to load C\+\+ extensions",
            r"Unable to JIT load the \w+ op due to (?:it not being compatible|ninja|hardware)",
            r"fatal error: \S+\.h(?:pp|xx)?: No such file",
            r"cannot find -lcurand|cannot find -lcudart|cannot find -lcuda\b",
            r"Failed to find C compiler",
            r"fatal error: Python\.h: No such file",
            r"No such file or directory: '(?:x86_64-\S+-)?(?:gcc|g\+\+|c\+\+|cc|clang|ninja)'",
            r"InvalidCxxCompiler",
            r"No working C\+\+ compiler found",
            r"command '?(?:/\S+/)?(?:x86_64-linux-gnu-)?(?:gcc|g\+\+|c\+\+|cc)'? (?:failed: No such file|failed: No "
            r"such file or "
            r"directory)|unable to execute '?(?:gcc|g\+\+)'?: No such file",
            r"Compiler: \S+ is not compatible with|Your compiler \(.{0,60}is not compatible",
            r"assert (?:torch\.utils\.cpp_extension\.)?CUDA_HOME is not None|CUDA_HOME is None",
        ),
        in_notices=False,
        cause="DeepSpeed, flash-attn, Triton and torch.compile build code on this machine. This requires nvcc "
        "(CUDA_HOME), a C++ compiler, ninja or Python's headers, and one of them is not installed.",
        fixes=(
            "install the tools: apt install build-essential python3-dev; pip install ninja; the CUDA toolkit of "
            "torch's version",
            "name the toolkit: export CUDA_HOME=/usr/local/cuda PATH=$CUDA_HOME/bin:$PATH",
            "or disable it: train.compile: false; for DeepSpeed's fused optimizer use torch's AdamW",
        ),
    ),
    KnownError(
        name="cuda-version-mismatch",
        title="the CUDA toolkit has another version than torch",
        patterns=(
            r"CUDAMismatchException",
            r"Installed CUDA version .{0,60}does not match the version torch was compiled with",
            r"The detected CUDA version .{0,60}mismatches the version that was used to compile",
            r"detected that PyTorch and \w+ were compiled with different CUDA(?: major)? versions",
            r"CUDA version mismatch",
            r"PyTorch has CUDA Version=.{0,20}and torchvision has CUDA Version",
        ),
        cause="Extensions are compiled with the nvcc of this machine, whose version must match torch's CUDA version.",
        fixes=(
            "compare: nvcc --version; python -c 'import torch; print(torch.version.cuda)'",
            "install the toolkit of torch's version and point CUDA_HOME to it, or a torch build for the toolkit's "
            "version",
            "for DeepSpeed, if only the minor version differs: DS_SKIP_CUDA_CHECK=1",
        ),
    ),
    KnownError(
        name="extension-build",
        title="a C++ or CUDA extension could not be built or loaded",
        patterns=(
            r"Error building extension '",
            r"Error compiling objects for extension",
            r"ninja: build stopped: subcommand failed",
            r"Command '\['ninja'.{0,40}\]' returned non-zero exit status",
            r"AttributeError: 'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'",
            r"'\w+' object has no attribute 'ds_opt_adam'",
            r"Failed to build installable wheels for|Failed building wheel for (?:flash|deepspeed|apex|xformers)",
            r"ImportError: \S*/torch_extensions/.{0,120}cannot open shared object file",
        ),
        role=Role.SYMPTOM,
        cause="The compiler's error precedes this message: versions of nvcc, the host compiler and torch that "
        "do not fit, or too little memory for parallel compilation.",
        fixes=(
            "read the first line with 'error:' before this one",
            "remove half-built files: rm -rf ~/.cache/torch_extensions; build with MAX_JOBS=4",
            "use a host compiler that nvcc supports: CC=gcc-11 CXX=g++-11",
        ),
    ),
    KnownError(
        name="triton-compile",
        title="Triton or ptxas could not compile a kernel",
        patterns=(
            r"triton\.compiler\.\w+\.CompilationError|triton\.compiler\.errors",
            r"triton.{0,40}CompilationError",
            r"PTXASError|`ptxas` (?:failed|stderr)|ptxas (?:fatal|error)|Internal Triton PTX codegen error",
            r"Cannot find ptxas|ptxas: not found|No such file or directory: '?\S*ptxas",
            r"CalledProcessError: Command '?\[?'?\S*(?:ptxas|gcc)\b.{0,400}(?:triton|cuda_utils|__triton_launcher|"
            r"\.ptx)",
            r"cuda_utils\.c|__triton_launcher",
            r"ImportError: .{0,60}\btriton\b",
            r"No module named '?triton",
            r"Cannot find a working triton installation|TritonMissing",
            r"fp8e4nv not supported in this architecture",
            r"type fp8\w+ not supported in this architecture",
            r"LLVM ERROR: ",
        ),
        unless=(
            r"sm_\w+' is not defined",
            r"A matching Triton is not available|Some optimizations will not be enabled",
        ),
        cause="The kernels of torch.compile and of some libraries are compiled at run time. Triton is missing or too "
        "old for this GPU, or a part of its toolchain (a C compiler, libcuda, Python's headers) is not found.",
        fixes=(
            "use the Triton of this torch: pip install -U torch triton; clear its cache: rm -rf ~/.triton",
            "install a C compiler and Python's headers: apt install build-essential python3-dev",
            "or disable compiled kernels: train.compile: false (TORCH_COMPILE_DISABLE=1)",
        ),
    ),
    KnownError(
        name="compile",
        title="torch.compile failed",
        patterns=(
            r"torch\._dynamo\.exc\.\w+",
            r"torch\._inductor\.exc\.\w+",
            r"BackendCompilerFailed",
            r"InductorError|LoweringException|CppCompileError",
            r"torch\.compile is not supported",
            r"Dynamo is not supported on Python",
        ),
        unless=(r"recompile_limit|cache_size_limit",),
        role=Role.SYMPTOM,
        cause="torch.compile met code or a machine that it does not support; the error inside, if any, is the reason.",
        fixes=(
            "train without it: train.compile: false (TORCH_COMPILE_DISABLE=1 for other programs)",
            "for a bug report: TORCH_LOGS=+dynamo TORCHDYNAMO_VERBOSE=1",
        ),
    ),
    KnownError(
        name="torch-abi",
        title="an extension was built for another torch",
        patterns=(
            r"undefined symbol: _ZN\w*(?:c10|torch|at|caffe2)\w*",
            r"undefined symbol: (?:_Z\w*(?:c10|torch|at\d)\w*|THCState\w*|aoti_torch\w*)",
            r"ImportError: .{0,200}\.so: undefined symbol",
            r"OSError: .{0,200}\.so: undefined symbol",
            r"operator torchvision::nms does not exist",
            r"Couldn't load custom C\+\+ ops",
            r"libtorch\w*\.so.{0,40}cannot open shared object",
            r"libc10\w*\.so.{0,40}cannot open shared object",
            r"symbol lookup error: .{0,200}undefined symbol",
            r"undefined symbol: (?:iJIT_NotifyEvent|__nvJitLink\w+|cusparse\w+|ncclCommRegister|ncclMemFree)",
        ),
        unless=(r"undefined symbol: nccl",),
        cause="A compiled package does not fit the torch (or the CUDA libraries) of this environment: torch was "
        "updated and the package was not, or a wheel for another version was installed.",
        fixes=(
            "reinstall the package that the line names against this torch: pip install --force-reinstall "
            "--no-cache-dir --no-build-isolation PACKAGE",
            "install torch, torchvision and torchaudio of one release together",
            "unset LD_LIBRARY_PATH, so that torch's own CUDA libraries are used",
        ),
    ),
    KnownError(
        name="system-library-too-old",
        title="a system library is too old for a package",
        patterns=(
            r"version `?'?GLIBC(?:XX)?_[\d.]+'? not found",
            r"version `?'?CXXABI_[\d.]+'? not found",
            r"libstdc\+\+\.so\.6: version",
            r"/lib\S*/libc\.so\.6: version",
            r"libffi\.so\.\d: undefined symbol",
        ),
        cause="The package was built on a newer system than this one, or the libstdc++ of conda is mixed with that of "
        "the system.",
        fixes=(
            "use a wheel built for this system, a newer container image, or build the package here",
            "for libstdc++ with conda: conda install -c conda-forge libstdcxx-ng, or export "
            "LD_LIBRARY_PATH=$CONDA_PREFIX/lib",
        ),
    ),
    KnownError(
        name="cuda-library-missing",
        title="a CUDA library is not found",
        patterns=(
            r"lib(?:cudart|cudnn[\w-]*|cublas\w*|cusparse\w*|cusolver|cufft|curand|nvrtc\w*|nvjitlink|nccl|cupti|"
            r"nvToolsExt|nvshmem\w*|cufile)\.so"
            r"[\d.]*: cannot open shared object file",
            r"Could not load (?:dynamic )?library '?lib(?:cudart|cublas|nvrtc)",
            r"libnvrtc.{0,60}(?:not found|cannot open)",
            r"nvrtc: error: failed to open libnvrtc-builtins",
            r"libcudart\.so.{0,30}not found",
        ),
        unless=(r"plugin|NET/Plugin|libnccl-net",),
        cause="A package was built for another major version of CUDA than the one that is installed, or the library's "
        "directory is not searched.",
        fixes=(
            "install the build for torch's CUDA version (python -c 'import torch; print(torch.version.cuda)')",
            "or the library itself: pip install nvidia-cuda-runtime-cu12 (the package of the missing library)",
        ),
    ),
    KnownError(
        name="package-versions",
        title="installed packages do not fit each other, or one is missing",
        patterns=(
            r"data did not match any variant of untagged enum",
            r"`rope_scaling` must be a dictionary",
            r"ImportError: cannot import name '",
            r"ModuleNotFoundError: No module named",
            r"is required for a normal functioning of this module, but found",
            r"ImportError: Using .{0,80}requires",
            r"ImportError: This modeling file requires the following packages",
            r"pkg_resources\.(?:VersionConflict|DistributionNotFound)",
            r"importlib\.metadata\.PackageNotFoundError",
            r"requires .{0,60}(?:but you have|which is not installed)",
            r"TypeError: \S+\(\) got an unexpected keyword argument '",
            r"AttributeError: module '[\w.]+' has no attribute '",
            r"Failed to import [\w.]+ because of the following error",
            r"KeyError: '(?:qwen\w*|llama\w*|gemma\w*|mistral\w*|phi\w*|deepseek\w*|mixtral\w*)'$",
            r"does not recognize this architecture",
            r"Could not import module '",
            r"Unrecognized configuration class|Unrecognized model in|Tokenizer class \w+ does not exist",
        ),
        role=Role.SYMPTOM,
        cause="A package is missing, or another one requires a different version.",
        fixes=(
            "install or update the packages of the line: pip install -U PACKAGE; pip check lists conflicts",
            "make a fresh environment from the project's pinned versions",
            "one of your files may shadow a package of the same name (torch.py, datasets/ in the working directory)",
        ),
    ),
    KnownError(
        name="system-library-missing",
        title="a system library is not installed",
        patterns=(r"(?:ImportError|OSError): \S+\.so[.\d]*: cannot open shared object file",),
        role=Role.SYMPTOM,
        cause="A Python package needs a library of the system that this machine or container lacks.",
        fixes=(
            "install the package that contains it: apt-file search LIBRARY (libGL.so.1: apt install libgl1; libaio: "
            "apt "
            "install libaio-dev)",
            "if it is installed elsewhere, add its directory to LD_LIBRARY_PATH",
        ),
    ),
    KnownError(
        name="attention-kernel-missing",
        title="xformers has no attention kernel for these inputs",
        patterns=(r"No operator found for (?:`?memory_efficient_attention|this attention)",),
        cause="xformers was built for another torch or CUDA, or none of its kernels supports this type (fp32), head "
        "size, mask or GPU. The lines below the message have the reason for each kernel.",
        fixes=(
            "check with python -m xformers.info; install the version for this torch: pip install -U xformers "
            "--index-url "
            "https://download.pytorch.org/whl/cu128",
            "use fp16 or bf16, or torch's own attention (sdpa) instead of xformers",
        ),
    ),
    KnownError(
        name="apex-without-kernels",
        title="apex is installed without its CUDA kernels",
        patterns=(
            r"No module named '(?:fused_layer_norm_cuda|amp_C|apex_C|syncbn|fused_weight_gradient_mlp_cuda|"
            r"scaled_\w+_softmax_cuda|fused_rotary_positional_embedding|distributed_adam_cuda)'",
            r"requires (?:apex|cuda) extensions?",
        ),
        cause="apex is installed without kernels unless its build options request them, with an nvcc of torch's CUDA "
        "version.",
        fixes=(
            "build it with them: APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation .",
            "or use torch's own fused layers and optimizers: torch.nn.LayerNorm, AdamW(fused=True)",
        ),
    ),
)
