// What becomes of logits: the likeliest tokens, which follows which, and the target's own draws.

#include "native.h"

#define CHUNK 64         // logits that are looked at together
#define STEEPEST 1e30f   // 1 / temperature: the largest logit's share of it must stay a number
#define VALUES 65536     // numbers in bf16
#define LOWEST -3e38f    // a logit from which on a token may be drawn: minus infinity may not
#define FAR 10.0f        // a distance of logits
#define FAINTEST -87.0f  // a power below which a weight is none

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
// FAR below the largest, three of four of a language model's, are left out: half a percent of the whole, by measurement.
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
    return 1.0f / total((float *)&sum);
}

// The k largest of each row of logits [rows, size], the first of equals first: their places, and log-probabilities
// normalised over the row. Both out are [rows, k].
void candidates(const bf16 *logits, int64_t *places, float *logp, int64_t rows, int64_t size, int64_t k, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > SMALL / 8)
    for (int64_t r = 0; r < rows; r++) {
        const bf16 *row = logits + r * size;
        int64_t *place = places + r * k;
        float *best = logp + r * k;
        for (int64_t j = 0; j < k; j++) place[j] = j, best[j] = -INFINITY;
        for (int64_t start = 0; start < size; start += CHUNK) {
            int64_t stop = start + CHUNK < size ? start + CHUNK : size;
            if (stop - start == CHUNK && !(largest_of(row + start) > best[k - 1])) continue;  // so most of them
            for (int64_t i = start; i < stop; i++) {
                float value = up(row[i]);
                if (!(value > best[k - 1])) continue;
                int64_t j = k - 1;
                for (; j > 0 && value > best[j - 1]; j--) best[j] = best[j - 1], place[j] = place[j - 1];
                best[j] = value, place[j] = i;
            }
        }
        float all = log_sum(row, size, best[0]);
        for (int64_t j = 0; j < k; j++) best[j] -= all;
    }
}

// log p of each of k candidates of a depth, given each of the depth before, [depths - 1, k, k]: `before` of the one times
// `after` of the other, [any, rank], and the other's logp [depths, k]; what is no candidate keeps its share. `rows`
// [depths, k] say which candidates. Returns 0, or 1 if memory ran out.
int pair_scores(const int64_t *rows, const float *logp, const bf16 *before, const bf16 *after, float *out,
                int64_t depths, int64_t k, int64_t rank) {
    int64_t vectors = (k + LANES - 1) / LANES, wide = vectors * LANES;
    vec *turned = aligned_alloc(sizeof *turned, (rank + 1) * vectors * sizeof *turned);
    if (!turned) return 1;
    float *lanes = (float *)turned, *scores = lanes + rank * wide;  // `after` of the candidates, one a lane; scores
    for (int64_t d = 1; d < depths; d++) {
        const int64_t *from = rows + (d - 1) * k, *to = rows + d * k;
        float rest = 1.0f;
        for (int64_t b = 0; b < k; b++) rest -= expf(logp[d * k + b]);
        for (int64_t b = 0; b < wide; b++)
            for (int64_t i = 0; i < rank; i++) lanes[i * wide + b] = b < k ? up(after[to[b] * rank + i]) : 0.0f;
        for (int64_t a = 0; a < k; a++, out += k) {
            const bf16 *mine = before + from[a] * rank;
            for (int64_t b = 0; b < wide; b++) scores[b] = b < k ? logp[d * k + b] : NEVER;
            vec sum = {0};
            for (int64_t v = 0; v < vectors; v++) {
                vec score = turned[rank * vectors + v];
                for (int64_t i = 0; i < rank; i++) score += up(mine[i]) * turned[i * vectors + v];
                sum += exponential(score), turned[rank * vectors + v] = score;
            }
            float all = logf(total((float *)&sum) + (rest > 0.0f ? rest : 0.0f));
            for (int64_t b = 0; b < k; b++) out[b] = scores[b] - all;
        }
    }
    free(turned);
    return 0;
}

// Which tokens may be drawn: those of logits from `least` on, before the place `from` only of those above. They weigh exp of
// how far they are below `most`, times `rate`.
typedef struct {
    float most, rate, least, above;  // `above` is the next number
    int64_t from;
} Draw;

// A number's place among all, by size.
static inline uint16_t rank_of(bf16 x) {
    x = x == 0x8000 ? 0 : x;  // there are two zeros
    return x ^ (uint16_t)((int16_t)x >> 15 | 0x8000);
}

static inline float of_rank(uint16_t rank) { return up(rank & 0x8000 ? rank ^ 0x8000 : ~rank); }

static inline vec weights(const Draw *draw, vec x, float least) {
    vec power = (x - draw->most) * draw->rate;
    return pick((x >= every(least)) & (power > every(FAINTEST)), exponential(power), every(0.0f));
}

static inline float least_at(const Draw *draw, int64_t place) { return place < draw->from ? draw->above : draw->least; }

static inline float weight_at(const Draw *draw, const bf16 *row, int64_t place) {
    return weights(draw, every(up(row[place])), least_at(draw, place))[0];
}

static double weight_between(const Draw *draw, const bf16 *row, int64_t start, int64_t stop) {
    if (stop - start == CHUNK && least_at(draw, start) == least_at(draw, stop - 1)) {
        vec lanes = {0};
        for (int64_t i = start; i < stop; i += LANES) lanes += weights(draw, widen(row + i), least_at(draw, start));
        return total((float *)&lanes);
    }
    double sum = 0.0;
    for (int64_t i = start; i < stop; i++) sum += weight_at(draw, row, i);
    return sum;
}

// The place behind the first `count` logits that are `value`.
static int64_t behind(const bf16 *row, int64_t size, float value, int64_t count) {
    int64_t i = 0;
    for (; i < size && count; i++) count -= up(row[i]) == value;
    return i;
}

static double weight_of(const Draw *draw, int64_t rank) { return weights(draw, every(of_rank(rank)), -INFINITY)[0]; }

// What a draw goes by. As candidates.py lays it out.
typedef struct {
    double temperature;  // above 0
    int64_t top_k;       // the size of a row, if all are kept
    double top_p, min_p;
} Rules;

// Leaves the `top_k` largest, the fewest of these that hold `top_p` of their weight, and none of less than `min_p` of the
// largest weight, in this order; of equal logits top-k takes all and top-p the last ones. Few numbers of a row differ, so
// they are counted instead of sorted. Returns 0, or 1 if memory ran out.
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
    *draw = (Draw){up(row[choice(row, size)]), rate < STEEPEST ? rate : STEEPEST, LOWEST, LOWEST, 0};
    return (rules->top_k < size || rules->top_p < 1.0 || rules->min_p > 0.0) && cut(draw, row, size, rules);
}

// The weight of all tokens, and of each chunk of them (unless null).
static double weigh(const Draw *draw, const bf16 *row, int64_t size, double *chunks) {
    double all = 0.0;
    for (int64_t start = 0; start < size; start += CHUNK) {
        double weight = weight_between(draw, row, start, start + CHUNK < size ? start + CHUNK : size);
        if (chunks) *chunks++ = weight;
        all += weight;
    }
    return all;
}

// The first place whose weight and that of all before it are more than this share of all.
static int64_t place_at(const Draw *draw, const bf16 *row, int64_t size, double *chunks, double quantile) {
    double left = quantile * weigh(draw, row, size, chunks);
    int64_t start = 0, place = 0;
    for (int64_t c = 0; c * CHUNK < size; left -= chunks[c++]) {
        if (chunks[c] > 0.0) start = c * CHUNK;
        if (chunks[c] > left) break;
    }
    for (int64_t i = start; i < size && left >= 0.0; i++) {
        float mine = weight_at(draw, row, i);
        if (mine > 0.0f) place = i, left -= mine;
    }
    return place;
}

// The place at this quantile of what the rules make of logits [size]; -1 if memory ran out.
int64_t draw(const bf16 *row, int64_t size, const Rules *rules, double quantile) {
    Draw draw;
    double *chunks = malloc((size + CHUNK - 1) / CHUNK * sizeof *chunks);
    int64_t place = !chunks || prepare(&draw, row, size, rules) ? -1 : place_at(&draw, row, size, chunks, quantile);
    free(chunks);
    return place;
}

// The same of each of several rows [rows, size], at temperatures and quantiles of their own; at temperature 0 the largest.
void draw_each(const bf16 *logits, int64_t rows, int64_t size, const double *temperatures, const double *quantiles,
               int64_t *places, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (rows * size > SMALL / 8)
    for (int64_t r = 0; r < rows; r++) {
        const Rules rules = {temperatures[r], size, 1.0, 0.0};
        const bf16 *row = logits + r * size;
        places[r] = temperatures[r] > 0.0 ? draw(row, size, &rules, quantiles[r]) : choice(row, size);
    }
}

// The probability of the path to each node of a tree, by what the rules make of its logits [nodes, size], whose rows are
// `stride` apart. Entry 0 of tokens, parents and out [nodes] is the root's. Returns 0, or 1 if memory ran out.
int reach(const bf16 *logits, int64_t stride, int64_t size, const Rules *rules, const int64_t *tokens,
          const int64_t *parents, int64_t nodes, double *out) {
    Draw draw;
    int failed = 0;
    out[0] = 1.0;
    for (int64_t parent = 0; parent < nodes && !failed; parent++) {
        const bf16 *row = logits + parent * stride;
        double all = 0.0;  // of the row, once a child asks
        for (int64_t i = parent + 1; i < nodes && !failed; i++) {
            if (parents[i] != parent) continue;
            if (all == 0.0 && !(failed = prepare(&draw, row, size, rules))) all = weigh(&draw, row, size, 0);
            out[i] = all > 0.0 ? out[parent] * weight_at(&draw, row, tokens[i]) / all : 0.0;  // 0: not a number among them
        }
    }
    return failed;
}
