#!/usr/bin/env bash
# Make a virtual environment and install the project with tested versions: setup_venv.sh [EXTRA [FOLDER [LOCK]]]
# FOLDER is .venv unless given, and LOCK environments/cpu.lock.txt; `none` as LOCK takes the newest of everything.
# `docs` as EXTRA installs what LOCK lists, without the project.
# Finds Python 3.12 or newer on PATH, under pyenv, or through uv; says what is missing otherwise.
set -euo pipefail
cd "$(dirname "$0")/.."

extra=${1:-dev}
venv=${2:-.venv}
lock=${3:-environments/cpu.lock.txt}
check='import sys, venv, ensurepip; raise SystemExit(sys.version_info < (3, 12))'

find_python() {
    local candidate
    for candidate in python3.12 python3.13 python3 python python3.14 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python; do
        # A pyenv shim is on PATH even where its version is not active, so only running it tells.
        if command -v "$candidate" >/dev/null 2>&1 && "$candidate" -c "$check" >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
}

make_venv() {
    local python
    python=$(find_python)
    if [ -n "$python" ]; then
        echo "making $venv with $("$python" --version) ($python)"
        "$python" -m venv "$venv"
    elif command -v uv >/dev/null 2>&1; then
        echo "making $venv with a Python 3.12 that uv provides"
        uv venv --quiet --seed --python 3.12 "$venv"
    else
        echo "error: no Python 3.12 or newer with venv and ensurepip was found on PATH or under pyenv, and there is no uv." >&2
        echo "Install one of: the packages python3.12 and python3.12-venv, 'pyenv install 3.12', or uv." >&2
        exit 1
    fi
}

install() {
    if command -v uv >/dev/null 2>&1; then
        uv pip install --quiet --python "$venv/bin/python" "$@"
    else
        # Twice quiet: errors are shown, notes about indexes and versions are not. Nothing is compiled here: one process
        # would compile all files, of which a run imports a quarter. Python compiles these when they are first imported.
        "$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --no-input --no-compile "$@"
    fi
}

if ! "$venv/bin/python" -c "$check" >/dev/null 2>&1; then
    rm -rf "$venv"
    make_venv
fi

if [ "$extra" = docs ]; then
    echo "installing $lock"
    install --requirement "$lock"
    exit
fi

echo "installing llava-mcore[$extra] (several GB the first time; some minutes)"
constraint=(--constraint "$lock")
if [ "$lock" = none ]; then constraint=(); fi
install "${constraint[@]}" --editable ".[$extra]"
if [ "$extra" = dev ] || [ "$extra" = small-vlm ]; then
    install --no-deps --requirement environments/test-models.txt
fi
