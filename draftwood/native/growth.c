// The likeliest paths through a trellis, as grow.py takes them: the same sums in the same order.

#include "native.h"

// A node of the tree, or one that waits.
typedef struct {
    double cost;                  // -log p of the path to it
    int64_t depth, parent, rank;  // the rank among the candidates of its depth
} Node;

// As trellis.py has it.
typedef struct {
    const float *logp, *pairs;  // [depth, k], [depth - 1, k, k]
    int64_t depth, k;
} Trellis;

// Those that wait: of each node of the tree no more than the next child, so no two children of one are compared.
typedef struct {
    Node *nodes;
    int64_t count;
} Heap;

static inline int precedes(const Node *one, const Node *other) {
    if (one->cost != other->cost) return one->cost < other->cost;
    return one->depth != other->depth ? one->depth < other->depth : one->parent < other->parent;
}

static void push(Heap *heap, Node node) {
    int64_t place = heap->count++;
    for (int64_t above; place && precedes(&node, heap->nodes + (above = (place - 1) / 2)); place = above)
        heap->nodes[place] = heap->nodes[above];
    heap->nodes[place] = node;
}

static Node pop(Heap *heap) {
    Node *nodes = heap->nodes, first = nodes[0], last = nodes[--heap->count];
    int64_t place = 0;
    for (int64_t below = 1; below < heap->count; below = 2 * place + 1) {
        below += below + 1 < heap->count && precedes(nodes + below + 1, nodes + below);
        if (!precedes(nodes + below, &last)) break;
        nodes[place] = nodes[below], place = below;
    }
    nodes[place] = last;
    return first;
}

// The rank that comes after `last` (-1: the first) as a row [k] falls, the first of equals first; k if none is alive.
// Few are asked for of a row, so looking through it is quicker than sorting it.
static int64_t after(const float *row, int64_t k, int64_t last) {
    int64_t next = k;
    float most = -INFINITY;
    for (int64_t r = 0; r < k; r++)
        if (row[r] > most && (last < 0 || row[r] < row[last] || (row[r] == row[last] && r > last)))
            most = row[r], next = r;
    return next;
}

// Puts the child that comes after the one of rank `last` on the heap, if there is one. The root's row falls already.
static void follow(Heap *heap, const Trellis *draft, const Node *nodes, int64_t parent, int64_t last) {
    const Node *node = nodes + parent;
    int64_t depth = node->depth, k = draft->k;
    if (depth == draft->depth) return;
    const float *row = depth ? draft->pairs + ((depth - 1) * k + node->rank) * k : draft->logp;
    int64_t rank = depth ? after(row, k, last) : last + 1;
    if (rank >= k || !(row[rank] > -INFINITY)) return;  // none left, dead, or not a number
    double cost = row[rank] < 0.0f ? -row[rank] : 0.0;
    push(heap, (Node){node->cost + cost, depth + 1, parent, rank});
}

// Best first, the root and at most `n_max` nodes, none that costs more than `most` and no child of one that costs more
// than `barren`. Candidates are `tokens` [depth, k], all different in a depth, with logp [depth, k] and pairs
// [depth - 1, k, k]. Out are costs [1 + n_max], and tokens, parents and depths in rows [3, 1 + n_max]; the root's token
// stays. Returns the number of nodes without the root, or -1 if memory ran out.
int64_t grow(const int64_t *tokens, const float *logp, const float *pairs, int64_t *rows, double *costs, int64_t depth,
             int64_t k, int64_t n_max, double most, double barren) {
    Trellis draft = {logp, pairs, depth, k};
    Node *nodes = malloc(2 * (n_max + 1) * sizeof *nodes);
    if (!nodes) return -1;
    Heap heap = {nodes + n_max + 1, 0};
    int64_t count = 0;
    nodes[0] = (Node){0.0, 0, -1, 0};
    for (; count < n_max; nodes[++count] = pop(&heap)) {
        if (nodes[count].cost <= barren) follow(&heap, &draft, nodes, count, -1);
        if (count) follow(&heap, &draft, nodes, nodes[count].parent, nodes[count].rank);
        if (!heap.count || heap.nodes[0].cost > most) break;
    }
    for (int64_t i = 0; i <= count; i++) {
        if (i) rows[i] = tokens[(nodes[i].depth - 1) * k + nodes[i].rank];
        rows[i + n_max + 1] = nodes[i].parent, rows[i + 2 * (n_max + 1)] = nodes[i].depth;
        costs[i] = nodes[i].cost;
    }
    free(nodes);
    return count;
}
