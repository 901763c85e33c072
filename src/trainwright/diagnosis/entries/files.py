"""Disks, permissions, checkpoints, and files from the Hugging Face Hub."""

from __future__ import annotations

from trainwright.diagnosis.known_error import KnownError, Role

ERRORS = (
    KnownError(
        name="disk-quota",
        title="the disk quota is used up",
        patterns=(r"Disk quota exceeded", r"\[Errno 122\]", r"EDQUOT"),
        cause="The user or project has used all space, or all files (inodes), that the file system allows.",
        fixes=(
            "check it: quota -s, or lfs quota -h -u $USER PATH; remove old checkpoints (checkpoint.keep_last) and "
            "caches",
            "move caches to another disk: HF_HOME=/scratch/hf TRITON_CACHE_DIR=/scratch/triton",
        ),
    ),
    KnownError(
        name="disk-full",
        title="the disk is full, or writing to it fails",
        patterns=(
            r"No space left on device",
            r"\[Errno 28\]",
            r"\(os error 28\)",
            r"ENOSPC",
            r"unexpected pos \d+ vs \d+",
            r"PytorchStreamWriter failed",
            r"write\(\): fd \d+ failed",
            r"RuntimeError: File \S+ cannot be opened",
            r"\[Errno 5\] Input/output error",
            r"Not enough free disk space|Not enough disk space",
            r"disk is full|low on disk space.{0,40}evict|ephemeral-storage",
        ),
        unless=(r"shm", r"not enough free disk space to download.{0,80}warn"),
        cause="Checkpoints, caches of the Hub or temporary files filled a file system, or used all of its inodes; "
        "rarely the disk or the server of a network file system fails.",
        fixes=(
            "find which: df -h; df -i (for data loader workers also /dev/shm); and what: du -xh --max-depth=2 PATH | "
            "sort -h | tail",
            "keep fewer checkpoints: checkpoint.keep_last: 2; clear caches: hf cache prune",
            "move them: logging.run_directory, HF_HOME=/data/hf, TMPDIR=/data/tmp",
        ),
    ),
    KnownError(
        name="permission-denied",
        title="no permission to read or write a file or directory",
        patterns=(
            r"PermissionError: \[Errno 13\]",
            r"\[Errno 13\] Permission denied",
            r"Permission denied \(os error 13\)",
            r"Read-only file system",
            r"\[Errno 30\]",
            r"mkdir: cannot create directory .{0,200}Permission denied",
        ),
        unless=(r"/dev/shm|shm_open", r"/dev/(?:nvidia|infiniband)"),
        cause="The process has no permission for the path in the message: a cache made by another user or by root in a "
        "container, or a read-only disk.",
        fixes=(
            "check: ls -ld PATH; change the owner: sudo chown -R $USER PATH",
            "use a cache of your own: HF_HOME, TRITON_CACHE_DIR, TORCH_EXTENSIONS_DIR and TORCHINDUCTOR_CACHE_DIR on "
            "a disk that can be written",
        ),
    ),
    KnownError(
        name="stale-file",
        title="an open file disappeared from a network file system",
        patterns=(r"Stale file handle", r"\[Errno 116\]", r"Remote I/O error", r"Transport endpoint is not connected"),
        cause="The file was deleted or replaced on another node, or the server of the file system was restarted.",
        fixes=(
            "do not clean caches or checkpoints that a run uses; give each node its own cache on a local disk "
            "(HF_HOME)",
            "mount the file system again: ls PATH fails until the mount works again",
        ),
    ),
    KnownError(
        name="gated-model",
        title="the model or data set needs access rights",
        patterns=(
            r"GatedRepoError",
            r"Cannot access gated repo",
            r"Access to (?:model|dataset) \S+ is restricted",
            r"You are trying to access a gated repo",
            r"403 Client Error.{0,200}(?:huggingface|hf\.co)",
            r"is a gated (?:repo|dataset)",
            r"Your request to access .{0,80}(?:is awaiting|has been rejected)",
            r"401 Client Error.{0,200}(?:huggingface|hf\.co)",
            r"Invalid (?:user token|username or password|credentials in Authorization header)",
            r"token is required|requires (?:you to be logged in|a token)|LocalTokenNotFoundError",
            r"RepositoryNotFoundError",
            r"is not a local folder and is not a valid model identifier",
            r"Repository Not Found for url",
            r"HFValidationError",
            r"Can't load (?:the )?(?:tokenizer|model|configuration|config|\w+ processor) for '",
            r"doesn't exist on the Hub or cannot be accessed",
        ),
        cause="The Hub denies access to the repository: its terms are not accepted, no valid token is given, or the "
        "name is "
        "wrong or private.",
        fixes=(
            "check the name; a local directory has to exist in this container and on every node",
            "accept the terms on the model's page, then: hf auth login, or HF_TOKEN=... on every node; hf auth whoami "
            "shows who you are",
        ),
    ),
    KnownError(
        name="hub-offline",
        title="the Hugging Face Hub cannot be reached",
        patterns=(
            r"We couldn't connect to 'https://huggingface\.co'",
            r"couldn't connect to .{0,40}huggingface\.co",
            r"(?:HTTPSConnectionPool|HTTPSConnection|MaxRetryError|ConnectionError|ConnectTimeout|ReadTimeout)"
            r".{0,200}(?:huggingface\.co|hf\.co|hf-mirror)",
            r"(?:huggingface\.co|hf\.co|hf-mirror).{0,200}(?:NameResolutionError|ConnectTimeoutError|Max retries "
            r"exceeded|"
            r"Network is unreachable|Read timed out|Connection refused)",
            r"OfflineModeIsEnabled|Cannot reach \S+: offline mode is enabled",
            r"LocalEntryNotFoundError",
            r"outgoing traffic has been disabled",
            r"Offline mode is enabled|offline mode is enabled",
            r"Couldn't reach .{0,120}on the Hub",
            r"429 Client Error: Too Many Requests.{0,200}(?:huggingface|hf\.co)",
            r"(?:500|502|503|504) Server Error.{0,200}(?:huggingface|hf\.co)",
            r"cached files? .{0,80}outgoing traffic",
        ),
        unless=(r"retrying|Retry\(total=[1-9]|will retry|Retrying in",),
        cause="The machine has no connection to the Hub (many clusters have none on compute nodes), or offline mode "
        "is on and the file is not in the cache.",
        fixes=(
            "download where there is a connection: hf download NAME; then use the same HF_HOME with HF_HUB_OFFLINE=1",
            "or copy the model and give its directory as model.name; set HTTPS_PROXY if the site has a proxy",
        ),
    ),
    KnownError(
        name="damaged-weights",
        title="a file of weights is damaged or incomplete",
        patterns=(
            r"SafetensorError: (?:Error while deserializing header|.{0,40}(?:HeaderTooLarge|MetadataIncompleteBuffer|"
            r"InvalidHeader|HeaderTooSmall|InvalidHeaderDeserialization))",
            r"Error while deserializing header",
            r"MetadataIncompleteBuffer|HeaderTooLarge|InvalidHeaderDeserialization|HeaderTooSmall",
            r"PytorchStreamReader failed (?:reading|finding|locating)",
            r"failed finding central directory",
            r"UnpicklingError: (?:invalid load key|unpickling stack underflow|pickle data was truncated)",
            r"invalid load key, '",
            r"Unable to load weights from pytorch checkpoint file",
            r"invalid header or archive is corrupted",
            r"EOFError: Ran out of input",
            r"pickle data was truncated",
            r"UnpicklingError: Weights only load failed.{0,20}invalid",
            r"Consistency check failed: file should be of size",
            r"storage has wrong byte size",
        ),
        cause="A download or a save was interrupted (full disk, kill), or the file is a Git LFS pointer instead of the "
        "weights. A complete file is also rejected if it has so many tensors that its header exceeds 100 MB.",
        fixes=(
            "check it: ls -l FILE and head -c 100 FILE; 'version https://git-lfs' means: git lfs pull",
            "download again: hf download NAME --force-download; for a checkpoint use the previous one (Trainwright "
            "verifies checkpoints and does so automatically)",
        ),
    ),
    KnownError(
        name="unsafe-load",
        title="torch rejects a pickle file",
        patterns=(
            r"Weights only load failed",
            r"WeightsUnpickler error",
            r"Unsupported global: GLOBAL",
            r"we now require users to upgrade torch to at least v2\.6",
            r"serious vulnerability issue in `?torch\.load`?",
        ),
        cause="torch.load reads only tensors by default (weights_only=True) since 2.6, because pickles can run code; "
        "transformers refuses .bin files with older torch.",
        fixes=(
            "use safetensors files, or update torch to 2.6 or newer",
            "for a file that you trust: torch.load(..., weights_only=False), or "
            "torch.serialization.add_safe_globals([...])",
        ),
    ),
    KnownError(
        name="shared-tensors",
        title="tied weights cannot be saved as safetensors",
        patterns=(
            r"Some tensors share memory, this will lead to duplicate memory",
            r"tensors? share memory.{0,80}safetensors",
            r"The weights trying to be saved contained shared tensors",
            r"shared tensors .{0,120}mismatching the transformers base configuration",
        ),
        cause="Two names of the state dict are one tensor (tied embeddings), which safetensors does not store twice.",
        fixes=(
            "save with model.save_pretrained, which handles tied weights, or safetensors.torch.save_model",
            "in Hugging Face's Trainer: save_safetensors=False",
        ),
    ),
    KnownError(
        name="weights-do-not-fit",
        title="weights do not match the model",
        patterns=(
            r"size mismatch for(?: [\w.]+|$)|Size mismatch between saved torch\.Size",
            r"Error\(s\) in loading state_dict",
            r"(?:Missing|Unexpected) key\(s\) in state_dict",
            r"Trying to set a tensor of shape .{0,80}in \"?\w+\"? \(which has shape",
            r"shape mismatch.{0,80}(?:checkpoint|state_dict|loading)",
            r"ignore_mismatched_sizes",
            r"Some of the .{0,40}weights .{0,60}mismatch",
            r"loaded state dict (?:has a different number of parameter groups|contains a parameter group that "
            r"doesn't match)",
        ),
        unless=(r"newly initialized",),
        cause="The checkpoint is of another model or configuration: another vocabulary size, another rank of the "
        "adapter, another architecture, names with a prefix (module., _orig_mod.), or an optimizer of other "
        "parameters.",
        fixes=(
            "compare the shapes of the message with config.json; use the configuration that the checkpoint was saved "
            "with",
            "after adding tokens: resize the embedding before loading the adapter or checkpoint",
            "remove prefixes: key.removeprefix('module.').removeprefix('_orig_mod.')",
        ),
    ),
    KnownError(
        name="checkpoint-missing",
        title="a file or checkpoint does not exist",
        patterns=(
            r"FileNotFoundError: \[Errno 2\] No such file or directory: '",
            r"Error no file named .{0,120}found in directory",
            r"No such file or directory \(os error 2\)",
            r"Can't find a valid checkpoint at",
            r"No valid checkpoint found in output directory",
            r"FileNotFoundError: (?:Couldn't find|Unable to find|Directory|\S)",
            r"NotADirectoryError",
        ),
        unless=(r"nvcc|ptxas|gcc|g\+\+|ninja|/dev/shm|git_lfs|libnccl",),
        role=Role.SYMPTOM,
        cause="The path does not exist for this process: a typo, a relative path from another directory, or a "
        "disk that this node or container does not have.",
        fixes=(
            "check it where the process runs: ls PATH on each node, in the container",
            "use absolute paths, and a file system that all nodes share for data and checkpoints",
        ),
    ),
    KnownError(
        name="remote-code",
        title="the repository has custom code, which must be allowed",
        patterns=(
            r"requires you to execute the (?:configuration|modeling|tokenizer|custom|dataset) ?\w* ?(?:file|code|"
            r"script)",
            r"contains custom code which must be executed",
            r"Please pass the argument `?trust_remote_code=True`?",
        ),
        cause="The model or data set needs Python code from its repository.",
        fixes=(
            "read that code, then pass trust_remote_code=True; or use a model that the library supports without "
            "custom code",
        ),
    ),
    KnownError(
        name="tracker-login",
        title="the experiment tracker has no credentials or connection",
        patterns=(
            r"wandb\.errors\.\S*(?:UsageError|AuthenticationError|CommError)",
            r"api_key not configured",
            r"wandb: ERROR (?:Error while calling W&B API|api_key)",
        ),
        role=Role.SYMPTOM,
        cause="Weights & Biases needs an API key, which is not set, or compute nodes have no connection.",
        fixes=("wandb login, WANDB_API_KEY=..., or WANDB_MODE=offline; without it: report_to='none'",),
    ),
)
