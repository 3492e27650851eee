#!/usr/bin/env bash
# Starts a training run, or resumes it where its folder is there.
#
#     start_or_resume.sh OUT [--process FLAGS --] [FLAGS OF A NEW RUN]
#
# The first flags, up to --, say which process this is and are given each time; the others are the
# settings of a new run, which a resumed run has in its folder. Several processes decide alike: the
# folder is made only after all of them have met.
set -euo pipefail

out=$1
shift
always=()
if [ "${1:-}" = --process ]; then
  shift
  while [ "${1:-}" != -- ]; do
    [ $# -gt 0 ] || { echo "start_or_resume.sh: --process ends with --" >&2; exit 2; }
    always+=("$1")
    shift
  done
  shift
fi
if [ -e "$out/config.json" ]; then
  set -- --resume
fi
read -ra command <<< "${JAXFORMER:-jaxformer}"
exec "${command[@]}" train --out "$out" "${always[@]}" "$@"
