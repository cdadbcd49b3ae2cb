// What several opinions say at a place, as pool.py has it: for growing (pooled.c) and for learning (judged.c).

#pragma once

#include "substrings.h"
#include "successors.h"

#define LISTED 16  // as in pool.py and pool_weights.py, like the next three
#define DEPTHS 8
#define FLOOR 0.003
#define DEAD -80.0
#define LEVELS 2   // as in experts.py, like what else is about matches
#define LONGEST 12
#define OFTEN 3
#define NEWS 3.0
#define ANEW 0.5
#define TEXTS 4    // most that are searched

// What followed earlier occurrences in a text; the evidence counts choices for the others and for it, for each kind of
// match [LEVELS, 1 + LONGEST, 1 + OFTEN, 2, 2].
typedef struct {
    const Automaton *text;
    double *evidence;
    int64_t state, length, source;  // where the root is
} Matches;

typedef struct {
    const int64_t *tokens;  // [depth, k] of a lattice or trellis, with its logp and, or null, pairs [depth - 1, k, k]
    const float *logp, *pairs;
    const Table *table;      // or null
    double *exponents;       // [DEPTHS, 4]
    const Matches *matches;  // [texts]
    const uint64_t *keys;    // [seen] of noise, or null
    const int64_t *shifts;   // [most] that are added to tokens of a depth, modulo `vocab`; or null
    double heat;             // the noise's factor
    int64_t depth, k, texts, seen, vocab, most, own, learned;  // the deepest node; the sources of lattice and table
} Pool;

// The likeliest candidates of a row, q.
typedef struct {
    int64_t there, count, tokens[LISTED];
    double logp[LISTED], powers[LISTED];  // q^a
    double total, least, outside;         // of all tokens' powers; what a token that is no candidate has, and its log q
} Row;

// What the table lists, corrected; other candidates of the row have `factor` times their powers.
typedef struct {
    int64_t count, tokens[KEPT], ranks[KEPT];  // in the row, -1: none of its candidates
    double p[KEPT], said[KEPT], factor;        // said: s
    int32_t seen;                              // times that the table saw the token before
} Corrected;

// A text's opinion about what follows one of its states.
typedef struct {
    const Automaton *text;
    int32_t state;
    int64_t source, followers;
    double *evidence, whole;
} Opinion;

static inline double *exponents_of(const Pool *pool, int64_t depth) {
    return pool->exponents + 4 * (depth < DEPTHS ? depth : DEPTHS - 1);
}

// Which of the exponents of s belongs to a token that was seen so often.
static inline int64_t known_of(int32_t seen) { return 1 + (seen > 2) + (seen > 9); }

static inline double share_of(const double *evidence) { return evidence[1] / (evidence[0] + evidence[1]); }

static inline int64_t rank_of(const Row *row, int64_t token) {
    for (int64_t rank = 0; rank < row->count; rank++)
        if (row->tokens[rank] == token) return rank;
    return -1;
}

// Log-probabilities [k] of a depth, given the token before where that matters.
static inline const float *logp_of(const Pool *pool, int64_t depth, int64_t before) {
    const int64_t k = pool->k, *above = pool->tokens + (depth - 1) * k;
    for (int64_t r = 0; pool->pairs && depth && r < k; r++)
        if (above[r] == before) return pool->pairs + ((depth - 1) * k + r) * k;
    return pool->logp + depth * k;
}

static inline Row row_of(const Pool *pool, int64_t depth, int64_t before) {
    Row row = {.there = depth < pool->depth};
    if (!row.there) return row;
    const float *logp = logp_of(pool, depth, before);
    double a = pool->table ? *exponents_of(pool, depth) : 1.0, known = 0.0, bound = INFINITY;
    int64_t most = pool->k < LISTED ? pool->k : LISTED;
    for (int64_t last = -1, next; row.count < most; row.count++, last = next) {
        double best = DEAD;
        next = -1;
        for (int64_t r = 0; r < pool->k; r++) {
            double x = logp[r] > 0.0f ? 0.0 : logp[r];
            if (x > best && (x < bound || (x == bound && r > last))) best = x, next = r;
        }
        if (next < 0) break;
        bound = row.logp[row.count] = best;
        row.tokens[row.count] = pool->tokens[depth * pool->k + next], row.powers[row.count] = exp(a * best);
        row.total += row.powers[row.count], known += exp(best);
    }
    int whole = most && row.count == most;  // impossible candidates count as nothing
    row.least = whole ? 0.5 * row.powers[most - 1] : 0.0, row.outside = whole ? row.logp[most - 1] : DEAD;
    row.total += known < 1.0 ? 1.0 - known : 0.0;
    if (row.total < 1e-30) row.total = 1e-30;
    return row;
}

static inline Corrected corrected(const Pool *pool, const Row *row, int64_t depth, int64_t before) {
    const Table *table = pool->table;
    Corrected out = {0};
    int64_t at = table && 0 <= before && before < table->known ? table->slots[before] : -1;
    if (at >= 0) out.seen = table->seen[at];
    double b = out.seen ? exponents_of(pool, depth)[known_of(out.seen)] : 0.0;
    double low = pow(FLOOR, b), total = row->total * low;
    for (int64_t i = at * KEPT; at >= 0 && i < (at + 1) * KEPT && table->names[i] >= 0; i++) {
        double s = table->probs[i], p = s;
        int64_t rank = rank_of(row, table->names[i]);
        if (row->there) {
            p = (rank < 0 ? row->least : row->powers[rank]) * pow(s + FLOOR, b);
            total += rank < 0 ? p : p - row->powers[rank] * low;
        }
        out.tokens[out.count] = table->names[i], out.ranks[out.count] = rank;
        out.said[out.count] = s, out.p[out.count++] = p;
    }
    if (!row->there) return out;
    if (total < 1e-30) total = 1e-30;
    for (int64_t i = 0; i < out.count; i++) out.p[i] /= total;
    out.factor = low / total;
    return out;
}

// What a text says at a place, the longest match first. Returns how many opinions.
static inline int64_t heard(const Matches *matches, int32_t state, int32_t length, Opinion *out) {
    const Automaton *text = matches->text;
    int64_t count = 0;
    for (; state > 0 && count < LEVELS; state = text->link[state], length = text->length[state]) {
        int64_t all = 0, most = 0, followers = 0;
        for (int32_t edge = text->newest[state]; edge >= 0; edge = text->older[edge], followers++) {
            int32_t times = text->count[text->to[edge]];
            all += times, most = times > most ? times : most;
        }
        if (!followers) continue;
        int64_t kind = count * (1 + LONGEST) + (length < LONGEST ? length : LONGEST);
        kind = 2 * (kind * (1 + OFTEN) + (all < OFTEN ? all : OFTEN)) + (most > 0.6 * all);
        double *evidence = matches->evidence + 2 * kind, whole = (double)all + NEWS + ANEW;
        out[count++] = (Opinion){text, state, matches->source, followers, evidence, whole};
    }
    return count;
}

// The probability that an opinion gives the token of `edge`.
static inline double likely(const Opinion *said, int32_t edge) {
    const Automaton *text = said->text;
    double times = text->count[text->to[edge]] + (text->token[edge] == text->latest[said->state] ? NEWS : 0.0);
    return times / said->whole;
}
