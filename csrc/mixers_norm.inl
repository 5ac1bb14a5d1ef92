// Root-mean-square norm, rotary embedding, conversions.

namespace ft {
namespace {

void rms_norm_row(const float *x, const float *weight, float epsilon, int64_t width, bool bf16, void *out) {
    const float scale = inverse_root_mean(x, width, epsilon);
    write_row(out, bf16, width, [&](auto kind, int64_t i) {
        using T = decltype(kind);
        return load<T>(x + i) * scale * load<T>(weight + i);
    });
}

// Pairs are (i, i + rotary / 2): the order in which Hugging Face checkpoints keep the weights.
void turn_heads(float *heads, int64_t count, int64_t dim, const float *norm, float epsilon, const float *cosine,
                const float *sine, int64_t rotary) {
    const int64_t half = rotary / 2;
    for (int64_t h = 0; h < count; ++h) {
        float *x = heads + h * dim;
        if (norm != nullptr) {
            const float *weight = norm + h * dim;
            const float scale = inverse_root_mean(x, dim, epsilon);
            across(dim, [&](auto kind, int64_t i) {
                using T = decltype(kind);
                store(x + i, load<T>(x + i) * scale * load<T>(weight + i));
            });
        }
        across(half, [&](auto kind, int64_t i) {
            using T = decltype(kind);
            const T first = load<T>(x + i), second = load<T>(x + half + i);
            const T c = load<T>(cosine + i), s = load<T>(sine + i);
            store<T>(x + i, first * c - second * s);
            store<T>(x + half + i, second * c + first * s);
        });
    }
}

void convert_row(const float *x, int64_t count, bool bf16, void *out) {
    write_row(out, bf16, count, [&](auto kind, int64_t i) { return load<decltype(kind)>(x + i); });
}

float exponentials_row(const float *x, int64_t count, float top, float *out) {
    Vector total = {};
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Vector e = exponential(load<Vector>(x + i) - top);
        store(out + i, e);
        total += e;
    }
    for (; i < count; ++i) rest += out[i] = exponential(x[i] - top);
    return sum(total) + rest;
}

}  // namespace
}  // namespace ft
