// How likely paths are to be accepted, as acceptance.py works it out.

#include "native.h"

#define FAINTEST 1e-38   // a mass counts as no less,
#define SUREST (1 - 1e-5)  // and as no more, as in recent.py
#define KNOWN 4          // weights: of 1, log mass, -log(1 - mass), depth - 1

// The chances of nodes with `masses` and `depths` [n], by weights [4]: raised by `optimism` standard errors, which
// follow from a covariance [4, 4].
void chances(const double *weights, const double *covariance, const float *masses, const int64_t *depths, float *out,
             int64_t n, double optimism) {
    for (int64_t i = 0; i < n; i++) {
        double mass = masses[i] > FAINTEST ? masses[i] < SUREST ? masses[i] : SUREST : FAINTEST;
        const double x[KNOWN] = {1.0, log(mass), -log1p(-mass), (double)(depths[i] - 1)};
        double odds = 0.0, variance = 0.0;
        for (int j = 0; j < KNOWN; j++) {
            odds += weights[j] * x[j];
            for (int k = 0; k < KNOWN; k++) variance += x[j] * covariance[j * KNOWN + k] * x[k];
        }
        out[i] = (float)(1 / (1 + exp(-odds - optimism * sqrt(variance > 0.0 ? variance : 0.0))));
    }
}
