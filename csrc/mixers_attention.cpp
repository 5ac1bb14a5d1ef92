// Who computes what in attention: tokens are prepared and stored, then blocks of prefill queries attended, then decode
// queries over parts of their keys. Parts have one size, so that results do not depend on the number of threads.
#include <algorithm>
#include <cstring>

#include "mixers.h"

namespace ft {
namespace {

constexpr int64_t PREPARED = 8;          // tokens of one task
constexpr int64_t PREFILL_ROWS = 128;    // query rows of one task, about
constexpr int64_t SHORTEST_PART = 256;  // keys of one part of a decode query's
constexpr int64_t MOST_PARTS = 16;      // of one decode query: threads to share them, while each reads a long run
constexpr int64_t PARTS_AT_ONCE = 64;   // whose partial results exist at a time

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How the scratch memory is divided, in floats.
struct Layout {
    int64_t block_tokens;  // query tokens of one prefill task
    int64_t tile, block_partial, head_partial, part;

    explicit Layout(const AttentionShape &s) {
        block_tokens = std::max<int64_t>(1, PREFILL_ROWS / s.group());
        const int64_t rows = block_tokens * s.group();
        tile = aligned(std::max(tile_floats(1, rows, s.head_dim), tile_floats(s.kv_heads, s.group(), s.head_dim)), 16);
        block_partial = aligned(partial_floats(rows, s.head_dim), 16);
        head_partial = aligned(partial_floats(s.group(), s.head_dim), 16);
        part = s.kv_heads * head_partial;
    }

    int64_t block_partials(int threads) const { return threads * tile; }
    int64_t parts(int threads) const { return block_partials(threads) + threads * block_partial; }
    int64_t total(int threads) const { return parts(threads) + PARTS_AT_ONCE * part; }
};

struct Attention {
    Team &team;
    const AttentionArguments &a;
    const AttentionShape &shape;
    const MixerKernels &k;
    const Layout layout;

    int64_t dim() const { return shape.head_dim; }
    int64_t group() const { return shape.group(); }
    float *projected(int64_t token, int64_t head) const { return a.projected + token * a.stride + head * dim(); }

    static char *element(void *data, Activation type, int64_t at) {
        return static_cast<char *>(data) + at * activation_bytes(type);
    }

    int64_t first_key(int64_t position) const {
        return shape.window > 0 ? std::max<int64_t>(0, position + 1 - shape.window) : 0;
    }

    // The queries of one key/value head, and that head's key and value.
    void prepare(int64_t token, int64_t kv) const {
        const int64_t half = shape.rotary_dim / 2, key = shape.heads + kv;
        const auto turn = [&](int64_t head, int64_t count) {
            k.turn(projected(token, head), count, dim(), a.norm ? a.norm + head * dim() : nullptr, a.norm_epsilon,
                   a.cosine + token * half, a.sine + token * half, shape.rotary_dim);
        };
        turn(kv * group(), group());
        turn(key, 1);
        const int64_t at = (a.slots[token] * shape.kv_heads + kv) * dim();
        const bool bf16 = a.cache == Activation::bf16;
        k.convert(projected(token, key), dim(), bf16, element(a.keys, a.cache, at));
        k.convert(projected(token, key + shape.kv_heads), dim(), bf16, element(a.values, a.cache, at));
        if (kv > 0) return;
        const int64_t width = shape.heads * dim();
        char *padding = element(a.out, a.type, token * a.out_stride + width);
        std::memset(padding, 0, size_t(element(padding, a.type, padded(width) - width) - padding));
    }

    AttendTile tile(const SpanOf &span, int64_t token, int64_t kv) const {
        AttendTile t{};
        t.shape = &shape;
        t.query = projected(span.row + token, kv * group());
        t.query_stride = a.stride;
        t.tokens = 1;
        t.heads = 1;
        t.position = span.context + token;
        t.pages = span.pages;
        t.keys = element(a.keys, a.cache, kv * dim());
        t.values = element(a.values, a.cache, kv * dim());
        t.bf16 = a.cache == Activation::bf16;
        t.scratch = a.scratch + team.index() * layout.tile;
        return t;
    }

    void merge(float *partial, int64_t parts, int64_t part_stride, int64_t rows, int64_t row, int64_t token, int64_t head) const {
        const float *gate = shape.gated ? projected(token, shape.heads + 2 * shape.kv_heads + head) : nullptr;
        k.merge({partial, parts, part_stride, rows, row, dim(), gate, a.type == Activation::bf16,
                 element(a.out, a.type, token * a.out_stride + head * dim())});
    }

    void prefill_block(const SpanOf &span, int64_t first, int64_t kv) const {
        AttendTile t = tile(span, first, kv);
        t.tokens = std::min(layout.block_tokens, span.length - first);
        t.first = first_key(t.position);
        t.last = t.position + t.tokens;
        t.partial = a.scratch + layout.block_partials(team.size()) + team.index() * layout.block_partial;
        k.attend(t);
        const int64_t rows = t.tokens * group();
        for (int64_t r = 0; r < rows; ++r)
            merge(t.partial, 1, 0, rows, r, span.row + first + r / group(), kv * group() + r % group());
    }

    // Blocks of all prefill spans, each span's last and so longest first.
    void prefill() const {
        const auto blocks_of = [&](const SpanOf &s) {
            return s.length > 1 ? ceil_div(s.length, layout.block_tokens) * shape.kv_heads : 0;
        };
        int64_t tasks = 0;
        for (int64_t i = 0; i < a.span_count; ++i) tasks += blocks_of(a.spans[i]);
        if (tasks == 0) return;
        team.each(tasks, [&](int64_t task) {
            const SpanOf *span = a.spans;
            for (; task >= blocks_of(*span); ++span) task -= blocks_of(*span);
            const int64_t block = (blocks_of(*span) - 1 - task) / shape.kv_heads;
            prefill_block(*span, block * layout.block_tokens, task % shape.kv_heads);
        });
    }

    // Depends on the number of keys only.
    static int64_t part_size(int64_t keys) {
        return std::max(SHORTEST_PART, aligned(ceil_div(keys, MOST_PARTS), KEY_BLOCK));
    }

    int64_t keys_of(const SpanOf &s) const { return s.context + 1 - first_key(s.context); }
    int64_t parts_of(const SpanOf &s) const {
        return s.length == 1 ? ceil_div(keys_of(s), part_size(keys_of(s))) : 0;
    }
    float *part(int64_t number) const { return a.scratch + layout.parts(team.size()) + number * layout.part; }

    void decode_part(const SpanOf &span, int64_t number, float *partial) const {
        const int64_t size = part_size(keys_of(span));
        AttendTile t = tile(span, 0, 0);
        t.heads = shape.kv_heads;
        t.first = first_key(span.context) + number * size;
        t.last = std::min(t.first + size, span.context + 1);
        t.partial = partial;
        t.partial_stride = layout.head_partial;
        k.attend(t);
    }

    // Spans [from, to), `parts` parts in all.
    void decode_spans(int64_t from, int64_t to, int64_t parts) const {
        team.each(parts, [&](int64_t task) {
            int64_t number = task;
            const SpanOf *span = a.spans + from;
            for (; number >= parts_of(*span); ++span) number -= parts_of(*span);
            decode_part(*span, number, part(task));
        });
        team.each((to - from) * shape.kv_heads, [&](int64_t task) {
            const int64_t i = from + task / shape.kv_heads, kv = task % shape.kv_heads;
            const SpanOf &span = a.spans[i];
            if (span.length != 1) return;
            int64_t before = 0;
            for (int64_t j = from; j < i; ++j) before += parts_of(a.spans[j]);
            for (int64_t h = 0; h < group(); ++h)
                merge(part(before) + kv * layout.head_partial, parts_of(span), layout.part, group(), h, span.row,
                      kv * group() + h);
        });
    }

    void decode() const {
        int64_t from = 0, parts = 0;
        for (int64_t i = 0; i < a.span_count; ++i) {
            const int64_t more = parts_of(a.spans[i]);
            if (parts + more > PARTS_AT_ONCE) {
                decode_spans(from, i, parts);
                from = i;
                parts = 0;
            }
            parts += more;
        }
        if (parts > 0) decode_spans(from, a.span_count, parts);
    }
};

}  // namespace

int64_t attention_scratch(const AttentionShape &shape, int threads) { return Layout(shape).total(threads); }

void attention(Team &team, const AttentionArguments &a) {
    const MixerKernels &k = a.kernels ? *a.kernels : mixers();
    const Attention work{team, a, a.shape, k, Layout(a.shape)};
    const int64_t kv_heads = a.shape.kv_heads;
    team.each(ceil_div(a.tokens, PREPARED) * kv_heads, [&](int64_t task) {
        const int64_t first = task / kv_heads * PREPARED, last = std::min(first + PREPARED, a.tokens);
        for (int64_t token = first; token < last; ++token) work.prepare(token, task % kv_heads);
    });
    work.prefill();
    work.decode();
}

}  // namespace ft
