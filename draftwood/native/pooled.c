// The likeliest paths of several opinions together, as grow.py takes them.

#include "growth.h"
#include "pooled.h"

#define FORESEEN 32  // as MOST in foresight.py

typedef struct {
    double p, key, cost;           // in order of keys, then of ties
    int64_t token, source, tie;
} Child;

// Children of all nodes, those of one node next to each other.
typedef struct {
    Child *all;
    int64_t count, room;
} Children;

static Child *room(Children *children, int64_t more) {
    if (children->count + more > children->room) {
        int64_t wider = 2 * (children->count + more);
        Child *moved = realloc(children->all, wider * sizeof *moved);
        if (!moved) return NULL;
        children->all = moved, children->room = wider;
    }
    return children->all + children->count;
}

// Mixes in an opinion with the weight `share`. Returns how many children there are then.
static int64_t believe(const Pool *pool, const Opinion *said, double share, const Row *row, double factor, Child *out,
                       int64_t count) {
    const Automaton *text = said->text;
    int64_t listed = count;
    for (int32_t edge = text->newest[said->state]; edge >= 0; edge = text->older[edge]) {
        int64_t token = text->token[edge], i = 0;
        double p = share * likely(said, edge);
        while (i < listed && out[i].token != token) i++;
        if (i == listed) {  // nor is it among those that this opinion added: each follower is there once
            int64_t rank = rank_of(row, token);
            double before = rank < 0 ? 0.0 : factor * row->powers[rank];
            out[i = count++] = (Child){.p = before, .token = token, .source = pool->own};
        }
        if (p > out[i].p) out[i].source = said->source;
        out[i].p += p;
    }
    return count;
}

// Sets the order of the `listed` children, and adds the rest of the row. Returns how many there are then.
static int64_t complete(const Pool *pool, const Row *row, double factor, Child *out, int64_t listed) {
    int64_t count = listed;
    for (int64_t i = 0; i < listed; i++) out[i].key = -out[i].p, out[i].tie = -1 - out[i].token;
    for (int64_t rank = 0; rank < row->count; rank++) {
        int64_t i = 0, token = row->tokens[rank];
        double p = factor * row->powers[rank];
        while (i < listed && out[i].token != token) i++;
        if (i == listed) out[count++] = (Child){.p = p, .key = -p, .token = token, .source = pool->own, .tie = rank};
    }
    return count;
}

// Writes the children of a node after all others, with what all say of them. Returns how many, or -1 if memory ran out.
static int64_t mix(const Pool *pool, int64_t depth, int64_t token, const int32_t (*places)[2], Children *children) {
    Opinion opinions[LEVELS * TEXTS];
    double shares[LEVELS * TEXTS], left = 1.0;
    int64_t said = 0, more = LISTED + KEPT;
    for (int64_t m = 0; m < pool->texts; m++)
        said += heard(pool->matches + m, places[m][0], places[m][1], opinions + said);
    for (int64_t o = 0; o < said; o++) {
        double share = share_of(opinions[o].evidence);
        shares[o] = left * share, left *= 1.0 - share, more += opinions[o].followers;
    }
    Child *out = room(children, more);
    if (!out) return -1;
    Row row = row_of(pool, depth, token);
    Corrected found = corrected(pool, &row, depth, token);
    double factor = left * found.factor;
    for (int64_t i = 0; i < found.count; i++) {
        int64_t source = row.there && found.ranks[i] >= 0 ? pool->own : pool->learned;
        out[i] = (Child){.p = left * found.p[i], .token = found.tokens[i], .source = source};
    }
    int64_t count = found.count;
    for (int64_t o = 0; o < said; o++) count = believe(pool, opinions + o, shares[o], &row, factor, out, count);
    return complete(pool, &row, factor, out, count);
}

static inline int before(const Child *one, const Child *other) {
    return one->key != other->key ? one->key < other->key : one->tie < other->tie;
}

// The place of the child that comes after the one at `last` (-1: the first), or -1. Few are needed, so nothing is
// sorted.
static int64_t after(const Child *children, int64_t count, int64_t last) {
    int64_t next = -1;
    for (int64_t i = 0; i < count; i++) {
        if (children[i].p <= 0.0 || (last >= 0 && !before(children + last, children + i))) continue;
        if (next < 0 || before(children + i, children + next)) next = i;
    }
    return next;
}

static int64_t named(const Pool *pool, int64_t depth, int64_t token) {
    return pool->shifts ? (token + pool->shifts[depth]) % pool->vocab : token;
}

// The likeliest children as in foresight.py, which knows the noise of the draws to come. Returns how many.
static int64_t foresee(const Pool *pool, int64_t depth, Child *children, int64_t count) {
    Child likeliest[FORESEEN];
    double known = 0.0, sums = 0.0;
    int64_t kept = 0;
    for (int64_t last = -1; kept < FORESEEN && (last = after(children, count, last)) >= 0; kept++) {
        Child *child = likeliest + kept;
        *child = children[last];
        double logp = child->p < 1.0 ? log(child->p) : 0.0;
        uint64_t bits = bits_of(pool->keys[depth], named(pool, depth, child->token));
        child->key = -(logp + pool->heat * noise_of(bits)), child->tie = kept;
        known += exp(logp), sums += exp(-child->key);
    }
    double total = log(sums + (known < 1.0 ? 1.0 - known : 0.0));
    for (int64_t i = 0; i < kept; i++) children[i] = likeliest[i], children[i].cost = likeliest[i].key + total;
    return kept;
}

// A tree as it grows.
typedef struct {
    const Pool *pool;
    Node *nodes;
    Heap heap;
    Children children;
    int64_t (*spans)[2];   // of each node's children: the first, how many
    int64_t *tokens;       // of each node
    int32_t (*places)[2];  // of each node in each text: state, length
} Growth;

// Finds a node's children. Returns -1 if memory ran out.
static int ask(Growth *tree, int64_t node) {
    const Pool *pool = tree->pool;
    int64_t depth = tree->nodes[node].depth, first = tree->children.count;
    const int32_t(*places)[2] = (const int32_t(*)[2])(tree->places + node * pool->texts);
    int64_t count = mix(pool, depth, tree->tokens[node], places, &tree->children);
    if (count < 0) return -1;
    Child *children = tree->children.all + first;
    if (pool->keys && depth < pool->seen)
        count = foresee(pool, depth, children, count);
    else
        for (int64_t i = 0; i < count; i++) children[i].cost = children[i].p < 1.0 ? -log(children[i].p) : 0.0;
    tree->spans[node][0] = first, tree->spans[node][1] = count, tree->children.count += count;
    return 0;
}

// Puts the child of a node that comes after the one at `last` (-1: the first) on the heap, if there is one.
static void follow(Growth *tree, int64_t node, int64_t last) {
    const Child *children = tree->children.all + tree->spans[node][0];
    int64_t next = after(children, tree->spans[node][1], last);
    if (next < 0) return;
    double cost = children[next].cost > 0.0 ? children[next].cost : 0.0;
    push(&tree->heap, (Node){tree->nodes[node].cost + cost, tree->nodes[node].depth + 1, node, next, 0.0});
}

static const Child *child_of(const Growth *tree, const Node *node) {
    return tree->children.all + tree->spans[node->parent][0] + node->rank;
}

// Takes the next node, and follows it through the texts.
static void take(Growth *tree, int64_t node) {
    const Pool *pool = tree->pool;
    Node taken = tree->nodes[node] = pop(&tree->heap);
    tree->tokens[node] = child_of(tree, &taken)->token, tree->spans[node][1] = 0;
    for (int64_t m = 0; m < pool->texts; m++) {
        int32_t *from = tree->places[taken.parent * pool->texts + m], *to = tree->places[node * pool->texts + m];
        to[1] = from[1], to[0] = step(pool->matches[m].text, from[0], (int32_t)tree->tokens[node], to + 1);
    }
}

static int64_t best_first(Growth *tree, int64_t n_max, double most, double barren) {
    int64_t count = 0;
    for (; count < n_max; take(tree, ++count)) {
        const Node *node = tree->nodes + count;
        if (node->cost <= barren && node->depth < tree->pool->most) {
            if (ask(tree, count)) return -1;
            follow(tree, count, -1);
        }
        if (count) follow(tree, node->parent, node->rank);
        if (!tree->heap.count || tree->heap.nodes[0].cost > most) break;
    }
    return count;
}

// Grows best first: the root and at most `n_max` nodes, none that costs more than `most` and no child of one that costs
// more than `barren`. Results are logarithms of masses [1 + n_max], and tokens, parents, depths and sources in rows
// [4, 1 + n_max], which have the root's token already. Returns the number of nodes without the root, or -1 if memory
// ran out.
int64_t grow_pooled(const Pool *pool, int64_t *rows, double *logs, int64_t n_max, double most, double barren) {
    int64_t width = n_max + 1, bytes = 2 * sizeof(Node) + 3 * sizeof(int64_t) + pool->texts * sizeof(int32_t[2]);
    Node *nodes = malloc(width * bytes);
    if (!nodes) return -1;
    int64_t (*spans)[2] = (int64_t(*)[2])(nodes + 2 * width), *tokens = (int64_t *)(spans + width);
    Growth tree = {pool, nodes, {nodes + width, 0}, {0}, spans, tokens, (int32_t(*)[2])(tokens + width)};
    nodes[0] = (Node){0.0, 0, -1, 0, 0.0}, tokens[0] = rows[0], spans[0][1] = 0;
    for (int64_t m = 0; m < pool->texts; m++)
        tree.places[m][0] = (int32_t)pool->matches[m].state, tree.places[m][1] = (int32_t)pool->matches[m].length;
    int64_t count = best_first(&tree, n_max, most, barren);
    for (int64_t i = 0; i <= count; i++) {
        const Child *child = i ? child_of(&tree, nodes + i) : NULL;
        if (i) rows[i] = named(pool, nodes[i].depth - 1, child->token);
        rows[i + width] = nodes[i].parent, rows[i + 2 * width] = nodes[i].depth, rows[i + 3 * width] = i ? child->source : 0;
        logs[i] = -nodes[i].cost;
    }
    free(tree.children.all), free(nodes);
    return count;
}
