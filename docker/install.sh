#!/bin/sh
# Fills the image's virtual environment. Runs while the image is built, in the folder that has pyproject.toml.
#
#     install.sh packages cpu|cuda TORCH [INDEX]     torch, from INDEX or pip's own, then all other packages
#     install.sh compiler                            gcc, in an image that needs it when it runs
#     install.sh code FOLDER                         atoll and the text of builtin:shakespeare, below FOLDER
#
# With wheels in /wheelhouse nothing is asked of the network.
set -eu

ENVIRONMENT=/opt/atoll
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore

pip() {
    /pip/bin/pip --python "$ENVIRONMENT/bin/python" "$@"
}

offline() {
    ls /wheelhouse/*.whl >/dev/null 2>&1
}

if offline; then
    export PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheelhouse
fi

# fastecdsa, which libp2p wants, comes as source. The packages' stage keeps its compiler to itself.
compiler() {
    offline && return
    apt-get update -qq && apt-get install -qq --no-install-recommends gcc libc6-dev libgmp-dev >/dev/null
}

packages() {
    compiler
    if [ -n "${3:-}" ] && ! offline; then
        pip install --quiet --index-url "$3" "$2"
    else
        pip install --quiet "$2"
    fi
    check_torch "$1"
    python3 -c 'import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' >/tmp/wanted.txt
    pip install --quiet -r /tmp/wanted.txt
    slim
}

# A wheelhouse with a CPU build would make a CUDA image that never uses the GPU.
check_torch() {
    found=$("$ENVIRONMENT/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))')
    case "$1 $found" in
    "cpu "*+cpu*) ;;
    "cpu "*) echo "warning: torch $found is not a CPU build: the image gets big; set TORCH_INDEX" >&2 ;;
    "cuda "*+cpu*) echo "error: torch $found is a CPU build; empty docker/wheelhouse" >&2 && exit 78 ;;
    esac
}

# What no node reads at run time: headers, build files and the tests of others.
slim() {
    cd "$ENVIRONMENT"/lib/python3*/site-packages
    rm -rf torch/include torch/share torch/test
    find torch -name '*.a' -delete
    find scipy sympy networkx -type d -name tests -prune -exec rm -rf {} +
}

code() {
    pip install --quiet --no-deps --root "$1" --prefix "$ENVIRONMENT" .
    site=$(echo "$1$ENVIRONMENT"/lib/python3*/site-packages)
    texts=$1$ENVIRONMENT/texts
    mkdir -p "$texts"
    fetch_text "$site" "$texts"
    chmod a+r "$texts"/*
}

# With an interpreter of its own: the code stage has none of the packages that the module's neighbours import.
fetch_text() {
    /pip/bin/pip install --quiet platformdirs msgspec
    ATOLL_CACHE=$2 PYTHONPATH=$1 /pip/bin/python -m atoll.node.learning.data.shakespeare
}

"$@"
