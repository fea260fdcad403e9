#!/usr/bin/env bash
# On the GPU machine:  bash FOLDER/take.sh FOLDER   keeps the parts in FOLDER/torch and FOLDER/vllm for setup.sh.
set -euo pipefail
parts=${OVERLAY_PARTS:-/tmp/overlay-parts}
mkdir -p "$parts"
for part in "$1"/*/part.*; do
  mkdir -p "$parts/$(basename "$(dirname "$part")")"
  mv "$part" "$parts/$(basename "$(dirname "$part")")/"
done
(cd "$parts" && ls -l ./*/part.*)
