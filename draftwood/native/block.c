// A block drafter's draft for one request in one call: calling its parts from Python takes half as long as the parts
// do.

#include "layers.h"

// A drafter, and what turns taps into its keys and values. As block.py lays it out, like the next two.
typedef struct {
    const Decoder *decoder;
    const Linear *fuse, *kv;     // taps -> hidden -> layers * 2 * G * D
    const bf16 *norm, *k_norm;
    const int64_t *ids;          // tokens of the head's rows; null: their numbers
    const bf16 *before, *after;  // [vocab, rank], which score pairs of candidates; null: depths are independent
    int64_t wide, rank;          // numbers of a row of taps
} Drafter;

// What it drafts after: `waiting` taps, and `context` slots out of `room` in which it has keys and values.
typedef struct {
    const bf16 *taps;
    bf16 *const *slots;  // [layers, 2]
    int64_t waiting, context, room;
} Behind;

// Where a draft goes: k candidates of each of `depth` places, and scores of all pairs [depth - 1, k, k] of neighbours.
// With keys [depth] the candidates are those that noise favours.
typedef struct {
    const uint64_t *keys;
    double heat;
    int64_t depth, k;
    int64_t *tokens;
    float *logp, *pairs;
} Found;

// Writes what `drafter` predicts for the tokens after the first of block [size], which are the root and masks. Taps
// that wait get their keys and values first. Returns 0, or 1 if memory ran out.
int draft_block(const Drafter *drafter, const Behind *behind, const int64_t *block, int64_t size, const Found *found,
                int threads) {
    const Decoder *model = drafter->decoder;
    const int64_t depth = found->depth, k = found->k, vocab = model->ends->vocab, dim = model->shape->dim;
    const int64_t start = behind->context, waiting = behind->waiting, longest = size > waiting ? size : waiting;
    int64_t *steps = malloc((longest + size + depth + 2 * depth * k) * sizeof *steps);
    int64_t *positions = steps + longest, *wanted = positions + size, *places = wanted + depth;
    bf16 *logits = aligned_alloc(LINE, (depth * vocab * sizeof *logits + LINE - 1) / LINE * LINE);
    int failed = !steps || !logits;
    if (!failed) {
        for (int64_t i = 0; i < longest; i++) steps[i] = i;
        for (int64_t i = 0; i < size; i++) positions[i] = start + waiting + i;
        for (int64_t i = 0; i < depth; i++) wanted[i] = 1 + i;
        Part part = {.depth = steps, .rows = waiting, .slots = behind->room, .context = start};
        if (waiting)
            failed = project(behind->taps, drafter->wide, drafter->fuse, drafter->norm, drafter->kv, drafter->k_norm,
                             model->count, model->shape, model->cosines + start * dim, model->sines + start * dim, &part,
                             behind->slots, threads);
        part.rows = size, part.context += waiting;
        failed |= forward(model->layers, model->count, model->shape, model->ends, block, positions, size, model->cosines,
                          model->sines, &part, 1, behind->slots, 0, -1, 0, wanted, depth, logits, threads);
    }
    if (!failed) {
        candidates(logits, places, found->logp, drafter->ids, found->keys, places + depth * k, depth, vocab, k, found->heat,
                   threads);
        for (int64_t i = 0; i < depth * k; i++) found->tokens[i] = drafter->ids ? drafter->ids[places[i]] : places[i];
        if (drafter->before)
            failed = pair_scores(places, found->logp, drafter->before, drafter->after, found->pairs, depth, k, drafter->rank,
                                 threads);
    }
    free(steps), free(logits);
    return failed;
}
