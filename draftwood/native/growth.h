// Nodes in the order in which best-first growth takes them, of a trellis (growth.c) or of a pool (pooled.c).

#pragma once

#include "native.h"

// A node of the tree, or one that waits.
typedef struct {
    double cost;                  // -log p of the path to it
    int64_t depth, parent, rank;  // the rank among the candidates of its depth, or of its parent
    double total;                 // log of the sum over its children with noise, and of the rest
} Node;

// The nodes that wait: of each node of the tree only the next child, so no two children of one node are compared.
typedef struct {
    Node *nodes;
    int64_t count;
} Heap;

static inline int precedes(const Node *one, const Node *other) {
    if (one->cost != other->cost) return one->cost < other->cost;
    return one->depth != other->depth ? one->depth < other->depth : one->parent < other->parent;
}

static inline void push(Heap *heap, Node node) {
    int64_t place = heap->count++;
    for (int64_t above; place && precedes(&node, heap->nodes + (above = (place - 1) / 2)); place = above)
        heap->nodes[place] = heap->nodes[above];
    heap->nodes[place] = node;
}

static inline Node pop(Heap *heap) {
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
