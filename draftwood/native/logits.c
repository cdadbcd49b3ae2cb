// What is made of logits: the likeliest tokens, which one follows which, and the target's own draws.

#include "native.h"

#define CHUNK 64         // logits that are looked at together
#define STEEPEST 1e30f   // most that 1 / temperature may be: infinity times the largest logit's 0 is not a number
#define VALUES 65536     // numbers in bf16
#define LOWEST -3e38f    // least logit of a token that may be drawn: one at minus infinity may not
#define FAR 10.0f        // a distance of logits
#define FAINTEST -87.0f  // an exponent below which a weight counts as 0
#define SPAN 32          // logits whose noise is looked at together
#define FAVOUR 8.0       // most that noise counts for where candidates are chosen, as in noise.py

static inline float largest(vec x) {
    float part[LANES];
    memcpy(part, &x, sizeof part);
    for (int width = LANES / 2; width; width /= 2)
        for (int l = 0; l < width; l++) part[l] = part[l + width] > part[l] ? part[l + width] : part[l];
    return part[0];
}

// The largest of CHUNK numbers.
static inline float largest_of(const bf16 *chunk) {
    vec most = widen(chunk);
    for (int i = LANES; i < CHUNK; i += LANES) most = larger(most, widen(chunk + i));
    return largest(most);
}

static inline float largest_in_span(const bf16 *span) {
    vec most = widen(span);
    for (int i = LANES; i < SPAN; i += LANES) most = larger(most, widen(span + i));
    return largest(most);
}

// The place of the largest of a row of logits [size], the first of equals; 0 if none is a number.
int64_t choice(const bf16 *row, int64_t size) {
    float best = -INFINITY;
    int64_t place = 0;
    for (int64_t start = 0; start < size; start += CHUNK) {
        int64_t stop = start + CHUNK < size ? start + CHUNK : size;
        if (stop - start == CHUNK && !(largest_of(row + start) > best)) continue;
        for (int64_t i = start; i < stop; i++)
            if (up(row[i]) > best) best = up(row[i]), place = i;
    }
    return place;
}

// log of the sum of the exponentials of a row.
static float log_sum(const bf16 *row, int64_t size, float most) {
    vec sum = {0};
    int64_t whole = size - size % LANES;
    for (int64_t i = 0; i < whole; i += LANES) sum += exponential(widen(row + i) - most);
    float rest = 0.0f;
    for (int64_t i = whole; i < size; i++) rest += exponential(every(up(row[i]) - most))[0];
    for (int l = 0; l < LANES; l++) rest += sum[l];
    return most + logf(rest);
}

// The largest probability of a row to about a percent, in one pass; not a number where no logit is one. Chunks that are
// FAR below the largest, three of four of a language model's, are left out: half a percent of the whole, by
// measurement.
float confidence(const bf16 *row, int64_t size) {
    float best = -INFINITY;
    vec sum = {0};  // of exponentials below `best`
    for (int64_t start = 0; start < size; start += CHUNK) {
        int64_t stop = start + CHUNK < size ? start + CHUNK : size;
        bf16 last[CHUNK];
        const bf16 *chunk = row + start;
        if (stop - start < CHUNK) {
            for (int64_t i = 0; i < CHUNK; i++) last[i] = i < stop - start ? chunk[i] : 0xff80;  // minus infinity
            chunk = last;
        }
        float most = largest_of(chunk);
        if (!(most > best - FAR)) continue;
        if (most > best) sum *= expf(best - most), best = most;
        for (int64_t i = 0; i < CHUNK; i += LANES) sum += exponential(widen(chunk + i) - best);
    }
    return best > -INFINITY ? 1.0f / total((float *)&sum) : NAN;
}

// The largest bits of noise among CHUNK tokens from `token` on.
static inline uint64_t most_bits(uint64_t key, int64_t token) {
    words states, most = {0};
    for (int l = 0; l < WORDS; l++) states[l] = key + (uint64_t)(token + 1 + l) * STEP;
    for (int i = 0; i < CHUNK; i += WORDS, states += WORDS * STEP) {
        words bits = bits_in(states), more = (words)(bits > most);
        most = (bits & more) | (most & ~more);
    }
    uint64_t best = 0;
    for (int l = 0; l < WORDS; l++) best = most[l] > best ? most[l] : best;
    return best;
}

// An upper bound of the noise of these bits, without a logarithm: -log(-log u) is below -log(1 - u), for which the
// power of two is enough.
static inline double most_noise(uint64_t bits) { return M_LN2 * (__builtin_clzll((1ll << NOISE) - bits) - 10); }

// Puts a value where it belongs among the k largest in falling order, if it is one of them.
static inline void insert(float value, int64_t at, int64_t k, int64_t *place, float *best) {
    if (!(value > best[k - 1])) return;
    int64_t j = k - 1;
    for (; j > 0 && value > best[j - 1]; j--) best[j] = best[j - 1], place[j] = place[j - 1];
    best[j] = value, place[j] = at;
}

static inline int among(const int64_t *places, int64_t k, int64_t place) {
    int found = 0;
    for (int64_t j = 0; j < k; j++) found |= places[j] == place;
    return found;
}

// Where fewer than k are possible, fills up with the first of the other places.
static inline void fill(int64_t *place, int64_t k) {
    int64_t next = 0;
    for (int64_t n = 0; n < k; n++)
        for (; place[n] < 0; next++)
            if (!among(place, k, next)) place[n] = next;
}

// The places of the k largest of a row, and their values, the first of equals first.
static void largest_k(const bf16 *row, int64_t size, int64_t k, int64_t *place, float *best) {
    for (int64_t j = 0; j < k; j++) place[j] = -1, best[j] = -INFINITY;
    for (int64_t start = 0; start < size; start += CHUNK) {
        int64_t stop = start + CHUNK < size ? start + CHUNK : size;
        if (stop - start == CHUNK && !(largest_of(row + start) > best[k - 1])) continue;  // most of them
        for (int64_t i = start; i < stop; i++) insert(up(row[i]), i, k, place, best);
    }
    fill(place, k);
}

// Whole numbers below 2^52, as doubles.
static inline doubles exact(words x) { return (doubles)(x | 0x4330000000000000) - 0x1p52; }

// The same bound, to a tenth: the bits of a double, read as a whole number and scaled, do not exceed its logarithm.
static inline doubles most_noises(words bits) {
    words left = (words)(0x1p52 - 0.5 - exact(bits));
    return M_LN2 * (1075.0 - 0x1p-40 * exact(left >> 12));
}

// Marks which of SPAN places from `start` on may have a larger sum than `least`. Returns whether any may.
static inline int contenders(const bf16 *row, const int64_t *ids, uint64_t key, double heat, int64_t start, double least,
                             int64_t *which) {
    words any = {0};
    for (int64_t i = 0; i < SPAN; i += WORDS) {
        words tokens;
        doubles logits;
        for (int l = 0; l < WORDS; l++) tokens[l] = ids ? ids[start + i + l] : start + i + l;
        for (int l = 0; l < WORDS; l++) logits[l] = up(row[start + i + l]);
        words found = (words)(logits + heat * most_noises(bits_in(key + (tokens + 1) * STEP)) > least);
        any |= found;
        memcpy(which + i, &found, sizeof found);
    }
    uint64_t some = 0;
    for (int l = 0; l < WORDS; l++) some |= any[l];
    return some != 0;
}

static inline float sum_of(const bf16 *row, const int64_t *ids, uint64_t key, double heat, int64_t i) {
    double noise = noise_of(bits_of(key, ids ? ids[i] : i));
    return up(row[i]) + heat * (noise < FAVOUR ? noise : FAVOUR);
}

// As `largest_k`, by the sums of logit and noise, which is `heat` times that of the tokens `ids` (null: the places);
// but in the order of their logits, which go into `best`. `likely` [k] is scratch.
static void favoured_k(const bf16 *row, int64_t size, int64_t k, const int64_t *ids, uint64_t key, double heat,
                       int64_t *place, float *best, int64_t *likely) {
    int64_t which[SPAN];
    largest_k(row, size, k, likely, best);  // first: few of the others then have a chance
    for (int64_t j = 0; j < k; j++) place[j] = -1, best[j] = -INFINITY;
    for (int64_t j = 0; j < k; j++) insert(sum_of(row, ids, key, heat, likely[j]), likely[j], k, place, best);
    for (int64_t start = 0; start < size; start += SPAN) {
        int64_t count = start + SPAN < size ? SPAN : size - start;
        if (count == SPAN && !(largest_in_span(row + start) + heat * FAVOUR > best[k - 1])) continue;
        if (count == SPAN && !contenders(row, ids, key, heat, start, best[k - 1], which)) continue;
        for (int64_t i = start; i < start + count; i++)
            if ((count < SPAN || which[i - start]) && !among(likely, k, i))
                insert(sum_of(row, ids, key, heat, i), i, k, place, best);
    }
    fill(place, k);
    for (int64_t n = 0; n < k; n++) {
        int64_t mine = place[n];
        best[n] = -INFINITY;
        insert(up(row[mine]), mine, n + 1, place, best);
    }
}

// The k largest of each row of logits [rows, size], the first of equals first: their places, and log-probabilities
// normalised over the row, [rows, k] each. With keys [rows] the k that noise favours, in the same order; only this
// needs scratch [rows, k]. Nothing is written if k is 0.
void candidates(const bf16 *logits, int64_t *places, float *logp, const int64_t *ids, const uint64_t *keys,
                int64_t *scratch, int64_t rows, int64_t size, int64_t k, double heat, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > SMALL / 2)
    for (int64_t r = 0; r < (k ? rows : 0); r++) {
        const bf16 *row = logits + r * size;
        int64_t *place = places + r * k;
        float *best = logp + r * k;
        if (keys) favoured_k(row, size, k, ids, keys[r], heat, place, best, scratch + r * k);
        else largest_k(row, size, k, place, best);
        float all = log_sum(row, size, up(row[keys ? scratch[r * k] : place[0]]));
        for (int64_t j = 0; j < k; j++) best[j] -= all;
    }
}

// log p of each of k candidates `to`, given each of those before, `from`: the product of `before` of the one and
// `after` of the other, `rank` numbers each, plus the other's logp [k], normalised. Other tokens keep their share.
// Returns 0, or 1 if memory ran out.
static int score_pairs(const int64_t *from, const int64_t *to, const float *logp, const bf16 *before, const bf16 *after,
                       float *out, int64_t k, int64_t rank) {
    int64_t vectors = (k + LANES - 1) / LANES, wide = vectors * LANES;
    vec *turned = aligned_alloc(sizeof *turned, (rank + 1) * vectors * sizeof *turned);
    if (!turned) return 1;
    float *lanes = (float *)turned, *scores = lanes + rank * wide;  // `after` of the candidates, one a lane; scores
    float rest = 1.0f;
    for (int64_t a = 0; a < k; a++)
        for (int64_t i = 0; i < rank; i += LINE / 2) later(before + from[a] * rank + i);
    for (int64_t b = 0; b < k; b++) rest -= expf(logp[b]);
    for (int64_t b = 0; b < wide; b++)
        for (int64_t i = 0; i < rank; i++) lanes[i * wide + b] = b < k ? up(after[to[b] * rank + i]) : 0.0f;
    for (int64_t a = 0; a < k; a++, out += k) {
        const bf16 *mine = before + from[a] * rank;
        for (int64_t b = 0; b < wide; b++) scores[b] = b < k ? logp[b] : NEVER;
        vec sum = {0};
        for (int64_t v = 0; v < vectors; v++) {
            vec score = turned[rank * vectors + v];
            for (int64_t i = 0; i < rank; i++) score += up(mine[i]) * turned[i * vectors + v];
            sum += exponential(score), turned[rank * vectors + v] = score;
        }
        float all = logf(total((float *)&sum) + (rest > 0.0f ? rest : 0.0f));
        for (int64_t b = 0; b < k; b++) out[b] = scores[b] - all;
    }
    free(turned);
    return 0;
}

// The same for each depth but the first, [depths - 1, k, k]; `rows` [depths, k] are the candidates.
int pair_scores(const int64_t *rows, const float *logp, const bf16 *before, const bf16 *after, float *out,
                int64_t depths, int64_t k, int64_t rank, int threads) {
    int failed = 0;
#pragma omp parallel for num_threads(threads) reduction(| : failed) if (depths * k * k * rank > SMALL)
    for (int64_t d = 1; d < depths; d++)
        failed |= score_pairs(rows + (d - 1) * k, rows + d * k, logp + d * k, before, after, out + (d - 1) * k * k, k, rank);
    return failed;
}

// Which tokens may be drawn: those with logits of `least` or more, but before the place `from` only those with more. A
// token's weight is exp((logit - most) * rate), where `rate` is 1 / temperature, at most STEEPEST.
typedef struct {
    double temperature;
    float most, rate, least, above;  // `above` is the next number after `least`
    int64_t from, place;             // `place` is that of the largest
} Draw;

// The place of a bf16 number among all of them, by size.
static inline uint16_t rank_of(bf16 x) {
    x = x == 0x8000 ? 0 : x;  // there are two zeros
    return x ^ (uint16_t)((int16_t)x >> 15 | 0x8000);
}

static inline float of_rank(uint16_t rank) { return up(rank & 0x8000 ? rank ^ 0x8000 : ~rank); }

static inline float least_at(const Draw *draw, int64_t place) { return place < draw->from ? draw->above : draw->least; }

// The place after the first `count` logits that are `value`.
static int64_t behind(const bf16 *row, int64_t size, float value, int64_t count) {
    int64_t i = 0;
    for (; i < size && count; i++) count -= up(row[i]) == value;
    return i;
}

static double weight_of(const Draw *draw, int64_t rank) {
    float power = (of_rank(rank) - draw->most) * draw->rate;
    return power > FAINTEST ? exponential(every(power))[0] : 0.0;
}

// The rules of a draw. As candidates.py lays it out.
typedef struct {
    double temperature;  // above 0
    int64_t top_k;       // the size of a row, if all are kept
    double top_p, min_p;
} Rules;

// Keeps the `top_k` largest, of these the fewest that hold `top_p` of their weight, and of those none with less than
// `min_p` of the largest weight. Of equal logits top-k keeps all and top-p the last ones. A row has few different
// numbers, so they are counted instead of sorted. Returns 0, or 1 if memory ran out.
static int cut(Draw *draw, const bf16 *row, int64_t size, const Rules *rules) {
    uint32_t *count = calloc(VALUES, sizeof *count);
    if (!count) return 1;
    for (int64_t i = 0; i < size; i++) count[rank_of(row[i])]++;
    int64_t highest = rank_of(down(draw->most)), lowest = highest, none = rank_of(down(-INFINITY));
    double all = 0.0, above = 0.0, share = rules->top_p;
    for (int64_t rank = highest, kept = 0; rank > none && kept < rules->top_k; rank--) {
        if (!count[rank]) continue;
        kept += count[rank], lowest = rank, all += count[rank] * weight_of(draw, rank);
    }
    for (int64_t rank = highest; rank >= lowest; rank--) {
        if (!count[rank]) continue;
        double weight = weight_of(draw, rank), room = share < 1.0 ? ceil((share * all - above) / weight) : size;
        if (weight < rules->min_p || !(room >= 1.0)) break;
        draw->least = of_rank(rank), draw->above = of_rank(rank + 1);
        if (room < count[rank]) draw->from = behind(row, size, draw->least, count[rank] - (int64_t)room);
        above += count[rank] * weight;
    }
    free(count);
    return 0;
}

// A row's temperature and cuts. Returns 0, or 1 if memory ran out.
static int prepare(Draw *draw, const bf16 *row, int64_t size, const Rules *rules) {
    double rate = 1.0 / rules->temperature;
    int64_t place = choice(row, size);
    *draw = (Draw){rules->temperature, up(row[place]), rate < STEEPEST ? rate : STEEPEST, LOWEST, LOWEST, 0, place};
    return (rules->top_k < size || rules->top_p < 1.0 || rules->min_p > 0.0) && cut(draw, row, size, rules);
}

static inline double score_of(const Draw *draw, float x) { return (x - draw->most) / draw->temperature; }

// A token and the sum of its score and its noise.
typedef struct {
    double sum;
    int64_t place;
} Drawn;

// The larger one of `best` and the largest sum of the tokens from `start` to `stop`; only the few near it take
// logarithms.
static Drawn noisier(Drawn best, const Draw *draw, const bf16 *row, int64_t start, int64_t stop, uint64_t key) {
    for (int64_t i = start; i < stop; i++) {
        double score = score_of(draw, up(row[i]));
        uint64_t bits = bits_of(key, i);
        if (!(score + most_noise(bits) > best.sum) || !(up(row[i]) >= least_at(draw, i))) continue;
        if (score + noise_of(bits) > best.sum) best = (Drawn){score + noise_of(bits), i};
    }
    return best;
}

// The place of the largest sum of score and noise under a key; 0 if no token may be drawn. The chunk with the largest
// logit is first: its sum is mostly so large that hardly any other chunk could hold a larger one.
static int64_t noisiest(const Draw *draw, const bf16 *row, int64_t size, uint64_t key) {
    int64_t first = draw->place / CHUNK * CHUNK, rest = size - size % CHUNK;
    Drawn best = noisier((Drawn){-INFINITY, 0}, draw, row, first, first + CHUNK < size ? first + CHUNK : size, key);
    for (int64_t start = 0; start < rest; start += CHUNK) {
        float most = largest_of(row + start);
        if (most >= draw->least && score_of(draw, most) + most_noise(most_bits(key, start)) > best.sum)
            best = noisier(best, draw, row, start, start + CHUNK, key);
    }
    return noisier(best, draw, row, rest, size, key).place;
}

// The token that is drawn from logits [size] by the rules, under a key; -1 if memory ran out.
int64_t draw(const bf16 *row, int64_t size, const Rules *rules, uint64_t key) {
    Draw draw;
    return prepare(&draw, row, size, rules) ? -1 : noisiest(&draw, row, size, key);
}

// Follows the target through a tree [1 + nodes], as in accept.py: rows of its logits [1 + nodes, size] are `pace`
// apart, and without rules it takes the largest. Puts the accepted nodes into `path`, and after them the bonus token.
// Returns how many nodes were accepted, or -1 if memory ran out.
int64_t walk(const bf16 *logits, int64_t pace, int64_t size, const int64_t *tokens, const int64_t *parents, int64_t nodes,
             const Rules *rules, const uint64_t *keys, int64_t *path) {
    for (int64_t node = 0, count = 0;;) {
        const bf16 *row = logits + node * pace;
        int64_t token = rules ? draw(row, size, rules, keys[count]) : choice(row, size), next = nodes;
        if (token < 0) return -1;
        while (next > node && (parents[next] != node || tokens[next] != token)) next--;
        path[count] = next > node ? next : token;
        if (next == node) return count;
        node = next, count++;
    }
}

// Draws from each of several rows [rows, size] with a temperature and a key of its own; at temperature 0 takes the
// largest.
void draw_each(const bf16 *logits, int64_t rows, int64_t size, const double *temperatures, const uint64_t *keys,
               int64_t *places, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (rows * size > SMALL / 2)
    for (int64_t r = 0; r < rows; r++) {
        const Rules rules = {temperatures[r], size, 1.0, 0.0};
        const bf16 *row = logits + r * size;
        places[r] = temperatures[r] > 0.0 ? draw(row, size, &rules, keys[r]) : choice(row, size);
    }
}
