// All layers of a decoder in one call: calling a small model's operators from Python takes as long as the operators do.

#include "layers.h"

static int apply(const Linear *linear, const bf16 *x, bf16 *out, int64_t rows, int64_t depth, int64_t width,
                 int threads) {
    return multiply(x, linear->weight, linear->bias, out, rows, depth, width, threads);
}

// Room for a layer's results, one after the other: `size` numbers of each of `rows` rows.
static bf16 *take(bf16 **room, int64_t rows, int64_t size) {
    bf16 *mine = *room;
    *room += rows * size;
    return mine;
}

static void look_up(const bf16 *table, const int64_t *places, int64_t count, int64_t width, bf16 *out) {
    for (int64_t i = 0; i < count; i++) memcpy(out + i * width, table + places[i] * width, width * sizeof *out);
}

// Runs x [rows, hidden] through all layers and writes RMSNorm(layers(x)) * last_norm to `normed`. Every row belongs to
// a part, whose keys and values in each layer begin at slots [layers, parts, 2]. Taps [rows, stride] get the last
// layer's output at last_tap; cosine and sine are [rows, D], `rest` is room for all results of a layer.
static int run_layers(const Layer *layers, int64_t count, const Shape *shape, const bf16 *last_norm, bf16 *x, bf16 *normed,
                      int64_t rows, const bf16 *cosine, const bf16 *sine, Part *parts, int64_t requests,
                      bf16 *const *slots, bf16 *taps, int64_t last_tap, int64_t stride, bf16 *rest, int threads) {
    int64_t heads = shape->heads, groups = shape->kv_heads, dim = shape->dim, hidden = shape->hidden;
    int64_t seen_by = heads * dim, projected = (heads + 2 * groups) * dim, inner = shape->inner;
    bf16 *delta = take(&rest, rows, hidden), *qkv = take(&rest, rows, projected), *q = take(&rest, rows, seen_by);
    bf16 *seen = take(&rest, rows, seen_by), *gate_up = take(&rest, rows, 2 * inner), *gated = take(&rest, rows, inner);
    int failed = 0;
    for (int64_t i = 0; i < count && !failed; i++, slots += 2 * requests) {
        const Layer *layer = layers + i;
        for (int64_t p = 0; p < requests; p++)
            parts[p].keys = slots[2 * p], parts[p].values = slots[2 * p + 1], parts[p].whole = layer->whole;
        add_norm(x, i ? delta : 0, layer->input_norm, normed, layer->tap < 0 ? 0 : taps + layer->tap, stride, shape->eps,
                 rows, hidden, threads);
        failed |= apply(&layer->qkv, normed, qkv, rows, hidden, projected, threads);
        rotate_store(qkv, projected, layer->qk_norm, cosine, sine, q, parts, requests, heads, groups, dim, shape->eps,
                     threads);
        failed |= attend(q, parts, requests, seen, heads, groups, dim, layer->window, shape->scale, threads);
        failed |= apply(&layer->output, seen, delta, rows, seen_by, hidden, threads);
        add_norm(x, delta, layer->post_norm, normed, 0, 0, shape->eps, rows, hidden, threads);
        failed |= apply(&layer->gate_up, normed, gate_up, rows, hidden, 2 * inner, threads);
        swiglu(gate_up, gated, rows, inner, threads);
        failed |= apply(&layer->down, gated, delta, rows, inner, hidden, threads);
    }
    add_norm(x, count ? delta : 0, last_norm, normed, last_tap < 0 ? 0 : taps + last_tap, stride, shape->eps, rows, hidden,
             threads);
    return failed;
}

// Writes logits [wants, vocab] to `out`, or without a head the last norm's results [wants, hidden], of the rows
// `wanted` (null: all), for tokens [rows] at positions [rows], whose cosines and sines are rows of the tables. The rest
// is as in run_layers. Returns 0, or 1 if memory ran out.
int forward(const Layer *layers, int64_t count, const Shape *shape, const Ends *ends, const int64_t *tokens,
            const int64_t *positions, int64_t rows, const bf16 *cosines, const bf16 *sines, Part *parts,
            int64_t requests, bf16 *const *slots, bf16 *taps, int64_t last_tap, int64_t stride, const int64_t *wanted,
            int64_t wants, bf16 *out, int threads) {
    int64_t hidden = shape->hidden, dim = shape->dim, heads = 3 * shape->heads + 2 * shape->kv_heads + 2;
    bf16 *room = malloc(rows * (3 * hidden + heads * dim + 3 * shape->inner) * sizeof *room), *rest = room;
    if (!room) return 1;
    bf16 *x = take(&rest, rows, hidden), *normed = take(&rest, rows, hidden);
    bf16 *cosine = take(&rest, rows, dim), *sine = take(&rest, rows, dim);
    look_up(ends->embedding, tokens, rows, hidden, x);
    look_up(cosines, positions, rows, dim, cosine);
    look_up(sines, positions, rows, dim, sine);
    for (int64_t i = 0; ends->scale != 1.0f && i < rows * hidden; i++) x[i] = down(up(x[i]) * ends->scale);
    int failed = run_layers(layers, count, shape, ends->last_norm, x, normed, rows, cosine, sine, parts, requests, slots,
                            taps, last_tap, stride, rest, threads);
    if (wanted) look_up(normed, wanted, wants, hidden, x);
    bf16 *chosen = wanted ? x : normed;
    if (ends->head.weight)
        failed |= apply(&ends->head, chosen, out, wants, hidden, ends->vocab, threads);
    else
        memcpy(out, chosen, wants * hidden * sizeof *out);
    free(room);
    return failed;
}

// Writes keys and values of one part's context tokens in all layers to its slots [layers, 2] after its context. Taps
// [rows, wide] go through `fuse`, a norm and `kv` [layers, 2, G, D]; keys are normalised (unless k_norm [layers, G, D]
// is null) and rotated. Returns 0, or 1 if memory ran out.
int project(const bf16 *taps, int64_t wide, const Linear *fuse, const bf16 *norm, const Linear *kv, const bf16 *k_norm,
            int64_t count, const Shape *shape, const bf16 *cosine, const bf16 *sine, Part *part, bf16 *const *slots,
            int threads) {
    int64_t size = shape->kv_heads * shape->dim, hidden = shape->hidden, all = 2 * count * size, rows = part->rows;
    bf16 *room = malloc(rows * (2 * hidden + all) * sizeof *room), *rest = room;
    if (!room) return 1;
    bf16 *fused = take(&rest, rows, hidden), *features = take(&rest, rows, hidden), *made = take(&rest, rows, all);
    int failed = apply(fuse, taps, fused, rows, wide, hidden, threads);
    add_norm(fused, 0, norm, features, 0, 0, shape->eps, rows, hidden, threads);
    failed |= apply(kv, features, made, rows, hidden, all, threads);
    for (int64_t i = 0; i < count; i++) {
        part->keys = slots[2 * i], part->values = slots[2 * i + 1];
        rotate_store(made + 2 * i * size, all, k_norm ? k_norm + i * size : 0, cosine, sine, 0, part, 1, 0,
                     shape->kv_heads, shape->dim, shape->eps, threads);
    }
    free(room);
    return failed;
}
