// The suffix automaton of a text, as drafters/automaton.py makes it token by token.

#include "substrings.h"

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

static int whole(const Automaton *a, int32_t edge) { return a->length[a->to[edge]] == a->length[a->from[edge]] + 1; }

// The suffix link of a new state whose longest known suffix is that of `edge`. A clone ends where its original does.
static int32_t split(Automaton *a, int32_t edge) {
    int32_t before = a->from[edge], token = a->token[edge], after = a->to[edge];
    if (whole(a, edge)) return after;
    int32_t clone = state(a, a->link[after], a->length[before] + 1);
    a->count[clone] = a->count[after], a->latest[clone] = a->latest[after];
    for (int32_t other = a->newest[after]; other >= 0; other = a->older[other])
        connect(a, clone, a->token[other], a->to[other]);
    for (; before >= 0 && (edge = find(a, before, token)) >= 0 && a->to[edge] == after; before = a->link[before])
        a->to[edge] = clone;
    return a->link[after] = clone;
}

// Tells `links` states, from `state` on along its suffix links, which token followed; `count` tells them that they
// occurred once more.
static void follow(Automaton *a, int32_t state, int64_t links, int32_t token) {
    for (; links-- && state > 0; state = a->link[state]) a->latest[state] = token;
}

static void count(Automaton *a, int32_t state, int64_t links) {
    for (; links-- && state > 0; state = a->link[state]) a->count[state]++;
}

// Whether there is room for a token: for its edges, and those of a clone.
static int fits(const Automaton *a, int32_t token) {
    int64_t more = 0;
    int32_t before = (int32_t)a->end, edge = -1;
    for (; before >= 0 && (edge = find(a, before, token)) < 0; before = a->link[before]) more++;
    if (before >= 0 && !whole(a, edge))
        for (int32_t other = a->newest[a->to[edge]]; other >= 0; other = a->older[other]) more++;
    return a->states + 2 <= a->state_room && a->edges + more <= a->edge_room;
}

// Begins an empty automaton.
void begin_text(Automaton *a) {
    memset(a->slots, -1, (a->mask + 1) * sizeof *a->slots);
    a->states = a->edges = 0, a->end = state(a, -1, 0);
}

// Fills the slots of an automaton that has moved to other memory.
void move_text(Automaton *a) {
    memset(a->slots, -1, (a->mask + 1) * sizeof *a->slots);
    for (int64_t edge = 0; edge < a->edges; edge++) a->slots[slot(a, a->from[edge], a->token[edge])] = (int32_t)edge;
}

static void append(Automaton *a, int32_t token) {
    int32_t made = state(a, 0, a->length[a->end] + 1), before = (int32_t)a->end, edge = -1;
    for (; before >= 0 && (edge = find(a, before, token)) < 0; before = a->link[before]) connect(a, before, token, made);
    if (before >= 0) a->link[made] = split(a, edge);
    a->end = made;
}

// Appends `tokens` [n], of each of which no more than `links` suffixes are told. Returns how many there was room for.
int64_t append_text(Automaton *a, const int32_t *tokens, int64_t n, int64_t links) {
    for (int64_t i = 0; i < n; i++) {
        if (!fits(a, tokens[i])) return i;
        follow(a, (int32_t)a->end, links, tokens[i]);
        append(a, tokens[i]);
        count(a, (int32_t)a->end, links);
    }
    return n;
}

int64_t step_text(const Automaton *a, int64_t state, int64_t token, int32_t *length) {
    return step(a, (int32_t)state, (int32_t)token, length);
}

// Which tokens followed a state and how often, as far as `found` [2, room] has room. Returns how many did.
int64_t followers(const Automaton *a, int64_t state, int32_t *found, int64_t room) {
    int64_t n = 0;
    for (int32_t edge = a->newest[state]; edge >= 0; edge = a->older[edge], n++)
        if (n < room) found[n] = a->token[edge], found[room + n] = a->count[a->to[edge]];
    return n;
}

