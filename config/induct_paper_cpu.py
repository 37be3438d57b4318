# Induction with the paper's model and lengths on a CPU: fewer steps, a smaller batch, eight keys.
#
#     python train.py config/induct_paper_cpu.py
#
# On one core of an AMD EPYC, the other busy too: 9 minutes. Eight answers right at 2-50 and 251-300
# symbols, seeds 10 and 11: 0.96, 0.40 (fot: 1.00, 0.47; tra_threshold=0.5: 0.95, 0.69).

task = 'induct'
train_length = 50
n_queries = 8                       # a denser signal; all must be right
n_layer = 4
n_head = 4
n_embd = 256
dropout = 0.0                       # so short a run has nothing to overfit
batch_size = 8
gradient_accumulation_steps = 2     # 16 in all: short sequences go together, which is faster
max_iters = 2000
learning_rate = 4e-4                # better than 1e-3 and 2e-4
beta2 = 0.95                        # in so short a run a shorter memory is steadier
log_interval = 100
eval_interval = 500
save_interval = 100
eval_n = 128
final_n = 100                       # sequences of each split and length
eval_lengths = (1, 2, 3, 4, 5, 6)   # buckets 2-50, 51-100, ..., 251-300
