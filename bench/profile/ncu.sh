#!/bin/sh
# Nsight Compute on one op, as its benchmark runs it:  bench/profile/ncu.sh OP [KERNEL_REGEX [arguments of the benchmark …]]
#   bench/profile/ncu.sh fp8_linear '_stream' --model llama-70b --rows 16
#   bench/profile/ncu.sh tree_attention '_attend' --contexts 8192 --batch 1 --nodes 64 --group 8 --kv bf16
# OP: what `specdec.ops` calls it; those that no GPU kernel has by itself are refused. KERNEL_REGEX "": the op's own kernels.
# Clocks are left as they are: the card is not ours to set. Where time goes: "Warp State"; what binds: "Speed Of Light".
set -eu
op=${1:?which op}; kernel=${2:-}; shift; [ $# -gt 0 ] && shift
cd "$(dirname "$0")/../.."
case $op in
  dense_linear | fp8_linear | fp8_fp8_linear | int4_linear) bench="kernels --op $op --replays 1"; own='_stream|fragment' ;;
  tree_attention) bench="kernels_attention --repeats 1"; own='_attend|_merge' ;;
  prefill_attention) bench="kernels_attention --repeats 1 --nodes 2048"; own='_attend|_merge' ;;
  moe_experts) bench="kernels_moe --repeats 1"; own='_sort|_gate_up|_down|_combine' ;;
  moe_route) own=_route ;;
  rms_norm | add_rms_norm) own='_norm$' ;;
  rms_norm_fp8 | add_rms_norm_fp8) own=_norm_fp8 ;;
  silu_mul) own='_silu_mul$' ;;
  silu_mul_fp8 | clamped_swiglu) own=_$op ;;
  quantize_fp8) own=_quantize ;;
  rope_write_kv) own='^_rope' ;;
  norm_rope_write_kv) own=_norm_rope ;;
  move_kv) own=_copy ;;
  coupled_verify) own=_verify ;;
  mass_cut) own='_weigh|_sieve|_find' ;;
  draft_topk) own='_race|_merge' ;;
  tree_build) own=_build ;;
  tree_walk) own=_walk ;;
  tree_layout) own=_layout ;;
  compaction_slots) own=_compact ;;
  pad_batch) own='_pad$' ;;
  gather_pairs) own=_gather ;;
  draft_layout) own=_layout ;;
  accepted_pairs) own=_pairs ;;
  draft_grow) own=_grow ;;
  *) echo "ncu.sh: no benchmark runs a GPU kernel of the op '$op'" >&2; exit 1 ;;
esac
ncu=$(command -v ncu || ls /usr/local/cuda/bin/ncu /opt/nvidia/nsight-compute/*/ncu 2>/dev/null | tail -1)
[ -n "$ncu" ] || { echo "ncu.sh: Nsight Compute (ncu) is not installed" >&2; exit 1; }
# shellcheck disable=SC2086  # the benchmark is several words
exec "$ncu" --clock-control none --graph-profiling node --launch-count 4 --kernel-name "regex:${kernel:-$own}" \
  --section SpeedOfLight --section MemoryWorkloadAnalysis --section SchedulerStats --section WarpStateStats --section Occupancy \
  --section LaunchStats "${PYTHON:-python}" -m bench.${bench:-kernels_small --ops $op --replays 1} --dry "$@"
