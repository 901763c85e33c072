"""GPT-2 in plain torch at its best, started by bench/gpu_peers.py: compiled, bf16 by autocast, fused AdamW.

Usage: python gpu_plain_gpt.py JOB.json, where the job names the sizes of the model, the texts, the tokens of a row, the
rows of a step and of a micro-batch, and the file for the result. The model is that of support/plain_gpt.py, after
nanoGPT's (karpathy/nanoGPT, MIT).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))
from support.plain_gpt import PlainGPT


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    sizes, rows, length = job["sizes"], job["micro_batch"], job["pack"]
    with device:
        model = PlainGPT(sizes["vocab_size"], length, sizes["layers"], sizes["heads"], sizes["width"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    run = torch.compile(model) if on_gpu else model
    text = "".join(json.loads(line)["text"] for line in Path(job["texts"]).read_text().splitlines())
    ids = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    ends, losses = [], []
    accumulation = job["packs"] // rows
    for _ in range(job["steps"]):
        total = torch.zeros((), device=device)
        for _ in range(accumulation):
            starts = torch.randint(len(ids) - length, (rows,))
            batch = torch.stack([ids[start : start + length + 1] for start in starts.tolist()])
            batch = (batch.pin_memory() if on_gpu else batch).to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16):
                loss = run(batch[:, :-1], batch[:, 1:]) / accumulation
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(total))  # waits for the device
        ends.append(time.time())
    result = {
        "started": job["started"],
        "step_ends": ends,
        "tokens": [job["packs"] * length] * job["steps"],
        "losses": losses,
        "memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "settings": {"compile": on_gpu, "micro_batch": rows},
        "versions": {"torch": torch.__version__},
    }
    Path(job["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
