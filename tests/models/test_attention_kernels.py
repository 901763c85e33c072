"""The choice of the attention kernel: each limit from both of its sides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trainwright.errors import RequestError
from trainwright.models.attention.kernels import (
    CPU,
    AttentionNeeds,
    Platform,
    choose,
    describe_kernels,
    list_kernels,
    list_missing_kernels,
)

NO_PACKAGES = (
    ("flash_attn_4", "is not installed"),
    ("flash_attn_3", "is not installed"),
    ("flash_attn", "is not installed"),
)
PLAIN = AttentionNeeds(128, 128, "bf16")


def gpu(capability: tuple[int, int] = (9, 0), missing: tuple[tuple[str, str], ...] = NO_PACKAGES) -> Platform:
    return Platform("NVIDIA", capability, missing)


def taken(platform: Platform, needs: AttentionNeeds = PLAIN, **other: object) -> str:
    return choose(replace(needs, **other), platform).kernel.name  # type: ignore[arg-type]


# Without packages of others: needs, capability, and the kernel.
CASES = [
    ({}, (9, 0), "varlen"),
    ({}, (8, 0), "varlen"),
    ({}, (7, 5), "scores"),  # no kernel there computes in bf16
    ({"dtype": "fp16"}, (7, 5), "sdpa_each"),
    ({"dtype": "fp32"}, (7, 5), "sdpa_each"),
    ({"dtype": "fp32"}, (9, 0), "sdpa_each"),
    ({"dtype": "fp16"}, (12, 0), "varlen"),
    ({"size": 256, "value_size": 256}, (9, 0), "varlen"),
    ({"size": 257, "value_size": 257}, (9, 0), "sdpa_each"),
    ({"size": 512, "value_size": 512}, (9, 0), "sdpa_each"),
    ({"size": 20, "value_size": 20}, (9, 0), "varlen"),  # padded to 24
    ({"size": 192, "value_size": 128}, (9, 0), "varlen"),  # values padded
    ({"size": 64, "value_size": 96}, (9, 0), "varlen"),  # queries and keys padded
    ({"size": 64, "value_size": 264}, (9, 0), "sdpa_each"),
    ({"size": 192, "value_size": 192}, (8, 6), "varlen"),
    ({"size": 193, "value_size": 193}, (8, 6), "sdpa_each"),
    ({"size": 224, "value_size": 224}, (8, 9), "sdpa_each"),
    ({"size": 225, "value_size": 225}, (8, 9), "varlen"),
    ({"size": 224, "value_size": 224}, (8, 0), "varlen"),
    ({"size": 200, "value_size": 200}, (12, 0), "sdpa_each"),
    ({"window": True}, (9, 0), "varlen"),
    ({"window": True, "dtype": "fp32"}, (9, 0), "flex"),
    ({"window": True, "dtype": "fp32"}, (7, 5), "scores"),
    ({"softcap": True}, (9, 0), "flex"),
    ({"softcap": True}, (7, 5), "scores"),
    ({"softcap": True, "size": 256, "value_size": 256}, (8, 0), "flex"),
    ({"softcap": True, "size": 512, "value_size": 512}, (8, 0), "scores"),
    ({"sinks": True, "window": True}, (9, 0), "flex"),
    ({"sinks": True, "dropout": True}, (9, 0), "scores"),
    ({"dropout": True}, (9, 0), "sdpa_each"),
    ({"dropout": True, "window": True}, (9, 0), "scores"),
    ({"deterministic": True}, (9, 0), "varlen"),
]


@pytest.mark.parametrize(("needs", "capability", "kernel"), CASES)
def test_with_torch_alone(needs: dict[str, object], capability: tuple[int, int], kernel: str) -> None:
    assert taken(gpu(capability), **needs) == kernel


@pytest.mark.parametrize(
    ("needs", "capability", "kernel"),
    [
        ({}, (9, 0), "flash_attn_3"),
        ({}, (8, 9), "varlen"),
        ({}, (10, 0), "flash_attn_4"),
        ({"window": True}, (10, 3), "flash_attn_4"),
        ({"size": 20, "value_size": 20}, (10, 0), "flash_attn_4"),
        ({"size": 136, "value_size": 136}, (10, 0), "varlen"),
        ({"size": 192, "value_size": 128}, (10, 0), "varlen"),
        ({"softcap": True}, (10, 0), "flash_attn"),
        ({"dropout": True}, (10, 0), "flash_attn"),
        ({}, (12, 0), "varlen"),
        ({"dtype": "fp32"}, (9, 0), "sdpa_each"),
        ({"softcap": True}, (9, 0), "flash_attn_3"),
        ({"softcap": True}, (8, 0), "flash_attn"),
        ({"softcap": True, "dropout": True}, (8, 0), "scores"),
        ({"dropout": True}, (9, 0), "flash_attn"),
        ({"dropout": True, "window": True}, (9, 0), "flash_attn"),
        ({"sinks": True}, (9, 0), "flex"),
        ({"size": 192, "value_size": 128, "deterministic": True}, (9, 0), "flash_attn_3"),
        ({"size": 256, "value_size": 256}, (9, 0), "flash_attn_3"),
        ({"size": 256, "value_size": 256, "deterministic": True}, (9, 0), "varlen"),
    ],
)
def test_with_all_packages(needs: dict[str, object], capability: tuple[int, int], kernel: str) -> None:
    assert taken(gpu(capability, ()), **needs) == kernel


def test_without_a_compiler_there_is_no_flex_attention() -> None:
    chosen = choose(replace(PLAIN, softcap=True), gpu(missing=(*NO_PACKAGES, ("flex", "needs a C compiler"))))
    assert chosen.kernel.name == "scores"
    assert dict(chosen.refused)["torch's flex_attention"] == "needs a C compiler"


def test_the_capability_of_an_amd_gpu_is_not_one_of_nvidia() -> None:
    assert taken(Platform("AMD", (9, 0))) == "varlen"
    assert taken(Platform("AMD", (9, 0)), softcap=True) == "scores"
    assert taken(Platform("AMD", (12, 0)), size=200, value_size=200) == "varlen"


def test_an_intel_gpu_has_the_kernels_that_torch_has_on_it() -> None:
    intel = Platform("Intel", (20, 1))
    assert (taken(intel), taken(intel, dropout=True), taken(intel, sinks=True)) == ("sdpa_each", "sdpa_each", "scores")
    with pytest.raises(RequestError, match=r"varlen flash attention does not run on GPUs of Intel"):
        choose(PLAIN, replace(intel, attention="varlen"))


@pytest.mark.parametrize(
    ("size", "capability", "kernel"),
    [
        (192, (8, 6), "flash_attn"),
        (256, (8, 6), "sdpa_each"),
        (256, (12, 0), "sdpa_each"),
        (256, (8, 0), "flash_attn"),
    ],
)
def test_dropout_in_wide_heads_does_not_fit_into_small_shared_memory(
    size: int, capability: tuple[int, int], kernel: str
) -> None:
    assert taken(gpu(capability, ()), size=size, value_size=size, dropout=True) == kernel


@pytest.mark.parametrize(
    ("kernel", "widths", "padded"),
    [
        ("varlen", (20, 20), (24, 24)),
        ("varlen", (192, 128), (192, 192)),
        ("sdpa_each", (20, 36), (24, 40)),
        ("flex", (8, 24), (16, 32)),
        ("scores", (20, 36), (20, 36)),
    ],
)
def test_heads_are_padded_to_what_a_kernel_takes(kernel: str, widths: tuple[int, int], padded: tuple[int, int]) -> None:
    assert next(one for one in list_kernels() if one.name == kernel).widths(*widths) == padded


@pytest.mark.parametrize(
    ("needs", "kernel"),
    [
        ({}, "cpu_flash"),
        ({"value_size": 64}, "scores"),
        ({"window": True}, "scores"),
        ({"dropout": True}, "scores"),
        ({"softcap": True}, "scores"),
        ({"sinks": True}, "scores"),
    ],
)
def test_on_a_cpu(needs: dict[str, object], kernel: str) -> None:
    assert taken(CPU, **needs) == kernel


@pytest.mark.parametrize(("needs", "kernel"), [({}, "sdpa"), ({"bias": True}, "sdpa"), ({"softcap": True}, "eager")])
def test_over_padded_rows(needs: dict[str, object], kernel: str) -> None:
    for platform in (CPU, gpu(), gpu((7, 5))):
        assert taken(platform, packed=False, **needs) == kernel


def test_packs_have_no_biases() -> None:
    with pytest.raises(ValueError, match="no attention kernel"):
        choose(replace(PLAIN, bias=True), gpu())


def test_the_reasons_name_every_faster_kernel() -> None:
    words = choose(replace(PLAIN, softcap=True), gpu((8, 0))).words()
    assert words == (
        "torch's flex_attention (FlashAttention-4: needs compute capability 10.0 to 10.3, this GPU has 8.0; "
        "FlashAttention-3: needs compute capability 9.0, this GPU has 8.0; "
        "torch's varlen flash attention: has no soft caps; flash-attn 2: is not installed; "
        "torch's SDPA, sequence by sequence: has no soft caps)"
    )
    old = choose(PLAIN, gpu((7, 5))).words()
    assert "torch's varlen flash attention: needs compute capability 8.0 or higher, this GPU has 7.5" in old
    wide = choose(replace(PLAIN, size=512, value_size=512), gpu()).words()
    assert "torch's varlen flash attention: needs heads of at most 256 channels, these have 512" in wide


def test_layers_with_one_kernel_share_a_line() -> None:
    both = [replace(PLAIN, window=window) for window in (False, True)]
    (line,) = describe_kernels(both, gpu())
    assert line.startswith("torch's varlen flash attention (") and "window" not in line
    plain, windowed = describe_kernels([replace(needs, dtype="fp32") for needs in both], gpu())
    assert plain.startswith("torch's SDPA, sequence by sequence (")
    assert windowed.startswith("torch's flex_attention (")
    assert windowed.endswith("), for sequences longer than the window")


def test_a_kernel_and_its_limits_are_data() -> None:
    assert len({kernel.name for kernel in list_kernels()}) == len(list_kernels())
    for packed in (True, False):
        last = [kernel for kernel in list_kernels() if kernel.packed is packed][-1]
        assert last.vendors == {"CPU", "NVIDIA", "AMD", "Intel"} and last.largest is None  # computes what no other does


@pytest.mark.parametrize(
    ("attention", "platform", "needs", "name"),
    [
        ("eager", CPU, AttentionNeeds(64, 64, "fp32"), "scores"),
        ("sdpa", CPU, AttentionNeeds(64, 64, "fp32"), "cpu_flash"),
        ("eager", CPU, AttentionNeeds(64, 64, "fp32", packed=False), "eager"),
        ("sdpa", Platform(), AttentionNeeds(64, 64, "bf16"), "sdpa_each"),
        ("flash_attention_2", Platform(), AttentionNeeds(64, 64, "bf16"), "varlen"),
        ("flash_attention_2", Platform(), AttentionNeeds(64, 64, "bf16", softcap=True), "flash_attn"),
        ("flash_attention_3", Platform(capability=(9, 0)), AttentionNeeds(64, 64, "bf16"), "flash_attn_3"),
        ("flash_attention_4", Platform(capability=(10, 0)), AttentionNeeds(64, 64, "bf16"), "flash_attn_4"),
        ("flex", Platform(), AttentionNeeds(64, 64, "bf16"), "flex"),
    ],
)
def test_the_kernel_that_a_recipe_names_is_taken(
    attention: str, platform: Platform, needs: AttentionNeeds, name: str
) -> None:
    chosen = choose(needs, replace(platform, attention=attention))
    assert chosen.kernel.name == name
    automatic = choose(needs, platform)
    if automatic.kernel is not chosen.kernel:
        assert (automatic.kernel.title, f"model.attention is {attention}") in chosen.refused


@pytest.mark.parametrize(
    ("attention", "platform", "needs", "said"),
    [
        (
            "flex",
            CPU,
            AttentionNeeds(64, 64, "fp32"),
            "flex_attention does not run on a CPU; set it to auto or eager or sdpa",
        ),
        ("flash_attention_2", Platform(), AttentionNeeds(64, 64, "fp32"), "does not compute in fp32"),
        (
            "flash_attention_3",
            Platform(),
            AttentionNeeds(64, 64, "bf16"),
            "needs compute capability 9.0, this GPU has 8.0",
        ),
        (
            "flash_attention_4",
            Platform(capability=(10, 0)),
            AttentionNeeds(192, 128, "bf16"),
            "FlashAttention-4 needs heads of at most 128 channels, these have 192; set it to auto or eager or sdpa",
        ),
        ("flash_attention_2", Platform(), AttentionNeeds(64, 64, "bf16", sinks=True), "has no sinks"),
        ("flex", Platform(), AttentionNeeds(64, 64, "bf16", packed=False), "is for packs, see data.pack_length"),
        (
            "flash_attention_3",
            Platform(capability=(9, 0), missing=(("flash_attn_3", "is not installed"),)),
            AttentionNeeds(64, 64, "bf16"),
            "FlashAttention-3 is not installed; set it to auto or eager or sdpa or flash_attention_2 or flex",
        ),
    ],
)
def test_a_kernel_that_cannot_be_is_refused_by_name(
    attention: str, platform: Platform, needs: AttentionNeeds, said: str
) -> None:
    with pytest.raises(RequestError, match=f"^model.attention: {attention} is not possible here") as refusal:
        choose(needs, replace(platform, attention=attention))
    assert said in str(refusal.value)


def test_flash_attn_4_alone_is_no_flash_attn_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fills a folder of the name of flash-attn, without the rest of it."""
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    for there in (False, True):
        if there:
            (tmp_path / "flash_attn" / "cute" / "interface.py").touch()
        list_missing_kernels.cache_clear()
        missing = dict(list_missing_kernels())
        assert missing["flash_attn"] == "is not installed"
        assert ("flash_attn_4" in missing) is not there
    list_missing_kernels.cache_clear()


def test_torch_has_the_switch_and_the_module_that_it_looks_for() -> None:
    """Of torch's own code: the names that selection relies on."""
    from torch.nn.attention import list_flash_attention_impls

    assert {"FA3", "FA4"} <= set(list_flash_attention_impls())
