#!/usr/bin/env bash
# A run on the machines of a SLURM job. From the repository's root, which lies on the shared file system, as runs/ does:
#
#   MODEL=/shared/models/Qwen2.5-7B TRAINERS=2 sbatch --nodes 3 --gpus-per-node 8 cluster/slurm.sh recipes/gsm8k.py --data /shared/gsm8k
#
# The first TRAINERS machines train (1), the others serve; further settings: cluster/node.sh. The same command continues the run.
# See docs/several_machines.md. Has not run on SLURM.
#SBATCH --job-name=ttrl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.log
set -euo pipefail

cd "$SLURM_SUBMIT_DIR"
export RUN=${RUN:-$PWD/runs/$(basename "${1:?which recipe?}" .py)}
export JOB=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0} GPUS_PER_NODE=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}

address_of() {
    local address
    address=$(getent ahostsv4 "$1" | awk 'NR == 1 { print $1 }') || true
    case $address in
        "" | 127.*) address=$(hostname -I | awk '{ print $1 }') ;; # this machine, by a name that only it knows
    esac
    echo "$address"
}
NODE_ADDRESSES=$(for name in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do address_of "$name"; done)
export NODE_ADDRESSES

# All CPUs for each of them, and where one fails, all end.
exec srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 \
    bash -c 'NODE_RANK=$SLURM_NODEID exec bash cluster/node.sh "$@"' node.sh "$@"
