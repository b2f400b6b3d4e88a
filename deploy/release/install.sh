#!/bin/sh
# Installs llmux for the user who runs this, from the files of a release beside it: into ~/.local/share/llmux/program, with the
# command in ~/.local/bin. What llmux needs comes from the package index, by hash; or from a folder `wheels` beside this script,
# where there is one. The version before stays, in case you want to go back; remove both with: sh install.sh --remove
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
python=${PYTHON:-python3}
programs=${XDG_DATA_HOME:-$HOME/.local/share}/llmux/program
command=$HOME/.local/bin/llmux

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

if [ "${1-}" = --remove ]; then
    rm -rf "$programs"
    [ ! -L "$command" ] || rm "$command"
    echo "Removed llmux. Its configuration, models and state are still there."
    exit
fi
[ $# -eq 0 ] || fail "the only option is --remove"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "llmux needs Python 3.11 or newer. Name one: PYTHON=python3.12 sh install.sh"
[ ! -e "$command" ] || [ -L "$command" ] || fail "$command is there, and it is not a link that this script made; move it away"

cd "$here"
sha256sum --check --quiet --strict SHA256SUMS || fail "these files are not those of the release; download them again"
set -- llmux_supervisor-*.whl
[ -f "$1" ] && [ $# -eq 1 ] || fail "there must be one wheel of llmux beside this script"
wheel=$1
version=${wheel#llmux_supervisor-}
version=${version%%-*}

# Made in its final place, since an environment can't be moved, and used only once it is whole.
new=$programs/$version-$$
trap 'rm -rf "$new"' EXIT
trap 'exit 1' HUP INT TERM
mkdir -p "$programs" "$(dirname "$command")"
"$python" -m venv "$new" || fail "Python makes no environment; on Debian and Ubuntu: apt install python3-venv"
links=
[ ! -d wheels ] || links="--no-index --find-links wheels"
# shellcheck disable=SC2086  # words, none with a blank of the user's
"$new/bin/python" -m pip install --quiet --disable-pip-version-check $links --require-hashes --requirement requirements.lock
"$new/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-index "./$wheel"
"$new/bin/llmux" --version >/dev/null
before=$(readlink -f "$command" || true)
ln -s "$new/bin/llmux" "$new/link"
mv -T "$new/link" "$command"
trap - EXIT

for folder in "$programs"/*; do
    case $folder/bin/llmux in "$new/bin/llmux" | "$before") ;; *) rm -rf "$folder" ;; esac
done
echo "Installed llmux $version: $command"
case :$PATH: in *":$HOME/.local/bin:"*) ;; *) echo "Add $HOME/.local/bin to your PATH." ;; esac
echo "Next: llmux doctor"
