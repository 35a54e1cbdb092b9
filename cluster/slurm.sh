#!/usr/bin/env bash
# A run on the machines of a SLURM job, as a Ray cluster. From the repository's root, which lies on the shared file system, as runs/
# does, and with Ray's token in ~/.ray/auth_token (`ray get-auth-token --generate`):
#
#   sbatch --nodes 3 --gpus-per-node 8 cluster/slurm.sh recipes/gsm8k.py --data /shared/gsm8k --set nnodes=2 servers=1 device=cuda
#
# The same command continues the run. See docs/how-to/several_machines.md. Has run on SLURM 22.05, without GPUs.
#SBATCH --job-name=ttrl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.log
set -euo pipefail

cd "$SLURM_SUBMIT_DIR"
export RAY_AUTH_MODE=token
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300 RAY_py_gcs_connect_timeout_s=300 # for one another, instead of 30
export PATH=$PWD/.venv/bin:$PATH # where symmetric-run looks for `ray`
# awk reads to the end, where head would kill scontrol with SIGPIPE, and pipefail then ends the job.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | awk 'NR == 1')
# An address, and not the 127.0.1.1 that Debian gives a machine's own name; Ray does not find every name that the machine does.
head=$({ getent ahostsv4 "$first"; hostname -I | tr ' ' '\n'; } | awk '!/^127\./ && !found++ { print $1 }')
# All CPUs for each of them, and where one fails, all end.
exec srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 \
    .venv/bin/ray symmetric-run --address "$head:6379" --min-nodes "$SLURM_JOB_NUM_NODES" -- \
    .venv/bin/python "$@" --cluster auto
