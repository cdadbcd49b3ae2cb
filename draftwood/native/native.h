// What the operators share. Everything is summed in fp32 and rounded once, to nearest even; so are attention's weights
// where they meet values in dot products.

#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// Dot products of pairs of bf16 numbers, or fused multiply-adds of both in fp32: build.py tries which are faster.
#if defined(DOTS) && defined(__AVX512BF16__)
#include <immintrin.h>
#else
#undef DOTS
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
#define LANES 8  // numbers in a vector: wider ones, which the compiler splits in two, would be kept in memory
#else
#define LANES 16
#endif
#define PANEL 2       // vectors of outputs of a product whose sums go on side by side
#define PAIRS (PANEL * (int64_t)sizeof(vec))  // bytes of a weight's panel for a pair of inputs
#define LINE 64       // bytes of a line of a cache, 32 numbers
#define NEAR 1024     // bytes between what is prefetched from the second cache and what is used
#define NEVER -1e30f  // the score of what is not there or not seen
#define MOST_DIM 512   // of a head
#define SMALL 100000  // multiply-adds below which a second thread costs more than it brings
#define INLINE static inline __attribute__((always_inline))  // so that sizes become constants

typedef uint16_t bf16;
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

#ifdef DOTS
static inline vec dot(vec sum, ivec x, int32_t y) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)_mm512_set1_epi32(y));
}
#endif

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

// Prefetches from memory what will be read.
INLINE void later(const void *from) { __builtin_prefetch(from, 0, 2); }

// Prefetches from the second cache what will soon be read after `from`.
INLINE void soon(const void *from) { __builtin_prefetch((const char *)from + NEAR, 0, 3); }

// The upper halves are the numbers in bf16.
static inline ivec rounded(vec x) {
    ivec bits = (ivec)x;
    return bits + 0x7fff + ((bits >> 16) & 1);
}

static inline void down_all(vec x, bf16 *to) {
#ifdef DOTS
    __m256bh numbers = _mm512_cvtneps_pbh((__m512)x);
#else
    halves numbers = __builtin_convertvector(rounded(x) >> 16, halves);
#endif
    memcpy(to, &numbers, sizeof numbers);
}

static inline vec every(float x) { return x - (vec){0}; }

static inline vec pick(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

static inline vec larger(vec x, vec y) { return pick(y > x, y, x); }

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

#define NOISE 52                 // bits of a token's noise
#define STEP 0x9e3779b97f4a7c15  // between the states of two tokens' noise
#define WORDS (LANES / 2)
typedef uint64_t words __attribute__((vector_size(4 * LANES)));
typedef double doubles __attribute__((vector_size(4 * LANES)));

// The bits of the noise of tokens in these states, as noise.py has them.
static inline words bits_in(words z) {
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return (z ^ z >> 31) >> (64 - NOISE);
}

static inline uint64_t bits_of(uint64_t key, int64_t token) {
    return bits_in((words){key + (uint64_t)(token + 1) * STEP})[0];
}

static inline double noise_of(uint64_t bits) { return -log(-log((bits + 0.5) * 0x1p-52)); }

static inline float total(const float *lanes) {
    float part[LANES];
    memcpy(part, lanes, sizeof part);
    for (int width = LANES / 2; width; width /= 2)
        for (int l = 0; l < width; l++) part[l] += part[l + width];
    return part[0];
}

// The tokens of one request: rows from `start` on of whatever all requests share, keys and values [G, slots, D] of its
// own. As records.py lays it out.
typedef struct {
    bf16 *keys, *values;
    const uint8_t *visible;  // [rows, rows] or null: every row sees those before it
    const int64_t *depth;    // [rows]
    int64_t start, rows, slots, context;
    int64_t whole;  // whether every row sees all rows instead, later ones too
} Part;

// ops.c
void add_norm(bf16 *x, const bf16 *delta, const bf16 *weight, bf16 *out, bf16 *tap, int64_t stride, float eps,
              int64_t rows, int64_t width, int threads);
void swiglu(const bf16 *gate_up, bf16 *out, int64_t rows, int64_t width, int threads);
void rotate_store(const bf16 *qkv, int64_t stride, const bf16 *qk_norm, const bf16 *cosine, const bf16 *sine, bf16 *q,
                  const Part *parts, int64_t count, int64_t heads, int64_t kv_heads, int64_t dim, float eps,
                  int threads);

// attention.c
int attend(const bf16 *q, const Part *parts, int64_t count, bf16 *out, int64_t heads, int64_t kv_heads, int64_t dim,
           int64_t window, float scale, int threads);

// tiles.c
int tiles(int64_t depth);
void shape_tiles(int64_t rows);
void sum_tiles(const bf16 *x, const ivec *panel, const char *next, int64_t step, int64_t depth, vec (*sums)[PANEL],
               int64_t rows);
void shape_tiles_of_scores(int64_t pace);
void score_tile(const bf16 *keys, const void *pairs, float *scores, int64_t dim, int64_t pace);
void shape_tiles_of_values(int64_t pace);
void weigh_tiles(const void *weights, const void *pairs, int64_t columns);
void store_tiles_of_values(void *sums, float *all, int64_t pace, int64_t columns);
void leave_tiles(void);

// products.c
int multiply(const bf16 *x, const ivec *weight, const bf16 *bias, bf16 *out, int64_t rows, int64_t depth, int64_t width,
             int threads);

// logits.c
void candidates(const bf16 *logits, int64_t *places, float *logp, const int64_t *ids, const uint64_t *keys,
                int64_t *scratch, int64_t rows, int64_t size, int64_t k, double heat, int threads);
int pair_scores(const int64_t *rows, const float *logp, const bf16 *before, const bf16 *after, float *out,
                int64_t depths, int64_t k, int64_t rank, int threads);
