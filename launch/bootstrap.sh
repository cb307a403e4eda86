#!/bin/sh
# Makes the virtual environment $1 with the first Python >= 3.12 it finds, and installs moejax into it with pinned versions;
# or, given a requirements file $2, installs that instead.
# Looks at $PYTHON (if set), python3, python3.14, python3.13, python3.12, then pyenv's versions.
set -eu
venv=${1:-.venv}
root=$(cd "$(dirname "$0")/.." && pwd)

usable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 15))' >/dev/null 2>&1
}

find_python() {
    for candidate in ${PYTHON:-} python3 python3.14 python3.13 python3.12 \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-4]*/bin/python; do
        if usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    {
        echo "moejax needs Python 3.12, 3.13 or 3.14 with the venv module; none was found."
        echo "Looked at: \$PYTHON, python3, python3.14, python3.13, python3.12, ${PYENV_ROOT:-$HOME/.pyenv}/versions/*."
        echo "Install one (for example 'apt-get install python3.12 python3.12-venv' or 'pyenv install 3.12'),"
        echo "or name it: make PYTHON=/path/to/python3.12 ..."
    } >&2
    exit 1
}

python=$(find_python)
echo "moejax: using $("$python" -c 'import sys; print(sys.executable, sys.version.split()[0])')" >&2
cd "$root"
rm -rf "$venv"
"$python" -m venv "$venv"
if [ $# -gt 1 ]; then
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$2"
else
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
fi
touch "$venv/.installed"
