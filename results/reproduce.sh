#!/usr/bin/env bash
# Makes the tables and pictures of README.md and results/README.md again, from training on:
#
#     bash results/reproduce.sh demo          the first picture's TRA line: minutes
#     bash results/reproduce.sh flipflop      or seeds, copy, induct, instruct, wikitext, bench, all
#
# Runs are kept in out/, each with its log beside it. Started again, the script skips what is
# complete and resumes the rest. A run has one thread, and two run at a time; JOBS=4: four.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python)}
queue=$(mktemp)
trap 'rm -f "$queue"' EXIT

add() {                                 # add NAME CONFIG [FLAG ...]: one more run
  echo "$@" >> "$queue"
}

every() {                               # every TASK CONFIG SEED ATTENTION ...
  for name in "${@:4}"; do
    case $name in
      nosparsity) flag=--tra_sparsity=False ;;
      nodistance) flag=--tra_distance=False ;;
      *) flag=--attn=$name ;;
    esac
    add "$1-$name-$3" "$2" --seed="$3" $flag
  done
}

train() {                               # what was added, side by side
  OMP_NUM_THREADS=${THREADS:-1} xargs -P "${JOBS:-2}" -L 1 bash "$0" run < "$queue"
  : > "$queue"
}

run() {                                 # run NAME CONFIG [FLAG ...]
  local out=out/$1 log=out/$1.log resume=
  if grep -qs '"final": true' "$out/metrics.jsonl"; then
    return
  fi
  mkdir -p out
  [ -e "$out/last.pt" ] && resume=--resume=True
  echo "$(date +%H:%M) $1 begins: tail -f $log"
  "$PYTHON" train.py "config/$2.py" --out_dir="$out" "${@:3}" $resume >> "$log" 2>&1
  echo "$(date +%H:%M) $1 ends: $(grep '^final' "$log" | tail -1 | cut -d'|' -f6-)"
}

table() {                               # table NAME [RUN ... FLAG ...]: results/NAME.json
  "$PYTHON" eval.py "${@:2}" --mistakes=0 --out="results/$1.json"
}
