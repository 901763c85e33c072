from __future__ import annotations

import subprocess
import sys

import pytest

from trainwright.errors import RequestError
from trainwright.planning.trace.catalog import _index_by_id, find_model, look_up_model
from trainwright.planning.trace.request import TracedModel
from trainwright.planning.trace.traced import read_model_facts
from trainwright.planning.trace.units import ModelFacts

# As Hugging Face shows them for each repository, from the headers of its safetensors files; where those store
# a tied head twice (Qwen3), or a vision tower of 416,866,032 with its projector (Gemma 3), without these.
PUBLISHED = {
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "Qwen/Qwen3-0.6B": 751_632_384 - 155_582_464,
    "Qwen/Qwen3-1.7B": 2_031_739_904 - 311_164_928,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "Qwen/Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "google/gemma-2b": 2_506_172_416,
    "google/gemma-7b": 8_537_680_896,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-3-1b-it": 999_885_952,
    "google/gemma-3-4b-it": 4_300_079_472 - 416_866_032 - 1152 * 2561,
    "google/gemma-3-12b-it": 12_187_325_040 - 416_866_032 - 1152 * 3841,
    "google/gemma-3-27b-it": 27_432_406_640 - 416_866_032 - 1152 * 5377,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mistral-Nemo-Base-2407": 12_247_782_400,
    "mistralai/Mistral-Small-24B-Base-2501": 23_572_403_200,
    "mistralai/Mistral-Large-Instruct-2407": 122_610_069_504,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "mistralai/Mixtral-8x22B-v0.1": 140_620_634_112,
    "mistralai/Mixtral-8x22B-Instruct-v0.1": 140_630_071_296,
    "microsoft/phi-1_5": 1_418_270_720,
    "microsoft/phi-2": 2_779_683_840,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft/Phi-3-medium-4k-instruct": 13_960_238_080,
    "microsoft/phi-4": 14_659_507_200,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    "allenai/OLMo-2-0425-1B": 1_484_916_736,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
    "allenai/OLMo-2-1124-13B": 13_716_198_400,
    "allenai/OLMo-2-0325-32B": 32_234_279_936,
    "openai-community/gpt2": 124_439_808,
    "openai-community/gpt2-medium": 354_823_168,
    "openai-community/gpt2-large": 774_030_080,
    "openai-community/gpt2-xl": 1_557_611_200,
    "distilbert/distilgpt2": 81_912_576,
    "EleutherAI/pythia-14m": 14_067_712,
    "EleutherAI/pythia-31m": 30_494_720,
    "EleutherAI/pythia-70m": 70_426_624,
    "EleutherAI/pythia-160m": 162_322_944,
    "EleutherAI/pythia-410m": 405_334_016,
    "EleutherAI/pythia-1b": 1_011_781_632,
    "EleutherAI/pythia-1.4b": 1_414_647_808,
    "EleutherAI/pythia-2.8b": 2_775_208_960,
    "EleutherAI/pythia-6.9b": 6_857_302_016,
    "EleutherAI/pythia-12b": 11_846_072_320,
    "bigcode/starcoder2-3b": 3_030_371_328,
    "bigcode/starcoder2-7b": 7_173_923_840,
    "bigcode/starcoder2-15b": 15_957_889_024,
    "CohereForAI/c4ai-command-r-v01": 34_980_831_232,
    "CohereForAI/aya-23-8B": 8_028_033_024,
    "ibm-granite/granite-3.1-2b-base": 2_533_531_648,
    "ibm-granite/granite-3.1-8b-base": 8_170_848_256,
    "huggyllama/llama-7b": 6_738_415_616,
    "huggyllama/llama-30b": 32_528_943_616,
    "huggyllama/llama-65b": 65_285_660_672,
    "codellama/CodeLlama-34b-hf": 33_743_970_304,
    "01-ai/Yi-6B": 6_061_035_520,
    "01-ai/Yi-1.5-9B": 8_829_407_232,
    "01-ai/Yi-34B": 34_388_917_248,
    "deepseek-ai/deepseek-llm-7b-base": 6_910_365_696,
    "deepseek-ai/deepseek-coder-6.7b-base": 6_740_512_768,
    "tiiuae/Falcon3-1B-Base": 1_669_408_768,
    "tiiuae/Falcon3-7B-Base": 7_455_550_464,
    "Qwen/Qwen1.5-0.5B": 463_987_712,
    "Qwen/Qwen1.5-7B": 7_721_324_544,
    "Qwen/Qwen1.5-14B": 14_167_290_880,
    "mistralai/Ministral-8B-Instruct-2410": 8_019_808_256,
    "mistralai/Codestral-22B-v0.1": 22_247_282_688,
    "google/gemma-3-270m": 268_098_176,
    "EleutherAI/gpt-neox-20b": 20_554_567_680,
    "CohereForAI/c4ai-command-r-plus": 103_810_674_688,
    "allenai/OLMoE-1B-7B-0924": 6_919_161_856,
    "microsoft/Phi-3.5-MoE-instruct": 41_873_153_344,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    # Without the buffer that balances the experts, of one number for each expert of a sparse block.
    "deepseek-ai/DeepSeek-V3": 671_026_419_200 - 58 * 256,
    "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
    "deepseek-ai/DeepSeek-V2": 235_741_434_880,
    "zai-org/GLM-4.5-Air": 106_852_251_264 - 45 * 128,
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": 480_154_875_392,
    "tiiuae/falcon-40b": 41_303_293_952,
    "tiiuae/falcon-rw-1b": 1_311_625_216,
    "mosaicml/mpt-7b": 6_649_286_656,
    "facebook/opt-125m": 125_239_296,
    "facebook/opt-6.7b": 6_658_473_984,
    "bigscience/bloom-560m": 559_214_592,
    "bigscience/bloom-7b1": 7_069_016_064,
    "EleutherAI/gpt-j-6b": 6_050_882_784,
    "stabilityai/stablelm-2-1_6b": 1_644_515_328,
    "zai-org/GLM-4-9B-0414": 9_400_279_040,
}


def facts(name: str) -> ModelFacts:
    return read_model_facts(TracedModel.of(find_model(name).config))


@pytest.mark.parametrize(
    ("name", "active"),  # billions that a token goes through, as the authors say
    [
        ("allenai/OLMoE-1B-7B-0924", 1.3),
        ("openai/gpt-oss-120b", 5.1),
        ("deepseek-ai/DeepSeek-V3", 37),
        ("deepseek-ai/DeepSeek-V2", 21),
        ("meta-llama/Llama-4-Scout-17B-16E", 17),
        ("meta-llama/Llama-4-Maverick-17B-128E", 17),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 3.5),
        ("zai-org/GLM-4.5-Air", 12.7),
    ],
)
def test_active_parameters_are_about_those_published(name: str, active: float) -> None:
    """Some count the embedding, and some do not."""
    assert facts(name).active == pytest.approx(active * 1e9, rel=0.13)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(name: str) -> None:
    assert facts(name).total == PUBLISHED[name]


@pytest.mark.slow
def test_every_entry_is_an_architecture() -> None:
    models = list(dict.fromkeys(_index_by_id().values()))
    assert len(models) > 100
    assert len({model.id.lower() for model in models}) == len(models)
    for model in models:
        assert facts(model.id).total > 1e7


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("META-LLAMA/meta-llama-3.1-8b-instruct", "meta-llama/Meta-Llama-3.1-8B-Instruct"),
        ("gpt2", "openai-community/gpt2"),
        ("Mixtral-8x7B", "mistralai/Mixtral-8x7B-v0.1"),
        ("gemma-3-4b", "google/gemma-3-4b-it"),
        ("gpt-oss-20b", "openai/gpt-oss-20b"),
        ("deepseek-ai/deepseek-r1", "deepseek-ai/DeepSeek-R1"),
        ("Qwen/Qwen3-Next-80B-A3B", "Qwen/Qwen3-Next-80B-A3B-Instruct"),
        ("OLMoE-1B-7B", "allenai/OLMoE-1B-7B-0924"),
        ("llama-7b", "huggyllama/llama-7b"),
        ("mpt-30b", "mosaicml/mpt-30b"),
    ],
)
def test_a_model_is_found_by_the_names_people_use(written: str, found: str) -> None:
    assert find_model(written).id == found


def test_what_differs_in_an_instruct_variant_is_kept() -> None:
    base, instruct = facts("Qwen2.5-7B"), facts("Qwen2.5-7B-Instruct")
    assert (base.positions, instruct.positions) == (131072, 32768)
    assert base.total == instruct.total
    assert (facts("Qwen3-8B").positions, facts("Qwen3-8B-Base").positions) == (40960, 32768)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        *((f"open-unlearning/tofu_{model}_{split}", f"meta-llama/{model}")
          for model in ("Llama-2-7b-chat-hf", "Llama-3.1-8B-Instruct", "Llama-3.2-1B-Instruct", "Llama-3.2-3B-Instruct")
          for split in ("full", "retain90", "retain95", "retain99")),
        *((f"muse-bench/MUSE-{corpus}_{kind}", "meta-llama/Llama-2-7b-hf")
          for corpus in ("News", "Books") for kind in ("target", "retrain")),
        ("locuslab/tofu_ft_llama2-7b", "meta-llama/Llama-2-7b-chat-hf"),
        ("locuslab/tofu_ft_phi-1.5", "microsoft/phi-1_5"),
    ],
)  # fmt: skip
def test_models_of_unlearning_benchmarks_are_planned_like_those_they_were_trained_from(
    name: str, published: str
) -> None:
    found = find_model(name)
    assert found.id == name
    assert facts(name).total == facts(published).total


def test_an_unknown_model_is_refused_with_the_nearest() -> None:
    assert look_up_model("meta-llama/Llama-3.1-9B") is None
    with pytest.raises(RequestError, match=r"did you mean meta-llama/Llama-3\.1-8B, meta-llama/Llama-3\.1-70B"):
        find_model("meta-llama/Llama-3.1-9B")
    with pytest.raises(RequestError, match=r"For other models, pass .*config\.json"):
        find_model("someone/something-else-altogether")


def test_another_organisation_is_not_taken_for_the_original() -> None:
    with pytest.raises(RequestError, match=r"did you mean meta-llama/Llama-3\.2-1B"):
        find_model("someone/Llama-3.2-1B")


def test_looking_up_imports_nothing_heavy() -> None:
    program = (
        "import sys; from trainwright.planning.trace.catalog import find_model\n"
        "from trainwright.planning.trace.request import TracedModel\n"
        "from trainwright.planning.trace.traced import read_model_facts\n"
        "read_model_facts(TracedModel.of(find_model('llama-3.1-8b').config))\n"
        "print(*{'torch', 'transformers', 'numpy', 'pydantic', 'yaml'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
