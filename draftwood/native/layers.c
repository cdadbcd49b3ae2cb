// All layers of a decoder in one call: between the operators of a small model, calls from outside take as long as they do.

#include "native.h"

// A product with a weight in panels; no bias is null.
typedef struct {
    const ivec *weight;
    const bf16 *bias;
} Linear;

// A decoder layer. As forward.py lays it out.
typedef struct {
    const bf16 *input_norm, *qk_norm, *post_norm;
    Linear qkv, output, gate_up, down;
    int64_t window, whole;  // how far back it looks, 0 for all; whether rows see those behind them
    bf16 *tap;              // takes what the layer before gave, or is null
} Layer;

// What all layers share. As forward.py lays it out.
typedef struct {
    int64_t heads, kv_heads, dim, hidden, inner;
    float eps, scale;
} Shape;

static int apply(const Linear *linear, const bf16 *x, bf16 *out, int64_t rows, int64_t depth, int64_t width,
                 int threads) {
    return multiply(x, linear->weight, linear->bias, out, rows, depth, width, threads);
}

// Room for a layer's results, one behind the other: `size` numbers of each of `rows` rows.
static bf16 *take(bf16 **room, int64_t rows, int64_t size) {
    bf16 *mine = *room;
    *room += rows * size;
    return mine;
}

// out [rows, hidden] = RMSNorm(layers(x)) * last_norm; x [rows, hidden] is written over. Every row belongs to a part, whose
// keys and values in each layer begin at slots [layers, parts, 2]. Rows of a tap, and of last_tap (or null), are `stride`
// apart; cosine and sine are [rows, D]. Returns 0, or 1 if memory ran out.
int run_layers(const Layer *layers, int64_t count, const Shape *shape, bf16 *x, bf16 *out, int64_t rows,
               const bf16 *cosine, const bf16 *sine, Part *parts, int64_t requests, bf16 *const *slots,
               const bf16 *last_norm, bf16 *last_tap, int64_t stride, int threads) {
    int64_t heads = shape->heads, groups = shape->kv_heads, dim = shape->dim, hidden = shape->hidden;
    int64_t seen_by = heads * dim, projected = (heads + 2 * groups) * dim, inner = shape->inner;
    bf16 *room = malloc(rows * (2 * hidden + projected + 2 * seen_by + 3 * inner) * sizeof *room), *rest = room;
    if (!room) return 1;
    bf16 *normed = take(&rest, rows, hidden), *delta = take(&rest, rows, hidden), *qkv = take(&rest, rows, projected);
    bf16 *q = take(&rest, rows, seen_by), *seen = take(&rest, rows, seen_by);
    bf16 *gate_up = take(&rest, rows, 2 * inner), *gated = take(&rest, rows, inner);
    int failed = 0;
    for (int64_t i = 0; i < count && !failed; i++, slots += 2 * requests) {
        const Layer *layer = layers + i;
        for (int64_t p = 0; p < requests; p++)
            parts[p].keys = slots[2 * p], parts[p].values = slots[2 * p + 1], parts[p].whole = layer->whole;
        add_norm(x, i ? delta : 0, layer->input_norm, normed, layer->tap, stride, shape->eps, rows, hidden, threads);
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
    add_norm(x, count ? delta : 0, last_norm, out, last_tap, stride, shape->eps, rows, hidden, threads);
    free(room);
    return failed;
}

// Keys and values of one part's rows for all layers, kv [rows, layers, 2, G, D], to its slots [layers, 2] behind its
// context: keys normalised (unless k_norm [layers, G, D] is null) and turned.
void store_layers(const bf16 *kv, int64_t count, const bf16 *k_norm, const bf16 *cosine, const bf16 *sine, Part *part,
                  bf16 *const *slots, int64_t kv_heads, int64_t dim, float eps, int threads) {
    int64_t size = kv_heads * dim;
    for (int64_t i = 0; i < count; i++) {
        part->keys = slots[2 * i], part->values = slots[2 * i + 1];
        rotate_store(kv + 2 * i * size, 2 * count * size, k_norm ? k_norm + i * size : 0, cosine, sine, 0, part, 1, 0,
                     kv_heads, dim, eps, threads);
    }
}
