// Attention's first step: scores of queries and keys, and the weights made from them. A row's never depend on other
// rows.

#include "attention.h"

static inline int sees(const Part *part, int64_t window, int64_t r, int64_t slot) {
    int64_t m = slot - part->context, place = m < 0 ? slot : part->context + part->depth[m];
    if (window && part->context + part->depth[r] - place >= window) return 0;
    return m < 0 || part->whole || (m <= r && (!part->visible || part->visible[r * part->rows + m]));
}

// A pair is two neighbours in d. `many` holds a pair of each of LANES rows; `one` is a row's pair that meets all of
// them.
#ifdef DOTS
typedef ivec many;
typedef int32_t one;

static inline many many_of(ivec pairs) { return pairs; }

static inline one one_of(const bf16 *pair) {
    one both;
    memcpy(&both, pair, sizeof both);
    return both;
}

#else
typedef struct {
    vec even, odd;
} many;
typedef struct {
    float even, odd;
} one;

static inline many many_of(ivec pairs) { return (many){(vec)(pairs << 16), (vec)(pairs & ~0xffff)}; }

static inline one one_of(const bf16 *pair) { return (one){up(pair[0]), up(pair[1])}; }

static inline vec dot(vec sum, many x, one y) { return sum + x.even * y.even + x.odd * y.odd; }
#endif

// Lays out rows [pace, dim], in which neighbours lie side by side in memory, as pairs [dim / 2, pace]: a row a lane.
INLINE void lay(const bf16 *rows, void *pairs, int64_t dim, int64_t pace) {
    for (int64_t d = 0; d < dim / 2; d += 4)
        for (int l = 0; l < pace; l += 4) cross(rows + l * dim + 2 * d, dim / 2, (int32_t *)pairs + d * pace + l, pace);
}

// scores [count, LANES] = query . key for LANES queries [LANES, dim]: a query a lane.
INLINE void score_many(const bf16 *keys, const bf16 *queries, float *scores, int64_t count, int64_t dim, Stream stream) {
    ivec pairs[MOST_DIM / 2];
    many query[MOST_DIM / 2];
    one key[AT_ONCE * MOST_DIM / 2];
    lay(queries, pairs, dim, LANES);
    for (int64_t d = 0; d < dim / 2; d++) query[d] = many_of(pairs[d]);
    for (int64_t s = 0; s < count; s += AT_ONCE) {
        ask(&stream, AT_ONCE, dim * sizeof *keys, dim * sizeof *keys);
        for (int64_t k = 0; k < AT_ONCE; k++) {
            int64_t slot = s + k < count ? s + k : count - 1;
            for (int64_t d = 0; d < dim / 2; d++) key[k * dim / 2 + d] = one_of(keys + slot * dim + 2 * d);
        }
        vec sums[AT_ONCE] = {0};
        for (int64_t d = 0; d < dim / 2; d++)
            for (int k = 0; k < AT_ONCE; k++) sums[k] = dot(sums[k], query[d], key[k * dim / 2 + d]);
        memcpy(scores + s * LANES, sums, sizeof sums);
    }
}

#if NARROW
#define KEYS 4  // at a time: their sums with two vectors of queries fill the registers

// The same for KEYS widened keys and two vectors of queries.
INLINE void score_keys(const float *keys, const vec (*queries)[2], float *scores, int64_t dim) {
    vec sums[KEYS][2] = {0};
    for (int64_t d = 0; d < dim; d++) {
        vec one = queries[d][0], other = queries[d][1];
        __asm__("" : "+x"(one), "+x"(other));  // compilers would read them again for every key
        for (int k = 0; k < KEYS; k++) sums[k][0] += one * keys[k * dim + d], sums[k][1] += other * keys[k * dim + d];
    }
    memcpy(scores, sums, sizeof sums);
}

// The same for QUERIES queries: scores [count, QUERIES].
INLINE void score_most(const bf16 *keys, const bf16 *queries, float *scores, int64_t count, int64_t dim, Stream stream) {
    ivec pairs[MOST_DIM / 2];
    vec query[MOST_DIM][2];
    float key[KEYS * MOST_DIM] = {0};
    for (int v = 0; v < 2; v++) {
        lay(queries + v * LANES * dim, pairs, dim, LANES);
        for (int64_t d = 0; d < dim; d++) query[d][v] = d % 2 ? many_of(pairs[d / 2]).odd : many_of(pairs[d / 2]).even;
    }
    for (int64_t s = 0; s < count; s += KEYS) {
        int64_t left = count - s < KEYS ? count - s : KEYS;
        ask(&stream, left, dim * sizeof *keys, dim * sizeof *keys);
        for (int64_t i = 0; i < left * dim; i++) key[i] = up(keys[s * dim + i]);
        score_keys(key, query, scores + s * QUERIES, dim);
    }
}
#endif

// The same for fewer queries [pace, dim], to scores [count, pace]: a key a lane, so that none is idle. Each sum runs
// over d as it does above, and so has the same bits.
INLINE void score_few(const bf16 *keys, const bf16 *queries, float *scores, int64_t count, int64_t dim, int64_t pace,
                      Stream stream) {
    bf16 rest[LANES * MOST_DIM];
    ivec pairs[MOST_DIM / 2];
    one query[AT_ONCE * MOST_DIM / 2];
    for (int64_t i = 0; i < pace * dim / 2; i++) query[i] = one_of(queries + 2 * i);
    for (int64_t s = 0; s < count; s += LANES) {
        const bf16 *key = keys + s * dim;
        ask(&stream, LANES, dim * sizeof *keys, dim * sizeof *keys);
        if (count - s < LANES) key = memcpy(rest, key, (count - s) * dim * sizeof(bf16));
        lay(key, pairs, dim, LANES);
        vec sums[AT_ONCE] = {0};
        for (int64_t d = 0; d < dim / 2; d++) {
            many row = many_of(pairs[d]);
            for (int l = 0; l < pace; l++) sums[l] = dot(sums[l], row, query[l * dim / 2 + d]);
        }
        for (int l = 0; l < pace; l += 4)
            for (int k = 0; k < LANES; k += 4)
                cross((float *)(sums + l) + k, LANES, scores + (s + k) * pace + l, pace);
    }
}

// The same on tiles, for any number of queries. Tiles sum in an order of their own, so they serve all queries or none.
static void score_tiled(const bf16 *keys, const bf16 *queries, float *scores, int64_t count, int64_t dim, int64_t pace,
                        Stream stream) {
    bf16 rest[LANES * MOST_DIM];
    ivec pairs[MOST_DIM / 2];
    lay(queries, pairs, dim, pace);
    shape_tiles_of_scores(pace);
    for (int64_t s = 0; s < count; s += LANES) {
        const bf16 *key = keys + s * dim;
        ask(&stream, LANES, dim * sizeof *keys, dim * sizeof *keys);
        if (count - s < LANES) key = memcpy(rest, key, (count - s) * dim * sizeof(bf16));
        score_tile(key, pairs, scores + s * pace, dim, pace);
    }
    leave_tiles();
}

INLINE void score(const bf16 *keys, const bf16 *queries, float *scores, int64_t count, int64_t dim, int64_t pace,
                  Stream stream) {
#if NARROW
    if (pace == QUERIES) return score_most(keys, queries, scores, count, dim, stream);
#endif
    if (pace == LANES)
        score_many(keys, queries, scores, count, dim, stream);
    else if (pace == AT_ONCE)
        score_few(keys, queries, scores, count, dim, AT_ONCE, stream);
    else
        score_few(keys, queries, scores, count, dim, AT_ONCE / 2, stream);
}

// The scores of one range of a block's slots, NEVER where a row does not see one, and their maxima.
void score_range(const Call *call, const Block *block, int64_t range) {
    int64_t first = block->first + range * RANGE, dim = call->dim, pace = block->pace;
    int64_t count = slots_of(block, range), filled = filled_of(block, range);
    const bf16 *keys = keys_of(call, block) + range * RANGE * dim;
    const bf16 *then = range + 1 < block->ranges ? keys + count * dim : values_of(call, block);
    Stream stream = stream_of(keys, count * dim, then);
    bf16 queries[QUERIES * MOST_DIM];
    float *scores = block->scores + range * RANGE * pace;
    for (int64_t l = 0; l < pace; l++)
        memcpy(queries + l * dim, call->q + query_at(call, block, l < block->lanes ? l : 0), dim * sizeof(bf16));
    if (tiles(dim))
        score_tiled(keys, queries, scores, count, dim, pace, stream);
    else if (dim == 64)  // a width known to the compiler
        score(keys, queries, scores, count, 64, pace, stream);
    else if (dim == 128)
        score(keys, queries, scores, count, 128, pace, stream);
    else
        score(keys, queries, scores, count, dim, pace, stream);
    for (int64_t s = 0; s < count; s++) {
        if (first + s >= block->clear && first + s < block->plain) s = block->plain - first;  // all see those before
        for (int64_t l = 0; s < count && l < block->lanes; l++)
            if (!sees(block->part, call->window, row_of(call, block, l), first + s)) scores[s * pace + l] = NEVER;
    }
    for (int64_t i = count * pace; i < filled * pace; i++) scores[i] = NEVER;
    vec most[4] = {every(NEVER), every(NEVER), every(NEVER), every(NEVER)};
    for (int64_t i = 0; i < filled * pace; i += 4 * LANES)
        for (int k = 0; k < 4; k++) most[k] = larger(most[k], *(vec *)(scores + i + k * LANES));
    int64_t vectors = vectors_of(pace);  // two at most
    for (int k = 0; k < 4; k++) most[k % vectors] = larger(most[k % vectors], most[k]);
    memcpy(block->tops + range * vectors, most, vectors * sizeof *most);
}

#ifdef DOTS
// In place: joins `count` weights [slots, pace], none below zero, to pairs of slots [slots / 2, pace]. The earlier
// slot's weight becomes the upper half of a number if `upper`, else the lower one.
INLINE void join_weights(float *weights, int64_t count, int64_t pace, const int upper) {
    uint16_t place[2 * LANES];  // slots 0 and 1, 2 and 3, … side by side
    for (int l = 0; l < LANES; l++) {
        place[2 * l + upper] = l + l / pace * pace;
        place[2 * l + !upper] = place[2 * l + upper] + pace;
    }
    const __m512i order = _mm512_loadu_si512(place);
    for (int64_t i = 0; i < count; i += 2 * LANES) {
        __m512bh two = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(weights + i + LANES), _mm512_loadu_ps(weights + i));
        _mm512_storeu_si512(weights + i / 2, _mm512_permutexvar_epi16(order, (__m512i)two));
    }
}
#else
INLINE void join_weights(float *weights, int64_t count, int64_t pace, const int upper) {
    for (int64_t i = 0; i < count / 2; i++) {
        const float *two = weights + i + i / pace * pace;
        uint32_t first = down(two[0]), last = down(two[pace]), both = upper ? first << 16 | last : last << 16 | first;
        memcpy(weights + i, &both, sizeof both);
    }
}
#endif

// In place: turns the weights of pairs of slots [count / 2, pace] into tiles [pace, STRIP] of bf16, one for each strip.
static void turn_weights(float *weights, int64_t count, int64_t pace) {
    ivec strip[LANES];
    for (int64_t s = 0; s < count; s += STRIP, weights += LANES * pace) {
        memcpy(strip, weights, LANES * pace * sizeof *weights);
        for (int64_t k = 0; k < LANES; k += 4)
            for (int64_t l = 0; l < pace; l += 4)
                cross((int32_t *)strip + k * pace + l, pace, weights + l * LANES + k, LANES);
    }
}

// exp((score - most) * scale), where no score is above `most`; exactly zero for what is not seen.
static inline vec weight_of(vec score, vec most, float scale) {
#ifdef DOTS  // to 2e-6: these weights are rounded to bf16
    const float rate = scale * 1.44269504f;
    vec x = score * rate - most * rate, n = (vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT), r = x - n;
    vec y = r * 1.3333558e-3f + 9.6181291e-3f;
    y = y * r + 5.5504109e-2f;
    y = y * r + 2.4022651e-1f;
    y = y * r + 6.9314718e-1f;
    return (vec)_mm512_scalef_ps((__m512)(y * r + 1.0f), (__m512)n);
#else
    return pick(score > every(NEVER), exponential((score - most) * scale), every(0.0f));
#endif
}

// Turns scores of a range into probabilities that are yet to be divided by their sum. Unseen slots get exactly zero.
void soften_range(const Call *call, const Block *block, int64_t range) {
    vec most[QUERIES / LANES], *all = (vec *)block->scores + range * RANGE * block->pace / LANES;
    int64_t slots = filled_of(block, range), count = slots * block->pace / LANES, vectors = vectors_of(block->pace);
    memcpy(most, block->tops, vectors * sizeof *most);
    for (int64_t i = vectors; i < block->ranges * vectors; i++)
        most[i % vectors] = larger(most[i % vectors], block->tops[i]);
    for (int64_t width = LANES / 2; width >= block->pace; width /= 2)
        for (int64_t l = 0; l < width; l++) most[0][l] = most[0][l + width] > most[0][l] ? most[0][l + width] : most[0][l];
    for (int64_t l = block->pace; l < LANES; l++) most[0][l] = most[0][l % block->pace];
    for (int64_t i = 0; i < count; i += vectors)
        for (int64_t v = 0; v < vectors; v++) all[i + v] = weight_of(all[i + v], most[v], call->scale);
    if (tiles(call->dim)) {
        join_weights((float *)all, slots * block->pace, block->pace, 0);
        turn_weights((float *)all, slots, block->pace);
    } else if (JOINED == 2)
        join_weights((float *)all, slots * block->pace, block->pace, 1);
}
