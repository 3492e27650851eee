#!/usr/bin/env bash
# Trains on a TPU slice, and starts again when a host or the whole slice is lost:
#
#     TPU=v5litepod-16 ZONE=us-west4-a OUT=/mnt/shared/run deploy/tpu_slice.sh --preset llama-1b …
#
# TPU      the kind of slice          NAME     of the slice; default jaxformer
# ZONE     where                      VERSION  of its software; default tpu-ubuntu2204-base
# OUT      the run's folder, on a disk that all hosts see
# SPOT=1   takes a slice that may be taken away
# KEEP=1   leaves the slice when the run is done
set -uo pipefail

: "${TPU:?set TPU, such as v5litepod-16}" "${ZONE:?set ZONE}" "${OUT:?set OUT}"
name=${NAME:-jaxformer}
version=${VERSION:-tpu-ubuntu2204-base}
most_restarts=${MOST_RESTARTS:-20}

slice() { gcloud compute tpus tpu-vm "$@" --zone="$ZONE"; }

ready() { [ "$(slice describe "$name" --format='value(state)' 2>/dev/null)" = READY ]; }

make_slice() {
  ready && return 0
  # A slice that was taken away is still listed, and its name in use.
  slice delete "$name" --quiet 2>/dev/null || true
  slice create "$name" --accelerator-type="$TPU" --version="$version" ${SPOT:+--spot} || return 1
  slice ssh "$name" --worker=all --command="python3 -m pip install --quiet 'jaxformer[tpu]'"
}

# The settings as one line that each host's shell reads back.
printf -v settings '%q ' "$@"
printf -v folder '%q' "$OUT"
run="if [ -e $folder/config.json ]; then set -- --resume; else set -- $settings; fi
python3 -m jaxformer train --out $folder --distributed \"\$@\""

for ((restarts = 0; restarts <= most_restarts; restarts++)); do
  if make_slice; then
    slice ssh "$name" --worker=all --command="$run"
    code=$?
    case $code in
      # Errors that trying again will not mend, and the end.
      0 | 2 | 3 | 4 | 5 | 6) break ;;
    esac
  else
    code=9
  fi
  echo "exit code $code: started again ($((restarts + 1)) of $most_restarts)" >&2
  sleep "${WAIT:-60}"
done
[ "${KEEP:-0}" = 1 ] || slice delete "$name" --quiet
exit "$code"
