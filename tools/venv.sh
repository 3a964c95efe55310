#!/bin/sh
# Make or refresh .venv, then install this project into it: `tools/venv.sh demo` or `tools/venv.sh dev`.
# Called by make before every target. Ends at once when nothing that matters has changed.
# pip finds packages by its own settings (environment, pip.conf); nothing here touches them.
# PYTHON=/path/to/python chooses the interpreter.
set -eu
cd "$(dirname "$0")/.."

kind=${1:?"kind: must be demo or dev"}
case $kind in
    demo) extras=plot ;;
    dev) extras=dev,plot,docs,tensorboard ;;
    *) echo "kind=$kind: must be demo or dev" >&2; exit 2 ;;
esac

# Says which interpreter this is, or fails: it must run, be 3.11 or newer and be able to make an environment.
identify() {
    "$1" -c '
import sys
assert sys.version_info >= (3, 11)
import ensurepip, venv
print(sys.base_prefix, sys.version.split()[0], sys.implementation.cache_tag)
' 2>/dev/null
}

if [ -n "${PYTHON:-}" ]; then
    python=$PYTHON
    identity=$(identify "$python") || {
        echo "PYTHON=$PYTHON: must be Python 3.11 or newer with its venv and ensurepip modules; give another one" >&2
        exit 2
    }
elif identity=$(identify .venv/bin/python); then
    python=.venv/bin/python  # the environment is there and works; do not ask which python comes first today
else
    identity=
    for python in python3 python3.14 python3.13 python3.12 python3.11 python; do
        identity=$(identify "$python") && break
        identity=
    done
    if [ -z "$identity" ]; then
        echo "python: no Python 3.11 or newer with venv and ensurepip was found on PATH;" \
            "install one (Debian and Ubuntu: python3 and python3-venv) or name it: make PYTHON=/path/to/python" >&2
        exit 2
    fi
fi

# An environment holds absolute paths, so it also belongs to the folder that it was made in.
home="$identity in $PWD"
if [ "$(cat .venv/.home 2>/dev/null || true)" != "$home" ]; then
    echo "making .venv with $python ($identity)"
    [ "$python" != .venv/bin/python ] || python=$(.venv/bin/python -c 'import sys; print(sys._base_executable)')
    rm -rf .venv
    "$python" -m venv .venv
    echo "$home" >.venv/.home
fi

# What is installed is named by the checksums of what decides it, so a fresh checkout date changes nothing.
stamp=.venv/.installed-$kind
wanted="$(cat pyproject.toml constraints.txt tools/venv.sh CMakeLists.txt csrc/* | cksum)"
[ "$(cat "$stamp" 2>/dev/null || true)" = "$wanted" ] && exit 0

rm -f "$stamp"
torch=$(grep '^torch==' constraints.txt)
echo "installing $torch"
.venv/bin/python -m pip install --quiet -c constraints.txt "$torch"
echo "installing sparseloco[$extras]"
.venv/bin/python -m pip install --quiet -c constraints.txt --editable ".[$extras]"
echo "$wanted" >"$stamp"
