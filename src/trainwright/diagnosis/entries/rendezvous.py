"""How processes find each other when they start."""

from __future__ import annotations

from trainwright.diagnosis.known_error import KnownError, Role

ERRORS = (
    KnownError(
        name="port-in-use",
        title="a port is already in use",
        patterns=(
            r"Address already in use",
            r"EADDRINUSE",
            r"errno: 98\b",
            r"\[Errno 98\]",
            r"port \d+ is (?:already )?(?:in use|occupied|taken)",
            r"tried to launch distributed communication on port `?\d+`?, but another process is utilizing it",
        ),
        in_notices=True,
        cause="Another run, or a process left over from an earlier run, listens on the rendezvous port.",
        fixes=(
            "find the process: ss -ltnp | grep :29500; end it if it is left over from an earlier run",
            "use another port: torchrun --master_port=29501, accelerate launch --main_process_port 29501, deepspeed "
            "--master_port 29501, MASTER_PORT=29501; on one machine torchrun --standalone or port 0 takes a free one",
        ),
        recipe_fixes=(
            "find the process: ss -ltnp | grep :PORT; end it if it is left over from an earlier run",
            "use another port: --rendezvous HOST:PORT, the same on every node; under torchrun --master_port",
        ),
    ),
    KnownError(
        name="host-name",
        title="a host name does not resolve",
        patterns=(
            r"Name or service not known",
            r"Temporary failure in name resolution",
            r"nodename nor servname provided",
            r"(?:gai|getaddrinfo).{0,60}(?:failed|error)",
            r"could not resolve host(?:name)?",
            r"The hostname of the client socket cannot be retrieved",
            r"NameResolutionError",
        ),
        unless=(r"huggingface\.co|hf\.co|pypi\.org|github|HTTPSConnection|https?://", r"err=-3|warn"),
        cause="The address of the main process (MASTER_ADDR), or this machine's own name, is not known to the "
        "resolver.",
        fixes=(
            "check on every node: getent hosts NAME; use the IP address of the first node in its place",
            "add the machine's name to /etc/hosts; in containers use --network=host",
        ),
    ),
    KnownError(
        name="rendezvous",
        title="ranks could not reach the main process",
        patterns=(
            r"The client socket has (?:failed to connect|timed out)",
            r"failed to connect to \S*:\d+",
            r"RendezvousConnectionError",
            r"RendezvousTimeoutError",
            r"RendezvousClosedError",
            r"The connection to the C10d store has failed",
            r"connect\(\) timed out",
            r"Connection refused",
            r"Connection timed out",
            r"No route to host",
            r"Network is unreachable",
            r"wait timeout after \d+ms",
            r"\[c10d\].{0,80}(?:timed out|failed to connect)",
            r"Socket Timeout",
            r"ncclUniqueId.{0,80}(?:timeout|failed)",
            r"retrieving ncclUniqueId from \[0\] via c10d key-value store",
        ),
        unless=(r"huggingface|hf\.co|https?://|HTTPSConnection|wandb|retrying|will retry|proxy|NCCL INFO",),
        role=Role.REACTION,
        in_notices=True,
        cause="There was no response at the address and port of the main process: it ended or has not started, the "
        "address "
        "is not reachable from this node, or a firewall drops the connection.",
        fixes=(
            "look at the first node's log for an error before this one",
            "from every other node: nc -vz MASTER_ADDR MASTER_PORT; open the port, and all ports between nodes for "
            "NCCL",
            "use the address of an interface that all nodes share; start the nodes within the timeout of each other",
        ),
        recipe_fixes=(
            "look at the first node's log for an error before this one",
            "from every other node: nc -vz HOST PORT, with the address of --rendezvous; open the port, and all ports "
            "between nodes for NCCL",
            "use the address of an interface that all nodes share; --rendezvous-timeout is how long nodes wait for "
            "each other",
        ),
    ),
    KnownError(
        name="gloo-connect",
        title="ranks could not connect to each other through gloo",
        patterns=(
            r"connectFullMesh failed",
            r"gloo/transport/tcp/\S*\W{0,3}\s?(?:Connect timeout|timed out connecting)",
        ),
        role=Role.REACTION,
        cause="A new gloo group connects every rank to every other, at the address that each rank's own host name "
        "resolves to. Other nodes cannot reach that address (127.0.0.1, a bridge of Docker), a firewall drops the "
        "connection, or a rank ended while it started.",
        fixes=(
            "look for an earlier error of another rank",
            "name one interface that all nodes share, on every node: GLOO_SOCKET_IFNAME=eth0 (ip -br addr lists them; "
            "unlike NCCL's, it takes no ^ and no prefix)",
            "or make the host name resolve to it: getent hosts $(hostname) must show the address that other nodes "
            "reach",
            "open all ports between the nodes",
        ),
    ),
)
