// Gated DeltaNet, one key head of one sequence: causal convolution, gated delta rule, gated norm
// (https://arxiv.org/abs/2412.06464). Formulas: layers/gated_delta_net.py and layers/delta_rule.py.

namespace ft {
namespace {

constexpr float UNIT_EPSILON = 1e-6f;  // under the root, as in the flash-linear-attention library

// What the tokens of one chunk become. Rows of keys and queries lie one after the other: one product serves both.
struct DeltaChunk {
    float *keys;      // [tokens][key_dim], unit length
    float *queries;   // [tokens][key_dim], unit length, scaled: keys + tokens * key_dim
    float *turned;    // keys transposed, [key_dim][tokens]
    float *products;  // [2 tokens][tokens]: keys with keys, queries with keys
    float *system;    // [tokens][tokens]
    float *scores;    // [tokens][tokens]
    float *recalled;  // [2 tokens][value_dim]: what keys, queries find in the state
    float *values;    // [tokens][value_dim], then corrections
    float *decayed;   // [tokens][value_dim]: corrections as they stand at the chunk's end
    float *total;     // [tokens]: log of the decay from the chunk's start
    float *rate;      // [tokens]
};

DeltaChunk divide(const DeltaNetDims &d, float *scratch, int64_t tokens) {
    const auto take = [&](int64_t count) {
        float *at = scratch;
        scratch += (count + 15) / 16 * 16;
        return at;
    };
    DeltaChunk c;
    c.keys = take(2 * tokens * d.key_dim);
    c.queries = c.keys + tokens * d.key_dim;
    c.turned = take(tokens * d.key_dim);
    c.products = take(2 * tokens * tokens);
    c.system = take(tokens * tokens);
    c.scores = take(tokens * tokens);
    c.recalled = take(2 * tokens * d.value_dim);
    c.values = take(tokens * d.value_dim);
    c.decayed = take(tokens * d.value_dim);
    c.total = take(tokens);
    c.rate = take(tokens);
    return c;
}

// out [tokens][width] = silu of the convolution of channels from `channel` on; token `first` of the sequence's part
// is the first row. Inputs before the part come from the window.
void convolve(const DeltaHead &h, int64_t first, int64_t tokens, int64_t channel, int64_t width, float *out) {
    const int64_t channels = h.dims.channels(), kernel = h.dims.kernel;
    for (int64_t t = 0; t < tokens; ++t) {
        float *row = out + t * width;
        for (int64_t tap = 0; tap < kernel; ++tap) {
            const int64_t source = first + t + tap - (kernel - 1);
            const float *x = source >= 0 ? h.projected + source * h.stride + channel
                                         : h.window + (kernel - 1 + source) * channels + channel;
            const float *weight = h.taps + tap * channels + channel;
            const bool last = tap == kernel - 1;
            across(width, [&](auto kind, int64_t i) {
                using T = decltype(kind);
                T y = load<T>(x + i) * load<T>(weight + i);
                if (tap > 0) y += load<T>(row + i);
                store<T>(row + i, last ? silu(y) : y);
            });
        }
    }
}


void scale_to_unit(float *row, int64_t width, float scale) {
    const float factor = scale / __builtin_sqrtf(dot(row, row, width) + UNIT_EPSILON);
    across(width, [&](auto kind, int64_t i) {
        using T = decltype(kind);
        store<T>(row + i, load<T>(row + i) * factor);
    });
}

inline float softplus(float x) { return x > 20.0f ? x : __builtin_log1pf(__builtin_expf(x)); }

// Log of the decay, and the rate, of one token and value head.
inline float log_decay(const DeltaHead &h, int64_t token, int64_t head) {
    const int64_t at = h.dims.channels() + h.dims.value_heads * (h.dims.value_dim + 1) + head;
    return h.decay_scale[head] * softplus(h.projected[token * h.stride + at] + h.decay_bias[head]);
}

inline float rate_of(const DeltaHead &h, int64_t token, int64_t head) {
    const int64_t at = h.dims.channels() + h.dims.value_heads * h.dims.value_dim + head;
    return sigmoid(h.projected[token * h.stride + at]);
}

// Norm and output gate of one token and value head.
void finish(const DeltaHead &h, int64_t token, int64_t head, const float *core) {
    const int64_t width = h.dims.value_dim;
    const float *gate = h.projected + token * h.stride + h.dims.channels() + head * width;
    const float scale = inverse_root_mean(core, width, h.norm_epsilon);
    char *out = static_cast<char *>(h.out) + (token * h.out_stride + head * width) * (h.bf16 ? 2 : 4);
    write_row(out, h.bf16, width, [&](auto kind, int64_t i) {
        using T = decltype(kind);
        return load<T>(core + i) * scale * load<T>(h.norm + i) * silu(load<T>(gate + i));
    });
}

struct DeltaToken {
    const float *key, *query, *value;
    float alignment;  // query . key
    float decay, rate;
};

// Columns of the state [key_dim][value_dim]. What key and query find is summed in one pass, the second one writes:
// the new state's answer to the query follows from the old one's.
template <class T, int V>
inline void step_columns(const DeltaNetDims &d, const DeltaToken &t, int64_t column, float *state, float *out) {
    constexpr int WIDTH = sizeof(T) / 4;
    T by_key[V] = {}, by_query[V] = {};
    const float *row = state + column;
    for (int64_t i = 0; i < d.key_dim; ++i, row += d.value_dim)
        for (int v = 0; v < V; ++v) {
            const T s = load<T>(row + v * WIDTH);
            by_key[v] += s * t.key[i];
            by_query[v] += s * t.query[i];
        }
    for (int v = 0; v < V; ++v) {
        by_key[v] = (load<T>(t.value + column + v * WIDTH) - by_key[v] * t.decay) * t.rate;
        store<T>(out + column + v * WIDTH, by_query[v] * t.decay + by_key[v] * t.alignment);
    }
    float *written = state + column;
    for (int64_t i = 0; i < d.key_dim; ++i, written += d.value_dim)
        for (int v = 0; v < V; ++v)
            store<T>(written + v * WIDTH, load<T>(written + v * WIDTH) * t.decay + by_key[v] * t.key[i]);
}

void step_state(const DeltaNetDims &d, const DeltaToken &t, float *state, float *out) {
    constexpr int VECTORS = LANES == 16 ? 8 : 4;
    int64_t column = 0;
    for (; column + VECTORS * LANES <= d.value_dim; column += VECTORS * LANES)
        step_columns<Vector, VECTORS>(d, t, column, state, out);
    for (; column + LANES <= d.value_dim; column += LANES) step_columns<Vector, 1>(d, t, column, state, out);
    for (; column < d.value_dim; ++column) step_columns<float, 1>(d, t, column, state, out);
}

void prepare(const DeltaHead &h, int64_t first, int64_t tokens, const DeltaChunk &c) {
    const DeltaNetDims &d = h.dims;
    convolve(h, first, tokens, h.head * d.key_dim, d.key_dim, c.queries);
    convolve(h, first, tokens, (d.key_heads + h.head) * d.key_dim, d.key_dim, c.keys);
    const float scale = 1.0f / __builtin_sqrtf(float(d.key_dim));
    for (int64_t t = 0; t < tokens; ++t) {
        scale_to_unit(c.queries + t * d.key_dim, d.key_dim, scale);
        scale_to_unit(c.keys + t * d.key_dim, d.key_dim, 1.0f);
    }
}

inline int64_t value_channel(const DeltaNetDims &d, int64_t head) {
    return 2 * d.key_heads * d.key_dim + head * d.value_dim;
}

void delta_step(const DeltaHead &h, int64_t first) {
    const DeltaNetDims &d = h.dims;
    const DeltaChunk c = divide(d, h.scratch, 1);
    prepare(h, first, 1, c);
    const float alignment = dot(c.queries, c.keys, d.key_dim);
    for (int64_t head = h.head * d.repeats(); head < (h.head + 1) * d.repeats(); ++head) {
        convolve(h, first, 1, value_channel(d, head), d.value_dim, c.values);
        const DeltaToken token{
            c.keys, c.queries, c.values, alignment, exponential(log_decay(h, first, head)), rate_of(h, first, head)};
        step_state(d, token, h.state + head * d.key_dim * d.value_dim, c.recalled);
        finish(h, first, head, c.recalled);
    }
}

// system: below the diagonal what correction j adds to correction i; scores: what it adds to output i.
void decay_products(const DeltaChunk &c, int64_t tokens) {
    for (int64_t i = 0; i < tokens; ++i) {
        const float *by_key = c.products + i * tokens, *by_query = c.products + (tokens + i) * tokens;
        float *system = c.system + i * tokens, *scores = c.scores + i * tokens;
        across(i + 1, [&](auto kind, int64_t j) {
            using T = decltype(kind);
            const T between = exponential(c.total[i] - load<T>(c.total + j));
            store<T>(system + j, load<T>(by_key + j) * between * -c.rate[i]);
            store<T>(scores + j, load<T>(by_query + j) * between);
        });
        __builtin_memset(scores + i + 1, 0, (tokens - i - 1) * sizeof(float));
    }
}

// values, the wanted corrections, become the corrections: unit triangular, by blocks of rows.
void solve(const DeltaChunk &c, int64_t tokens, int64_t width) {
    constexpr int64_t BLOCK = 8;
    for (int64_t start = 0; start < tokens; start += BLOCK) {
        const int64_t end = start + BLOCK < tokens ? start + BLOCK : tokens;
        if (start > 0)
            product(end - start, width, start, {c.system + start * tokens, tokens, 1}, c.values, width, 1,
                    c.values + start * width, width);
        for (int64_t i = start + 1; i < end; ++i)
            product(1, width, i - start, {c.system + i * tokens + start, tokens, 1}, c.values + start * width, width,
                    1, c.values + i * width, width);
    }
}

void chunk_of_head(const DeltaHead &h, int64_t first, int64_t tokens, int64_t head, const DeltaChunk &c) {
    const DeltaNetDims &d = h.dims;
    const int64_t width = d.value_dim;
    float *state = h.state + head * d.key_dim * width;
    float total = 0;
    for (int64_t t = 0; t < tokens; ++t) {
        c.total[t] = total += log_decay(h, first + t, head);
        c.rate[t] = rate_of(h, first + t, head);
    }
    decay_products(c, tokens);
    product(2 * tokens, width, d.key_dim, {c.keys, d.key_dim, 1}, state, width, 0, c.recalled, width);
    convolve(h, first, tokens, value_channel(d, head), width, c.values);
    for (int64_t t = 0; t < tokens; ++t) {
        const float from_start = exponential(c.total[t]), rate = c.rate[t];
        float *value = c.values + t * width, *by_key = c.recalled + t * width, *out = by_key + tokens * width;
        across(width, [&](auto kind, int64_t i) {
            using T = decltype(kind);
            store<T>(value + i, (load<T>(value + i) - load<T>(by_key + i) * from_start) * rate);
            store<T>(out + i, load<T>(out + i) * from_start);
        });
    }
    solve(c, tokens, width);
    float *out = c.recalled + tokens * width;
    product(tokens, width, tokens, {c.scores, tokens, 1}, c.values, width, 1, out, width);
    for (int64_t t = 0; t < tokens; ++t) {
        finish(h, first + t, head, out + t * width);
        const float to_end = exponential(total - c.total[t]);
        across(width, [&](auto kind, int64_t i) {
            using T = decltype(kind);
            store<T>(c.decayed + t * width + i, load<T>(c.values + t * width + i) * to_end);
        });
    }
    product(d.key_dim, width, tokens, {c.keys, 1, d.key_dim}, c.decayed, width, exponential(total), state, width);
}

void delta_chunk(const DeltaHead &h, int64_t first, int64_t tokens) {
    const DeltaNetDims &d = h.dims;
    const DeltaChunk c = divide(d, h.scratch, tokens);
    prepare(h, first, tokens, c);
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t i = 0; i < d.key_dim; ++i) c.turned[i * tokens + t] = c.keys[t * d.key_dim + i];
    product(2 * tokens, tokens, d.key_dim, {c.keys, d.key_dim, 1}, c.turned, tokens, 0, c.products, tokens);
    for (int64_t head = h.head * d.repeats(); head < (h.head + 1) * d.repeats(); ++head)
        chunk_of_head(h, first, tokens, head, c);
}

// Calls f(first channel, channels) for each run of channels that belongs to the key head and its value heads.
template <class F>
void each_run(const DeltaHead &h, F &&f) {
    const DeltaNetDims &d = h.dims;
    f(h.head * d.key_dim, d.key_dim);
    f((d.key_heads + h.head) * d.key_dim, d.key_dim);
    f(value_channel(d, h.head * d.repeats()), d.repeats() * d.value_dim);
}

void reset(const DeltaHead &h) {
    const DeltaNetDims &d = h.dims;
    const int64_t size = d.key_dim * d.value_dim * d.repeats();
    __builtin_memset(h.state + h.head * size, 0, size * sizeof(float));
    each_run(h, [&](int64_t channel, int64_t width) {
        for (int64_t i = 0; i < d.kernel - 1; ++i)
            __builtin_memset(h.window + i * d.channels() + channel, 0, width * sizeof(float));
    });
}

// window: the inputs before token `end` of the part. It may be the one that the part goes on from.
void keep_window(const DeltaHead &h, int64_t end, float *window) {
    const int64_t channels = h.dims.channels(), kept = h.dims.kernel - 1;
    each_run(h, [&](int64_t channel, int64_t width) {
        for (int64_t i = 0; i < kept; ++i) {
            const int64_t source = end + i - kept;
            const float *x = source >= 0 ? h.projected + source * h.stride : h.window + (kept + source) * channels;
            __builtin_memmove(window + i * channels + channel, x + channel, width * sizeof(float));
        }
    });
}

void keep(const DeltaHead &h, const CaptureOf &capture) {
    const DeltaNetDims &d = h.dims;
    const int64_t size = d.key_dim * d.value_dim * d.repeats(), at = h.head * size;
    __builtin_memcpy(h.states + capture.slot * d.state_floats() + at, h.state + at, size * sizeof(float));
    keep_window(h, capture.tokens, h.windows + capture.slot * d.window_floats());
}

void advance(const DeltaHead &h, int64_t first, int64_t end) {
    if (end - first == 1) return delta_step(h, first);
    for (; first < end; first += DELTA_CHUNK)
        delta_chunk(h, first, end - first < DELTA_CHUNK ? end - first : DELTA_CHUNK);
}

void delta_net_head(const DeltaHead &h) {
    if (h.fresh) reset(h);
    int64_t first = 0;
    for (int64_t i = 0; i < h.capture_count; ++i) {
        advance(h, first, h.captures[i].tokens);
        keep(h, h.captures[i]);
        first = h.captures[i].tokens;
    }
    advance(h, first, h.length);
    keep_window(h, h.length, h.window);
}

}  // namespace
}  // namespace ft
