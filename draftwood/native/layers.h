// What decoders are made of, for layers.c and block.c.

#include "native.h"

// A product with a weight in panels; null if there is no bias.
typedef struct {
    const ivec *weight;
    const bf16 *bias;
} Linear;

// A decoder layer. As records.py lays it out.
typedef struct {
    const bf16 *input_norm, *qk_norm, *post_norm;
    Linear qkv, output, gate_up, down;
    int64_t window, whole;  // how far back it looks, 0 for all; whether rows see later ones
    int64_t tap;            // where in a row of taps the output of the layer before goes, -1 for nowhere
} Layer;

// What all layers share. As records.py lays it out.
typedef struct {
    int64_t heads, kv_heads, dim, hidden, inner;
    float eps, scale;
} Shape;

// What comes before and after the layers. As records.py lays it out.
typedef struct {
    const bf16 *embedding, *last_norm;  // [any, hidden], [hidden]
    Linear head;                        // hidden -> vocab; without one the last norm's results are wanted
    int64_t vocab;
    float scale;  // of embeddings
} Ends;

// A decoder, and the tables of its positions [any, D]. As records.py lays it out.
typedef struct {
    const Layer *layers;
    int64_t count;
    const Shape *shape;
    const Ends *ends;
    const bf16 *cosines, *sines;
} Decoder;

// layers.c
int forward(const Layer *layers, int64_t count, const Shape *shape, const Ends *ends, const int64_t *tokens,
            const int64_t *positions, int64_t rows, const bf16 *cosines, const bf16 *sines, Part *parts,
            int64_t requests, bf16 *const *slots, bf16 *taps, int64_t last_tap, int64_t stride, const int64_t *wanted,
            int64_t wants, bf16 *out, int threads);
int project(const bf16 *taps, int64_t wide, const Linear *fuse, const bf16 *norm, const Linear *kv, const bf16 *k_norm,
            int64_t count, const Shape *shape, const bf16 *cosine, const bf16 *sine, Part *part, bf16 *const *slots,
            int threads);
