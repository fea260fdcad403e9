#!/usr/bin/env bash
# On the GPU machine, in the root of a checkout of kvant:  . FOLDER/setup.sh
# Unpacks what take.sh has kept, once, and sets the environment: torch and vLLM of the overlay come before those of the machine.
# With OVERLAY_TORCH=machine, vLLM runs with the machine's own torch and triton, and needs no parts of torch.

_overlay=${OVERLAY:-/tmp/gpu-overlay} _parts=${OVERLAY_PARTS:-/tmp/overlay-parts}
_sums='@SHA256SUMS@'

_overlay_unpack() { # one archive, if all of its parts are there and whole
  local name=$1 sums
  [ ! -e "$_overlay/$name/.unpacked" ] || return 0
  sums=$(grep " $name/" <<<"$_sums") || { echo "setup: this script knows no parts of $name" >&2; return 1; }
  (cd "$_parts" && sha256sum --check --quiet <<<"$sums") || { echo "setup: parts of $name are missing or damaged in $_parts" >&2; return 1; }
  mkdir -p "$_overlay/$name"
  (cd "$_parts" && set -o pipefail && cut -d' ' -f3 <<<"$sums" | xargs cat | xz -dc -T0 | tar -xf - -C "$_overlay/$name" --no-same-owner) \
    || { echo "setup: $name could not be unpacked" >&2; return 1; }
  touch "$_overlay/$name/.unpacked"
}

_overlay_libraries() { # torch looks for CUDA's libraries beside itself: links lead to those of the machine
  local site library found
  site=$(env -u PYTHONPATH python3 -c 'from importlib.util import find_spec as f; print(f("torch").submodule_search_locations[0])')/..
  mkdir -p "$_overlay/torch/nvidia"
  for library in "$site"/nvidia/*; do
    [ -e "$_overlay/torch/nvidia/$(basename "$library")" ] || ln -s "$(readlink -f "$library")" "$_overlay/torch/nvidia/"
  done
  for library in $(ldd "$_overlay"/torch/torch/lib/*.so | sed -n 's/^\t*\([^ ]*\) => not found$/\1/p' | sort -u); do
    found=$(find -L "$site" /usr/local/cuda*/lib64 /usr/local/cuda*/targets/*/lib /usr/lib/x86_64-linux-gnu -name "$library" 2>/dev/null | head -n 1)
    if [ -n "$found" ]; then ln -sf "$found" "$_overlay/torch/torch/lib/"; else echo "setup: torch needs $library, which is nowhere" >&2; fi
  done
}

_overlay_kvant() { # the checkout, as if it were installed: vLLM finds kvant by its entry points
  mkdir -p "$_overlay/kvant/bin"
  printf '#!/bin/sh\nexec python3 -m kvant "$@"\n' >"$_overlay/kvant/bin/kvant"
  chmod +x "$_overlay/kvant/bin/kvant"
  python3 - "$_overlay/kvant" <<'EOF'
import pathlib, re, sys, tomllib
project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
version = re.search(r'VERSION = "(.*)"', pathlib.Path("kvant/version.py").read_text())[1]
directory = pathlib.Path(sys.argv[1], f"kvant-{version}.dist-info")
directory.mkdir(exist_ok=True)
(directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvant\nVersion: {version}\n")
groups = {"console_scripts": project["scripts"], **project["entry-points"]}
points = [f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items()) for group, entries in groups.items()]
(directory / "entry_points.txt").write_text("\n".join(points))
EOF
}

_overlay_setup() {
  local start=$SECONDS
  export PYTHONPATH=
  if [ "${OVERLAY_TORCH:-carried}" = carried ]; then
    _overlay_unpack torch && _overlay_libraries || return 1
    PYTHONPATH=$_overlay/torch
    LD_LIBRARY_PATH=$(printf '%s:' "$_overlay"/torch/nvidia/*/lib)${LD_LIBRARY_PATH:-}
    export LD_LIBRARY_PATH
    export PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK=1 # the machine's cuDNN is older than the one torch was built with
  fi
  _overlay_unpack vllm || return 1
  PYTHONPATH=$_overlay/vllm:$PYTHONPATH
  if [ -e kvant/version.py ]; then
    _overlay_kvant || return 1
    PYTHONPATH=$PWD:$_overlay/kvant:$PYTHONPATH
  fi
  PYTHONPATH=${PYTHONPATH%:}
  export PATH=$_overlay/kvant/bin:$_overlay/vllm/bin:$PATH
  export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
  export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0 TVM_FFI_DISABLE_TORCH_C_DLPACK=1
  export VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
  if [ -z "${CUDA_HOME:-}" ] && command -v nvcc >/dev/null; then
    CUDA_HOME=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
    export CUDA_HOME
  fi
  echo "setup: ready after $((SECONDS - start)) s; $PYTHONPATH"
}
_overlay_setup
