#!/usr/bin/env bash
# Train on TPU slices in GKE. Fills in jobset.yaml, or calls XPK, which makes its own JobSet.
#
#   scripts/launch/gke.sh --name RUN --image IMAGE --accelerator tpu-v5-lite-podslice --topology 16x16 --hosts 64 --chips 4
#       [--slices 2] [--claim VOLUME] [--dry-run] -- RECIPE [--FLAG VALUE ...]
#   scripts/launch/gke.sh --xpk CLUSTER --name RUN --image IMAGE --topology v5litepod-256 [--slices 2] [--dry-run] -- RECIPE ...
#
# IMAGE has the package installed. --hosts is the number in one slice, --chips the number in one host. The volume of --claim is
# mounted on /shared, where --workdir belongs. A run that fails or is preempted is started again and continues (--resume is added).
set -euo pipefail

usage() { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; echo "error: $1" >&2; exit 2; }

name='' image='' accelerator='' topology='' hosts='' chips='' slices=1 claim='' xpk='' dry_run=''
while (($#)); do
    case $1 in
        --name | --image | --accelerator | --topology | --hosts | --chips | --slices | --claim | --xpk)
            (($# > 1)) || usage "$1 needs a value after it"
            declare "${1#--}=$2"
            shift 2 ;;
        --dry-run) dry_run=yes; shift ;;
        --) shift; break ;;
        *) usage "no option is named $1; the recipe and its flags come after --" ;;
    esac
done
needed=(name image topology)
[[ $xpk ]] || needed+=(accelerator hosts chips)
for option in "${needed[@]}"; do
    [[ ${!option} ]] || usage "--$option is missing"
done
(($#)) || usage "the recipe is missing; write it after --"

train=$(printf '%q ' python -u -m train "$@" --resume)

if [[ $xpk ]]; then
    command=(xpk workload create --cluster="$xpk" --workload="$name" --docker-image="$image" --tpu-type="$topology"
        --num-slices="$slices" --max-restarts=10 --command="${train% }")
    if [[ $dry_run ]]; then
        printf '%q ' "${command[@]}"
        echo
    else
        "${command[@]}"
    fi
    exit
fi

# Values go into the template unchanged. Characters with a meaning in YAML are refused, not escaped.
filled=$(<"$(dirname "${BASH_SOURCE[0]}")/jobset.yaml")
volume='emptyDir: {}'
[[ ! $claim ]] || volume="persistentVolumeClaim: {claimName: $claim}"
for value in "$name" "$image" "$accelerator" "$topology" "$hosts" "$chips" "$slices" "$claim"; do
    [[ $value =~ ^[A-Za-z0-9./:@_-]*$ ]] || usage "$value has a character that no name here has"
done
[[ $train != *\'* ]] || usage "a flag has a quotation mark; write it without"
filled=${filled//@NAME@/$name} filled=${filled//@IMAGE@/$image} filled=${filled//@ACCELERATOR@/$accelerator}
filled=${filled//@TOPOLOGY@/$topology} filled=${filled//@HOSTS@/$hosts} filled=${filled//@CHIPS@/$chips}
filled=${filled//@SLICES@/$slices} filled=${filled//@VOLUME@/$volume} filled=${filled//@TRAIN@/${train% }}

if [[ $dry_run ]]; then
    printf '%s\n' "$filled"
else
    printf '%s\n' "$filled" | kubectl apply -f -
fi
