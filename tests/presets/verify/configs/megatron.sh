torchrun --nproc-per-node 8 pretrain_gpt.py \
  --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 \
  --position-embedding-type rope --untie-embeddings-and-output-weights \
  --use-mup --mup-base-hidden-size 256 --init-method-std 0.02 --optimizer adam --lr 3e-3 --weight-decay 0.1
