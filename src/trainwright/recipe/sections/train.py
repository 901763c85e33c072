"""The section ``train``: the length of the training, batch sizes and precision."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from trainwright.recipe.sections.fields import Auto, Count, Positive, Section, Text, Until, reject_bool

# A trace of a step has some megabytes for each rank.
_MAX_PROFILED = 20


BatchUnit = Literal["examples", "packs", "tokens"]


class ProfileSection(Section):
    """Steps that torch.profiler records."""

    steps: tuple[Count, Count] = Field(
        description="First and last step, such as [10, 12]; the first ones include compilation and the first use of "
        f"memory. At most {_MAX_PROFILED} steps."
    )

    @property
    def count(self) -> int:
        """Return how many steps are recorded."""
        return self.steps[1] - self.steps[0] + 1

    @field_validator("steps")
    @classmethod
    def _in_order(cls, steps: tuple[int, int]) -> tuple[int, int]:
        if not 0 <= steps[1] - steps[0] < _MAX_PROFILED:
            raise PydanticCustomError("steps", f"first and last step, in order, at most {_MAX_PROFILED} steps in all")
        return steps


class TrainSection(Section):
    """Length of the training, batch sizes and precision."""

    max_steps: Count | None = Field(
        None, description="Number of optimizer steps. Set only one of max_steps, epochs and max_tokens."
    )
    max_tokens: Count | None = Field(
        None, description="Number of training tokens; converted to a number of examples by their average length."
    )
    epochs: Positive | None = Field(
        None, description="Number of passes over the training rows. Default: 1, if no other length is set."
    )
    global_batch_size: Count = Field(
        16,
        description="Examples (or packs or tokens, see batch_unit) per optimizer step, over all processes and gradient "
        "accumulation, packed or not. It does not depend on the number of processes.",
    )
    batch_unit: BatchUnit = Field(
        "examples",
        description="What global_batch_size counts. packs: a step has the examples, in the order of the epoch, that "
        "fit into so many packs of data.pack_length tokens. tokens: whole examples until the next would pass so many "
        "tokens, packed or not. No step depends on the number of processes.",
    )
    initial_batch_size: Count | None = Field(
        None,
        description="Batch size of the first steps, in examples; grows to global_batch_size over batch_warmup_steps.",
    )
    batch_warmup_steps: Annotated[int, Field(ge=0), BeforeValidator(reject_bool)] = Field(
        0, description="Number of steps in which the batch size grows linearly."
    )
    micro_batch_size: Count | Auto = Field(
        "auto", description="Rows per process and forward pass: examples, or packs if data.pack_length is set."
    )
    gradient_accumulation_steps: Count | Auto = Field(
        "auto", description="Micro-batches per process and optimizer step. auto: computed from the batch sizes."
    )
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = Field(
        "auto",
        description="Precision of the computation. no: fp32. fp16: with loss scaling. auto: the fastest, as measured "
        "on a CPU, or by the capability of a GPU.",
    )
    tf32: bool = Field(
        False,
        description="Compute fp32 matrix products in TF32, with factors rounded to 10 bits, on GPUs of compute "
        "capability 8.0 or higher: several times as fast on data center GPUs. All products with mixed_precision: no, "
        "few otherwise.",
    )
    float8: Literal["no", "rowwise", "tensorwise", "mxfp8", "nvfp4"] = Field(
        "no",
        description="Compute the products of the blocks' linear layers in 8 or 4 bits: faster on NVIDIA GPUs of "
        "compute capability 8.9 or higher, above all with train.compile. rowwise: a scale for each row, gradients "
        "of weights in bf16; losses do not depend on how a batch is divided. tensorwise: a scale for each tensor, "
        "faster and less accurate; as with dropout, losses are the same on any number of processes only at the same "
        "micro-batch size. mxfp8: a scale for every 32 numbers that a product sums over, else as rowwise; nvfp4: "
        "the same backward, forward in 4 bits with a scale for every 16 numbers, the fastest and least accurate; both "
        "for compute capability 10.0 or higher. A CPU rounds the same, and is slower than in bf16.",
    )
    activation_checkpointing: Literal["auto", "none", "full", "selective"] | Annotated[int, Field(ge=2)] = Field(
        "auto",
        description="Recompute activations in the backward pass to save memory. full: in every block. n: in every "
        "n-th block. selective: all except the results of matrix products and attention. none: keep all activations.",
    )
    activation_offload: bool = Field(
        False, description="Offload the activations kept for the backward pass to the host's memory."
    )
    compile: bool | Auto = Field("auto", description="Compile the model's blocks with torch.compile.")
    deterministic: bool = Field(
        False,
        description="Use only deterministic kernels, so that a repeated or resumed run on the same GPUs is "
        "bit-identical. Otherwise the backward pass of attention, among others, adds in no fixed order on a GPU, and "
        "such runs are equal up to rounding. Slower on GPUs. Runs on a CPU are always bit-identical.",
    )
    replan: Literal["offer", "auto"] = Field(
        "offer",
        description="What to do if the first steps differ from the plan and another strategy or number of processes "
        "is expected to be over 20 % faster. offer: print a suggestion. auto: switch after the next checkpoint, in "
        "the same run.",
    )
    gradient_noise_scale: Count | None = Field(
        None,
        description="Estimate the gradient noise scale every N steps: the batch size, in examples, above which "
        "larger batches give diminishing returns (arXiv 1812.06162, appendix A.1). Each estimate costs half a step.",
    )
    skip_loss_spikes: Positive | None = Field(
        None,
        description="A loss more than this many standard deviations above the mean of previous steps is a spike: the "
        "update of its step is skipped, or what faults.on_loss_spike says. null: no loss is a spike.",
    )
    max_loss: Positive | None = Field(
        None,
        description="End the run with exit code 4, before the update, if the loss of max_loss_steps steps in a row is "
        "above this. null: no limit.",
    )
    max_loss_steps: Count = Field(
        3, description="Number of steps with a loss above max_loss, in a row, that end the run."
    )
    neftune_noise_alpha: Positive | None = Field(
        None,
        description="NEFTune: in training, add noise to the embeddings of a sequence of L tokens and H numbers each, "
        "uniform in +-alpha / sqrt(L * H) (arXiv 2310.05914; 5 is usual). As with dropout, losses are the same on any "
        "number of processes at the same micro-batch size.",
    )
    fork: Text | None = Field(
        None,
        description="Start from a checkpoint of another run: RUN or RUN@STEP, a run's directory and a step (otherwise "
        "the newest); short: --fork. Takes the weights, and the optimizer's state if the optimizer and the trained "
        "parameters are the same. With the same batches (rows, order, seed and batch size) the run goes on behind that "
        "step; otherwise it begins at step 0. Resolved with the checkpoint's checksum.",
    )
    profile: ProfileSection | None = Field(
        None,
        description="Record these steps with torch.profiler, on every rank: a trace for ui.perfetto.dev in the "
        "directory profile of the run, with the phases of each rank, a table of the slowest operators in the report, "
        "and on GPUs a snapshot of the memory.",
    )
    step_policies: list[Text] = Field(
        [],
        description="Step policies of installed packages by name, or module:Name. A policy may skip an update, "
        "recompute gradients or add metrics.",
    )
    seed: Annotated[int, Field(ge=0, lt=2**32), BeforeValidator(reject_bool)] = Field(
        0,
        description="Seed of the validation split, the order of the examples, dropout and the initialization of "
        "weights.",
    )

    @property
    def end(self) -> Until:
        """The end of a run whose length is a number of steps or of tokens."""
        return Until(self.max_tokens or 0, "tokens") if self.max_steps is None else Until(self.max_steps, "steps")

    @model_validator(mode="before")
    @classmethod
    def _one_epoch_unless_told(cls, values: Any) -> Any:
        lengths = "max_steps", "epochs", "max_tokens"
        if isinstance(values, dict) and all(values.get(key) is None for key in lengths):
            return {**values, "epochs": 1.0}
        return values
