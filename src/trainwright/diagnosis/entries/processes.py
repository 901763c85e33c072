"""Signals, schedulers, data loader workers and launchers."""

from __future__ import annotations

from trainwright.diagnosis.known_error import KnownError, Role

ERRORS = (
    KnownError(
        name="time-limit",
        title="the scheduler ended the job at its time limit",
        patterns=(
            r"DUE TO TIME LIMIT",
            r"job killed: walltime .{0,40}exceeded|exceeded (?:its |the )?(?:wall ?time|run time) limit",
            r"TERM_RUNLIMIT",
            r"DeadlineExceeded",
        ),
        cause="The job reached its time limit.",
        fixes=(
            "resume: trainwright train --resume RUN continues from the newest checkpoint",
            "request more time (sbatch --time=...), or request a signal before the end: sbatch --signal=B:TERM@300, so "
            "that a checkpoint is written",
        ),
    ),
    KnownError(
        name="preempted",
        title="the scheduler took the machines away",
        patterns=(
            r"DUE TO (?:PREEMPTION|NODE FAILURE|JOB REQUEUE)",
            r"(?:spot|preemptible) (?:instance|VM).{0,60}(?:interrupt|preempt|terminat|reclaim)",
            r"instance .{0,40}(?:was|is being) preempted",
            r"JOB \d+ ON \S+ CANCELLED AT \S+ DUE TO NODE",
            r"srun: error: Node failure on",
            r"Preempted by",
        ),
        cause="A job of higher priority, the provider of the machine, or a failed node ended this job.",
        fixes=(
            "resume: trainwright train --resume RUN continues from the newest checkpoint, on any number of processes",
            "write checkpoints often enough: checkpoint.every; let Slurm requeue: sbatch --requeue",
        ),
    ),
    KnownError(
        name="too-many-open-files",
        title="too many open files",
        patterns=(
            r"Too many open files",
            r"\[Errno 24\]",
            r"received 0 items of ancdata",
            r"unable to open shared memory object \S+ in read-write mode(?:: too many|\s*$)",
            r"EMFILE",
        ),
        cause="The process reached its limit on open files: data loader workers pass tensors as file descriptors, and "
        "every memory-mapped shard of data or weights needs another.",
        fixes=(
            "raise the limit: ulimit -n 65536 (docker run --ulimit nofile=65536)",
            "or share tensors by name: torch.multiprocessing.set_sharing_strategy('file_system')",
        ),
    ),
    KnownError(
        name="too-many-processes",
        title="no more processes or threads can be started",
        patterns=(
            r"can't start new thread",
            r"(?:fork|pthread_create).{0,60}Resource temporarily unavailable",
            r"\[Errno 11\] Resource temporarily unavailable",
            r"OpenBLAS blas_thread_init: pthread_create failed",
            r"libgomp: Thread creation failed",
        ),
        cause="The limit on processes and threads of the user or the container is reached.",
        fixes=(
            "raise it: ulimit -u unlimited; docker run --pids-limit=-1",
            "start fewer threads: OMP_NUM_THREADS=1, fewer data loader workers; TOKENIZERS_PARALLELISM=false",
        ),
    ),
    KnownError(
        name="data-loader-worker",
        title="a data loader worker died",
        patterns=(
            r"DataLoader worker \(pid.{0,40}(?:is killed by signal|exited unexpectedly)",
            r"DataLoader worker \(pid\(s\) .{0,60}\) exited unexpectedly",
            r"One of the subprocesses has abruptly died during map operation",
            r"A process in the process pool was terminated abruptly",
            r"BrokenProcessPool",
        ),
        unless=(r"signal: (?:Bus error|Aborted)", r"signal: Terminated"),
        role=Role.SYMPTOM,
        cause="A process that prepares data was killed (usually for its memory) or crashed; its message, if any, "
        "comes earlier.",
        fixes=(
            "watch main memory while it runs: free -g; use fewer workers (num_workers, num_proc)",
            "to get the error in the main process: num_workers=0",
        ),
    ),
    KnownError(
        name="killed",
        title="a process was killed (SIGKILL)",
        patterns=(
            r"terminated with signal SIGKILL",
            r"exitcode\s*: ?-9\b",
            r"\(exitcode: -9\)",
            r"Signal 9 \(SIGKILL\)",
            r"(?:return code|returncode|exit code|exits? with|exited with)[ =:]*(?:-9|137)\b",
            r"died with <Signals\.SIGKILL: 9>",
            r"was killed by an external SIGKILL",
            r"^(?:\S*: line \d+: +\d+ )?Killed(?:\s|$)",
            r"task \d+(?:[,-]\d+)*: Killed",
            r"killed by signal: Killed",
            r"Command terminated by signal 9",
        ),
        role=Role.SYMPTOM,
        in_notices=True,
        cause="SIGKILL comes from outside, almost always from the kernel because host memory ran out (of the machine "
        "or of the container), otherwise from a scheduler or a user.",
        fixes=(
            "check whether it was memory: dmesg -T | grep -i -E 'oom|killed process', or the job's record (sacct -j "
            "JOB -o State,MaxRSS)",
            "if so: ask for more main memory, or use less of it: fewer processes, fewer data loader workers, no "
            "offloading",
            "otherwise look at the scheduler's limits on time and memory",
        ),
    ),
    KnownError(
        name="crashed",
        title="a process crashed in native code",
        patterns=(
            r"terminated with signal SIG(?:SEGV|ILL|FPE)",
            r"exitcode\s*: ?-(?:4|8|11)\b",
            r"\(exitcode: -(?:4|8|11)\)",
            r"Signal (?:4|8|11) \(SIG(?:ILL|FPE|SEGV)\)",
            r"died with <Signals\.SIG(?:ILL|FPE|SEGV): \d+>",
            r"Segmentation fault",
            r"Fatal Python error: (?:Segmentation fault|Illegal instruction)",
            r"(?:return code|returncode|exit code|exits? with|exited with)[ =:]*-(?:4|8|11)\b",
            r"Illegal instruction(?: \(core dumped\))?",
            r"crashed in native code",
            r"Caught signal 11",
        ),
        role=Role.SYMPTOM,
        in_notices=True,
        cause="A library failed outside of Python, usually an extension built for another torch, CUDA or, with SIGILL, "
        "processor.",
        fixes=(
            "find where: PYTHONFAULTHANDLER=1 prints the Python stack of a crash",
            "rebuild or update extensions of torch (flash-attn, bitsandbytes, xformers, deepspeed ops)",
            "read the lines before the crash: a library may have said why",
        ),
    ),
    KnownError(
        name="aborted",
        title="a process aborted itself (SIGABRT)",
        patterns=(
            r"terminated with signal SIGABRT",
            r"exitcode\s*: ?-6\b",
            r"\(exitcode: -6\)",
            r"Signal 6 \(SIGABRT\)",
            r"died with <Signals\.SIGABRT: 6>",
            r"Fatal Python error: Aborted",
            r"(?:return code|returncode|exit code|exits? with|exited with)[ =:]*-6\b",
            r"Aborted\s+\(core dumped\)",
            r"killed by signal: Aborted",
        ),
        role=Role.REACTION,
        in_notices=True,
        cause="A C++ exception ended the process. Its message (terminate called after throwing, what():) precedes "
        "this line; with NCCL it is usually the watchdog, which aborts after a failed collective.",
        fixes=("read the log of the rank before the abort, from its first line with an error",),
    ),
    KnownError(
        name="terminated",
        title="a process was ended by SIGTERM from outside",
        patterns=(
            r"SignalException: Process \d+ got signal: (?:15|1|2)\b",
            r"Received (?:Signals\.)?(?:SIGTERM|SIGHUP|SIGINT|15|1|2) (?:death signal|.{0,40}shutting down)",
            r"got signal: 15",
            r"CANCELLED AT \d",
            r"was ended by an external SIG(?:TERM|INT|HUP)",
            r"Received Signals\.SIG(?:TERM|HUP|INT) death signal, shutting down workers",
        ),
        unless=(r"DUE TO", r"STEP"),
        role=Role.REACTION,
        in_notices=True,
        cause="A user, a scheduler or a closed terminal (SIGHUP) ended the run.",
        fixes=(
            "find out which: sacct -j JOB, the scheduler's events, or the shell's history; start under tmux, nohup or "
            "sbatch "
            "if the terminal was closed",
            "resume: trainwright train --resume RUN",
        ),
    ),
    KnownError(
        name="launcher-report",
        title="a launcher reports that a process failed",
        patterns=(
            r"Command '\[.{0,2000}returned non-zero exit status",
            r"ChildFailedError",
            r"ProcessExitedException|ProcessRaisedException",
            r"^subprocess\.CalledProcessError",
            r"torch\.distributed\.elastic\.multiprocessing\.api:failed",
            r"failed \(exitcode: \d+\) local_rank",
            r"exitcode\s*: ?(?:\d+|-15) \(pid",
            r"\(exitcode: -15\)|Signal 15 \(SIGTERM\)",
            r"Sending process \d+ closing signal",
            r"Killing subprocess \d+",
            r"exits with return code = \d+",
            r"srun: error: \S+: tasks? [\d,-]+: Exited with exit code",
            r"srun: (?:Terminating|Force Terminat\w+) (?:Step|job)",
            r"slurmstepd: error: \*\*\* STEP \S+ ON \S+ CANCELLED AT",
            r"(?:mpirun|mpiexec|prterun|PRTE) .{0,80}(?:exited on signal|non-zero|exiting improperly)",
            r"Primary job .{0,20}terminated normally, but \d+ process",
            r"Process group watchdog thread terminated with exception",
            r"terminate called after throwing an instance of",
            r"Some NCCL operations have failed or timed out",
            r"To avoid data inconsistency, we are taking the entire process down",
            r"RayTaskError|ActorDiedError|WorkerCrashedError",
            r"A worker died or was killed while executing a task|Raylet is terminated",
            r"a worker failed without an error",
        ),
        role=Role.FOLLOW_UP,
        in_notices=True,
        cause="A launcher only reports exit codes; the error is in the log of the process that failed first.",
        fixes=(
            "check the log of the rank that it reports as the first failure; torchrun keeps logs of every rank with "
            "--log-dir DIR --tee 3",
        ),
    ),
    KnownError(
        name="interrupted",
        title="the run was interrupted from the keyboard",
        patterns=(r"^\W*KeyboardInterrupt\b",),
        role=Role.REACTION,
        cause="Ctrl-C, or SIGINT from a notebook or launcher.",
        fixes=("resume: trainwright train --resume RUN",),
    ),
    KnownError(
        name="pickling",
        title="an object cannot be sent to another process",
        patterns=(
            r"Can't pickle|Can't get (?:local )?(?:attribute|object)|cannot pickle",
            r"PicklingError|AttributeError: Can't get attribute",
            r"TypeError: cannot (?:pickle|serialize)",
        ),
        cause="Processes that are spawned get their arguments pickled; lambdas, local functions, open files and "
        "generators cannot be.",
        fixes=(
            "define functions and classes at the top of a module; use functools.partial in place of lambdas",
            "or run without workers: num_workers=0, num_proc=1",
        ),
    ),
    KnownError(
        name="spawn-without-main-guard",
        title="a spawned process runs the script again",
        patterns=(r"An attempt has been made to start a new process before the\s*(?:current process)?",),
        cause="Spawned processes import the script; without a guard it starts processes again.",
        fixes=("put what the script runs under: if __name__ == '__main__':",),
    ),
    KnownError(
        name="tokenizers-fork-warning",
        title="a warning of tokenizers after a fork",
        patterns=(r"huggingface/tokenizers: The current process just got forked",),
        role=Role.HARMLESS,
        in_notices=True,
        cause="The library disables its threads after a fork. This is not an error.",
        fixes=("to turn the warning off: TOKENIZERS_PARALLELISM=false",),
    ),
    KnownError(
        name="bus-error",
        title="a process was ended by a bus error (SIGBUS)",
        patterns=(
            r"exitcode\s*: ?-7\b",
            r"\(exitcode: -7\)",
            r"Signal 7 \(SIGBUS\)",
            r"died with <Signals\.SIGBUS: 7>",
            r"Fatal Python error: Bus error",
            r"(?:return code|returncode|exit code|exits? with|exited with)[ =:]*-7\b",
            r"Bus error\s+\(core dumped\)",
            r"terminated with signal SIGBUS",
            r"\*\*\* SIGBUS received",
            r"Caught signal 7 \(Bus error",
            r"Unexpected bus error encountered",
        ),
        role=Role.SYMPTOM,
        in_notices=True,
        cause="A process used mapped memory that could not be provided. With NCCL or data loader workers /dev/shm is "
        "almost always too small (64 MiB in containers); otherwise a mapped file was truncated, or its disk is full.",
        fixes=(
            "check its size while the program runs: df -h /dev/shm",
            "start the container with --ipc=host or --shm-size=16g; on Kubernetes mount an emptyDir with medium: "
            "Memory at /dev/shm",
            "check the disk of data and caches: df -h; download or prepare files again that may be cut off",
        ),
    ),
)
