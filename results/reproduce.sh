#!/usr/bin/env bash
# Makes the tables and pictures of README.md and results/README.md again, from training on:
#
#     bash results/reproduce.sh demo          TRA's line in the first picture: minutes
#     bash results/reproduce.sh flipflop      or lengths, seeds, rates, copy, induct, instruct,
#                                             why, wikitext, bench, all
#
# Runs stay in out/, each with a log beside it; tables go to results/, pictures to assets/. Started
# again, it skips the runs that are complete and resumes the others. A run has one thread, and two
# run at a time; JOBS=4: four.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python)}
queue=$(mktemp)
trap 'rm -f "$queue"' EXIT
others='rope nope alibi nape cope fot stick nosparsity nodistance'
rivals='rope alibi fot'

job() {                                 # job NAME CONFIG FLAG ...: a run for `train`
  echo "$1 config/$2.py ${*:3}" >> "$queue"
}

add() {                                 # add CONFIG SEED "NAME ..." [FLAG ...]: several of them
  local name flag
  for name in $3; do
    case $name in
      nosparsity) flag=--tra_sparsity=False ;;
      nodistance) flag=--tra_distance=False ;;
      above) flag=--tra_threshold=0.5 ;;
      *) flag=--attn=$name ;;
    esac
    job "$1-$name-$2" "$1" --seed=$2 $flag ${@:4}
  done
}

runs() {                                # runs CONFIG SEED "NAME ...": their folders
  for name in $3; do echo "out/$1-$name-$2"; done
}

train() {                               # everything added so far, side by side
  echo "$(wc -l < "$queue") runs, ${JOBS:-2} at a time"
  OMP_NUM_THREADS=${THREADS:-1} xargs -P "${JOBS:-2}" -L 1 bash "$0" run < "$queue"
  : > "$queue"
}

run() {                                 # run NAME FILE FLAG ...
  local log=out/$1.log
  mkdir -p out
  if grep -qs '"final": true' "out/$1/metrics.jsonl"; then
    return
  fi
  echo "$(date +%H:%M) $1 begins: tail -f $log"
  "$PYTHON" train.py "${@:2}" --out_dir="out/$1" $([ -e "out/$1/last.pt" ] && echo --resume=True) \
    >> "$log" 2>&1 || { tail -3 "$log"; exit 255; }         # 255: xargs begins no other
  echo "$(date +%H:%M) $1 ends: $(grep '^final' "$log" | cut -d'|' -f6)"
}

table() {                               # table NAME RUN ... [FLAG ...]: results/NAME.json
  "$PYTHON" eval.py "${@:2}" --mistakes=0 --out="results/$1.json"
}

picture() {                             # picture NAME RESULT ... [FLAG ...]: assets/NAME.png
  "$PYTHON" eval.py "${@:2}" --plot="assets/$1.png" > /dev/null
}

demo() {
  add flipflop_cpu 0 tra
  train
  table demo out/flipflop_cpu-tra-0 --lengths=1x,4x --n=200
  table lengths_tra out/flipflop_cpu-tra-0 --lengths=1x,4x,16x,64x,256x,1024x --n=50,50,50,16,4,1
  picture flipflop results/lengths_tra.json results/lengths.json --split=nonstationary
}

lengths() {                             # the others in that picture, with ten times the steps
  add flipflop_cpu 0 "$rivals" --max_iters=1500
  train
  table lengths $(runs flipflop_cpu 0 "$rivals") --lengths=1x,4x,16x,64x,256x --n=50,50,50,16,4
  picture flipflop results/lengths_tra.json results/lengths.json --split=nonstationary
  "$PYTHON" eval.py out/flipflop_cpu-{tra,rope}-0 --attention=w1i0i1w0i1r0 --heads=2.2 \
    --plot=assets/attention.png
}

seeds() {
  for seed in {302..317}; do add flipflop_cpu $seed tra; done
  train
  for seed in {318..325}; do add flipflop_cpu $seed tra; done
  THREADS=2 JOBS=1 train
  table seeds out/flipflop_cpu-tra-{302..317} --lengths=1x,4x --n=200
  table seeds_2threads out/flipflop_cpu-tra-{318..325} --lengths=1x,4x --n=200
}

flipflop() {
  for seed in {14..17}; do add flipflop_paper_cpu $seed tra; done
  add flipflop_paper_cpu 14 "$others"
  train
  table flipflop_tra out/flipflop_paper_cpu-tra-{14..17} --lengths=1x,4x,16x --n=1000,50,8
  table flipflop $(runs flipflop_paper_cpu 14 "$others") --lengths=1x,4x,16x --n=100,16,4
}

symbols() {                             # symbols TASK [FLAG ...]: the paper's model and lengths
  local two='tra above fot' one='rope nape stick nosparsity nodistance'
  add "$1_paper_cpu" 10 "$two $one"
  add "$1_paper_cpu" 10 cope --learning_rate=2e-4           # the best of `rates`
  add "$1_paper_cpu" 11 "$two"
  train
  table "$1" $(runs "$1_paper_cpu" 10 "$two $one cope") $(runs "$1_paper_cpu" 11 "$two") "${@:2}"
  picture "$1" "results/$1.json" --split=val
}

copy() {
  symbols copy --n=200
  job copy_long-tra-10 copy_paper_cpu --seed=10 --max_iters=6000 --eval_interval=1000
  job copy_long-above-10 copy_paper_cpu --seed=10 --max_iters=5000 --eval_interval=1000 \
    --tra_threshold=0.5 --vary_alphabet=True
  train
  table copy_long out/copy_long-{tra,above}-10 --n=200
}

induct() {
  symbols induct --n=100
}

instruct() {
  symbols instruct --lengths=1x,2x,6x,10x --n=60
}

rates() {                               # the learning rates tried, in results/start.json
  for rate in 1e-3 4e-4 2e-4; do
    for name in tra fot rope nape cope; do
      job "rate-$name-$rate" induct_paper_cpu --attn=$name --seed=100 --max_iters=1000 \
        --eval_interval=1000 --learning_rate=$rate
    done
  done
  train
}

why() {                                 # where the mistakes on copy and induct are
  for run in copy_paper_cpu-{tra,fot,above}-10 {copy_long,induct_paper_cpu}-tra-10{,' 300 100 3 1'} \
             copy_long-above-10; do
    "$PYTHON" results/why.py out/$run
  done | sed '1s/^/{"runs": [\n/; $!s/$/,/; $s/$/\n]}/' > results/why.json
}

wikitext() {
  "$PYTHON" data.py wikitext2 --tokenizer=bytes
  add wikitext_cpu 0 "tra above $others"
  train
  table wikitext $(runs wikitext_cpu 0 "tra above $others") --n=65536
  picture wikitext results/wikitext.json
}

bench() {
  "$PYTHON" eval.py --bench --out=results/bench.json
}

all() {
  for part in $parts; do "$part"; done
}

parts='demo lengths seeds flipflop rates copy induct instruct why wikitext bench'
case " run all $parts " in
  *" ${1:-help} "*) "$@" ;;
  *) sed -n '2,10s/^# \{0,1\}//p' "$0" ;;
esac
