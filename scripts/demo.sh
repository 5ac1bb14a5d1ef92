#!/usr/bin/env bash
# From nothing to an answer of a coding agent on this machine: environment, demo model, Claude Code, one question.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need_npm
install_project ''
.venv/bin/ft pull demo
exec .venv/bin/ft launch claude --model demo --yes --lean -- -p "${1:-What is the capital of France?}"
