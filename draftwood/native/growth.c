// The likeliest paths through a trellis, as grow.py takes them: the same sums in the same order.

#include "growth.h"

// As trellis.py has it.
typedef struct {
    const float *logp, *pairs;  // [depth, k], [depth - 1, k, k]
    const int64_t *tokens;      // [depth, k]
    const uint64_t *keys;       // [depth] of the noise, or null
    double heat, *noise;        // its factor, and the noise [depth, k] as far as it is known
    int64_t known, depth, k;
} Trellis;

// The children of a node: their log p and noise, [k] each.
typedef struct {
    const float *logp;
    const double *noise;  // or null
    int64_t k;
} Row;

static Row row_of(Trellis *draft, const Node *node) {
    int64_t depth = node->depth, k = draft->k;
    const float *logp = depth ? draft->pairs + ((depth - 1) * k + node->rank) * k : draft->logp;
    if (!draft->keys) return (Row){logp, NULL, k};
    if (draft->known == depth) {  // no node is deeper by more than one than all before it
        for (int64_t i = depth * k; i < (depth + 1) * k; i++)
            draft->noise[i] = draft->heat * noise_of(bits_of(draft->keys[depth], draft->tokens[i]));
        draft->known++;
    }
    return (Row){logp, draft->noise + depth * k, k};
}

static inline double sum_at(const Row *row, int64_t rank) {
    double logp = row->logp[rank] > 0.0f ? 0.0 : row->logp[rank];
    return row->noise ? logp + row->noise[rank] : logp;
}

// The logarithm that normalises a row, as in trellis.py; 0 without noise.
static double total_of(const Row *row) {
    if (!row->noise) return 0.0;
    double sums = 0.0, known = 0.0;
    for (int64_t r = 0; r < row->k; r++)
        if (row->logp[r] > -INFINITY) sums += exp(sum_at(row, r)), known += exp(sum_at(&(Row){row->logp, NULL, 0}, r));
    return log(sums + (known < 1.0 ? 1.0 - known : 0.0));
}

// The rank that comes after `last` (-1: the first) in the falling order of a row, the first of equals first; k if there
// is none that is possible. Few ranks of a row are needed, so looking through it is quicker than sorting it.
static int64_t after(const Row *row, int64_t last) {
    int64_t next = row->k;
    double most = -INFINITY, before = last < 0 ? INFINITY : sum_at(row, last);
    for (int64_t r = 0; r < row->k; r++) {
        double sum = sum_at(row, r);
        if (sum > most && (sum < before || (sum == before && r > last))) most = sum, next = r;
    }
    return next;
}

// Puts the child that comes after the one of rank `last` on the heap, if there is one.
static void follow(Heap *heap, Trellis *draft, Node *nodes, int64_t parent, int64_t last) {
    Node *node = nodes + parent;
    if (node->depth == draft->depth) return;
    Row row = row_of(draft, node);
    if (last < 0) node->total = total_of(&row);
    int64_t rank = after(&row, last);
    if (rank == row.k) return;
    double cost = node->total - sum_at(&row, rank);
    push(heap, (Node){node->cost + (cost > 0.0 ? cost : 0.0), node->depth + 1, parent, rank, 0.0});
}

// Grows best first: the root and at most `n_max` nodes, none that costs more than `most` and no child of one that costs
// more than `barren`. Candidates are `tokens` [depth, k], all different in a depth, with logp [depth, k], pairs
// [depth - 1, k, k], and keys [depth] of noise (or null) and its factor. Results are logarithms of masses [1 + n_max],
// and tokens, parents and depths in rows [3, 1 + n_max]; the root's token stays. Returns the number of nodes without
// the root, or -1 if memory ran out.
int64_t grow(const int64_t *tokens, const float *logp, const float *pairs, const uint64_t *keys, int64_t *rows, double *logs,
             int64_t depth, int64_t k, int64_t n_max, double heat, double most, double barren) {
    Node *nodes = malloc(2 * (n_max + 1) * sizeof *nodes + depth * k * sizeof(double));
    if (!nodes) return -1;
    Trellis draft = {logp, pairs, tokens, keys, heat, (double *)(nodes + 2 * (n_max + 1)), 0, depth, k};
    Heap heap = {nodes + n_max + 1, 0};
    int64_t count = 0;
    nodes[0] = (Node){0.0, 0, -1, 0, 0.0};
    for (; count < n_max; nodes[++count] = pop(&heap)) {
        if (nodes[count].cost <= barren) follow(&heap, &draft, nodes, count, -1);
        if (count) follow(&heap, &draft, nodes, nodes[count].parent, nodes[count].rank);
        if (!heap.count || heap.nodes[0].cost > most) break;
    }
    for (int64_t i = 0; i <= count; i++) {
        if (i) rows[i] = tokens[(nodes[i].depth - 1) * k + nodes[i].rank];
        rows[i + n_max + 1] = nodes[i].parent, rows[i + 2 * (n_max + 1)] = nodes[i].depth;
        logs[i] = -nodes[i].cost;
    }
    free(nodes);
    return count;
}
