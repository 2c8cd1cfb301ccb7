# Sourced by the commands in this folder: sets PYTHON to an interpreter that can run them, or ends with the remedy.
# Plain POSIX sh, since nothing but a shell and a Python may be taken for granted here.

# Says `ok`, `newer` (works perhaps: the locks were made for 3.11 to 3.14) or why the candidate will not do.
judge_python() {
    "$1" -I -c '
import sys
version = "%d.%d.%d" % sys.version_info[:3]
if sys.version_info < (3, 11):
    print("is Python " + version + ", too old")
elif sys.implementation.name != "cpython":
    print("is " + sys.implementation.name + ", for which the locked packages have no builds")
else:
    try:
        import ensurepip, ssl, venv
    except ImportError as error:
        print("is Python " + version + " without the module " + str(error.name))
    else:
        print("ok" if sys.version_info < (3, 15) else "newer")
' 2>/dev/null || echo "does not start"
}

find_python() {
    asked=${PYTHON:-}
    PYTHON=
    newer=
    refused=
    # One that was named is used or refused, never silently replaced.
    for candidate in ${asked:-python3 python3.14 python3.13 python3.12 python3.11 python3.15 python}; do
        program=$(command -v "$candidate" 2>/dev/null) || continue
        verdict=$(judge_python "$program")
        case $verdict in
            ok)
                PYTHON=$program
                return 0
                ;;
            newer) newer=${newer:-$program} ;;
            *) refused="$refused
  $program $verdict" ;;
        esac
    done
    if [ -n "$newer" ]; then
        echo "Using $newer, newer than the Python versions tested (3.11 to 3.14); a package may lack a build for it." >&2
        PYTHON=$newer
        return 0
    fi
    if [ -n "$asked" ]; then
        echo "error: PYTHON=$asked does not name a usable Python 3.11 or newer." >&2
    else
        echo "error: this needs Python 3.11 or newer with its venv module, and found none on PATH." >&2
    fi
    [ -z "$refused" ] || echo "Looked at:$refused" >&2
    cat >&2 <<'REMEDY'
Remedy: install one, then run this again.
  Debian, Ubuntu   sudo apt install python3 python3-venv   (python3.12-venv and the like for a certain version)
  Fedora           sudo dnf install python3
  macOS            brew install python3, or the installer of the Python project
An interpreter outside PATH is named so:  PYTHON=/path/to/python3.12 ./scripts/...
REMEDY
    exit 69 # EX_UNAVAILABLE
}
