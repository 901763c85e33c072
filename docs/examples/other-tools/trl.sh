MODEL=HuggingFaceTB/SmolLM2-135M-Instruct

accelerate launch --num_processes 4 trl/scripts/sft.py \
    --model_name_or_path $MODEL \
    --dataset_name trl-lib/Capybara \
    --max_length 1024 \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 8 \
    --learning_rate 2.0e-5 \
    --num_train_epochs 1 \
    --assistant_only_loss \
    --eval_strategy steps --eval_steps 100 \
    --report_to wandb
