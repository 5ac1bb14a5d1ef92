# Sourced by the scripts beside it: an environment in .venv with the project installed in place.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    printf '%s: %s\n' "$(basename "$0")" "$1" >&2
    exit 1
}

# Sets `python` to the first Python >= 3.10 that can make an environment; PYTHON=... is asked first.
find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python3.10 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            python=$candidate
            "$python" -c 'import ensurepip, venv' 2>/dev/null ||
                fail "$python cannot make environments. On Debian or Ubuntu: sudo apt install python3-venv"
            "$python" -c 'import pathlib, sys, sysconfig
sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())' ||
                fail "$python comes without its C headers. On Debian or Ubuntu: sudo apt install python3-dev"
            return
        fi
    done
    fail 'Python 3.10 or newer is missing. On Debian or Ubuntu: sudo apt install python3 python3-venv python3-dev'
}

need_compiler() {
    local candidate
    for candidate in ${CXX:-} c++ g++ clang++; do
        command -v "$candidate" >/dev/null && return
    done
    fail 'a C++17 compiler is missing. On Debian or Ubuntu: sudo apt install g++, on macOS: xcode-select --install'
}

# An older Node.js is only told of: some releases of the agents run with it.
need_npm() {
    local oldest=22 version
    command -v npm >/dev/null ||
        fail "npm is missing, and the agents are npm packages. Install Node $oldest or newer: https://nodejs.org"
    version=$(node --version 2>/dev/null) ||
        fail "npm is there, but node is not, or does not run. Install Node $oldest or newer: https://nodejs.org"
    version=${version#v}
    [[ ! ${version%%.*} =~ ^[0-9]{1,9}$ ]] || ((10#${version%%.*} >= oldest)) ||
        printf '%s: Node is %s; newer releases of the agents may not start. Install Node %s or newer: %s\n' \
            "$(basename "$0")" "$version" "$oldest" https://nodejs.org >&2
}

# install_project EXTRAS: editable, so that a changed Python file counts at once. Skipped while what decides the result
# (pyproject.toml, csrc/, this folder's place, the Python) is as it was at the last installation.
install_project() {
    local extras=$1 stamp found
    if ! .venv/bin/python -c 'import pip' 2>/dev/null; then
        find_python
        need_compiler
        echo "Creating .venv with $("$python" --version) ..."
        "$python" -m venv --clear .venv
    fi
    stamp=$( (pwd && .venv/bin/python --version && cat pyproject.toml csrc/*) | cksum)
    for found in .venv/.installed-${extras:-*}; do
        [ "$(cat "$found" 2>/dev/null)" != "$stamp" ] || return 0
    done
    need_compiler
    echo 'Installing ftlaunch and what it needs into .venv (minutes the first time) ...'
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".${extras:+[$extras]}"
    echo "$stamp" >".venv/.installed-$extras"
}
