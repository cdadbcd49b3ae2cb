// The suffix automaton of a text, as drafters/automaton.py has it, in memory that Python owns.

#pragma once

#include "native.h"

typedef struct {
    int32_t *link, *length, *count, *latest;  // of each state, as in automaton.py
    int32_t *newest, *older;                  // the last edge of each state and the one before each edge, or -1
    int32_t *from, *token, *to;               // of each edge
    int32_t *slots;                           // a hash table of edges by state and token, -1 where it is empty
    int64_t states, edges;
    int64_t state_room, edge_room, mask;  // how many there is room for; the number of slots, a power of two, less one
    int64_t end;                          // the state of everything so far
} Automaton;

static inline int64_t slot(const Automaton *a, int32_t state, int32_t token) {
    uint64_t mixed = ((uint64_t)(uint32_t)state << 32 | (uint32_t)token) * 0x9E3779B97F4A7C15u;
    int64_t place = (int64_t)(mixed >> 20) & a->mask;
    for (int32_t edge; (edge = a->slots[place]) >= 0; place = (place + 1) & a->mask)
        if (a->from[edge] == state && a->token[edge] == token) break;
    return place;
}

static inline int32_t find(const Automaton *a, int32_t state, int32_t token) { return a->slots[slot(a, state, token)]; }

// The state of the longest suffix that occurred of the `length` tokens that led to `state` and `token` after them;
// `length` becomes that suffix's.
static inline int32_t step(const Automaton *a, int32_t state, int32_t token, int32_t *length) {
    int32_t edge;
    while ((edge = find(a, state, token)) < 0 && state > 0) state = a->link[state], *length = a->length[state];
    *length = edge < 0 ? 0 : *length + 1;
    return edge < 0 ? 0 : a->to[edge];
}
