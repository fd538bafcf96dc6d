#!/usr/bin/env bash
# Train on a Cloud TPU VM slice of any number of hosts. Copies the committed checkout to all hosts and starts the run on each.
#
#   scripts/launch/tpu_vm.sh --tpu NAME --zone ZONE [--project NAME] [--dry-run] -- RECIPE [--FLAG VALUE ...]
#
# --workdir must be a bucket (gs://...) or a folder that all hosts share. Call this again to continue a run (--resume is added).
# After a crash the run starts again, at most five times (--restart 5 is added).
set -euo pipefail

usage() { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; echo "error: $1" >&2; exit 2; }

tpu='' zone='' project='' dry_run=''
while (($#)); do
    case $1 in
        --tpu | --zone | --project)
            (($# > 1)) || usage "$1 needs a value after it"
            declare "${1#--}=$2"
            shift 2 ;;
        --dry-run) dry_run=yes; shift ;;
        --) shift; break ;;
        *) usage "no option is named $1; the recipe and its flags come after --" ;;
    esac
done
[[ $tpu ]] || usage "--tpu is missing"
[[ $zone ]] || usage "--zone is missing"
(($#)) || usage "the recipe is missing; write it after --"

where=("--zone=$zone" --worker=all)
[[ ! $project ]] || where+=("--project=$project")

run() {
    if [[ $dry_run ]]; then
        printf '%q ' "$@"
        echo
    else
        "$@"
    fi
}

# uv installs Python 3.12; the images have an older Python.
install='rm -rf mupax && mkdir mupax && tar xzf mupax.tar.gz -C mupax && cd mupax && python3 -m pip install -q --user uv'
install+=' && ~/.local/bin/uv venv -q --python 3.12 --seed ~/mupax-venv --allow-existing'
install+=' && ~/.local/bin/uv pip install -q --python ~/mupax-venv/bin/python -r requirements.txt -e ".[tpu,gcs]"'
train="cd mupax && exec ~/mupax-venv/bin/python -u -m train$(printf ' %q' "$@" --resume --restart 5)"

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
run git archive --format=tar.gz --output=mupax.tar.gz HEAD
run gcloud compute tpus tpu-vm scp mupax.tar.gz "$tpu:mupax.tar.gz" "${where[@]}"
run gcloud compute tpus tpu-vm ssh "$tpu" "${where[@]}" --command="$install"
run gcloud compute tpus tpu-vm ssh "$tpu" "${where[@]}" --command="$train"
