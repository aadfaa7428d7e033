#!/bin/sh
# An SGLang server that drafts with eaglex:  sglang_server.sh TARGET DRAFT [more of SGLang's own flags]
# Needs sglang==0.5.17 and eaglex in one environment. eaglex's own options are in EAGLEX_OPTIONS (docs/sglang.md).
set -eu
usage="usage: sglang_server.sh TARGET DRAFT [more of SGLang's own flags]"
target=${1:?$usage} draft=${2:?$usage}
shift 2
exec python3 -m sglang.launch_server \
  --model-path "$target" \
  --speculative-algorithm EAGLEX \
  --speculative-draft-model-path "$draft" \
  --speculative-num-steps 5 \
  --speculative-eagle-topk 1 \
  --speculative-num-draft-tokens 6 \
  --enable-metrics \
  "$@"
