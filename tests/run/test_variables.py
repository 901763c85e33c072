"""What job files and the command lines of other hosts have of this process's variables."""

from __future__ import annotations

import pytest

from trainwright.clusters.hosts import format_exports
from trainwright.clusters.job import capture_variables

NEEDED = {
    "HF_HOME": "/data/hf",
    "HF_HUB_OFFLINE": "1",
    "HF_ENDPOINT": "https://mirror.example",
    "NCCL_SOCKET_IFNAME": "eth0",
    "GLOO_SOCKET_IFNAME": "eth0",
    "OMP_NUM_THREADS": "4",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "TRAINWRIGHT_CACHE": "/data/cache",
    "TRAINWRIGHT_MACHINE": "/data/machine.json",
    "PATH": "/opt/bin:/bin",
}
SECRET = [
    "HF_TOKEN",
    "HF_AUTH",
    "HF_PAT",
    "HF_HUB_ACCESS",
    "HF_NEW_LOGIN",
    "HUGGING_FACE_HUB_TOKEN",
    "TRANSFORMERS_LOGIN",
    "TRAINWRIGHT_SSH",
    "TRAINWRIGHT_JOB_SECRET",
    "TRAINWRIGHT_NEW",
    "WANDB_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "DS_PAT",
    "TORCH_AUTH",
    "MY_VARIABLE",
]


@pytest.mark.parametrize("name", SECRET)
def test_only_known_variables_leave_this_machine(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for key, value in {**NEEDED, name: "hidden-value"}.items():
        monkeypatch.setenv(key, value)
    assert capture_variables({**NEEDED, name: "hidden-value"}) == NEEDED
    lines = format_exports().splitlines()
    assert "export HF_HOME=/data/hf" in lines and "hidden-value" not in format_exports()


@pytest.mark.parametrize("url", ["https://me:hidden@mirror.example", "https://hidden@mirror.example/hf"])
@pytest.mark.parametrize("name", ["HF_ENDPOINT", "TRAINWRIGHT_CACHE", "TORCH_HOME"])
def test_a_url_with_a_login_does_not(name: str, url: str) -> None:
    assert capture_variables({name: url}) == {}
    assert capture_variables({name: "https://mirror.example/a@b"}) == {name: "https://mirror.example/a@b"}
