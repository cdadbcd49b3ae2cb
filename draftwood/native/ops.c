// The small operators between the matrix products of a decoder layer, fused, for bf16 on a CPU.
//
// Compiled on first use by build.py. Everything is computed in fp32 and rounded once, to nearest even. A row's
// result never depends on the other rows: sums run over a row's own visible keys, one after the other (others add
// an exact zero), so a token gets the same bits alone, in a chain and in a tree. Widths of heads and rows are
// multiples of LANES.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define SMALL 400000  // multiply-adds below which a second thread costs more than it brings
#define MOST_DIM 512  // of a head
#define AT_ONCE 8     // sums that go on side by side
#define CHUNK 64      // logits that are looked at together
#define NEVER -1e30f  // the score of a slot that is not seen

typedef uint16_t bf16;
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));

static inline float up(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline bf16 down(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline vec every(float x) { return x - (vec){0}; }

static inline vec pick(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

static inline vec widen(const bf16 *x) {
    float lanes[LANES];
    for (int l = 0; l < LANES; l++) lanes[l] = up(x[l]);
    vec wide;
    memcpy(&wide, lanes, sizeof wide);
    return wide;
}

// exp to about one unit in the last place, by range reduction and a polynomial (Cephes), for every lane.
static inline vec exponential(vec x) {
    x = pick(x < every(-87.0f), every(-87.0f), pick(x > every(88.0f), every(88.0f), x));
    vec n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    vec r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vec y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    return y * (vec)((__builtin_convertvector(n, ivec) + 127) << 23);
}

static inline float total(const float *lanes) {
    float part[LANES];
    memcpy(part, lanes, sizeof part);
    for (int width = LANES / 2; width; width /= 2)
        for (int l = 0; l < width; l++) part[l] += part[l + width];
    return part[0];
}

static inline float inverse_rms(const bf16 *x, int64_t width, float eps) {
    float lanes[LANES] = {0};
    for (int64_t i = 0; i < width; i += LANES)
        for (int l = 0; l < LANES; l++) lanes[l] += up(x[i + l]) * up(x[i + l]);
    return 1.0f / sqrtf(total(lanes) / (float)width + eps);
}

// x += delta (unless null); out = RMSNorm(x) * weight. All [rows, width].
void add_norm(bf16 *x, const bf16 *delta, const bf16 *weight, bf16 *out, float eps, int64_t rows, int64_t width,
              int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > SMALL / 4)
    for (int64_t r = 0; r < rows; r++) {
        bf16 *row = x + r * width, *to = out + r * width;
        if (delta)
            for (int64_t i = 0; i < width; i++) row[i] = down(up(row[i]) + up(delta[r * width + i]));
        float scale = inverse_rms(row, width, eps);
        for (int64_t i = 0; i < width; i++) to[i] = down(up(row[i]) * scale * up(weight[i]));
    }
}

// out [rows, width] = silu(gate) * up of gate_up [rows, 2 * width].
void swiglu(const bf16 *gate_up, bf16 *out, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > SMALL / 16)
    for (int64_t r = 0; r < rows; r++) {
        const bf16 *gate = gate_up + 2 * r * width, *other = gate + width;
        for (int64_t i = 0; i < width; i += LANES) {
            vec g = widen(gate + i);
            g = g / (1.0f + exponential(-g)) * widen(other + i);
            for (int l = 0; l < LANES; l++) out[r * width + i + l] = down(g[l]);
        }
    }
}

// The tokens of one request: rows from `start` on of whatever all requests share, keys and values [G, slots, D] of its
// own. As forward.py lays it out.
typedef struct {
    bf16 *keys, *values;
    const uint8_t *visible;  // [rows, rows] or null: every row sees those before it
    const int64_t *depth;    // [rows]
    int64_t start, rows, slots, context;
} Part;

static void turn(const bf16 *head, const bf16 *weight, const bf16 *cosine, const bf16 *sine, bf16 *to, int64_t dim,
                 float eps) {
    float x[MOST_DIM], scale = weight ? inverse_rms(head, dim, eps) : 1.0f;
    for (int64_t d = 0; d < dim; d++) x[d] = weight ? up(head[d]) * scale * up(weight[d]) : up(head[d]);
    int64_t half = dim / 2;
    for (int64_t d = 0; d < half; d++) {
        to[d] = down(x[d] * up(cosine[d]) + x[d + half] * up(sine[d]));
        to[d + half] = down(x[d + half] * up(cosine[d + half]) + x[d] * up(sine[d + half]));
    }
}

// Queries of qkv [all rows, (H + 2 G) * D], normalised and turned, to q [all rows, H, D]; keys and values to each
// part's slots behind its context. qk_norm is [H + G, D] or null, cosine and sine are [all rows, D].
void rotate_store(const bf16 *qkv, const bf16 *qk_norm, const bf16 *cosine, const bf16 *sine, bf16 *q, const Part *parts,
                  int64_t count, int64_t heads, int64_t kv_heads, int64_t dim, float eps, int threads) {
    int64_t stride = (heads + 2 * kv_heads) * dim, all = 0;
    for (int64_t p = 0; p < count; p++) all += parts[p].rows;
#pragma omp parallel num_threads(threads) if (all * stride > SMALL / 8)
    for (int64_t p = 0; p < count; p++) {
        Part part = parts[p];
#pragma omp for schedule(dynamic, 4) nowait
        for (int64_t m = 0; m < part.rows; m++) {
            int64_t r = part.start + m, slot = part.context + m;
            const bf16 *row = qkv + r * stride;
            for (int64_t h = 0; h < heads + kv_heads; h++) {
                bf16 *to = h < heads ? q + (r * heads + h) * dim : part.keys + ((h - heads) * part.slots + slot) * dim;
                turn(row + h * dim, qk_norm ? qk_norm + h * dim : 0, cosine + r * dim, sine + r * dim, to, dim, eps);
            }
            for (int64_t g = 0; g < kv_heads; g++)
                memcpy(part.values + (g * part.slots + slot) * dim, row + (heads + kv_heads + g) * dim,
                       dim * sizeof(bf16));
        }
    }
}

// Queries that share a key head are laid out side by side, one a lane, up to LANES of them: rows * groups in all.
typedef struct {
    const bf16 *keys, *values;  // [slots, D] of one key head
    const uint8_t *visible;     // [rows, rows] or null: every row sees those before it
    const int64_t *depth;       // [rows]
    int64_t rows, context, window;
} Scene;

// Whether each lane's row sees a slot: all ones or all zeros.
static inline ivec sees(const Scene *scene, int64_t slot, const int64_t *row, int64_t lanes) {
    ivec seen = {0};
    int64_t m = slot - scene->context;
    for (int64_t l = 0; l < lanes; l++) {
        int64_t r = row[l], place = m < 0 ? slot : scene->context + scene->depth[m];
        int open = m < 0 || (m <= r && (!scene->visible || scene->visible[r * scene->rows + m]));
        if (scene->window && scene->context + scene->depth[r] - place >= scene->window) open = 0;
        seen[l] = -open;
    }
    return seen;
}

// scores[s] = query . key of slots first to stop, a query a lane. query is [dim].
static inline __attribute__((always_inline)) void score(const bf16 *keys, const vec *query, vec *scores, int64_t first,
                                                        int64_t stop, int64_t dim) {
    float key[AT_ONCE][MOST_DIM];
    for (int64_t s = first; s < stop; s += AT_ONCE) {
        for (int64_t k = 0; k < AT_ONCE; k++) {
            int64_t slot = s + k < stop ? s + k : stop - 1;
            for (int64_t d = 0; d < dim; d++) key[k][d] = up(keys[slot * dim + d]);
        }
        vec sums[AT_ONCE] = {0};
        for (int64_t d = 0; d < dim; d++)
            for (int k = 0; k < AT_ONCE; k++) sums[k] += query[d] * key[k][d];
        for (int64_t k = 0; k < AT_ONCE && s + k < stop; k++) scores[s + k] = sums[k];
    }
}

// Scores to probabilities that are yet to be multiplied by what is returned. Unseen slots get exactly zero.
static inline vec soften(const Scene *scene, vec *scores, int64_t first, int64_t stop, const int64_t *row,
                         int64_t lanes) {
    vec most = every(NEVER), sum = {0};
    int64_t plain = scene->window ? first : scene->context;  // slots before it are seen by all
    for (int64_t s = first; s < stop; s++) {
        if (s >= plain) scores[s] = pick(sees(scene, s, row, lanes), scores[s], every(NEVER));
        most = pick(scores[s] > most, scores[s], most);
    }
    for (int64_t s = first; s < stop; s++) {
        ivec seen = scores[s] > every(NEVER);
        scores[s] = pick(seen, exponential(scores[s] - most), every(0.0f));
        sum += scores[s];
    }
    return 1.0f / pick(sum > every(0.0f), sum, every(1.0f));
}

// out [lane, dim] at `to` = sum of weighted values, LANES columns of AT_ONCE lanes at a time.
static inline __attribute__((always_inline)) void gather(const bf16 *values, const vec *scores, vec weight,
                                                         int64_t first, int64_t stop, int64_t lanes, int64_t dim,
                                                         bf16 **to) {
    for (int64_t l = 0; l < lanes; l += AT_ONCE)
        for (int64_t d = 0; d < dim; d += LANES) {
            vec sums[AT_ONCE] = {0};
            for (int64_t s = first; s < stop; s++) {
                vec value = widen(values + s * dim + d);
                for (int k = 0; k < AT_ONCE; k++) sums[k] += value * scores[s][l + k];
            }
            for (int k = 0; k < AT_ONCE && l + k < lanes; k++)
                for (int i = 0; i < LANES; i++) to[l + k][d + i] = down(sums[k][i] * weight[l + k]);
        }
}

static inline __attribute__((always_inline)) void see(const Scene *scene, const bf16 **from, bf16 **to,
                                                      const int64_t *row, int64_t lanes, int64_t dim, float scale,
                                                      vec *scores) {
    vec query[MOST_DIM];
    int64_t first = scene->context, last = 0;
    for (int64_t d = 0; d < dim; d++)
        for (int64_t l = 0; l < LANES; l++) query[d][l] = l < lanes ? up(from[l][d]) * scale : 0.0f;
    for (int64_t l = 0; l < lanes; l++) {
        int64_t reach = scene->context + scene->depth[row[l]] - scene->window + 1;
        first = !scene->window || reach < 0 ? 0 : reach < first ? reach : first;
        last = row[l] > last ? row[l] : last;
    }
    int64_t stop = scene->context + last + 1;
    score(scene->keys, query, scores, first, stop, dim);
    vec weight = soften(scene, scores, first, stop, row, lanes);
    gather(scene->values, scores, weight, first, stop, lanes, dim, to);
}

// One item of `attend`: up to LANES queries of a part that share a key head.
static void see_block(const Part *part, const bf16 *q, bf16 *out, int64_t g, int64_t block, int64_t heads, int64_t groups,
                      int64_t dim, int64_t window, float scale, vec *scores) {
    int64_t queries = part->rows * groups, start = block * LANES, row[LANES];
    int64_t lanes = queries - start < LANES ? queries - start : LANES;
    const bf16 *from[LANES];
    bf16 *to[LANES];
    for (int64_t l = 0; l < lanes; l++) {
        row[l] = (start + l) / groups;
        int64_t at = ((part->start + row[l]) * heads + g * groups + (start + l) % groups) * dim;
        from[l] = q + at;
        to[l] = out + at;
    }
    int64_t head = g * part->slots * dim;
    Scene scene = {part->keys + head, part->values + head, part->visible, part->depth, part->rows, part->context, window};
    if (dim == 64)  // a width known to the compiler
        see(&scene, from, to, row, lanes, 64, scale, scores);
    else if (dim == 128)
        see(&scene, from, to, row, lanes, 128, scale, scores);
    else
        see(&scene, from, to, row, lanes, dim, scale, scores);
}

// What rows of q [all rows, H, D] see: each part's `context` committed slots and, behind them, its rows m with
// visible[r, m] (null: all up to r itself). Positions are context + depth[r]; nothing `window` or more positions back
// is seen (0: no limit). out is [all rows, H, D]. Returns 0, or 1 if memory ran out.
int attend(const bf16 *q, const Part *parts, int64_t count, bf16 *out, int64_t heads, int64_t kv_heads, int64_t dim,
           int64_t window, float scale, int threads) {
    int64_t groups = heads / kv_heads, work = 0, longest = 0;
    int failed = 0;
    for (int64_t p = 0; p < count; p++) {
        int64_t keys = parts[p].context + parts[p].rows;
        work += parts[p].rows * heads * keys * dim;
        longest = keys > longest ? keys : longest;
    }
#pragma omp parallel num_threads(threads) if (work > SMALL)
    {
        vec *scores = aligned_alloc(sizeof(vec), longest * sizeof(vec));
        if (!scores) failed = 1;
        for (int64_t p = 0; p < count; p++) {
            int64_t blocks = (parts[p].rows * groups + LANES - 1) / LANES;
#pragma omp for schedule(dynamic, 1) nowait
            for (int64_t item = 0; item < kv_heads * blocks; item++)
                if (!failed)  // the later blocks of a chain see the most: they go first
                    see_block(parts + p, q, out, item % kv_heads, blocks - 1 - item / kv_heads, heads, groups, dim,
                              window, scale, scores);
        }
        free(scores);
    }
    return failed;
}

static inline float largest(vec x) {
    float most = x[0];
    for (int l = 1; l < LANES; l++) most = x[l] > most ? x[l] : most;
    return most;
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

// The k largest of each row of logits [rows, size], the first of equals first: their places, and log-probabilities
// normalised over the row. Both out are [rows, k].
void candidates(const bf16 *logits, int64_t *places, float *logp, int64_t rows, int64_t size, int64_t k, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > SMALL)
    for (int64_t r = 0; r < rows; r++) {
        const bf16 *row = logits + r * size;
        int64_t *place = places + r * k;
        float *best = logp + r * k;
        for (int64_t j = 0; j < k; j++) place[j] = j, best[j] = -INFINITY;
        for (int64_t start = 0; start < size; start += CHUNK) {
            int64_t stop = start + CHUNK < size ? start + CHUNK : size;
            if (stop - start == CHUNK) {  // most chunks hold nothing that is large enough
                vec most = widen(row + start);
                for (int64_t i = start + LANES; i < stop; i += LANES) {
                    vec next = widen(row + i);
                    most = pick(next > most, next, most);
                }
                if (!(largest(most) > best[k - 1])) continue;
            }
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

// Slots `source` (ascending, none before its place) of tensors [heads, slots, bytes] into the slots from `start` on.
void move_slots(char *const *tensors, int64_t count, const int64_t *source, int64_t moved, int64_t start,
                int64_t heads, int64_t slots, int64_t bytes) {
    for (int64_t t = 0; t < count; t++)
        for (int64_t h = 0; h < heads; h++) {
            char *head = tensors[t] + h * slots * bytes;
            for (int64_t i = 0; i < moved; i++) memcpy(head + (start + i) * bytes, head + source[i] * bytes, bytes);
        }
}
