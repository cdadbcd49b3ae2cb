// What a pool learns from the tokens that the target chose, as pool.py and pool_weights.py do.

#include "pooled.h"

#define MEMORY 0.99  // as in pool_weights.py, like the others: UNHEARD is its NEVER, RATE its STEP
#define UNHEARD 1e-4
#define LEAST 0.1
#define RATE 0.005
#define STEEP 8.0
#define LOWEST_A 0.3
#define HIGHEST 1.5

static void move(double *exponent, double gradient, double lowest) {
    double moved = *exponent + RATE * fmin(fmax(gradient, -STEEP), STEEP);
    *exponent = fmin(fmax(moved, lowest), HIGHEST);
}

// Moves exponents towards a larger log p(chosen). The gradient is log q and log s of the chosen token, less their means
// under p.
static void follow_gradient(double *exponents, const Row *row, const Corrected *found, int64_t rank, int64_t at) {
    double mean_q = 0.0, mean_s = 0.0, spoken = 0.0;
    for (int64_t r = 0; r < row->count; r++) mean_q += found->factor * row->powers[r] * row->logp[r];
    for (int64_t i = 0; i < found->count; i++) {
        int64_t r = found->ranks[i];
        mean_q += r < 0 ? found->p[i] * row->outside : (found->p[i] - found->factor * row->powers[r]) * row->logp[r];
        mean_s += found->p[i] * log(found->said[i] + FLOOR), spoken += found->p[i];
    }
    mean_s += (1.0 - spoken) * log(FLOOR);
    move(exponents, (rank < 0 ? row->outside : row->logp[rank]) - mean_q, LOWEST_A);
    move(exponents + known_of(found->seen), log((at < 0 ? 0.0 : found->said[at]) + FLOOR) - mean_s, 0.0);
}

// Credits an opinion for a chosen token, to which the others gave probability `p[0]`, and the others without the row
// `p[1]`: these become what they and the opinion give it together.
static void credit(const Opinion *said, double *p, int64_t token) {
    int32_t edge = find(said->text, said->state, (int32_t)token);
    double own = edge < 0 ? 0.0 : likely(said, edge), share = share_of(said->evidence);
    double by = share * own / (share * own + (1.0 - share) * fmax(p[0], UNHEARD));
    said->evidence[0] = MEMORY * said->evidence[0] + 1.0 - by;
    said->evidence[1] = fmax(MEMORY * said->evidence[1] + by, LEAST);
    for (int64_t i = 0; i < 2; i++) p[i] += share * (own - p[i]);
}

// The target wrote `chosen` [n] after `root`: exponents and evidence learn from it. Into `judged` [n, 3] go the
// probabilities that the pool, the row alone and all but the row gave each token. Returns for how many there was a row.
int64_t learn_pooled(const Pool *pool, int64_t root, const int64_t *chosen, int64_t n, double *judged) {
    int32_t places[TEXTS][2];
    int64_t rows = 0;
    for (int64_t m = 0; m < pool->texts; m++)
        places[m][0] = (int32_t)pool->matches[m].state, places[m][1] = (int32_t)pool->matches[m].length;
    for (int64_t depth = 0, before = root; depth < n && depth < pool->most; before = chosen[depth++]) {
        Opinion opinions[LEVELS * TEXTS];
        int64_t said = 0, token = chosen[depth], at = 0;
        for (int64_t m = 0; m < pool->texts; m++)
            said += heard(pool->matches + m, places[m][0], places[m][1], opinions + said);
        Row row = row_of(pool, depth, before);
        Corrected found = corrected(pool, &row, depth, before);
        int64_t rank = rank_of(&row, token);
        while (at < found.count && found.tokens[at] != token) at++;
        if (at == found.count) at = -1;
        double p[2] = {rank < 0 ? 0.0 : found.factor * row.powers[rank], 0.0};
        if (at >= 0) p[0] = found.p[at], p[1] = found.said[at];
        while (said--) credit(opinions + said, p, token);
        if (row.there) {
            double *own = judged + 3 * rows++;
            own[0] = p[0], own[1] = rank < 0 ? 0.0 : exp(row.logp[rank]), own[2] = p[1];
            if (pool->table && found.count && (rank >= 0 || at >= 0))
                follow_gradient(exponents_of(pool, depth), &row, &found, rank, at);
        }
        for (int64_t m = 0; m < pool->texts; m++)
            places[m][0] = step(pool->matches[m].text, places[m][0], (int32_t)token, places[m] + 1);
    }
    return rows;
}
