#!/bin/bash
# Trains on several machines under Slurm:   sbatch examples/slurm.sh
#
# One torchrun a machine starts that machine's ranks; they meet on the job's first machine. SIGTERM, which Slurm sends
# before a time limit, saves and ends the run; --requeue and the same command then go on from there.
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

# A file system that all machines see under the same path.
shared=${SHARED:-/shared}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# The interface that leads to the other machines, where there are several: ip -brief address shows them.
#   export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
# What NCCL found of the network, at the beginning of a run:
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
