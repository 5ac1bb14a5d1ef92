#include "mixers.h"

namespace ft {

void route(const float *logits, int64_t experts, int64_t top_k, bool normalize, int32_t *ids, float *weights,
           const MixerKernels &k) {
    // A sorted list of the best so far. Comparisons with NaN are false, so that ids are valid whatever the logits are.
    int64_t held = 0;
    for (int64_t e = 0; e < experts; ++e) {
        if (held == top_k && !(logits[e] > weights[top_k - 1])) continue;
        int64_t at = held < top_k ? held++ : top_k - 1;
        for (; at > 0 && logits[e] > weights[at - 1]; --at) {
            weights[at] = weights[at - 1];
            ids[at] = ids[at - 1];
        }
        weights[at] = logits[e];
        ids[at] = int32_t(e);
    }
    constexpr int64_t BLOCK = 256;
    float scratch[BLOCK];
    const float top = weights[0];
    float total = 0;
    for (int64_t e = 0; e < experts; e += BLOCK)
        total += k.exponentials(logits + e, experts - e < BLOCK ? experts - e : BLOCK, top, scratch);
    const float chosen = k.exponentials(weights, top_k, top, weights);
    const float scale = normalize && total == total ? 1.0f / chosen : 1.0f / total;
    for (int64_t i = 0; i < top_k; ++i) weights[i] *= scale;
}

}  // namespace ft
