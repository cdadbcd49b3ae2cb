#!/bin/bash
# A drafter like the one that ships, from nothing, on prompts alone whose licences allow any use:
#
#     anew.sh GSM8K.jsonl MBPP.jsonl OUT
#
# The two files are training questions of GSM8K and MBPP. A run that was stopped goes on when the same command is given
# again. TOKENS, BEGUN and STEPS say how much is written and trained, MORE what else `draftwood train` is told. With what
# stands here an H200 should take some five minutes for the texts and eleven for the steps; it has not run there yet.
set -eu
gsm8k=$1 mbpp=$2 out=$3 here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"

# Prompts: questions, forms and functions; and what the target makes of their first words.
[ -e "$out/mixture.jsonl" ] || {
    python "$here/mixture.py" "$out" "$gsm8k" "$mbpp" 25 74
    cat "$out"/mixture-?.jsonl > "$out/whole.jsonl"
    mv "$out/whole.jsonl" "$out/mixture.jsonl"
}
[ -e "$out/finished.jsonl" ] || {
    python "$here/beginnings.py" cut "$out/mixture.jsonl" "$out/begun.jsonl"
    draftwood distill --raw --prompts "$out/begun.jsonl" --temperature 0.75 --max-new-tokens 100 \
        --tokens "${BEGUN:=600000}" --out "$out/begun"
    python "$here/beginnings.py" finish "$out/begun" "$out/whole.jsonl"
    mv "$out/whole.jsonl" "$out/finished.jsonl"
}
draftwood distill --prompts "$out/mixture.jsonl" --prompts "$out/finished.jsonl" --prompts self \
    --temperature 0,0.7 --max-new-tokens 256 --tokens "${TOKENS:=14000000}" --out "$out/texts"

# The target's last three layers, without the tap and the neurons that matter least: the package has room for no more.
[ -e "$out/seed/model.safetensors" ] || {
    draftwood train --data "$out/texts" --out "$out/begin" --steps 1 --lr 1e-9 --holdout 0 --markov-rank 0 \
        --causal --block-size 8 --window 320 --head-tokens 8000 --batch-size 1
    python "$here/taps.py" "$out/begin" "$out/fewer"
    python "$here/narrow.py" "$out/fewer" "$out/seed" 1504 "$out/texts"
}
# Blocks of 8 are the first halves of blocks of 16: what is causal learns as much from them for half the work.
draftwood train --data "$out/texts" --init "$out/seed" --out "$out/drafter" --steps "${STEPS:=7500}" \
    --block-size 8 --batch-size 64 --anchors 96 --gamma 4 --soft 0.5 --optimizer muon --lr 1.2e-3 \
    --head-tokens 8000 --save-minutes 2 --eval-every 100000 ${MORE:-}
sed -i 's/"block_size": 8/"block_size": 16/' "$out/drafter/config.json"
