"""The model, its numbers and its data."""

from __future__ import annotations

from trainwright.diagnosis.known_error import KnownError, Role

ERRORS = (
    KnownError(
        name="loss-scale",
        title="fp16 overflows: the loss scale fell to its minimum",
        patterns=(
            r"Current loss scale already at minimum",
            r"Minimum loss scale reached",
            r"loss scale (?:is )?(?:already )?(?:at|reached|below).{0,20}minimum",
            r"Attempted loss scale: 1(?:\.0)?, reducing to 1\b",
            r"reducing loss scale to (?:0\.\d|[\d.]+e-\d)",
        ),
        in_notices=True,
        cause="In fp16 the gradients overflow in every step, so the loss scale was halved down to its minimum: the "
        "model produces values beyond 65,504, or NaN.",
        fixes=(
            "train in bf16 on GPUs that support it: train.mixed_precision: bf16; models trained in bf16 overflow in "
            "fp16",
            "lower optimizer.learning_rate, raise optimizer.warmup_steps, look for bad rows in the data",
        ),
    ),
    KnownError(
        name="not-finite",
        title="the loss or the gradients became NaN or infinite",
        patterns=(
            r"found invalid values:\s*$",
            r"^tensor\(\[+\s*nan",
            r"loss is (?:nan|inf|not finite|non-finite)",
            r"(?:non-?finite|nan|inf)\b.{0,30}(?:loss|gradient|grad norm)s?\b.{0,60}(?:detected|encountered|found|"
            r"stopping|abort)",
            r"(?:loss|gradient|grad norm).{0,40}(?:is|are|became|contains?) (?:nan|inf|not finite|non-?finite)",
            r"found NaN in local grad norm",
            r"The total norm of order .{0,20}is non-finite",
            r"Function '\w+Backward\d*' returned nan values",
            r"FloatingPointError: .{0,80}(?:NaN|nan|inf|Minimum loss scale)",
        ),
        unless=(r"Minimum loss scale",),
        role=Role.SYMPTOM,
        in_notices=True,
        cause="A value overflowed: fp16, a learning rate that is too high, bad rows (no target tokens, damaged text), "
        "or a division by zero in the loss.",
        fixes=(
            "train in bf16: train.mixed_precision: bf16",
            "lower optimizer.learning_rate, raise optimizer.warmup_steps, set optimizer.max_grad_norm: 1.0",
            "find the first step and its rows: torch.autograd.set_detect_anomaly(True); trainwright data check RECIPE",
        ),
    ),
    KnownError(
        name="not-finite-metric",
        title="a logged loss or gradient norm is NaN or infinite",
        patterns=(r"(?:loss|grad_norm|grad norm)'?\"?\s*[:=]\s*'?(?:nan|-?inf)\b",),
        role=Role.SIGN,
        in_notices=True,
        cause="A value overflowed: fp16, a learning rate that is too high, bad rows (no target tokens, damaged text), "
        "or a division by zero in the loss.",
        fixes=(
            "train in bf16: train.mixed_precision: bf16",
            "lower optimizer.learning_rate, raise optimizer.warmup_steps, set optimizer.max_grad_norm: 1.0",
            "find the first step and its rows: torch.autograd.set_detect_anomaly(True); trainwright data check RECIPE",
        ),
    ),
    KnownError(
        name="unused-parameters",
        title="DDP waits for gradients of parameters that were not used",
        patterns=(
            r"Expected to have finished reduction in the prior iteration",
            r"find_unused_parameters=True",
            r"parameters that were not used in producing loss",
            r"Parameter indices which did not receive grad",
        ),
        unless=(r"find_unused_parameters=True was specified in DDP constructor",),
        cause="Some parameters got no gradient on a rank, so the reduction of the step never finished.",
        fixes=(
            "freeze what is not used (requires_grad_(False)), or make the loss depend on every parameter",
            "otherwise DistributedDataParallel(find_unused_parameters=True) (ddp_find_unused_parameters in Hugging "
            "Face arguments); TORCH_DISTRIBUTED_DEBUG=DETAIL names the parameters",
        ),
    ),
    KnownError(
        name="marked-ready-twice",
        title="DDP got a gradient twice in one step",
        patterns=(
            r"Expected to mark a variable ready only once",
            r"has been marked as ready twice",
        ),
        cause="A parameter was used in several backward passes of a step: reentrant activation checkpointing, or a "
        "module shared by two losses.",
        fixes=(
            "use non-reentrant checkpointing: gradient_checkpointing_kwargs={'use_reentrant': False}",
            "turn find_unused_parameters off if every parameter is used; static_graph=True if the graph never changes",
        ),
    ),
    KnownError(
        name="inplace-modification",
        title="a tensor that the backward pass needs was modified in place",
        patterns=(r"has been modified by an inplace operation", r"a leaf Variable that requires grad .{0,40}in-place"),
        cause="An in-place operation changed an activation or parameter between forward and backward; with DDP also a "
        "buffer that is broadcast in a second forward.",
        fixes=(
            "replace in-place operations (x += y, relu_(), x[...] = y) on tensors with gradients by out-of-place ones",
            "with several forward passes per step: DistributedDataParallel(broadcast_buffers=False)",
        ),
    ),
    KnownError(
        name="backward-twice",
        title="the graph was used for backward a second time",
        patterns=(r"Trying to backward through the graph a second time",),
        cause="Tensors kept from an earlier step (a state, an accumulated loss) still hold its graph.",
        fixes=("detach tensors that are kept between steps: state = state.detach(); total += loss.item()",),
    ),
    KnownError(
        name="no-gradient",
        title="nothing in the loss requires a gradient",
        patterns=(
            r"No inf checks were recorded for this optimizer",
            r"optimizer got an empty parameter list",
            r"element 0 of tensors does not require grad",
            r"None of the inputs have requires_grad=True\. Gradients will be None.{0,5}$",
            r"does not require grad and does not have a grad_fn",
        ),
        unless=(r"UserWarning|warnings\.warn",),
        cause="All parameters on the path to the loss are frozen. With adapters and activation checkpointing the "
        "inputs of the checkpointed blocks have no gradient, so reentrant checkpointing drops the graph.",
        fixes=(
            "before training: model.enable_input_require_grads(), or gradient_checkpointing_kwargs={'use_reentrant': "
            "False}",
            "check that something is trainable: model.print_trainable_parameters(); is the adapter loaded with "
            "is_trainable=True, and is the loss computed outside of torch.no_grad()?",
        ),
    ),
    KnownError(
        name="fsdp-mixed-requires-grad",
        title="FSDP cannot flatten frozen and trainable parameters together",
        patterns=(
            r"Must flatten tensors with uniform `?requires_grad`?",
            r"FlatParameter`? requires uniform `?requires_grad",
            r"uniform `?requires_grad`? .{0,60}use_orig_params",
        ),
        cause="The first FSDP flattens all parameters of a block; with adapters some of them are frozen.",
        fixes=(
            "FullyShardedDataParallel(use_orig_params=True) (fsdp_use_orig_params: true), or a wrapping policy that "
            "separates adapters",
            "use FSDP2 (fully_shard), which has no flat parameters; Trainwright's parallel.strategy: fsdp is FSDP2",
        ),
    ),
    KnownError(
        name="fsdp-mixed-dtype",
        title="FSDP needs one data type for all parameters of a block",
        patterns=(
            r"Must flatten tensors with (?:the same|uniform) (?:d?type|dtype)",
            r"FSDP expects uniform original parameter dtype",
            r"FlatParameter`? requires uniform `?dtype",
            r"Cannot flatten integer dtype tensors",
        ),
        cause="A block has parameters of several types: a model in bf16 with adapters or norms in fp32, or quantized "
        "weights stored as integers.",
        fixes=(
            "cast the model to one type before wrapping: model.to(torch.bfloat16)",
            "for quantized bases: bnb_4bit_quant_storage=torch.bfloat16, equal to the type of the other parameters",
        ),
    ),
    KnownError(
        name="mixed-dtype",
        title="two tensors of one operation have different data types",
        patterns=(
            r"expected (?:m1 and m2|mat1 and mat2|scalar type|both) .{0,40}(?:same dtype|but found|to have the same)",
            r"mat1 and mat2 must have the same dtype",
            r"expected scalar type \w+ but found \w+",
            r"Expected query, key, and value to have the same dtype",
            r"Input type \(.{0,40}\) and (?:weight|bias) type \(.{0,40}\) should be the same",
            r"\"\w+\" not implemented for '(?:BFloat16|Half|Float8\w*|Long|Int|Char|Bool)'",
            r"Attempting to unscale FP16 gradients",
            r"self and mat2 must have the same dtype",
            r"Index put requires the source and destination dtypes match",
            r"result type \w+ can't be cast to",
            r"query and key must have the same dtype",
        ),
        unless=(r"torch\.cuda\.\w+Tensor\) and weight type \(torch\.(?!cuda)",),
        cause="Weights, inputs or adapters were loaded in different precisions (bf16, fp16, fp32), or the operation "
        "has no implementation for the type on this device.",
        fixes=(
            "load the weights in fp32 and let train.mixed_precision: bf16 cast (autocast), or cast everything to one "
            "type",
            'trained weights must not be fp16 ("Attempting to unscale FP16 gradients"): load them in fp32 or bf16',
            "move modules that stay in fp32 (norms, heads) into autocast, or cast their inputs",
        ),
    ),
    KnownError(
        name="bf16-unsupported",
        title="this GPU does not support bf16",
        patterns=(
            r"Your setup doesn't support bf16",
            r"bf16 (?:is )?(?:not supported|requires|unsupported)",
            r"Bfloat16 is only supported on GPUs with compute capability of at least 8\.0",
            r"BF16 Mixed precision is only supported on",
            r"Current accelerator does not support bf16|Type 'bf16' is not supported on your device",
            r"bf16 mixed precision requires",
            r"fp8 mixed precision requires .{0,60}(?:Hopper|compute capability)|FP8 .{0,40}requires compute capability",
        ),
        cause="bf16 needs a GPU of compute capability 8.0 or higher (Ampere); fp8 needs 8.9 or higher.",
        fixes=(
            "use fp16 on older GPUs: train.mixed_precision: fp16, or auto to have it chosen",
            "if the GPU is new enough, torch does not see it: check nvidia-smi and torch.cuda.is_available()",
        ),
    ),
    KnownError(
        name="batch-settings",
        title="batch sizes do not multiply to the global batch",
        patterns=(
            r"Check batch related parameters\. train_batch_size is not equal",
            r"train_batch_size .{0,80}(?:is not equal|not divisible)",
            r"global[_ ]batch[_ ]size.{0,80}(?:not divisible|must be divisible|is not consistent)",
            r"batch size .{0,60}(?:not|must be) divisible by",
            r"world size.{0,60}is not divisible by",
            r"Please correct the following DeepSpeed config values that mismatch TrainingArguments",
        ),
        cause="Global batch = micro-batch x accumulation steps x processes, and the given numbers contradict it, "
        "often after a change of the number of GPUs.",
        fixes=(
            "give the global batch and leave the rest to be computed: train.global_batch_size with "
            'train.micro_batch_size: auto; in DeepSpeed\'s configuration use "auto"',
            "keep the number of processes a divisor of the global batch and a multiple of the model-parallel sizes",
        ),
    ),
    KnownError(
        name="shapes",
        title="shapes of tensors do not fit",
        patterns=(
            r"shape mismatch: value tensor",
            r"Given groups=\d+, weight of size",
            r"Target size .{0,40}must be the same as input size",
            r"mat1 and mat2 shapes cannot be multiplied",
            r"The size of tensor a \(\d+\) must match the size of tensor b",
            r"shape '\[.{0,60}\]' is invalid for input of size",
            r"Sizes of tensors must match except in dimension",
            r"stack expects each tensor to be equal size",
            r"The expanded size of the tensor .{0,60}must match the existing size",
            r"Expected input batch_size \(\d+\) to match target batch_size",
            r"Unable to create tensor, you should probably activate truncation and/or padding",
            r"expected sequence of length \d+ at dim \d+",
            r"CheckpointError: torch\.utils\.checkpoint: .{0,80}(?:different|recomputed)",
            r"Recomputed values for the following tensors have different metadata",
            r"weight' must be 2-D|'weight' must be 2-D",
        ),
        role=Role.SYMPTOM,
        cause="Rows of different lengths were batched without padding, a layer got an input of another width, or a "
        "sharded or quantized weight was used outside of its module (ZeRO-3: 'weight' must be 2-D).",
        fixes=(
            "pad and truncate: a data collator with padding, data.max_length for the longest row",
            "compare the two shapes of the message with the configuration of the model",
            "with ZeRO-3 or FSDP use parameters only inside of the forward of their own module",
        ),
    ),
    KnownError(
        name="padding-token-missing",
        title="the tokenizer has no padding token",
        patterns=(
            r"does not have a (?:padding|pad)[_ ]token",
            r"Asking to pad but the tokenizer does not have a padding token",
            r"Cannot handle batch sizes > 1 if no padding token is defined",
            r"tokenizer\.pad_token .{0,60}(?:is None|must be|not set)",
            r"`?pad_token_id`? .{0,40}(?:is None|must be defined|not defined)",
        ),
        cause="Rows of a batch are padded to one length, and this tokenizer defines no token for it.",
        fixes=(
            "set one: tokenizer.pad_token = tokenizer.eos_token, and model.config.pad_token_id = "
            "tokenizer.pad_token_id",
            "or pack rows instead of padding, as Trainwright does",
        ),
    ),
    KnownError(
        name="chat-template-missing",
        title="the tokenizer has no chat template, or the template rejects the messages",
        patterns=(
            r"tokenizer\.chat_template is not set",
            r"no (?:default )?chat[_ ]template|does not have a chat template",
            r"Cannot use chat template functions because",
            r"Conversation roles must alternate",
            r"jinja2\.exceptions\.(?:TemplateError|UndefinedError|TemplateSyntaxError)",
            r"System role not supported",
        ),
        cause="Base models have no template for conversations; others reject a system message, or consecutive turns "
        "of one role.",
        fixes=(
            "train an instruction-tuned model, or give a template: tokenizer.chat_template = ... (chat_template_path)",
            "merge the system message into the first turn; let user and assistant alternate",
        ),
    ),
    KnownError(
        name="data-format",
        title="a data file does not have the expected format",
        patterns=(
            r"DatasetGenerationError|DatasetGenerationCastError",
            r"All the data files must have the same columns",
            r"pyarrow\.lib\.ArrowInvalid",
            r"JSONDecodeError|JSON parse error",
            r"Couldn't (?:cast array of type|cast)",
            r"Column .{0,60}not in the dataset|column names? .{0,60}(?:don't|do not) match",
            r"No columns in the dataset match the model's forward method signature",
            r"KeyError: '(?:text|messages|prompt|completion|input_ids|labels|chosen|rejected|instruction|"
            r"conversations)'",
            r"UnicodeDecodeError",
        ),
        role=Role.SYMPTOM,
        cause="A file is not valid JSON or UTF-8, files of one data set differ in columns or types, or the expected "
        "column is missing.",
        fixes=(
            "check every row with its file and line: trainwright data check FILE",
            "name columns as the program expects (messages, or prompt and completion, or text)",
        ),
    ),
    KnownError(
        name="model-spread-over-devices",
        title="the model was placed on several devices by device_map",
        patterns=(
            r"Some modules are dispatched on the CPU or the disk",
            r"You can't train a model that has been loaded (?:in|with)",
            r"not compatible with `?low_cpu_mem_usage=True`? or with passing a `?device_map`?",
            r"You shouldn't move a model that is dispatched using accelerate hooks",
        ),
        unless=(r"when it is dispatched on multiple devices",),
        cause="device_map='auto' spreads one copy of the model over all GPUs, the CPU and the disk; training in "
        "several processes needs a copy or a shard in each.",
        fixes=(
            "load without device_map, or with device_map={'': int(os.environ['LOCAL_RANK'])} for quantized models",
            "if it does not fit one GPU: parallel.strategy: fsdp or zero3",
        ),
    ),
    KnownError(
        name="quantized-weights-not-trainable",
        title="quantized weights cannot be trained without adapters",
        patterns=(
            r"You cannot perform fine-tuning on purely quantized models",
            r"only Tensors of floating point (?:and complex )?dtype can require gradients",
        ),
        role=Role.SYMPTOM,
        cause="Weights stored as integers have no gradients.",
        fixes=(
            "attach adapters: model.adapter in Trainwright, get_peft_model elsewhere; or load the weights unquantized",
        ),
    ),
    KnownError(
        name="adapter-targets",
        title="the adapter's target modules are not in the model",
        patterns=(r"Target modules? .{0,200}not found in the base model", r"Please specify `?target_modules`?"),
        cause="The adapter's target names are those of another architecture.",
        fixes=("print the names: [n for n, m in model.named_modules()]; or target_modules='all-linear'",),
    ),
    KnownError(
        name="meta-tensors",
        title="weights were never loaded",
        patterns=(r"Cannot copy out of meta tensor; no data", r"Tensor on device meta is not on the expected device"),
        cause="Parameters are still on the meta device: the checkpoint lacks them, or a rank that should receive them "
        "from rank 0 does not.",
        fixes=(
            "check the names in the checkpoint against model.state_dict(); with FSDP: sync_module_states=True",
            "materialize first: model.to_empty(device=...) and then load",
        ),
    ),
    KnownError(
        name="mixed-tensor-kinds",
        title="an operation mixes a plain and a sharded tensor",
        patterns=(r"got mixed torch\.Tensor and DTensor",),
        cause="An operation combines a parameter that FSDP2 or tensor parallelism shards (a DTensor) with a plain "
        "tensor: a part of the model was not wrapped, or the operation runs outside of the module's forward.",
        fixes=("wrap every part of the model, or use tensor.full_tensor() or distribute_tensor for one of the two",),
    ),
    KnownError(
        name="wrap-class",
        title="the class to wrap is not in the model",
        patterns=(r"Could not find the transformer (?:layer )?class",),
        cause="The name of the block's class is that of another architecture.",
        fixes=("let the program choose: parallel.wrap: auto; or print(model) and take the name of its blocks",),
    ),
    KnownError(
        name="quantized-model-moved",
        title="a quantized model cannot be moved or cast",
        patterns=(r"`?\.to`? is not supported for `?[48]-bit", r"Calling `?cuda\(\)`? is not supported for `?[48]-bit"),
        cause="Weights in 4 or 8 bits are put on their device when they are loaded.",
        fixes=("leave out .to() and .cuda(); give the device when loading: device_map={'': 0}",),
    ),
    KnownError(
        name="parallel-sizes",
        title="the model cannot be split into this many parts",
        patterns=(
            r"(?:num_layers|num_(?:attention_)?heads|heads|hidden_size|vocab\w*|sequence length|seq_?len\w*).{0,80}"
            r"(?:divisible by|not divisible|multiple of).{0,80}(?:parallel|world|tp_size|pp_size|cp_size|degree)",
            r"world_?size.{0,60}(?:not|must be|should be) divisible by.{0,80}parallel",
        ),
        cause="Tensor, pipeline and context parallelism divide the model's heads, layers or sequence evenly.",
        fixes=("choose parallel sizes that divide the numbers of heads, layers and GPUs of the message",),
    ),
)
