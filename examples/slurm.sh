#!/bin/bash
# Trains on several machines under Slurm:   sbatch examples/slurm.sh
#
# One torchrun per machine starts its ranks; the rendezvous is on the job's first machine. SIGTERM, which Slurm sends
# before the time limit, saves and ends the run; --requeue runs the same command again, which resumes it.
#SBATCH --job-name=colonnade
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --output=slurm-%j.out

set -euo pipefail

# A file system mounted on all machines under the same path.
shared=${SHARED:-/shared}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# The network interface to the other machines, if there are several: ip -brief address shows them.
#   export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
# To log NCCL's network detection at the start of a run:
#   export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET
export OMP_NUM_THREADS=8

srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node 8 \
    --max-restarts 3 \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$first:29500" \
    -m colonnade train \
    --preset llama-3-8b \
    --plan.tp 8 \
    --plan.sequence_parallel \
    --plan.dp 2 \
    --train.keep 3 \
    --data.path "$shared/corpus" \
    --runs "$shared/runs" \
    --name llama
