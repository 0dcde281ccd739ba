#!/bin/sh
# Nsight Compute on one op, as bench.kernels runs it:  bench/profile/ncu.sh OP [KERNEL_REGEX] [bench.kernels arguments …]
#   bench/profile/ncu.sh fp8_linear '_stream' --model llama-70b --rows 16
# Clocks are left as they are: the card is not ours to set. Where time goes: "Warp State"; what binds: "Speed Of Light".
set -eu
op=${1:?which op}; kernel=${2:-.}; shift; [ $# -gt 0 ] && shift
cd "$(dirname "$0")/../.."
ncu=$(command -v ncu || ls /usr/local/cuda/bin/ncu /opt/nvidia/nsight-compute/*/ncu 2>/dev/null | tail -1)
[ -n "$ncu" ] || { echo "ncu.sh: Nsight Compute (ncu) is not installed" >&2; exit 1; }
exec "$ncu" --clock-control none --graph-profiling node --launch-count 4 --kernel-name "regex:$kernel" \
  --section SpeedOfLight --section MemoryWorkloadAnalysis --section SchedulerStats --section WarpStateStats --section Occupancy \
  --section LaunchStats "${PYTHON:-python}" -m bench.kernels --op "$op" --replays 1 --dry "$@"
