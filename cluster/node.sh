#!/usr/bin/env bash
# One machine's part of a run over several: it leads, trains with the one that leads, or serves. All machines run the same line;
# slurm.sh and skypilot.yaml do so. See docs/several_machines.md. Tried with stand-ins for its commands alone.
#
#   cluster/node.sh recipes/gsm8k.py --data openai/gsm8k      with, in the environment,
#
#   RUN             the run folder: an absolute path on a file system that all machines share, the same everywhere
#   MODEL           a model folder on such a file system, or a name on the hub (then HF_HOME must lie there too)
#   NODE_ADDRESSES  of all machines, in a network that is theirs alone; the first one leads
#   NODE_RANK       which of them this is, from 0
#   JOB             a name for this start of the run, the same everywhere, another one at the next start
#   TRAINERS        the first so many machines train (1), the others serve
#   GPUS_PER_NODE   trainer processes on each machine (1)
#   SERVER_GPUS     GPUs over which vLLM shares the model on each server (all); must divide its heads
#   DTYPE           of the servers, that of the run (bfloat16)
#   MAX_MODEL_LEN   of the servers (the model's)
#   PYTHON          (.venv/bin/python)
set -euo pipefail

: "${RUN:?}" "${MODEL:?}" "${NODE_ADDRESSES:?}" "${NODE_RANK:?}" "${JOB:?}"
read -ra addresses <<<"$(tr '\n' ' ' <<<"$NODE_ADDRESSES")"
trainers=${TRAINERS:-1} gpus=${GPUS_PER_NODE:-1} python=${PYTHON:-.venv/bin/python} poll=${POLL_SECONDS:-2}
servers=("${addresses[@]:trainers}")
key=$RUN.key over=$RUN.over-${JOB//[^[:alnum:]]/-}
if ((trainers < 1 || trainers > ${#addresses[@]})); then
    echo "TRAINERS is $trainers, and there are ${#addresses[@]} machines" >&2
    exit 2
fi
mkdir -p "$(dirname "$RUN")"

child=
end_child() {
    if [[ -n $child ]]; then
        kill "$child" 2>/dev/null || true
        wait "$child" 2>/dev/null || true
    fi
}
trap 'exit 143' TERM
trap 'exit 130' INT

lead() {
    trap 'end_child; touch "$over"' EXIT # the others end then
    rm -f "$over"
    if [[ ! -s $key ]]; then # beside the run folder, which may be mirrored
        (umask 077 && head -c 32 /dev/urandom | base64 | tr -dc '[:alnum:]' >"$key.new" && mv "$key.new" "$key")
    fi
    local settings=("nnodes=$trainers") urls=() address
    if ((trainers > 1)); then
        settings+=("rdzv_endpoint=${addresses[0]}:29400")
    fi
    for address in "${servers[@]}"; do
        echo "waiting for the server at $address"
        until curl --silent --fail --noproxy '*' --max-time 5 --output /dev/null "http://$address:8000/health"; do
            sleep "$poll"
        done
        urls+=("http://$address:8000")
    done
    if ((${#urls[@]})); then
        settings+=("servers=0" "joined_servers=[$(IFS=,; echo "${urls[*]}")]" "joined_key_file=$key")
    fi
    local recipe=$1
    shift
    "$python" "$recipe" --run "$RUN" --model "$MODEL" --nproc-per-node "$gpus" --set "${settings[@]}" "$@" &
    child=$!
    local status=0
    wait "$child" || status=$?
    child=
    exit "$status"
}

follow() { # "$@", until it ends or the leading machine says that all is over
    trap end_child EXIT
    until [[ -s $key || -e $over ]]; do sleep "$poll"; done
    "$@" &
    child=$!
    while [[ ! -e $over ]]; do
        if ! kill -0 "$child" 2>/dev/null; then
            local status=0
            wait "$child" || status=$?
            child=
            exit "$status"
        fi
        sleep "$poll"
    done
}

if ((NODE_RANK == 0)); then
    lead "$@"
elif ((NODE_RANK < trainers)); then
    follow "$python" -m ttrl.cli join "$RUN" --patience 86400
else
    serve=("$python" -m ttrl.cli serve "$MODEL" --host "${addresses[NODE_RANK]}" --port 8000 --key-file "$key"
        --log "$RUN.server-$NODE_RANK.log" --dtype "${DTYPE:-bfloat16}" --vllm "tensor_parallel_size=${SERVER_GPUS:-$gpus}")
    if [[ -n ${MAX_MODEL_LEN:-} ]]; then
        serve+=(--max-model-len "$MAX_MODEL_LEN")
    fi
    follow "${serve[@]}"
fi
