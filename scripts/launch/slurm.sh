#!/usr/bin/env bash
# Train on a SLURM cluster: one process per node, which drives all GPUs of its node.
#
#   scripts/launch/slurm.sh --nodes 4 --gpus 8 [--time 24:00:00] [--partition NAME] [--dry-run] -- RECIPE [--FLAG VALUE ...]
#
# Call this in the checkout. All nodes must see the checkout and --workdir. Two minutes before its time ends, the job gets
# SIGTERM and saves. Submit it again to continue (--resume is added). After a crash the run starts again, at most five times
# (--restart 5 is added).
set -euo pipefail

usage() { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; echo "error: $1" >&2; exit 2; }

nodes='' gpus='' time=24:00:00 partition='' dry_run=''
while (($#)); do
    case $1 in
        --nodes | --gpus | --time | --partition)
            (($# > 1)) || usage "$1 needs a value after it"
            declare "${1#--}=$2"
            shift 2 ;;
        --dry-run) dry_run=yes; shift ;;
        --) shift; break ;;
        *) usage "no option is named $1; the recipe and its flags come after --" ;;
    esac
done
[[ $nodes ]] || usage "--nodes is missing"
[[ $gpus ]] || usage "--gpus (of each node, 0 for none) is missing"
(($#)) || usage "the recipe is missing; write it after --"

job() {
    echo '#!/usr/bin/env bash'
    printf '#SBATCH --%s\n' "job-name=mupax-$1" "nodes=$nodes" ntasks-per-node=1 exclusive "time=$time" \
        signal=TERM@120 open-mode=append 'output=%x-%j.log'
    ((gpus == 0)) || echo "#SBATCH --gpus-per-node=$gpus"
    [[ ! $partition ]] || echo "#SBATCH --partition=$partition"
    # If one process fails, end the others, even if it could not tell them.
    printf 'srun --kill-on-bad-exit=1'
    printf ' %q' .venv/bin/python -u -m train "$@" --resume --restart 5
    echo
}

if [[ $dry_run ]]; then
    job "$@"
else
    job "$@" | sbatch
fi
