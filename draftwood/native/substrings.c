// The suffix automaton of a whole text, as drafters/automaton.py makes it token by token.

#include "native.h"

// Of n tokens there are at most 2 n + 1 states and 3 n + 1 edges.
typedef struct {
    int32_t *link, *length, *count, *latest;  // of each state, as in automaton.py
    int32_t *newest, *older;                  // the last edge of each state and the one before each edge, or -1
    int32_t *from, *token, *to;               // of each edge
    int32_t *slots;                           // a hash table of edges by state and token, -1 where it is empty
    int64_t states, edges, mask;
} Automaton;

static int64_t slot(const Automaton *a, int32_t state, int32_t token) {
    uint64_t mixed = ((uint64_t)(uint32_t)state << 32 | (uint32_t)token) * 0x9E3779B97F4A7C15u;
    int64_t place = (int64_t)(mixed >> 20) & a->mask;
    for (int32_t edge; (edge = a->slots[place]) >= 0; place = (place + 1) & a->mask)
        if (a->from[edge] == state && a->token[edge] == token) break;
    return place;
}

static int32_t find(const Automaton *a, int32_t state, int32_t token) { return a->slots[slot(a, state, token)]; }

static void connect(Automaton *a, int32_t state, int32_t token, int32_t to) {
    int32_t edge = (int32_t)a->edges++;
    a->slots[slot(a, state, token)] = edge;
    a->from[edge] = state, a->token[edge] = token, a->to[edge] = to;
    a->older[edge] = a->newest[state], a->newest[state] = edge;
}

static int32_t state(Automaton *a, int32_t link, int32_t length) {
    int32_t made = (int32_t)a->states++;
    a->link[made] = link, a->length[made] = length;
    a->count[made] = 0, a->latest[made] = a->newest[made] = -1;
    return made;
}

// The suffix link of a new state whose longest known suffix is that of `edge`.
static int32_t split(Automaton *a, int32_t edge) {
    int32_t before = a->from[edge], token = a->token[edge], after = a->to[edge];
    if (a->length[after] == a->length[before] + 1) return after;
    int32_t clone = state(a, a->link[after], a->length[before] + 1);
    for (int32_t other = a->newest[after]; other >= 0; other = a->older[other])
        connect(a, clone, a->token[other], a->to[other]);
    for (; before >= 0 && (edge = find(a, before, token)) >= 0 && a->to[edge] == after; before = a->link[before])
        a->to[edge] = clone;
    return a->link[after] = clone;
}

// What ends at a prefix ends at all its suffixes: longest first, each state tells its link. `order` has room for all
// states, `starts` for n + 2 numbers.
static void tell(Automaton *a, int64_t n, int32_t *order, int32_t *starts) {
    memset(starts, 0, (n + 2) * sizeof *starts);
    for (int64_t s = 0; s < a->states; s++) starts[a->length[s] + 1]++;
    for (int64_t i = 1; i < n + 2; i++) starts[i] += starts[i - 1];
    for (int64_t s = 0; s < a->states; s++) order[starts[a->length[s]]++] = (int32_t)s;
    for (int64_t i = a->states - 1; i > 0; i--) {
        int32_t one = order[i], link = a->link[one];
        a->count[link] += a->count[one];
        if (a->latest[one] > a->latest[link]) a->latest[link] = a->latest[one];
    }
}

// The edges in order of their states, those of one as they were made: `starts` [states + 1] says where each begins.
static void sort(const Automaton *a, int32_t *starts, int32_t *tokens, int32_t *to) {
    int32_t place = starts[a->states] = (int32_t)a->edges;
    for (int64_t s = a->states - 1; s >= 0; starts[s--] = place)
        for (int32_t edge = a->newest[s]; edge >= 0; edge = a->older[edge])
            tokens[--place] = a->token[edge], to[place] = a->to[edge];
}

// `tokens` [n] into states [5, 2 n + 2] (link, length, occurrences, the token after the latest one or -1, the first
// edge) and edges [2, 3 n + 1] (token, to). `end` becomes the state of the whole text. Returns the number of states,
// or -1 if memory ran out.
int64_t read_text(const int32_t *tokens, int64_t n, int32_t *states, int32_t *edges, int64_t *end) {
    int64_t row = 2 * n + 2, most = 3 * n + 1, room = 16;
    while (room < 2 * most) room *= 2;
    int32_t *memory = malloc((2 * row + 4 * most + room) * sizeof *memory), *from = memory + 2 * row;
    if (!memory) return -1;
    Automaton a = {states, states + row, states + 2 * row, states + 3 * row, memory,          from + 3 * most,
                   from,   from + most,  from + 2 * most,  from + 4 * most,  0, 0, room - 1};
    memset(a.slots, -1, room * sizeof *a.slots);
    int32_t last = state(&a, -1, 0);
    for (int64_t i = 0; i < n; i++) {
        int32_t made = state(&a, 0, (int32_t)i + 1), before = last, edge = -1;
        for (; before >= 0 && (edge = find(&a, before, tokens[i])) < 0; before = a.link[before])
            connect(&a, before, tokens[i], made);
        if (before >= 0) a.link[made] = split(&a, edge);
        a.count[made] = 1, a.latest[made] = i + 1 < n ? (int32_t)i + 1 : -1, last = made;
    }
    tell(&a, n, memory + row, a.slots);
    for (int64_t s = 0; s < a.states; s++)
        if (a.latest[s] >= 0) a.latest[s] = tokens[a.latest[s]];
    a.count[0] = 0, a.latest[0] = -1;  // of the empty string nobody asks
    sort(&a, states + 4 * row, edges, edges + most);
    free(memory);
    *end = last;
    return a.states;
}
