#!/usr/bin/env bash
# sbatch examples/slurm.sh [options of mxep train]: one task for each GPU of two machines; change the numbers to yours.
# The folder of the run (OUT) must be the same for all machines. A job that is requeued goes on from its last checkpoint.
#SBATCH --job-name=mxep
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --signal=TERM@300
#SBATCH --requeue
set -euo pipefail

OUT="${OUT:-runs/slurm-$SLURM_JOB_ID}"
hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
export MASTER_ADDR="${hosts%%$'\n'*}" MASTER_PORT="${MASTER_PORT:-29500}"

# Every rank is a task of its own: SIGTERM, 300 s before the time is up, reaches each of them, and they end together after the step.
srun --kill-on-bad-exit=1 bash -c '
    export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE="$SLURM_NTASKS"
    exec python3 -m mxep train "$@"' mxep --out "$OUT" --resume auto "$@"
