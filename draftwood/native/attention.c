// Attention over the keys and values of a cache, for bf16 on a CPU: a tree behind its context in one call.
//
// A row's result never depends on the other rows: sums run over a row's own visible keys, one after the other (others
// add an exact zero), so a token gets the same bits alone, in a chain and in a tree, and on any number of threads.

#include "native.h"

#define AT_ONCE 8     // sums that go on side by side
#define COLUMNS 4     // vectors of a head that are summed side by side for a few lanes; half as many for more
#define RANGE 256     // slots that a thread takes at a time, a multiple of 4 * LANES
#define WAVE 16384    // vectors of scores for each thread, where one block needs less
#define STRIP 32      // slots whose values are weighed together on tiles, from a multiple of so many on
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (quad){__VA_ARGS__})
#endif

typedef int32_t quad __attribute__((vector_size(16)));
typedef float float4 __attribute__((vector_size(16)));

// What one call of `attend` asks for.
typedef struct {
    const bf16 *q;
    bf16 *out;
    int64_t heads, groups, dim, window;
    float scale;
} Call;

// Up to LANES queries of a part that share a key head, and their scores [slot - first][pace], a query a lane.
typedef struct {
    const Part *part;
    int64_t head, start, lanes, pace;  // query start + l is of row (start + l) / groups
    int64_t first, stop;               // slots that any of its rows sees
    int64_t clear, plain;              // slots that all of them see
    int64_t ranges, before;            // of RANGE slots; those of the blocks before it
    vec *tops;                         // [ranges]: the largest of each lane of `scores`
    float *scores;
} Block;

static inline int64_t row_of(const Call *call, const Block *block, int64_t l) {
    return (block->start + l) / call->groups;
}

static inline int64_t query_at(const Call *call, const Block *block, int64_t l) {
    int64_t head = block->head * call->groups + (block->start + l) % call->groups;
    return ((block->part->start + row_of(call, block, l)) * call->heads + head) * call->dim;
}

static inline int64_t slots_of(const Block *block, int64_t range) {
    int64_t left = block->stop - block->first - range * RANGE;
    return left < RANGE ? left : RANGE;
}

// The same with what fills the last strip.
static inline int64_t filled_of(const Block *block, int64_t range) {
    return (slots_of(block, range) + STRIP - 1) / STRIP * STRIP;
}

static inline int sees(const Part *part, int64_t window, int64_t r, int64_t slot) {
    int64_t m = slot - part->context, place = m < 0 ? slot : part->context + part->depth[m];
    if (window && part->context + part->depth[r] - place >= window) return 0;
    return m < 0 || part->whole || (m <= r && (!part->visible || part->visible[r * part->rows + m]));
}

// Four rows of four numbers of 32 bits to four columns. Narrow vectors, as every machine has their shuffles.
static inline void cross(const void *from, int64_t step, void *to, int64_t pace) {
    quad x[4];
    for (int i = 0; i < 4; i++) memcpy(x + i, (const int32_t *)from + i * step, sizeof(quad));
    quad low = SHUFFLE(x[0], x[2], 0, 4, 1, 5), high = SHUFFLE(x[0], x[2], 2, 6, 3, 7);
    quad lower = SHUFFLE(x[1], x[3], 0, 4, 1, 5), higher = SHUFFLE(x[1], x[3], 2, 6, 3, 7);
    quad turned[] = {SHUFFLE(low, lower, 0, 4, 1, 5), SHUFFLE(low, lower, 2, 6, 3, 7),
                     SHUFFLE(high, higher, 0, 4, 1, 5), SHUFFLE(high, higher, 2, 6, 3, 7)};
    for (int i = 0; i < 4; i++) memcpy((int32_t *)to + i * pace, turned + i, sizeof(quad));
}

// What is read a row after the other: `left` bytes from `at` on, and then what begins at `then`.
typedef struct {
    const char *at, *then;
    int64_t left;
} Stream;

static inline Stream stream_of(const bf16 *from, int64_t numbers, const bf16 *then) {
    return (Stream){(const char *)from, (const char *)then, numbers * (int64_t)sizeof *from};
}

// Asks memory for `bytes` of each of `rows` rows long before they are read, `row` bytes apart.
INLINE void ask(Stream *stream, int64_t rows, int64_t row, int64_t bytes) {
    for (int64_t r = 0; r < rows; r++, stream->at += row, stream->left -= row) {
        const char *far = stream->left > AHEAD ? stream->at + AHEAD : stream->then + (AHEAD - stream->left);
        for (int64_t line = 0; line < bytes; line += LINE) later(far + line), soon(stream->at + line);
    }
}

// A pair is two neighbours in d. `many` holds a pair a lane, of LANES rows; `one` is of a row that meets all of them.
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

// Pairs of rows [pace, dim], whose neighbours lie side by side in memory, to pairs [dim / 2, pace]: a row a lane.
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

// The same on tiles, for any number of queries. Tiles sum in an order of their own, so they serve all or none.
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
    if (pace == LANES)
        score_many(keys, queries, scores, count, dim, stream);
    else if (pace == AT_ONCE)
        score_few(keys, queries, scores, count, dim, AT_ONCE, stream);
    else
        score_few(keys, queries, scores, count, dim, AT_ONCE / 2, stream);
}

static inline const bf16 *keys_of(const Call *call, const Block *block) {
    return block->part->keys + (block->head * block->part->slots + block->first) * call->dim;
}

static inline const bf16 *values_of(const Call *call, const Block *block) {
    return block->part->values + (block->head * block->part->slots + block->first) * call->dim;
}

// The scores of one range of a block's slots, NEVER where a row does not see, and the largest of them.
static void score_range(const Call *call, const Block *block, int64_t range) {
    int64_t first = block->first + range * RANGE, dim = call->dim, pace = block->pace;
    int64_t count = slots_of(block, range), filled = filled_of(block, range);
    const bf16 *keys = keys_of(call, block) + range * RANGE * dim;
    const bf16 *then = range + 1 < block->ranges ? keys + count * dim : values_of(call, block);
    Stream stream = stream_of(keys, count * dim, then);
    bf16 queries[LANES * MOST_DIM];
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
    block->tops[range] = larger(larger(most[0], most[1]), larger(most[2], most[3]));
}

#ifdef DOTS
// In place: `count` weights [slots, pace], none below zero, to those of two slots [slots / 2, pace], of which the earlier one
// is the `upper` half of a number or the lower one.
INLINE void join_weights(float *weights, int64_t count, int64_t pace, const int upper) {
    uint16_t place[2 * LANES];  // slots 0 and 1, 2 and 3, … side by side
    for (int l = 0; l < LANES; l++) place[2 * l + upper] = l + l / pace * pace, place[2 * l + !upper] = l + l / pace * pace + pace;
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

// `JOINED` neighbouring slots are weighed at once, to the sums of one after the other: a dot product adds the upper
// halves first and rounds in between, so the earlier slot's value and weight are there. Processors with tiles are quicker at
// sums than at dot products.
#if defined(DOTS) && !defined(TILES)
#define JOINED 2
typedef ivec value;
typedef int32_t weight;

static inline ivec numbers_of(const bf16 *x) { return (ivec)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)x)); }

static inline value value_of(const bf16 *first, const bf16 *last) { return numbers_of(first) << 16 | numbers_of(last); }

static inline vec weigh(vec sum, value side, weight both) { return dot(sum, side, both); }

static inline float4 add_weights(float4 total, const weight *weights) {
    quad both;
    memcpy(&both, weights, sizeof both);
    return total + (float4)(both & ~0xffff) + (float4)(both << 16);
}

#else
#define JOINED 1
typedef vec value;
typedef float weight;

static inline value value_of(const bf16 *first, const bf16 *last) { return widen(first); }

static inline vec weigh(vec sum, value side, weight one) { return sum + side * one; }

static inline float4 add_weights(float4 total, const weight *weights) {
    float4 some;
    memcpy(&some, weights, sizeof some);
    return total + some;
}
#endif

// In place: the weights of pairs of slots [count / 2, pace] to tiles [pace, STRIP] of bf16, one of each strip.
static void turn_weights(float *weights, int64_t count, int64_t pace) {
    ivec strip[LANES];
    for (int64_t s = 0; s < count; s += STRIP, weights += LANES * pace) {
        memcpy(strip, weights, LANES * pace * sizeof *weights);
        for (int64_t k = 0; k < LANES; k += 4)
            for (int64_t l = 0; l < pace; l += 4) cross((int32_t *)strip + k * pace + l, pace, weights + l * LANES + k, LANES);
    }
}

// exp of a score, times its scale, that is no more than the largest; exactly zero for what is not seen.
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

// Scores of a range to probabilities that are yet to be divided by their sum. Unseen slots get exactly zero.
static void soften_range(const Call *call, const Block *block, int64_t range) {
    vec most = block->tops[0], *all = (vec *)block->scores + range * RANGE * block->pace / LANES;
    int64_t slots = filled_of(block, range), count = slots * block->pace / LANES;
    for (int64_t i = 1; i < block->ranges; i++) most = larger(most, block->tops[i]);
    for (int64_t width = LANES / 2; width >= block->pace; width /= 2)
        for (int64_t l = 0; l < width; l++) most[l] = most[l + width] > most[l] ? most[l + width] : most[l];
    for (int64_t l = block->pace; l < LANES; l++) most[l] = most[l % block->pace];
    for (int64_t i = 0; i < count; i++) all[i] = weight_of(all[i], most, call->scale);
    if (tiles(call->dim)) {
        join_weights((float *)all, slots * block->pace, block->pace, 0);
        turn_weights((float *)all, slots, block->pace);
    } else if (JOINED == 2)
        join_weights((float *)all, slots * block->pace, block->pace, 1);
}

// Adds `count` weighted values, the next ones of a stream, to the sums of `width` lanes, `columns` vectors of each, and
// their weights to `all`.
INLINE void gather_some(const bf16 *values, const weight *weights, int64_t count, int64_t dim, int64_t pace,
                        vec sums[][COLUMNS], float4 *all, const int width, const int columns, Stream *stream) {
    vec mine[AT_ONCE][COLUMNS];
    value side[COLUMNS];
    float4 total[AT_ONCE / 4];
    memcpy(mine, sums, width * sizeof *mine), memcpy(total, all, width / 4 * sizeof *total);
    for (int64_t s = 0; s < count; s += JOINED, values += JOINED * dim, weights += pace) {
        const bf16 *last = values + (s + JOINED > count ? 0 : JOINED - 1) * dim;  // what is not there weighs nothing
        ask(stream, JOINED, dim * sizeof *values, columns * LANES * sizeof *values);
        for (int c = 0; c < columns; c++) side[c] = value_of(values + c * LANES, last + c * LANES);
        for (int k = 0; k < width; k++)
            for (int c = 0; c < columns; c++) mine[k][c] = weigh(mine[k][c], side[c], weights[k]);
        for (int k = 0; k < width; k += 4) total[k / 4] = add_weights(total[k / 4], weights + k);
    }
    memcpy(sums, mine, width * sizeof *mine), memcpy(all, total, width / 4 * sizeof *total);
}

// How many vectors of a head are summed side by side: more where one thread sums all, if their sums fit in registers.
static inline int columns_of(const Call *call, int64_t pace, int alone) {
    int columns = alone && LANES == 16 && (pace < AT_ONCE || tiles(call->dim)) ? COLUMNS : COLUMNS / 2;
    while (call->dim % (columns * LANES)) columns /= 2;
    return columns;
}

// What `columns` vectors of values, from d on, sum up to for each lane of a block, and its weights. In ranges, so that values
// are fetched once for all lanes. `then` will be read next.
INLINE void gather_ranges(const Call *call, const Block *block, int64_t d, const int columns, const bf16 *then,
                          vec sums[][COLUMNS], float4 *all) {
    int64_t dim = call->dim, pace = block->pace;
    const bf16 *values = values_of(call, block) + d;
    Stream stream = stream_of(values, (block->stop - block->first) * dim, then);
    for (int64_t range = 0; range < block->ranges; range++, values += RANGE * dim) {
        const weight *weights = (const weight *)(block->scores + range * RANGE * pace);
        int64_t count = slots_of(block, range);
        Stream again = stream;
        for (int64_t l = 0; l < block->lanes; l += AT_ONCE) {
            stream = again;
            if (columns == COLUMNS || block->lanes - l <= AT_ONCE / 2)
                gather_some(values, weights + l, count, dim, pace, sums + l, all + l / 4, AT_ONCE / 2, columns, &stream);
            else
                gather_some(values, weights + l, count, dim, pace, sums + l, all + l / 4, AT_ONCE, columns, &stream);
        }
    }
}

// Of a block on tiles: the weights [pace, STRIP] of the strip that begins so many slots behind the first.
static inline const bf16 *strip_at(const Block *block, int64_t slot) {
    int64_t range = slot / RANGE, strip = slot % RANGE / STRIP;
    return (const bf16 *)(block->scores + (range * RANGE + strip * LANES) * block->pace);
}

// Values of two slots side by side, `columns` vectors of STRIP slots: what a tile multiplies.
#ifdef DOTS
INLINE void lay_values(const bf16 *values, int64_t dim, ivec pairs[][LANES], const int columns) {
    for (int k = 0; k < LANES; k++, values += 2 * dim)
        for (int c = 0; c < columns; c += 2) {
            __m512i even = _mm512_loadu_si512(values + c * LANES), odd = _mm512_loadu_si512(values + dim + c * LANES);
            pairs[c][k] = (ivec)_mm512_unpacklo_epi16(even, odd), pairs[c + 1][k] = (ivec)_mm512_unpackhi_epi16(even, odd);
        }
}

// Two columns of sums in the order of their values: of every eight numbers the one has the first four, the other the last.
static inline void sort_columns(vec *sums) {
    const __m512i first = (__m512i)(ivec){0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
    const __m512i last = (__m512i)((ivec)first + 8);
    __m512 one = (__m512)sums[0], other = (__m512)sums[1];
    sums[0] = (vec)_mm512_permutex2var_ps(one, first, other), sums[1] = (vec)_mm512_permutex2var_ps(one, last, other);
}
#else
INLINE void lay_values(const bf16 *values, int64_t dim, ivec pairs[][LANES], const int columns) {
    for (int k = 0; k < LANES; k++, values += 2 * dim)
        for (int c = 0; c < columns; c++)
            for (int l = 0; l < LANES; l++) pairs[c][k][l] = values[c * LANES + l] | values[dim + c * LANES + l] << 16;
}

static inline void sort_columns(vec *sums) {}
#endif

// The same sums as `gather_ranges` makes, on tiles. Of every STRIP positions these sum even ones and odd ones apart, and
// then both. In a tree slots are no positions, so from the strip on where the context ends `gather_tree` sums.
INLINE void gather_strips(const Call *call, const Block *block, int64_t d, const int columns, const bf16 *then,
                          vec sums[][COLUMNS], float *all) {
    const Part *part = block->part;
    int64_t dim = call->dim, seen = block->stop - block->first, stop = seen;
    if (part->visible) stop = part->context / STRIP * STRIP - block->first;
    const bf16 *values = values_of(call, block) + d;
    ivec pairs[2][COLUMNS][LANES];
    bf16 rest[STRIP * COLUMNS * LANES] = {0};
    Stream stream = stream_of(values, seen * dim, then);
    shape_tiles_of_values(block->pace);
    for (int64_t s = 0, turn = 0; s < stop; s += STRIP, values += STRIP * dim, turn = !turn) {
        if (stop - s < STRIP) {  // what is not there weighs nothing, but must be a number
            for (int64_t k = 0; k < stop - s; k++)
                memcpy(rest + k * columns * LANES, values + k * dim, columns * LANES * sizeof *rest);
            lay_values(rest, columns * LANES, pairs[turn], columns);
        } else {
            ask(&stream, STRIP, dim * sizeof *values, columns * LANES * sizeof *values);
            lay_values(values, dim, pairs[turn], columns);
        }
        weigh_tiles(strip_at(block, s), pairs[turn], columns);
    }
    store_tiles_of_values(sums, all, block->pace, columns);
    for (int64_t l = 0; l < block->lanes; l++)
        for (int c = 0; c < columns; c += 2) sort_columns(sums[l] + c);
}

// Adds to a lane's sums those of the slots `some`: each a position's of which there is none twice on the lane's path.
INLINE void gather_chain(const bf16 *values, const Block *block, int64_t dim, int64_t lane, const int32_t *some,
                         int64_t count, const int columns, vec *sums, float *all) {
    for (int64_t i = 0; i < count; i++) {
        float weight = up(strip_at(block, some[i])[lane * STRIP + some[i] % STRIP]);
        if (weight == 0.0f) continue;  // most are not on the path
        for (int c = 0; c < columns; c++) sums[c] += weight * widen(values + some[i] * dim + c * LANES);
        *all += weight;
    }
}

// Which slots from one on are of positions in the strip that begins at `base`, even ones or odd ones, counted from a
// block's first slot. Returns how many.
static int64_t slots_in(const Block *block, int64_t from, int64_t base, int64_t odd, int32_t *some) {
    const Part *part = block->part;
    int64_t count = 0;
    for (int64_t slot = from; slot < block->stop; slot++) {
        int64_t position = slot < part->context ? slot : part->context + part->depth[slot - part->context];
        if (position / STRIP * STRIP == base && position % 2 == odd) some[count++] = (int32_t)(slot - block->first);
    }
    return count;
}

// Adds what `gather_strips` leaves of a tree, in the order in which tiles would sum the lane's own path.
INLINE void gather_tree(const Call *call, const Block *block, int64_t d, const int columns, vec sums[][COLUMNS],
                        float *all) {
    const Part *part = block->part;
    const bf16 *values = values_of(call, block) + d;
    int64_t from = part->context / STRIP * STRIP, deepest = 0;
    if (from < block->first) from = block->first;
    for (int64_t m = 0; m < block->stop - part->context; m++) deepest = part->depth[m] > deepest ? part->depth[m] : deepest;
    int32_t some[2][block->stop - from];
    for (int64_t base = from; base <= part->context + deepest; base += STRIP) {
        int64_t even = slots_in(block, from, base, 0, some[0]), odd = slots_in(block, from, base, 1, some[1]);
        for (int64_t l = 0; l < block->lanes; l++) {
            vec chain[2][COLUMNS] = {0};
            float weights[2] = {0};
            gather_chain(values, block, call->dim, l, some[0], even, columns, chain[0], weights);
            gather_chain(values, block, call->dim, l, some[1], odd, columns, chain[1], weights + 1);
            for (int c = 0; c < columns; c++) sums[l][c] += chain[0][c] + chain[1][c];
            all[l] += weights[0] + weights[1];
        }
    }
}

// `columns` vectors of a block's output [lanes, dim], from d on: sums of weighted values over those of weights.
INLINE void gather(const Call *call, const Block *block, int64_t d, const int columns, const bf16 *then) {
    vec sums[LANES][COLUMNS] = {0};
    float4 all[LANES / 4] = {0};
    if (tiles(call->dim)) {
        gather_strips(call, block, d, columns, then, sums, (float *)all);
        if (block->part->visible) gather_tree(call, block, d, columns, sums, (float *)all);
    } else
        gather_ranges(call, block, d, columns, then, sums, all);
    for (int64_t l = 0; l < block->lanes; l++) {
        float sum = all[l / 4][l % 4], scale = 1.0f / (sum > 0.0f ? sum : 1.0f);
        bf16 *to = call->out + query_at(call, block, l) + d;
        for (int c = 0; c < columns; c++) down_all(sums[l][c] * scale, to + c * LANES);
    }
}

static void gather_piece(const Call *call, const Block *block, int64_t piece, int columns, const bf16 *then) {
    int64_t d = piece * columns * LANES;
    switch (columns) {
        case COLUMNS: gather(call, block, d, COLUMNS, then); break;
        case COLUMNS / 2: gather(call, block, d, COLUMNS / 2, then); break;
        default: gather(call, block, d, 1, then);
    }
}

static inline int64_t pace_of(int64_t lanes) {
    return lanes > AT_ONCE ? LANES : lanes > AT_ONCE / 2 ? AT_ONCE : AT_ONCE / 2;
}

// No more than `most` queries from `start` on of a part and a key head.
static Block block_of(const Call *call, const Part *part, int64_t head, int64_t start, int64_t most) {
    int64_t queries = part->rows * call->groups, lanes = queries - start < most ? queries - start : most;
    int64_t top = start / call->groups, last = (start + lanes - 1) / call->groups;
    Block block = {.part = part, .head = head, .start = start, .lanes = lanes, .pace = pace_of(lanes)};
    block.stop = part->context + (part->whole ? part->rows : last + 1);
    block.plain = part->whole ? block.stop : part->context + (part->visible ? 0 : top + 1);
    block.first = call->window ? block.stop : 0;
    for (int64_t r = top; call->window && r <= last; r++) {
        int64_t reach = part->context + part->depth[r] - call->window + 1;
        reach = reach > 0 ? reach : 0;
        block.first = reach < block.first ? reach / STRIP * STRIP : block.first;
        block.clear = reach > block.clear ? reach : block.clear;
    }
    block.ranges = (block.stop - block.first + RANGE - 1) / RANGE;
    return block;
}

// The vectors that a block's scores and their largest take.
static inline int64_t size_at(const Block *block, int64_t pace) { return block->ranges * (1 + RANGE * pace / LANES); }

static inline int64_t size_of(const Block *block) { return size_at(block, block->pace); }

static int larger_first(const void *one, const void *other) {
    int64_t a = size_of(one), b = size_of(other);
    return (a < b) - (a > b);
}

// Of blocks that are alike: queries of each piece, if those left over when every thread has had as many as the others are
// divided among all threads.
static inline int64_t piece_of(const Block *blocks, int64_t count, int threads) {
    int64_t rest = count % threads, pieces = rest ? threads / rest : 1;
    return ((blocks->lanes + pieces - 1) / pieces + 3) / 4 * 4;
}

// Divides those. Returns how many blocks there are.
static int64_t divide_rest(const Call *call, Block *blocks, int64_t count, int threads) {
    int64_t step = piece_of(blocks, count, threads), listed = count - count % threads;
    Block rest[threads];
    memcpy(rest, blocks + listed, (count - listed) * sizeof *rest);
    for (const Block *block = rest; block < rest + count % threads; block++) {
        int64_t end = block->start + block->lanes;
        for (int64_t start = block->start; start < end; start += step)
            blocks[listed++] = block_of(call, block->part, block->head, start, step < end - start ? step : end - start);
    }
    return listed;
}

static inline void place(Block *block, vec *room) {
    block->tops = room;
    block->scores = (float *)(room + block->ranges);
}

// A thread for each block: none waits for another.
static void attend_whole(const Call *call, const Block *blocks, int64_t count, vec *scores, int64_t largest,
                         int threads) {
    int begun = 0, taken = 0;
#pragma omp parallel num_threads(threads)
    {
        int mine, i, next;
#pragma omp atomic capture
        mine = begun++;
#pragma omp atomic capture
        i = taken++;
        for (; i < count; i = next) {
            Block block = blocks[i];
            const int columns = columns_of(call, block.pace, 1);
            const int64_t pieces = call->dim / (columns * LANES);
            place(&block, scores + mine * largest);
            for (int64_t range = 0; range < block.ranges; range++) score_range(call, &block, range);
            for (int64_t range = 0; range < block.ranges; range++) soften_range(call, &block, range);
#pragma omp atomic capture
            next = taken++;  // not before: it would be taken from a thread that is yet to begin
            for (int64_t piece = 0; piece < pieces; piece++) {
                const bf16 *then = keys_of(call, blocks + (next < count ? next : i));
                if (piece + 1 < pieces) then = values_of(call, &block) + (piece + 1) * columns * LANES;
                gather_piece(call, &block, piece, columns, then);
            }
        }
    }
}

// The block that range i of all is of.
static const Block *holder(const Block *blocks, int64_t count, int64_t i) {
    int64_t low = 0, high = count;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        *(blocks[middle].before <= i ? &low : &high) = middle;
    }
    return blocks + low;
}

// All threads for all blocks: each loop is divided as finely as the order of its sums permits.
static void attend_together(const Call *call, const Block *blocks, int64_t count, int threads) {
    const int columns = columns_of(call, LANES, 0);
    const int64_t ranges = blocks[count - 1].before + blocks[count - 1].ranges, pieces = call->dim / (columns * LANES);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < ranges; i++) {
            const Block *block = holder(blocks, count, i);
            score_range(call, block, i - block->before);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < ranges; i++) {
            const Block *block = holder(blocks, count, i);
            soften_range(call, block, i - block->before);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < count * pieces; i++) {
            const Block *block = blocks + i / pieces;
            gather_piece(call, block, i % pieces, columns, values_of(call, block));
        }
    }
}

// The same, no more blocks at a time than there is room for scores.
static void attend_divided(const Call *call, Block *blocks, int64_t count, vec *scores, int64_t room, int threads) {
    for (int64_t start = 0, stop = 0; start < count; start = stop) {
        int64_t used = 0, before = 0;
        for (; stop < count && used + size_of(blocks + stop) <= room; stop++) {
            place(blocks + stop, scores + used);
            blocks[stop].before = before;
            used += size_of(blocks + stop), before += blocks[stop].ranges;
        }
        attend_together(call, blocks + start, stop - start, threads);
    }
}

// What rows of q [all rows, H, D] see: each part's `context` committed slots and, behind them, its rows m with
// visible[r, m] (null: all up to r itself, or all of a `whole` part). Positions are context + depth[r]; nothing `window` or more positions back
// is seen (0: no limit). out is [all rows, H, D]. Returns 0, or 1 if memory ran out.
int attend(const bf16 *q, const Part *parts, int64_t count, bf16 *out, int64_t heads, int64_t kv_heads, int64_t dim,
           int64_t window, float scale, int threads) {
    Call call = {q, out, heads, heads / kv_heads, dim, window, scale};
    int64_t most = 0, listed = 0, work = 0, total = 0, largest = 0, least = INT64_MAX;
    for (int64_t p = 0; p < count; p++) {
        most += (parts[p].rows * call.groups + LANES - 1) / LANES * kv_heads;
        work += parts[p].rows * heads * (parts[p].context + parts[p].rows) * dim;
    }
    if (!most) return 0;
    if (work <= SMALL) threads = 1;
    Block *blocks = malloc((most + threads) * sizeof(Block));
    if (!blocks) return 1;
    // In an order in which a thread mostly takes blocks of one head: its keys and values are then in its cache.
    for (int64_t p = 0; p < count; p++)
        for (int64_t first = 0; first < kv_heads; first += threads)
            for (int64_t start = 0; start < parts[p].rows * call.groups; start += LANES)
                for (int64_t head = first; head < first + threads && head < kv_heads; head++) {
                    blocks[listed] = block_of(&call, parts + p, head, start, LANES);
                    int64_t size = size_of(blocks + listed++);
                    total += size, largest = size > largest ? size : largest, least = size < least ? size : least;
                }
    if (least < largest) qsort(blocks, listed, sizeof(Block), larger_first);
    int64_t turn = threads * largest, spent = (total + turn - 1) / turn * turn;  // idle threads' time counts as well
    int alike = least == largest;
    if (alike && listed % threads)
        spent = listed / threads * turn + threads * size_at(blocks, pace_of(piece_of(blocks, listed, threads)));
    // Idle threads are better than blocks of which each has a part if they are few: many scores would go from one core to
    // another.
    int whole = threads == 1 || spent * 8 <= total * (blocks[0].pace == LANES ? 12 : 9);
    if (whole && alike) listed = divide_rest(&call, blocks, listed, threads);
    int64_t room = threads * (whole || largest > WAVE ? largest : WAVE);
    if (room > total && !whole) room = total;
    vec *scores = aligned_alloc(sizeof(vec), room * sizeof(vec));
    if (scores && whole)
        attend_whole(&call, blocks, listed, scores, largest, threads);
    else if (scores)
        attend_divided(&call, blocks, listed, scores, room, threads);
    free(scores), free(blocks);
    return !scores;
}
