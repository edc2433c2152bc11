#!/usr/bin/env bash
# CONFIG_FILE=<a TOML file> ./run_train.sh [options]: torchtitan's way to start a run, with its option names (docs/migration.md).
#   CONFIG_FILE  options in TOML; configs/deepseek_v3_debug.toml where it is not set
#   NGPU         ranks to start on this machine; without it as many as the degrees ask for, else all GPUs
set -euo pipefail

here="$(cd "$(dirname "$0")" && pwd)"
exec "${PYTHON:-python3}" -m mxep train --job.config_file="${CONFIG_FILE:-$here/configs/deepseek_v3_debug.toml}" \
    ${NGPU:+--nproc="$NGPU"} "$@"
