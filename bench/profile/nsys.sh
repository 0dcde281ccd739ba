#!/bin/sh
# Nsight Systems over a steady stretch of decoding:  bench/profile/nsys.sh OUT [bench.decode arguments …]
#   bench/profile/nsys.sh decode --model llama-3.1-8b --batch 1
# Writes OUT.nsys-rep and prints the kernels by time. Where nsys is missing or cannot report, bench/profile/step.py traces the same steps.
set -eu
out=${1:?where to}; shift
cd "$(dirname "$0")/../.."
command -v nsys >/dev/null || { echo "nsys.sh: Nsight Systems (nsys) is not installed; python -m bench.profile.step writes a trace without it" >&2; exit 1; }
nsys profile --force-overwrite true --trace cuda,nvtx --cuda-graph-trace node --output "$out" "${PYTHON:-python}" -m bench.decode --steps 24 "$@"
exec nsys stats --report cuda_gpu_kern_sum --format table "$out.nsys-rep"
