python train.py --n_layer=2 --n_head=16 --n_embd=1024 --init_std=0.02 --learning_rate=1e-2 --weight_decay=1e-1 \
 --mup_enabled=True --mup_width_multiplier=4.0 --mup_input_alpha=1.0 --mup_output_alpha=1.0
