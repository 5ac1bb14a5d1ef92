#!/usr/bin/env bash
# Sets everything up in .venv and runs the tests. Arguments go to pytest: scripts/test.sh tests/cli -k help
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

install_project test
command -v npm >/dev/null || echo 'npm is missing: the tests with real agents will be skipped.'
# Workers and engines share the cores: threads that wait for others must sleep, not spin.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
exec .venv/bin/python -m pytest -n 2 "$@"
