// The small operators between the matrix products of a decoder layer, fused, for bf16 on a CPU.
//
// Compiled on first use by build.py. A row's result never depends on the other rows, nor on the number of threads.
// Widths of heads and rows are multiples of LANES.

#include "native.h"

#define FEW 3000  // numbers below which a second thread costs more than it brings

// Whether loops run on several cores.
int threaded(void) {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}

static inline float inverse_rms(const bf16 *x, int64_t width, float eps) {
    float lanes[LANES] = {0};
    for (int64_t i = 0; i < width; i += LANES)
        for (int l = 0; l < LANES; l++) lanes[l] += up(x[i + l]) * up(x[i + l]);
    return 1.0f / sqrtf(total(lanes) / (float)width + eps);
}

// x += delta (unless null); out = RMSNorm(x) * weight. All [rows, width]. The sum goes to tap, too (unless null), whose
// rows are stride apart.
void add_norm(bf16 *x, const bf16 *delta, const bf16 *weight, bf16 *out, bf16 *tap, int64_t stride, float eps,
              int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > FEW)
    for (int64_t r = 0; r < rows; r++) {
        bf16 *row = x + r * width, *to = out + r * width;
        if (delta)
            for (int64_t i = 0; i < width; i++) row[i] = down(up(row[i]) + up(delta[r * width + i]));
        if (tap) memcpy(tap + r * stride, row, width * sizeof *row);
        float scale = inverse_rms(row, width, eps);
        for (int64_t i = 0; i < width; i++) to[i] = down(up(row[i]) * scale * up(weight[i]));
    }
}

// out [rows, width] = silu(gate) * up of gate_up [rows, 2 * width].
void swiglu(const bf16 *gate_up, bf16 *out, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > FEW)
    for (int64_t r = 0; r < rows; r++) {
        const bf16 *gate = gate_up + 2 * r * width, *other = gate + width;
        for (int64_t i = 0; i < width; i += LANES) {
            vec g = widen(gate + i);
            g = g / (1.0f + exponential(-g)) * widen(other + i);
            down_all(g, out + r * width + i);
        }
    }
}

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

// Normalises and rotates queries and keys of qkv [all rows, (H + 2 G) * D], whose rows are `stride` apart. Queries go
// to q [all rows, H, D], keys and values to each part's slots after its context. qk_norm is [H + G, D] or null, cosine
// and sine are [all rows, D].
void rotate_store(const bf16 *qkv, int64_t stride, const bf16 *qk_norm, const bf16 *cosine, const bf16 *sine, bf16 *q,
                  const Part *parts, int64_t count, int64_t heads, int64_t kv_heads, int64_t dim, float eps,
                  int threads) {
    int64_t all = 0;
    for (int64_t p = 0; p < count; p++) all += parts[p].rows;
#pragma omp parallel num_threads(threads) if (all * (heads + 2 * kv_heads) * dim > FEW)
    for (int64_t p = 0; p < count; p++) {
        Part part = parts[p];
#pragma omp for nowait
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

// Moves slots `source` (ascending, none before its new place) of tensors [heads, slots, bytes] to those from `start`
// on.
void move_slots(char *const *tensors, int64_t count, const int64_t *source, int64_t moved, int64_t start,
                int64_t heads, int64_t slots, int64_t bytes) {
    for (int64_t t = 0; t < count; t++)
        for (int64_t h = 0; h < heads; h++) {
            char *head = tensors[t] + h * slots * bytes;
            for (int64_t i = 0; i < moved; i++) memcpy(head + (start + i) * bytes, head + source[i] * bytes, bytes);
        }
}
