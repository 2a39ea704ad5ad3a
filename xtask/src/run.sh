#!/usr/bin/env bash
# Runs what this bundle holds. It needs a Python with torch @TORCH@ and nothing of Rust.
#
#   ./run.sh [tests|examples|bench|all] [filter] [arguments for each program...]
#
# The filter is a part of a program's name. TCH_AMP_PYTHON says which Python, if not python3.
set -u

what=${1:-all}
filter=${2:-}
[ $# -gt 2 ] && shift 2 || set --

case $what in
    tests | examples | bench) kinds=$what ;;
    all) kinds="tests examples bench" ;;
    *)
        echo "usage: $0 [tests|examples|bench|all] [filter] [arguments...]" >&2
        exit 2
        ;;
esac

cd "$(dirname "$0")" || exit 2
python=${TCH_AMP_PYTHON:-python3}
print='import os, torch; print(torch.__version__.split("+")[0], os.path.dirname(torch.__file__))'
found=$("$python" -c "$print" 2>/dev/null | tail -n 1)
version=${found%% *}
torch=${found#* }
if [ "$version" != "@TORCH@" ]; then
    echo "error: this bundle needs torch @TORCH@, but $python has ${version:-no torch}:" >&2
    echo "run \`$python -m pip install torch==@TORCH@\`, or set TCH_AMP_PYTHON to a Python that has it" >&2
    exit 2
fi

libraries=$torch/lib
for folder in "$torch"/../nvidia/*/lib; do
    [ -d "$folder" ] && libraries=$libraries:$folder
done
export LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export TCH_AMP_PYTHON=$python TCH_AMP_REQUIRE_PYTHON=1 TCH_AMP_ROOT=$PWD
if nvidia-smi >/dev/null 2>&1; then
    export TCH_AMP_REQUIRE_CUDA=1
fi

run() {
    case $1 in
        # As cargo xtask bench does: one core for both sides.
        bench/*) OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $pin "bin/$@" ;;
        *) "bin/$@" ;;
    esac
}

pin=
if command -v taskset >/dev/null; then
    cores=$(taskset -cp $$ | sed 's/.*: //')
    pin="taskset -c ${cores##*[,-]}"
fi

passed=0
failed=
for kind in $kinds; do
    for program in bin/"$kind"/*"$filter"*; do
        [ -x "$program" ] || continue
        name=$kind/${program##*/}
        echo "== $name"
        if run "$name" "$@"; then
            passed=$((passed + 1))
        else
            echo "FAILED: $name (exit status $?)"
            failed="$failed $name"
        fi
    done
done

set -- $failed
for name in "$@"; do
    echo "failed: $name"
done
echo "$passed passed, $# failed"
[ $# -eq 0 ] && [ "$passed" -gt 0 ]
