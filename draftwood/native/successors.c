// Learning what follows a token, as successors.py does.

#include "successors.h"

#define RECENT 0.3

// Puts the entry `at` where it belongs: the likeliest first, of equals the one that was there first.
static void insert(int32_t *names, double *probs, int64_t at) {
    int32_t name = names[at];
    double p = probs[at];
    for (; at && p > probs[at - 1]; at--) names[at] = names[at - 1], probs[at] = probs[at - 1];
    names[at] = name, probs[at] = p;
}

// `tokens` [m] were each followed by `names` [m, k] with `probs` [m, k]. There is room for the rows of all of them.
void learn_successors(Table *table, const int64_t *tokens, const int64_t *names, const double *probs, int64_t m, int64_t k) {
    int32_t mean_names[KEPT + k];
    double mean[KEPT + k];
    for (int64_t t = 0; t < m; t++, names += k, probs += k) {
        int32_t *slot = table->slots + tokens[t];
        if (*slot < 0) *slot = (int32_t)table->rows++;
        int32_t *kept_names = table->names + *slot * KEPT, seen = table->seen[*slot]++;
        double *kept = table->probs + *slot * KEPT, new = 1.0 / (1 + seen);
        if (new < RECENT) new = RECENT;
        int64_t count = 0;
        for (; count < KEPT && kept_names[count] >= 0; count++)
            mean_names[count] = kept_names[count], mean[count] = (1 - new) * kept[count];
        for (int64_t f = 0, i; f < k; f++) {
            for (i = 0; i < count && mean_names[i] != names[f]; i++);
            if (i == count) mean_names[count] = (int32_t)names[f], mean[count++] = 0.0;
            mean[i] += new * probs[f];
        }
        for (int64_t i = 0; i < count; i++) insert(mean_names, mean, i);
        if (count > KEPT) count = KEPT;
        memcpy(kept_names, mean_names, count * sizeof *mean_names), memcpy(kept, mean, count * sizeof *mean);
    }
}
